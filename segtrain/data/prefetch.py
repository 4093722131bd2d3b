"""Calls made by threads a few items ahead of the caller, for decoding and writing images.

Threads, not processes: decoding and compressing images happen outside the interpreter lock, and
nothing has to be started, pickled or put into shared memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


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
            item = next(left)
        except StopIteration:
            return
        except Exception as error:
            failed: Future[R] = Future()
            failed.set_exception(error)
            waiting.append(failed)
        else:
            waiting.append(pool.submit(function, item))

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


def one_late(items: Iterable[T]) -> Iterator[T]:
    """Yields each item once the next has been made; before an error, the item that was made."""
    left = iter(items)
    held: list[T] = []
    while True:
        try:
            held.append(next(left))
        except StopIteration:
            break
        except Exception:
            yield from held
            raise
        if len(held) > 1:
            yield held.pop(0)
    yield from held
