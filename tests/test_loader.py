import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from itertools import chain

import cv2
import numpy as np
import pytest
import torch
from experiments import settings
from processes import left_after

from segtrain.data.sample import loader as loader_module
from segtrain.data.sample.loader import (
    TrainLoader,
    _start_worker,
    largest_microbatch,
    training_workers,
)
from segtrain.data.sample.stream import TrainStream, image_at
from segtrain.distributed.layout import Layout, even
from segtrain.distributed.machine import descendants, num_cores
from segtrain.errors import DataError, UserError

# Newer Pythons warn of what loaders do: fork a process that has threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Numbers:
    """Images that hold their own number, of unequal height and width."""

    def __init__(self, num_images=7):
        self.pairs = range(num_images)

    def name(self, index):
        return f"image {index}"

    def __getitem__(self, index):
        return np.full((3, 4, 3), index, np.uint8), np.full((3, 4), index, np.uint8)

    def view(self, index):
        return self[index]


def add_noise(image, label, rng, **_):
    return image + rng.integers(100, dtype=np.uint8), label


def unchanged(image, label, rng, **_):
    return image, label


def loader(dataset=None, *, transform=add_noise, **options):
    stream = TrainStream(dataset or Numbers(), transform, stream_seed=11, batch_size=5)
    given = {"indices": (range(5),), "start_step": 0, "steps": 6, "num_workers": 0}
    given |= {"pin_memory": False, "timeout_s": 60, "start_method": None}
    return TrainLoader(stream, **given | options)


def contents(batches):
    """Per batch: names, first value of every image, which tells image and augmentation."""
    return [(batch.names, batch.images[:, 0, 0, 0].tolist()) for batch in batches]


def test_every_epoch_shows_every_image_once_and_augments_it_anew():
    """Across the ends of epochs, also in a set smaller than the batch."""
    shown = [pair for batch in contents(loader(steps=7)) for pair in zip(*batch, strict=True)]
    epochs = [[name for name, _ in shown[start : start + 7]] for start in range(0, 35, 7)]
    assert all(sorted(epoch) == [f"image {i}" for i in range(7)] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    for i in range(7):
        assert len({value for name, value in shown if name == f"image {i}"}) > 1
    images = [image_at(11, number, 3) for number in range(9)]
    assert [sorted(images[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


@pytest.mark.fault(44, 70)
@pytest.mark.parametrize(("world_size", "microbatches"), [(3, 1), (5, 1), (2, 2), (1, 3)])
def test_the_ranks_parts_make_the_batch_of_one_process(world_size, microbatches):
    """Augmentation included: position in the batch is the key, not position in the part."""
    whole = contents(loader())
    parts = [
        contents(loader(indices=Layout(5, microbatches, even(world_size)).positions(rank)))
        for rank in range(world_size)
    ]
    by_pass = list(zip(*parts, strict=True))
    for step, batch in enumerate(whole):
        here = chain(*by_pass[step * microbatches : (step + 1) * microbatches])
        assert tuple(list(chain(*lists)) for lists in zip(*here, strict=True)) == batch


@pytest.mark.parametrize(
    ("options", "ranks", "most"),
    [
        ({"batch_size": 7}, 2, 4),
        ({"batch_size": 5, "accumulate_steps": 2}, 1, 3),  # 3 + 2
        ({"batch_size": 7, "shares": 4}, 3, 4),  # 2 + 2, 2, 1
    ],
)
def test_the_loader_reckons_with_the_largest_microbatch_of_any_rank(
    monkeypatch, options, ranks, most
):
    monkeypatch.setattr(loader_module.dist, "world_size", lambda: ranks)
    assert largest_microbatch(settings(**options)) == most


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(24, 2, 8), (7, 2, 3), (1, 2, 0)])
def test_by_default_the_ranks_of_a_machine_share_its_cores(monkeypatch, cores, ranks, workers):
    monkeypatch.setattr(loader_module, "num_cores", lambda: cores)
    monkeypatch.setattr(loader_module.dist, "local_world_size", lambda: ranks)
    assert training_workers(settings()) == workers


def test_batches_are_channels_last_bytes_with_their_labels():
    batch = next(loader())
    assert batch.images.shape == (5, 3, 3, 4)
    assert batch.labels.shape == (5, 3, 4)
    assert batch.images.dtype == batch.labels.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert [f"image {label[0, 0]}" for label in batch.labels] == batch.names


class Damaged(Numbers):
    """Has an unreadable image."""

    def __getitem__(self, index):
        if index == 3:
            raise DataError("images/3.png: cut short")
        return super().__getitem__(index)


def signalled(number):
    """In place of `_start_worker`: SIGTERM comes before it has set up anything."""
    os.kill(os.getpid(), signal.SIGTERM)
    _start_worker(number)


class Deadly(Numbers):
    """Ends the process that reads image 3, as the kernel does when memory is out."""

    def __getitem__(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def first_error(dataset, num_workers, **options):
    try:
        for _ in loader(dataset, num_workers=num_workers, **options):
            pass
    except UserError as error:
        return type(error).__name__, str(error)
    return None


def outcomes(start_method):
    """What happens with loader processes."""
    two = {"num_workers": 2, "start_method": start_method}
    batches = loader(**two, steps=20)
    # One batch of each: a worker that is still starting does not know of signals yet.
    seen = [next(batches), next(batches)]
    started = [worker.pid for worker in multiprocessing.active_children()]
    if start_method == "forkserver":
        started = descendants(os.getpid())[1:]
        assert len(started) == 3, "the fork server and its workers"
    for name in ("TERM", "INT", "HUP"):
        subprocess.run(["kill", f"-{name}", *map(str, started)], check=True)
    seen.extend(batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "_start_worker", signalled)
        early = contents(loader(**two))
    return {
        "one": contents(loader(num_workers=1, start_method=start_method)),
        "tail": contents(loader(**two, start_step=3)),
        "signalled": contents(seen),
        "early": early,
        "damaged": first_error(Damaged(), **two),
        "killed": first_error(Deadly(), 1, start_method=start_method),
    }


@pytest.fixture(scope="module", params=["fork", "forkserver"])
def workers(request, run_ranks):
    """What happened with loader processes, told once: to start them takes a while."""
    if request.param == "fork":
        return outcomes(None)
    return run_ranks(1, outcomes, "forkserver")[0]  # the tests have a fork server of their own


def test_any_number_of_workers_gives_the_same_batches(workers):
    assert workers["one"] == workers["early"] == contents(loader())
    assert workers["tail"] == contents(loader())[3:]


def test_signals_to_the_whole_process_group_leave_workers_at_work(workers):
    """Else SIGTERM from a cluster manager would crash the rank instead of saving its state."""
    assert workers["signalled"] == contents(loader(steps=20))
    assert workers["early"] == contents(loader())


def rank_with_a_fork_server(pipe):
    batches = loader(num_workers=2, steps=50, start_method="forkserver")
    next(batches)
    workers = multiprocessing.active_children()
    pipe.send(([worker.pid for worker in workers], descendants(os.getpid())[1:]))
    pipe.recv()
    workers[0].terminate()
    pipe.recv()


def test_workers_of_a_fork_server_end_as_the_rank_wants_and_all_end_with_it(forkserver):
    """Also a worker that is stopped, and the server, of which the workers are children."""
    mine, theirs = forkserver.Pipe()
    rank = forkserver.Process(target=rank_with_a_fork_server, args=(theirs,))
    rank.start()
    theirs.close()  # or a rank that fails would be waited for
    (one, other), everyone = mine.recv()
    assert left_after([one, other], 0) == [one, other]
    mine.send("terminate")
    assert left_after([one], 10) == []
    assert left_after([other], 0) == [other]
    os.kill(other, signal.SIGSTOP)
    rank.kill()
    assert left_after(everyone, 15) == []


class Counting(Numbers):
    """Images of three counts: OpenCV's threads, those it starts, and pages fetched for an image."""

    def __getitem__(self, index):
        threads = os.listdir("/proc/self/task")
        cv2.GaussianBlur(np.zeros((2000, 2000), np.float32), (0, 0), 9)
        started = len(os.listdir("/proc/self/task")) - len(threads)
        for i in range(10):  # images of 8 MB come and go
            if i == 2:  # by then, an allocator that keeps memory has it
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            parts = [np.ones(2**21, np.uint8) for _ in range(4)]
            del parts
        fetched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        image, label = super().__getitem__(index)
        image[:] = [cv2.getNumThreads(), started, min(255, fetched // 8)]
        return image, label


@pytest.mark.fault(24)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")
def test_a_worker_starts_no_threads_of_opencv_and_reuses_the_memory_of_earlier_images():
    """There are as many workers as cores, and clearing new pages takes longer than filling them."""
    before = cv2.getNumThreads()
    cv2.setNumThreads(4)  # also where the machine has one core
    try:
        (batch,) = loader(Counting(), steps=1, num_workers=1, transform=unchanged)
    finally:
        cv2.setNumThreads(before)
    assert batch.images[:, :2, 0, 0].tolist() == [[1, 0]] * 5
    assert batch.images[:, 2].max() < 50  # of 2,048


@pytest.mark.fault(20)
def test_an_unreadable_file_is_reported_without_a_traceback(workers):
    reported = ("DataError", "images/3.png: cut short")
    assert workers["damaged"] == first_error(Damaged(), 0) == reported


@pytest.mark.fault(19)
def test_a_killed_worker_is_a_failure_of_the_system_with_advice(workers):
    kind, message = workers["killed"]
    assert kind == "ExecutionError"
    assert "killed by signal" in message or "exited unexpectedly" in message
    assert "data.num_workers" in message


def test_the_thread_that_pins_ends_without_a_traceback_and_others_with_one(monkeypatch, capsys):
    def _pin_memory_loop(error):
        raise error

    def other():
        raise EOFError("another thread")

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    loader_module._silence_pinning.__wrapped__()
    errors = EOFError("a worker is gone"), OSError("too many open files")
    threads = [threading.Thread(target=_pin_memory_loop, args=[error]) for error in errors]
    for thread in (*threads, threading.Thread(target=other)):
        thread.start()
        thread.join()
    told = capsys.readouterr().err
    assert "another thread" in told
    assert "too many open files" in told
    assert "a worker is gone" not in told


def test_the_cores_are_those_that_this_process_may_use(monkeypatch):
    """Not those of another one, such as init, which has all."""
    allowed = {0: {3, 5, 9}}
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: allowed.get(pid, set(range(64))))
    assert num_cores() == 3
