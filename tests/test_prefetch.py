import threading
import time

import pytest

from segtrain.data.read.concurrent import delayed_by_one, prefetch


def until(error_at):
    yield from range(error_at)
    raise RuntimeError("no more")


def test_an_error_of_the_items_comes_after_the_results_before_it():
    def slow(item):
        time.sleep(0.02)
        return item

    seen = []
    with pytest.raises(RuntimeError, match="no more"):
        iter_into(seen, prefetch(slow, until(3), 2))
    assert seen == [0, 1, 2]


def iter_into(seen, items):
    for item in items:
        seen.append(item)


def test_threads_end_after_an_error_of_the_items():
    before = threading.active_count()
    with pytest.raises(RuntimeError):
        list(prefetch(str, until(3), 2))
    assert threading.active_count() == before


def test_an_item_comes_when_the_next_is_made():
    made = []

    def items():
        for i in range(3):
            made.append(i)
            yield i

    assert [(item, len(made)) for item in delayed_by_one(items())] == [(0, 2), (1, 3), (2, 3)]
    assert list(delayed_by_one([])) == []


def test_the_last_item_before_an_error_comes_too():
    seen = []
    with pytest.raises(RuntimeError, match="no more"):
        iter_into(seen, delayed_by_one(until(3)))
    assert seen == [0, 1, 2]
