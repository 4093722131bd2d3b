"""Work on many images: by threads ahead of the caller, or by processes for a whole data set.

Threads where they are enough: decoding and compressing images happen outside the interpreter lock,
and nothing has to be started, pickled or put into shared memory.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

from tqdm import tqdm

from segtrain.distributed.machine import num_cores
from segtrain.errors import ExecutionError
from segtrain.text import printable

T = TypeVar("T")
R = TypeVar("R")

# Of what asks for headers and sizes: it waits for the disk, not for the processor.
IO_THREADS = 16
_CHUNK = 8
# Each process needs enough pairs to pay for its start.
_PAIRS_PER_PROCESS = 128


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
            # `items` may be a generator that fails. The results before its error come first.
            waiting.append(Future())
            waiting[-1].set_exception(error)

    try:
        # One more than there are threads: a thread that is done has work while its result waits for
        # the caller.
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


def num_processes(num_pairs: int, jobs: int | None) -> int:
    """At most `jobs` (None: one for each core that this process may use), and no idle ones."""
    useful = -(-num_pairs // _PAIRS_PER_PROCESS)
    return max(1, min(jobs or num_cores(), useful))


def for_each_pair(
    function: Callable[[T], R], pairs: Sequence[T], pool: ProcessPoolExecutor | None, what: str
) -> Iterator[R]:
    """Yields `function(pair)` for every pair, in order, and shows how many are done.

    pool: the processes that call `function`; None: this one does.

    Raises:
        ExecutionError: a process was killed.
    """
    results = map(function, pairs) if pool is None else pool.map(function, pairs, chunksize=_CHUNK)
    # A terminal is redrawn, a log file gets a new line each time.
    every_s = 0.1 if sys.stderr.isatty() else 15
    options = {"unit": "pair", "leave": False, "delay": every_s, "mininterval": every_s}
    try:
        yield from tqdm(results, printable(what), len(pairs), **options)
    except BrokenProcessPool as error:
        raise ExecutionError(
            "a process was killed, probably for lack of memory; use fewer --jobs (a script that "
            "calls segtrain from its top level needs `if __name__ == '__main__':`)"
        ) from error
    except BaseException:
        if pool is not None:
            # Ctrl-C, or a caller that leaves early: what has not begun is dropped.
            pool.shutdown(wait=False, cancel_futures=True)
        raise
