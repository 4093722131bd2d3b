import threading

import pytest

from segtrain.data.read.concurrent import delayed_by_one, prefetch


def until(error_at):
    yield from range(error_at)
    raise RuntimeError("no more")


@pytest.mark.parametrize("ahead", [lambda items: prefetch(int, items, 2), delayed_by_one])
def test_an_error_of_the_items_comes_after_the_results_before_it_and_ends_the_threads(ahead):
    seen, before = [], threading.active_count()
    with pytest.raises(RuntimeError, match="no more"):
        seen.extend(ahead(until(3)))
    assert seen == [0, 1, 2]
    assert threading.active_count() == before


def test_an_item_comes_when_the_next_is_made():
    made = []

    def items():
        for i in range(3):
            made.append(i)
            yield i

    assert [(item, len(made)) for item in delayed_by_one(items())] == [(0, 2), (1, 3), (2, 3)]
    assert list(delayed_by_one([])) == []
