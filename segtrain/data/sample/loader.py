"""The stream of training samples (`data.sample.stream`) in batches, for any number of ranks.

There is no state to save: a loader that starts at step s yields the same batches as one that
started at 0, on any number of ranks and workers.
"""

import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, cached_property
from itertools import cycle, product
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Listener
from typing import Literal, Self

import cv2
import torch
from torch.utils.data import DataLoader, Dataset

from segtrain import plugins
from segtrain.config import Config, DataConfig
from segtrain.data.read.image import ImageForm
from segtrain.data.sample.stream import Made, SampleKey, TrainStream
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Layout, split_of
from segtrain.distributed.machine import keep_freed_memory, num_cores
from segtrain.distributed.signals import die_with_parent
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError, UserError
from segtrain.types import Batch

# Batches that each worker prepares ahead.
_PREFETCH = 4
# The tracker would warn that it removes the semaphores of a rank that was killed.
_NO_WORD = "ignore:resource_tracker"
_PINNING = re.compile("^Pin memory thread exited|^Caught .* in pin memory thread")


def num_loader_workers(config: DataConfig) -> int:
    """The loader processes of this rank, for an evaluation."""
    if config.num_workers is None:
        return min(8, num_cores() // dist.local_world_size())
    return config.num_workers


def training_workers(config: Config) -> int:
    """The loader processes of this rank while it trains."""
    # A server's worker learns which images it gets when it has sent the gradient before.
    return 0 if config.train.num_servers else num_loader_workers(config.data)


def largest_microbatch(config: Config) -> int:
    """The most images that a rank has in one microbatch."""
    split = split_of(config.train, dist.world_size())
    return max(Layout.of(config.train, split).images)


def bytes_in_flight(config: Config, form: ImageForm, num_workers: int, label_bytes: int = 1) -> int:
    """The shared memory of the batches that one rank with so many workers has ready.

    label_bytes: of a pixel, `SegDataset.label_bytes`.
    """
    height, width = config.augment.crop_size
    pixel = form.channels * form.dtype.itemsize + label_bytes
    microbatch = largest_microbatch(config) * pixel * height * width
    return num_workers * _PREFETCH * microbatch


class TrainLoader:
    """This rank's Batch of every microbatch of the steps start_step .. steps - 1, in order.

    An iterator, whose workers start with the first batch; `close` ends them.

    indices: for each microbatch, this rank's positions in the batch; see `Layout.positions`.
    timeout_s: how long to wait for a batch from the workers.
    start_method: of the workers; None: as Python starts processes here, on Linux by fork.

    Raises:
        ConfigError: an extra transform cannot be sent to a worker that is not forked from here.
    """

    def __init__(
        self,
        stream: TrainStream,
        *,
        indices: Sequence[Sequence[int]],
        start_step: int,
        steps: int,
        num_workers: int,
        pin_memory: bool,
        timeout_s: float,
        start_method: Literal["forkserver"] | None = None,
    ) -> None:
        if pin_memory:
            _silence_pinning()
        self._method = start_method or multiprocessing.get_start_method()
        inherits = self._method == "fork" or not num_workers
        parts = product(range(start_step, steps), indices)
        self._loader = DataLoader(
            stream if inherits else _SentStream(stream),
            # A rank without an image makes one all the same, whose shape and types an empty batch
            # has.
            batch_sampler=([(step, position) for position in part or [0]] for step, part in parts),
            collate_fn=_collate,
            num_workers=num_workers,
            prefetch_factor=_PREFETCH if num_workers else None,
            pin_memory=pin_memory,
            worker_init_fn=_start_worker,
            multiprocessing_context=self._method if num_workers else None,
        )
        self._indices, self._timeout_s = cycle(indices), timeout_s
        self._expired = threading.Event()
        self._batches: Iterator[Batch | UserError] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            UserError: from the data set, such as a DataError for a file that cannot be read.
            ExecutionError: a worker was killed or hangs.
        """
        try:
            with worker_failures():
                batch = self._next()
        except (ExecutionError, EOFError, ConnectionError) as error:
            self.close()
            if self._expired.is_set():
                raise ExecutionError(
                    f"rank {dist.rank()}: no loader worker has given a batch for "
                    f"{self._timeout_s:.0f} s (0.8 of train.timeout_s): a worker or its network "
                    "drive hangs, or reading is very slow; continue from the last checkpoint with "
                    "--resume"
                ) from error
            if isinstance(error, ExecutionError):
                raise
            # The connection to a worker can break before torch notices that the worker died.
            raise _worker_died("a loader worker was killed") from error
        if batch is None:
            raise StopIteration
        if isinstance(batch, UserError):
            self.close()
            raise batch
        # Of a part without positions the image only gave shape and types.
        return batch if next(self._indices) else batch.empty()

    def _next(self) -> Batch | UserError | None:
        if self._batches is None:
            if self._loader.num_workers:
                _check_sockets()
                if self._method == "forkserver":
                    _start_fork_server()
            with _blocked(signal.SIGTERM):
                self._batches = iter(self._loader)
        try:
            limit = _time_limit(self._timeout_s, self._expired)
            with limit if self._loader.num_workers else nullcontext():
                return next(self._batches, None)
        except (EOFError, ConnectionError):
            # torch's signal handler raises an error for a dead worker too: wait for it here,
            # because inside the DataLoader's clean-up Python could only print it.
            with suppress(RuntimeError):
                time.sleep(1)
            raise

    def close(self) -> None:
        """Ends the workers, cleanly: otherwise their temporary directories stay behind."""
        self._batches = iter(())


class _SentStream(Dataset):
    """A TrainStream for workers that inherit nothing: pickled, with the plugins that it needs."""

    def __init__(self, stream: TrainStream) -> None:
        transforms = [plugins.registered("transform", name) for name in plugins.names("transform")]
        self._sources, self._records = plugins.loaded(), [plugin.record() for plugin in transforms]
        try:
            self._pickled = pickle.dumps(stream)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            what = f"augment.extra: no loader process can get a copy of a transform: {error}"
            raise ConfigError(f"{what}; remove it, or set data.num_workers: 0") from error

    @cached_property
    def _stream(self) -> TrainStream:
        # In the worker, at its first batch. Plugins come first: the pickled stream names what they
        # define.
        for source in self._sources:
            plugins.load(source)
        for change in plugins.changes(self._records):
            raise ConfigError(f"{change}; it changed during the training: start again")
        return pickle.loads(self._pickled)

    def __getitems__(self, keys: Sequence[SampleKey]) -> Made | UserError:
        try:
            return self._stream.__getitems__(keys)
        except UserError as error:  # returned, as in TrainStream
            return error


def _check_sockets() -> None:
    """Raises ExecutionError where a worker could not hand over its batches."""
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        what = f"loader workers cannot have sockets in the folder of temporary files: {error}"
        raise ExecutionError(
            f"{what}; set TMPDIR to a short path, or data.num_workers: 0"
        ) from error


def _start_fork_server() -> None:
    """Starts the process that forks the workers and has imported what they need; once."""
    slow = {"albumentations"} & sys.modules.keys()  # seconds, and few configs use it
    forkserver.set_forkserver_preload(["segtrain.data.sample.fork_server", *slow])
    if _NO_WORD not in sys.warnoptions:
        sys.warnoptions.append(_NO_WORD)
    # One by one: the tracker unblocks signals in this process.
    for process in (resource_tracker, forkserver):
        with _blocked(signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            process.ensure_running()


@contextmanager
def worker_failures() -> Iterator[None]:
    """Turns torch's error about a dead loader worker into an ExecutionError with a repair.

    Put it around all code that runs while workers exist: torch raises the error in the main thread,
    wherever that is when a worker dies.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        # With pinned memory a thread takes the batches. It may notice the death first, by a file
        # or a connection of the worker, and end.
        if not str(error).startswith("DataLoader ") and not _PINNING.search(str(error)):
            raise
        raise _worker_died(str(error).splitlines()[0]) from error


@cache
def _silence_pinning() -> None:
    """Lets Python print no traceback where the thread that pins sees first that a worker died.

    `worker_failures` tells of it.
    """
    others = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        name = "" if failure.thread is None else failure.thread.name
        is_known = issubclass(failure.exc_type, (EOFError, ConnectionError, FileNotFoundError))
        if "_pin_memory_loop" not in name or not is_known:
            others(failure)

    threading.excepthook = hook


def _worker_died(what: str) -> ExecutionError:
    return ExecutionError(
        f"{what}; a killed worker is often out of memory: use fewer data.num_workers, or give the "
        "container more shared memory (/dev/shm); a training goes on with --resume"
    )


def _collate(made: Made | UserError) -> Batch | UserError:
    if isinstance(made, UserError):
        return made
    began, samples, pixels = made
    images, labels, names = zip(*samples, strict=True)
    # Stacking HWC images and viewing them as NCHW makes a channels-last batch without a copy.
    images = torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    labels = torch.stack(labels)
    made_s = time.perf_counter() - began
    return Batch(images, labels, list(names), made_s, pixels)


@contextmanager
def _time_limit(timeout_s: float, expired: threading.Event) -> Iterator[None]:
    """Sets `expired` and kills this process's loader workers if the body takes too long."""

    # The DataLoader's own timeout does not help if a worker is stopped: the main process then waits
    # without limit for the memory of its finished batches. Only SIGKILL ends such a worker.
    def expire() -> None:
        expired.set()
        for worker in multiprocessing.active_children():
            worker.kill()

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        timer.cancel()


@contextmanager
def _blocked(*numbers: int) -> Iterator[None]:
    """Processes that start inside inherit it: a signal to the whole run must not end one early."""
    if not hasattr(signal, "sigtimedwait"):  # macOS; see `_start_worker`
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(_: int) -> None:
    # There are as many workers as cores; OpenCV would start as many threads in each of them.
    cv2.setNumThreads(0)
    keep_freed_memory()
    # Terminals and cluster managers signal all processes of a run, but the rank needs its workers
    # to finish the step, and ends them itself.
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_rank, daemon=True).start()
    die_with_parent(signal.SIGKILL)


def _end_with_rank() -> None:
    """Ends this worker once its rank sends SIGTERM or is gone; SIGTERM from others is ignored."""
    # `die_with_parent` does not end a worker that a fork server started: that is its parent.
    rank = multiprocessing.parent_process()
    while rank.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, 1)
        if received is not None and received.si_pid == rank.pid:
            break
    os._exit(EXIT_OK)
