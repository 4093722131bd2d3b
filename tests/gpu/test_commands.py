"""Whole runs on the device: the demo, equal bits after a stop and a kill, killed loader workers."""

import os
import signal
import statistics
import time

import pytest
from chaos import curve, fingerprint, loader_workers
from commands import DEMO, draw_scenes, logged, segtrain, settings
from processes import Command, left_after

from segtrain.distributed.machine import descendants
from segtrain.errors import EXIT_SYSTEM, EXIT_TERMINATED

# configs/demo.yaml reaches 0.711 on CPUs. How far runs part by rounding is not known: the spread
# only tells a training that works from one that does not.
EXPECTED, SPREAD = 0.711, 0.04


@pytest.mark.gpu(limit_s=300)
def test_the_demo_reaches_its_score_whole_and_on_two_virtual_ranks(device, figures, tmp_path):
    is_cuda = device.type == "cuda"
    size, numbers = ((128, 256), (700, 100)) if is_cuda else ((64, 128), (12, 4))
    options = settings(data__root=draw_scenes(tmp_path / "scenes", *numbers, size))
    options += settings(log__every_steps=1, train__precision="float32")  # for the first loss
    if not is_cuda:
        options += settings(augment__crop_size=size, train__steps=3, schedule__warmup_steps=1)
    losses, scores = {}, {}
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        where = ["--device", device.type, "--nproc", 1, "--output", run]
        segtrain("train", DEMO, *where, *options, *settings(train__virtual_ranks=ranks))
        losses[ranks], (scores[ranks],) = logged(run, "train/loss"), logged(run, "eval/mIoU")
        figures[f"{ranks} virtual ranks: mIoU"] = scores[ranks]
        figures[f"{ranks} virtual ranks: s a step"] = statistics.median(logged(run, "time/step_s"))
    differences = [abs(a / b - 1) for a, b in zip(*losses.values(), strict=True)]
    figures["differences of the first three losses"] = differences[:3]
    # The weights are equal then; later training amplifies rounding errors.
    assert differences[0] < 1e-5
    if is_cuda:
        assert list(scores.values()) == pytest.approx([EXPECTED] * 2, abs=SPREAD)


@pytest.mark.gpu(limit_s=240)
def test_deterministic_training_is_bitwise_the_same_after_a_kill(device, figures, tmp_path):
    """A run that SIGTERM stops, and SIGKILL after it has gone on; its steps are replayed."""
    is_cuda = device.type == "cuda"
    size, steps, scenes = ((128, 256), 400, 40) if is_cuda else ((48, 64), 8, 8)
    options = settings(
        data__root=draw_scenes(tmp_path / "scenes", scenes, 4, size),
        data__num_workers=2,
        augment__crop_size=size,
        augment__scale_range=[0.5, 1.5],
        train__steps=steps,
        schedule__warmup_steps=2,
        optim__ema_decay=0.9,
        log__every_steps=1,
        checkpoint__every_steps=steps // 4,
    )

    def arguments(name):
        where = ["--device", device.type, "--nproc", 1, "--output", tmp_path / name]
        return ["train", DEMO, *where, *options, *settings(train__deterministic=True)]

    segtrain(*arguments("alone"))
    resume = []
    for number, least in ((signal.SIGTERM, steps // 4), (signal.SIGKILL, 5 * steps // 8)):
        command = Command(tmp_path, *arguments("killed"), *resume, fresh=True)
        command.wait_until(
            lambda least=least: len(logged(tmp_path / "killed", "train/loss")) >= least
        )
        if number == signal.SIGTERM:
            command.process.send_signal(number)
            assert command.wait() == EXIT_TERMINATED, command.errors
        else:
            command.kill()
        resume = ["--resume"]
    segtrain(*arguments("killed"), *resume)
    bits = {name: fingerprint(tmp_path / name) for name in ("alone", "killed")}
    figures["weights"] = {name: digest[:8] for name, digest in bits.items()}
    assert bits["alone"] == bits["killed"]
    assert curve(tmp_path / "alone") == curve(tmp_path / "killed")


@pytest.mark.gpu(limit_s=300)
def test_a_killed_loader_worker_ends_the_run_and_is_named(device, figures, tmp_path):
    """With pinned memory, whose thread may notice the death first; each time at another moment."""
    options = settings(
        data__root=draw_scenes(tmp_path / "scenes", 16, 4, (64, 128)),
        data__num_workers=2,
        augment__crop_size=[48, 64],
        train__steps=100_000,
        train__timeout_s=300,  # whoever comes that far hangs
        log__every_steps=1,
    )
    for number in range(10 if device.type == "cuda" else 1):
        run = tmp_path / f"run_{number}"
        where = ["--device", device.type, "--nproc", 1, "--output", run]
        command = Command(tmp_path, "train", DEMO, *where, *options, fresh=True)
        launcher = command.process.pid
        command.wait_until(
            lambda run=run, launcher=launcher: (
                len(logged(run, "train/loss")) >= 2 and loader_workers(launcher)
            )
        )
        time.sleep(0.037 * number)
        everyone, began = descendants(launcher), time.monotonic()
        os.kill(loader_workers(launcher)[0], signal.SIGKILL)
        assert command.wait() == EXIT_SYSTEM
        figures[f"kill {number + 1}: seconds to the end"] = time.monotonic() - began
        assert "worker" in command.errors
        assert "killed" in command.errors
        assert "Traceback" not in command.errors
        assert left_after(everyone, 5) == []
