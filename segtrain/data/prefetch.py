"""Calls made by threads a few items ahead of the caller, for decoding and writing images.

Threads, not processes: decoding and compressing images happen outside the interpreter lock, and
nothing has to be started, pickled or put into shared memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetch(function: Callable[[T], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """Yields `function(item)` for every item, in order, computed up to `num_threads` + 1 ahead.

    An error is raised where the result of its item is due. Close the iterator if you leave it
    early: that ends the threads.
    """
    left = iter(items)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prefetch")
    try:
        waiting = deque(pool.submit(function, item) for item in islice(left, num_threads + 1))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in islice(left, 1))
            yield result
            del result  # or it would stay in memory until the next result is there
    finally:
        pool.shutdown(cancel_futures=True)
