"""Work on many images: calls made by threads ahead of the caller, and how far a long one has come.

Threads, not processes: decoding and compressing images happen outside the interpreter lock, and
nothing has to be started, pickled or put into shared memory.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from tqdm import tqdm

from segtrain.text import printable

T = TypeVar("T")
R = TypeVar("R")

_PLAIN_PROGRESS_S = 15


def prefetch(function: Callable[[T], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """Yields `function(item)` for every item, in order, computed up to `num_threads` + 1 ahead.

    An error is raised where the result of its item is due, also one of `items` itself. Close the
    iterator if you leave it early: that ends the threads.
    """
    left = iter(items)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prefetch")
    waiting: deque[Future[R]] = deque()

    def submit_next() -> None:
        try:
            waiting.extend(pool.submit(function, item) for item in islice(left, 1))
        except Exception as error:
            waiting.append(Future())
            waiting[-1].set_exception(error)

    try:
        for _ in range(num_threads + 1):
            submit_next()
        while waiting:
            result = waiting.popleft().result()
            submit_next()
            yield result
            del result  # or it would stay in memory until the next result is there
    finally:
        pool.shutdown(cancel_futures=True)


def delayed_by_one(items: Iterable[T]) -> Iterator[T]:
    """Yields each item once the next has been made; before an error, the item that was made."""
    held: list[T] = []
    try:
        for item in items:
            yield from held
            held = [item]
    except Exception:
        yield from held
        raise
    yield from held


def with_progress(results: Iterable[T], num_pairs: int, what: str) -> Iterator[T]:
    """`results` of pairs, with a progress bar on a terminal, or else a line every 15 s."""
    if sys.stderr.isatty():
        yield from tqdm(results, desc=printable(what), total=num_pairs, unit="pair", leave=False)
        return
    last = time.monotonic()
    for done, result in enumerate(results, start=1):
        if time.monotonic() - last > _PLAIN_PROGRESS_S:
            sys.stderr.write(f"{printable(what)}: {done} of {num_pairs} pairs\n")
            last = time.monotonic()
        yield result
