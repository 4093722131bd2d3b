"""Work done by threads a few items ahead of the caller, or a few calls behind.

Threads, not processes: decoding and compressing images happen outside the interpreter lock, and
nothing has to be started, pickled or put into shared memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
            del result  # or it would stay in memory until the next one is there
    finally:
        pool.shutdown(cancel_futures=True)


class WriteBehind:
    """Calls `function` in threads while the caller goes on; at most `num_threads` + 1 calls wait.

    An error of a call is raised by a later `put` or at the end of the `with` block.
    """

    def __init__(self, function: Callable[..., None], num_threads: int) -> None:
        self._function = function
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="write")
        self._waiting: deque[Future[None]] = deque()

    def put(self, *args: object) -> None:
        """Calls `function(*args)` in a thread, once few enough calls are waiting."""
        if len(self._waiting) > self._num_threads:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._function, *args))

    def __enter__(self) -> "WriteBehind":
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()
