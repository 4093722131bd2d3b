"""`data.num_workers: auto`: the number of loader processes is measured and changes no batch."""

import pytest
import torch
from experiments import assert_same_state, experiment, last, losses, small, train, write_config

from segtrain.commands.train import auto_workers, training
from segtrain.commands.train.auto_workers import MEASURED_STEPS, Measurement
from segtrain.config import load_config
from segtrain.data.read.image import RGB
from segtrain.data.sample import loader
from segtrain.distributed import collectives as dist

CPU = torch.device("cpu")


def measured(now, steps_s, *, made_s, images=4):
    """A measurement of steps that took so long; the loader was waited for in between."""
    measurement = Measurement(CPU)
    for step_s in steps_s:
        now[0] += 7.0
        measurement.start()
        now[0] += step_s
        measurement.stop(made_s, images)
    return measurement


MANY = [0.4] * MEASURED_STEPS


@pytest.mark.parametrize(
    ("steps_s", "made_s", "most", "workers"),
    [
        (MANY, 0.6, 16, 3),  # 1.5 * 0.6 / 0.4
        # The first ones and rare long ones do not count.
        ([60.0, 9.0, 9.0, *MANY[6:], 300.0, 300.0, 300.0], 0.6, 16, 3),
        (MANY, 1.2, 2, 2),
        (MANY, 1e-4, 16, 1),
    ],
)
def test_the_loader_is_to_be_half_as_fast_again_as_the_steps(now, steps_s, made_s, most, workers):
    chosen, line = measured(now, steps_s, made_s=made_s).choice(most)
    assert chosen == workers
    assert line == (
        f"loader     {workers} of at most {most} workers a rank (data.num_workers auto): a sample "
        f"takes one {made_s * 250:.1f} ms, a step of 4 images 400.0 ms"
    )


class Event:
    """A CUDA event on a device whose queue is one second behind the host."""

    host_s, synchronized = 0.0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at_s = Event.host_s

    def synchronize(self):
        Event.synchronized += 1

    def elapsed_time(self, other):
        return 1e3 * (other.at_s - self.at_s)


def test_steps_of_a_device_are_timed_by_the_device_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    measurement = Measurement(torch.device("cuda"))
    for _ in range(MEASURED_STEPS):
        measurement.start()
        Event.host_s += 0.25
        measurement.stop(0.5, 2)
    assert Event.synchronized == 0
    workers, line = measurement.choice(16)
    assert (workers, line.endswith("2 images 250.0 ms")) == (3, True)
    assert Event.synchronized > 0


@pytest.mark.parametrize(
    ("cores", "ranks", "free", "most", "first"),
    [
        (24, 2, None, 12, 8),
        (24, 2, 10**9, 12, 8),
        (24, 2, 2 * 5 * 400_000 + 799_999, 5, 5),
        (24, 2, 10, 1, 1),  # the start refuses it
        (1, 2, None, 0, 0),
    ],
)
def test_cores_and_shared_memory_bound_the_number(
    monkeypatch, tmp_path, data, cores, ranks, free, most, first
):
    options = experiment(data, data={"num_workers": "auto"})
    options["augment"]["crop_size"] = [100, 125]
    config = load_config(write_config(tmp_path / "c.yaml", options))
    monkeypatch.setattr(loader, "num_cores", lambda: cores)
    monkeypatch.setattr(loader, "free_shared_memory", lambda: free)
    monkeypatch.setattr(dist, "local_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "world_size", lambda: 2 * ranks)  # two images a rank
    assert loader.bytes_in_flight(config, RGB, 1) == 4 * 2 * 4 * 100 * 125 == 400_000
    assert loader.most_workers(config, RGB) == most
    assert loader.first_workers(config, RGB) == first


FEWER = 5


def train_and_choose(config, directory, *args, **options):
    """As `train`; each rank begins with one worker, then rank 0 has two.

    Returns first step and number of workers of each loader of this rank.
    """
    used, whole, choice = [], training.TrainLoader, Measurement.choice

    def train_loader(*args, **options):
        used.append((options["start_step"], options["num_workers"]))
        return whole(*args, **options)

    training.TrainLoader = train_loader
    auto_workers.MEASURED_STEPS = FEWER
    auto_workers.most_workers, training.first_workers = lambda *_: 3, lambda *_: 1
    Measurement.choice = lambda self, most: (2 - dist.rank(), choice(self, most)[1])
    assert train(config, directory, *args, **options) == 0
    return used


def test_choosing_anew_after_each_start_changes_no_bit(run_ranks, tmp_path, data):
    """Also with two passes a step, and ranks that choose differently."""
    steps = FEWER + 4
    options = small(data, train={"steps": steps, "batch_size": 5, "accumulate_steps": 2})
    options["augment"]["crop_size"] = [25, 33]
    alone = write_config(tmp_path / "alone.yaml", options)
    options["data"]["num_workers"] = "auto"
    auto = write_config(tmp_path / "auto.yaml", options)
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert run_ranks(2, train, alone, whole) == [0, 0]
    first = run_ranks(2, train_and_choose, auto, run, until=2)
    assert first == [[(0, 1)], [(0, 1)]]
    assert "data.num_workers auto" not in (run / "train.log").read_text()
    second = run_ranks(2, train_and_choose, auto, run, True)
    assert second == [[(2, 1), (2 + FEWER, 2)], [(2, 1)]]
    assert losses(run) == losses(whole)
    assert_same_state(last(run), last(whole))
    log = (run / "train.log").read_text()
    assert log.count(" of at most 3 workers a rank (data.num_workers auto): a ") == 1
