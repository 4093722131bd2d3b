"""`segtrain bench`: the parts of a step, operations, and what it concludes."""

import argparse
import gzip
import json
import subprocess
import sys
import threading
from itertools import count

import pytest
import torch
from experiments import experiment, write_config
from torch import nn

from segtrain.cli import main
from segtrain.config import TrainConfig, load_config
from segtrain.desk.commands import bench
from segtrain.desk.commands.bench import StepFigures, limit_of
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.training import measure
from segtrain.training.measure import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    UPDATE,
    PartClock,
    covered,
    span,
    training_flops,
)
from segtrain.types import DropoutMasks

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path, data):
    options = experiment(
        data,
        augment={"crop_size": [25, 33]},
        model={"head_channels": 8, "aux_channels": 8},
        train={"steps": 4, "batch_size": 4, "precision": "float32"},
    )
    return write_config(tmp_path / "c.yaml", options)


def test_time_belongs_to_one_part_and_sums_over_ranks_come_first(now):
    clock = PartClock(CPU)
    with clock.running():
        now[0] += 1  # nobody's
        with span(FORWARD):
            now[0] += 2
            with clock.part(COMMUNICATION):
                now[0] += 4
            now[0] += 8
        with span(BACKWARD):
            now[0] += 16
        with span(UPDATE):
            now[0] += 32
    with span(FORWARD):  # nobody listens any more
        now[0] += 64
    assert clock.seconds == {FORWARD: 10, COMMUNICATION: 4, BACKWARD: 16, UPDATE: 32}


def test_parts_in_several_threads_do_not_add_up_to_more_than_the_time(now):
    clock = PartClock(CPU)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with span(FORWARD):
            inside.set()
            leave.wait(10)

    with clock.running():
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(10)
        now[0] += 1
        with span(FORWARD):
            now[0] += 1
            with span(BACKWARD):
                now[0] += 1
        leave.set()
        thread.join()
    assert clock.seconds == {FORWARD: 2, BACKWARD: 1}


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0), ([(1, 3), (2, 4), (10, 11)], 4), ([(5, 6), (0, 9)], 9), ([(0, 1), (1, 2)], 2)],
)
def test_overlapping_kernels_count_once(intervals, length):
    assert covered(intervals) == length


@pytest.mark.parametrize(
    ("backbone", "arch", "more"),
    [
        ("mobilenet_v2", "deeplabv3plus", 0),
        ("mobilenet_v2", "pspnet", 0.01),
        ("timm/mobilenetv3_small_050", "deeplabv3plus", 0),
    ],
)
def test_operations_are_those_of_every_convolution(config, backbone, arch, more):
    """And twice that in the backward pass. PSPNet pools by small matrix products."""
    if "/" in backbone:
        pytest.importorskip("timm", reason="needs timm: pip install '.[timm]'")
    groups = [f"model.backbone={backbone}", "model.num_stages=4", "model.output_stride=16"]
    settings = load_config(config, [f"model.arch={arch}", *groups])
    model = build_model(settings.model, num_classes=4, norm=make_norm(settings.norm)).train()
    costs = []

    def count(layer, args, output):
        kernel = layer.weight[0].numel()  # of a group
        costs.append(2 * output.numel() * kernel)

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(count)
    model(torch.rand(2, 3, *settings.augment.crop_size), DropoutMasks())
    assert 0 <= training_flops(settings, 4) / (3 * sum(costs) / 2) - 1 <= more


def report(**changes):
    values = {
        "device": "cpu",
        "ranks": 2,
        "precision": "float32",
        "batch_size": 8,
        "crop_size": (64, 96),
        "steps": 20,
        "step_s": 0.5,
        "data_s": 0.01,
        "parted_step_s": 0.6,
        "parts_s": {"data": 0.01, "communication": 0.05, "forward": 0.2, "backward": 0.3},
        "eager_step_s": None,
        "workers": 2,
        "loader_images_per_s": 20.0,
        "flops_of_image": 3e9,
        "peak_flops": 4e11,
        "peak_bytes": 2**30,
        "device_busy": None,
    }
    return StepFigures(**values | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_s": 0.1}, "the loader: 20% of the step"),
        ({"parts_s": {"communication": 0.3}}, "communication: 50% of the step"),
        ({"peak_flops": 6e10}, "arithmetic: 80% of what large matrix products reach"),
        ({"device_busy": 0.4}, "the host: kernels run only 40% of the time"),
        ({"device_busy": 0.95}, "memory traffic or other programs: arithmetic is at 12%"),
        ({"data_s": 0.1, "parts_s": {"communication": 0.3}}, "communication: 50% of the step"),
    ],
)
def test_limit_is_what_takes_the_time(changes, said):
    assert limit_of(report(**changes)).startswith(said)


def test_bench_measures_every_part_of_real_steps(config, tmp_path, capsys):
    file, trace = tmp_path / "bench.json", tmp_path / "trace.json.gz"
    words = f"bench {config} --steps 2 --json {file} --profile {trace} --device cpu --nproc 1"
    assert main(words.split()) == 0
    found = json.loads(file.read_text())
    assert (found["ranks"], found["steps"]) == (1, 2)
    parts = found["parts_s"]
    assert list(parts) == ["data", "communication", "backward", "forward", "update", "other"]
    assert all(parts[name] > 0 for name in ("data", "backward", "forward", "update"))
    assert sum(parts.values()) == pytest.approx(found["parted_step_s"])
    assert found["flops_of_image"] == training_flops(load_config(config), 4)
    assert min(found[key] for key in ("step_s", "peak_flops", "peak_bytes")) > 0
    assert found["limit"] in capsys.readouterr().out
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {FORWARD, BACKWARD, UPDATE} <= {event.get("name") for event in events}
    assert not (tmp_path / "runs").exists()


def short_bench(arguments):
    """In ranks that warm up less and measure no arithmetic."""
    bench._WARMUP = bench._PROFILED = 1
    bench.matmul_peak = bench.training_flops = lambda *_: 1.0
    return bench.run_bench(arguments)


@pytest.mark.parametrize(
    "shares", ["null", pytest.param(2, marks=pytest.mark.slow("training", "desk"))]
)
def test_bench_on_ranks(run_ranks, config, tmp_path, shares):
    file, options = tmp_path / "bench.json", {"steps": 1, "device": "cpu", "memory": False}
    options["profile"] = tmp_path / "trace.gz" if shares == "null" else None
    shared = [f"train.shares={shares}"]
    args = argparse.Namespace(config=str(config), json=file, set=shared, **options)
    assert run_ranks(2, short_bench, args) == [0, 0]
    found = json.loads(file.read_text())
    assert found["ranks"] == 2
    assert found["parts_s"]["communication"] > 0
    traces = {path.name for path in tmp_path.glob("*.gz")}
    assert traces == ({"trace_0.gz", "trace_1.gz"} if shares == "null" else set())


def test_the_memory_of_ranks_and_workers_counts_together(run_ranks, config, tmp_path):
    file, options = tmp_path / "memory.json", {"steps": 1, "device": "cpu", "memory": True}
    args = argparse.Namespace(config=str(config), json=file, profile=None, set=[], **options)
    hosts = []
    for ranks in (1, 2):
        assert run_ranks(ranks, bench.run_bench, args) == [0] * ranks
        found = json.loads(file.read_text())
        assert found["device_bytes"] is None
        assert found["step_s"] > 0
        hosts.append(found["host_bytes"])
    assert 1.5 * hosts[0] < hosts[1] < 2.5 * hosts[0]


def test_the_peak_is_the_operations_of_the_products_by_their_seconds(monkeypatch):
    """A clock of which each product takes half of the time: two of 2 * 1024**3 operations."""
    step = measure._PEAK_SECONDS / 2
    monkeypatch.setattr(measure.time, "perf_counter", count(7.0, step).__next__)
    found = measure.matmul_peak(CPU, TrainConfig())
    assert found == pytest.approx(2 * 2 * 1024**3 / measure._PEAK_SECONDS)


def test_peak_memory_is_that_of_the_process_itself():
    """Linux hands the peak of a parent on to its children, in ru_maxrss."""
    child = (
        "import torch; from segtrain.training.measure import peak_bytes;"
        "print(peak_bytes(torch.device('cpu')))"
    )
    parent = (
        "import subprocess, sys; held = b'x' * (900 << 20);"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 50 << 20 < int(done.stdout) < 900 << 20
