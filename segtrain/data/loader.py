"""The endless stream of training batches, cut anywhere and shared by any number of ranks.

The stream is one permutation of the whole set after another; step s takes the samples
[s B, (s + 1) B) of it, across the ends of epochs. Which image stands at which place, and how it
is augmented, are functions of (seed, step, position), so there is no state to save: a loader that
starts at step s yields what one that started at 0 yields from there on, for any number of ranks and
workers.
"""

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache

import cv2
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from segtrain import seed
from segtrain.config import DataConfig
from segtrain.data.dataset import SegDataset
from segtrain.data.transforms import TrainTransform
from segtrain.distributed import collectives as dist
from segtrain.distributed.partition import partition
from segtrain.distributed.signals import die_with_parent
from segtrain.errors import EXIT_OK, ExecutionError, UserError
from segtrain.types import Batch

Sample = tuple[torch.Tensor, torch.Tensor, str]
"""Image (3, H, W) uint8, label (H, W) uint8 and name."""

Place = tuple[int, int]
"""(step, position in the batch of that step)"""


@lru_cache(maxsize=2)
def _order(stream_seed: int, epoch: int, num_images: int) -> list[int]:
    return seed.sample_order(stream_seed, epoch, num_images).tolist()


def image_at(stream_seed: int, place: int, num_images: int) -> int:
    """The index of the image at `place` of the endless stream, counted from 0."""
    epoch, index = divmod(place, num_images)
    return _order(stream_seed, epoch, num_images)[index]


class TrainStream(Dataset):
    """Augmented samples of `dataset`, found by their place: `stream[step, position]`."""

    def __init__(
        self, dataset: SegDataset, transform: TrainTransform, *, stream_seed: int, batch_size: int
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.stream_seed = stream_seed
        self.batch_size = batch_size

    def __getitem__(self, place: Place) -> Sample:
        """The augmented sample at `place`."""
        step, position = place
        index = image_at(
            self.stream_seed, step * self.batch_size + position, len(self.dataset.pairs)
        )
        image, label = self.dataset[index]
        rng = seed.augment_rng(self.stream_seed, step, position)
        image, label = self.transform(image, label, rng)
        return (
            torch.from_numpy(image).permute(2, 0, 1),
            torch.from_numpy(label),
            self.dataset.pairs[index].name,
        )

    def __getitems__(self, places: Sequence[Place]) -> list[Sample] | UserError:
        """The samples of a whole batch, which torch asks for by this name, or why there is none."""
        try:
            return [self[place] for place in places]
        except UserError as error:
            # As a value: raised in a worker, torch would put its traceback into the message.
            return error


def indices_of_rank(batch_size: int, passes: int, rank: int, world_size: int) -> list[range]:
    """The positions of the batch that `rank` takes in each of the step's `passes`.

    The batch is cut into passes first and each pass into ranks, both contiguous and as even as
    possible: so a pass is the same set of images, with the same batch statistics, on any number of
    ranks.
    """
    rows = []
    for index in range(passes):
        part = partition(batch_size, passes, index)
        mine = partition(len(part), world_size, rank)
        rows.append(part[mine.start : mine.stop])
    return rows


class _PlaceSampler(Sampler[list[Place]]):
    """This rank's places of every step from `start` to `steps`, one list a pass."""

    def __init__(self, rows: Sequence[Sequence[int]], start: int, steps: int) -> None:
        self.rows = rows
        self.start = start
        self.steps = steps

    def __iter__(self) -> Iterator[list[Place]]:
        for step in range(self.start, self.steps):
            for rows in self.rows:
                yield [(step, position) for position in rows]

    def __len__(self) -> int:
        return (self.steps - self.start) * len(self.rows)


def _collate(samples: list[Sample] | UserError) -> Batch | UserError:
    if isinstance(samples, UserError):
        return samples
    images, labels, names = zip(*samples, strict=True)
    # Stacking HWC images and viewing them as NCHW makes a channels-last batch without a copy.
    images = torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return Batch(images, torch.stack(labels), list(names))


def _start_worker(_: int) -> None:
    # One thread a worker: OpenCV would start as many as there are cores in each of them.
    cv2.setNumThreads(0)
    # Terminals and cluster managers signal all processes of a run. Only the rank may decide to
    # stop: it needs its workers to finish the step, and ends them itself.
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_rank, daemon=True).start()
    die_with_parent(signal.SIGKILL)


def _end_with_rank() -> None:
    """Ends this process when its rank terminates it or is gone, and by nobody else's SIGTERM.

    The rank is the parent of a worker that it forked. What a fork server forked has another parent,
    which lives as long as its workers do.
    """
    rank = multiprocessing.parent_process()
    while rank.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, 1)
        if received is not None and received.si_pid == rank.pid:
            break
    os._exit(EXIT_OK)


def default_workers(ranks_here: int) -> int:
    """Loader processes a rank where the config does not say: this machine's cores shared evenly."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(8, (cores or 1) // ranks_here)


def num_loader_workers(config: DataConfig) -> int:
    """The loader processes of this rank."""
    if config.num_workers is not None:
        return config.num_workers
    return default_workers(dist.local_world_size())


def bytes_in_flight(
    crop_size: tuple[int, int], images: int, *, num_workers: int, prefetch: int
) -> int:
    """The shared memory that one rank's batches take while they wait for it.

    Args:
        images: images of a pass on this rank.
    """
    # Three bytes of image and one of label a pixel.
    return num_workers * prefetch * images * 4 * crop_size[0] * crop_size[1]


def train_loader(
    stream: TrainStream,
    *,
    rows: Sequence[Sequence[int]],
    start_step: int,
    steps: int,
    num_workers: int,
    prefetch: int,
    pin_memory: bool,
    timeout_s: float,
) -> Iterator[Batch]:
    """Yields this rank's Batch for every pass of the steps start_step .. steps - 1, in order.

    Args:
        timeout_s: how long to wait for a batch of the workers.

    Raises:
        UserError: of the data set, such as a DataError for a file that cannot be read.
        ExecutionError: a worker was killed or is stuck.
    """
    loader = DataLoader(
        stream,
        batch_sampler=_PlaceSampler(rows, start_step, steps),
        collate_fn=_collate,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker,
    )
    with _Watch(timeout_s if num_workers else math.inf) as watch:
        try:
            with worker_failures():
                yield from _batches(loader, watch)
        except (ExecutionError, EOFError, ConnectionError) as error:
            if watch.expired:
                raise ExecutionError(
                    f"rank {dist.rank()}: no loader worker has given a batch for {timeout_s:.0f} s "
                    "(0.8 of train.timeout_s): one hangs, on a dead network drive for instance, or "
                    "reading is very slow; training goes on from the last checkpoint by --resume"
                ) from error
            if isinstance(error, ExecutionError):
                raise
            # The connection to a worker may end before its death is known.
            raise _worker_died("a loader worker was killed") from error


@contextmanager
def worker_failures() -> Iterator[None]:
    """Says what torch says of dead loader workers in the words of a user's error.

    Around all that runs while there are workers: torch raises it wherever the main thread is when a
    worker dies.

    Raises:
        ExecutionError: a worker was killed.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader "):
            raise
        raise _worker_died(str(error)) from error


def _worker_died(what: str) -> ExecutionError:
    return ExecutionError(
        f"{what}; a killed worker is often out of memory: use fewer data.num_workers, or give the "
        "container more shared memory (/dev/shm)"
    )


def _batches(loader: DataLoader, watch: "_Watch") -> Iterator[Batch]:
    batches = iter(loader)
    try:
        while True:
            with watch.over_one_batch():
                batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, UserError):
                raise batch
            yield batch
    except (EOFError, ConnectionError):
        # A worker has died. The signal that says so raises an error too, which is to come here:
        # from within the end of the loader Python could only print it.
        with suppress(RuntimeError):
            time.sleep(1)
        raise
    finally:
        # An error would keep it alive in its traceback. The workers are to end now and in good
        # order, or their directories would stay behind.
        del batches


class _Watch:
    """Kills the loader workers of this process if one batch takes them too long.

    The DataLoader's own timeout is no help against a worker that is stopped as a whole: a thread of
    the worker hands over the memory of the batches that it has finished, and is waited for forever.
    Only SIGKILL ends such a worker, too.
    """

    def __init__(self, timeout_s: float) -> None:
        self.expired = False
        self._timeout_s = timeout_s
        self._deadline = math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    @contextmanager
    def over_one_batch(self) -> Iterator[None]:
        self._deadline = time.monotonic() + self._timeout_s
        yield
        self._deadline = math.inf

    def _run(self) -> None:
        while not self._over.wait(min(1.0, self._timeout_s / 10)):
            if time.monotonic() > self._deadline:
                self.expired = True
                for worker in multiprocessing.active_children():
                    worker.kill()
                return
