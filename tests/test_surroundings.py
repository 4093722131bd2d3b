"""Whole runs where something around them is missing: disk, network, memory, terminal."""

import json
import shutil
from contextlib import suppress

import numpy as np
import pytest
from experiments import last, losses, small, train, write_config, write_data
from processes import Command, run_python

from segtrain.checkpoint.format import load


@pytest.mark.fault(22)
def test_too_little_shared_memory_is_refused_at_the_start(tmp_path, data, little_shared_memory):
    """Both ranks together: alone each would find enough."""
    sizes = {"data": {"num_workers": 10}, "train": {"steps": 1}}
    config = write_config(tmp_path / "c.yaml", small(data, **sizes))
    arguments = ["train", config, "--nproc", 2, "--output", tmp_path / "run"]
    command = Command(tmp_path, *arguments, wrapper=little_shared_memory)
    assert command.wait() == 2
    assert len(command.errors.splitlines()) == 1, command.errors
    line = command.errors
    assert line.startswith("segtrain: /dev/shm: the loader's batches take up to 1.3 MB and 1.0 MB ")
    assert "are free; use fewer data.num_workers, or give" in line
    assert not (tmp_path / "run").exists()

    fewer = ["--set", "data.num_workers=1"]
    command = Command(tmp_path, *arguments, *fewer, wrapper=little_shared_memory)
    assert command.wait() == 0, command.errors


def test_without_semaphores_workers_are_refused_and_pools_do_without(
    tmp_path, data, no_shared_memory
):
    options = small(data, data={"num_workers": 1}, train={"steps": 2})
    config, output = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    command = Command(tmp_path, "train", config, "--output", output, wrapper=no_shared_memory)
    assert command.wait() == 2, command.errors
    (line,) = command.errors.splitlines()
    assert line.startswith("segtrain: /dev/shm: no semaphore can be made there: ")
    assert "make it writable, or set data.num_workers: 0" in line

    counts = ("--num-train", 9, "--num-val", 1, "--size", 64, 64, "--jobs", 2)
    command = Command(tmp_path, "data", "synth", tmp_path / "s", *counts, wrapper=no_shared_memory)
    assert command.wait() == 0, command.errors
    assert "segtrain: warning: one process instead of 2: /dev/shm: no sem" in command.errors


@pytest.mark.slow
@pytest.mark.fault(28, 85)
def test_a_run_outlives_its_directory(tmp_path, data):
    """Deleted with its lock, its curves and its checkpoints; the last ones are there in the end."""
    options = small(data, train={"steps": 30}, checkpoint={"every_steps": 10})
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    command = Command(tmp_path, "train", config, "--nproc", 2, "--output", run)
    command.wait_for_step(run, 12)
    for _ in range(9):
        with suppress(OSError):  # it wrote a file meanwhile
            shutil.rmtree(run)
            break
    assert command.wait() == 0, command.errors
    assert command.errors == ""
    warnings = [line for line in command.output.splitlines() if line.startswith("warning")]
    assert sorted(line.split()[1] for line in warnings) == [
        "TensorBoard",
        "metrics.jsonl",
        "train.log",
    ]
    assert all("deleted during the run" in line for line in warnings)
    assert last(run).step == 30
    assert load(run / "checkpoints" / "best.pt").step == 30

    # And it is a run that can be gone on with.
    again = Command(tmp_path, "train", config, "--resume", "--output", run)
    assert again.wait() == 0, again.errors
    assert "already complete: 30 steps" in again.output


@pytest.mark.fault(47)
def test_the_precision_may_change_on_the_way(run_ranks, tmp_path, data):
    """Only float16 scales its loss; the device cannot change here, where there is one kind."""
    run = tmp_path / "run"
    scalers = []
    for steps, precision in [(1, "float32"), (3, "float16"), (4, "float16"), (5, "float32")]:
        sizes = {"train": {"steps": steps, "precision": precision, "batch_size": 2}}
        options = small(data, **sizes, augment={"crop_size": [9, 17]}, optim={"ema_decay": None})
        options["eval"]["precision"] = "float32"
        config = write_config(tmp_path / "c.yaml", options)
        resumed = steps > 1
        assert run_ranks(1, train, config, run, resumed, accept_changes=resumed) == [0]
        assert last(run).step == steps
        scalers.append(last(run).scaler)
    assert scalers[0] == scalers[3] == {}
    # The steps since an overflow: it was not begun anew.
    assert [scaler["_growth_tracker"] for scaler in scalers[1:3]] == [2, 3]
    assert len(losses(run)) == 5
    assert np.isfinite(losses(run)).all()
    log = (run / "train.log").read_text()
    assert "changed    train.precision: float32 there, float16 now" in log


@pytest.mark.fault(69)
def test_a_data_set_of_fewer_images_than_ranks_is_trained_on_all_the_same(run_ranks, tmp_path):
    """The stream of samples does not end with an epoch. Images that are left out are told."""
    root, run = tmp_path / "data", tmp_path / "run"
    root.mkdir()
    write_data(root, num_images=2)
    (root / "images/train/0.png").rename(root / "images/train/0.tga")
    config = write_config(tmp_path / "c.yaml", small(root, train={"steps": 2}))
    assert run_ranks(2, train, config, run) == [0, 0]
    assert len(losses(run)) == last(run).step == 2
    said = "warning: 1 image is left out, no reader has the format: "
    assert f"{said}{root / 'images/train/0.tga'}\n" in (run / "train.log").read_text()


@pytest.mark.fault(84)
def test_other_versions_of_libraries_are_told_once_at_a_resumption(run_ranks, tmp_path, data):
    config = write_config(tmp_path / "c.yaml", small(data, train={"steps": 4}))
    run = tmp_path / "run"
    assert run_ranks(1, train, config, run, until=1) == [0]
    path = run / "environment.json"
    recorded = json.loads(path.read_text())
    now = recorded["libraries"]["torch"]
    recorded["libraries"] |= {"torch": "2.1.7", "pillow": None}
    recorded["python"] = "3.9.1"
    path.write_text(json.dumps(recorded))
    for until in (2, 3):
        assert run_ranks(1, train, config, run, True, until=until) == [0]
    log = (run / "train.log").read_text()
    said = [line.split("warning: ")[1] for line in log.splitlines() if "warning: " in line]
    numbers = ": numbers may differ"
    assert len(said) == 3
    assert said[0].startswith("the run had python 3.9.1 there, 3.")
    assert said[1] == f"the run had torch 2.1.7 there, {now} now{numbers}"
    assert said[2].startswith("the run had pillow none there, ")
    assert json.loads(path.read_text())["libraries"]["torch"] == now


@pytest.mark.slow("cli", "commands", "trainer", "distributed", "desk", "text")
@pytest.mark.fault(87, 88)
def test_no_network_no_terminal_and_no_language_are_needed(tmp_path, no_network):
    """The names of the classes are not written in plain letters, the output is."""
    root, run = tmp_path / "data", tmp_path / "run"
    root.mkdir()
    write_data(root)
    names = "classes: [Straße, plant, water, 砂]\nignore_ids: [255]\n"
    (root / "classes.yaml").write_text(names, encoding="utf-8")
    options = small(root, data={"num_workers": 1}, train={"steps": 1})
    config = write_config(tmp_path / "c.yaml", options)
    words = ["train", config, "--nproc", 2, "--output", run]
    trained = Command(tmp_path, *words, wrapper=no_network)
    assert trained.wait() == 0, trained.errors
    code = f"import sys; from segtrain.cli import main; sys.exit(main(['eval', {str(run)!r}]))"
    language = {"LC_ALL": "C", "PYTHONUTF8": "0", "TERM": "dumb"}
    done = run_python(code, wrapper=no_network, **language)
    assert done.returncode == 0, done.stderr
    # torch remarks that it cannot look up names.
    said = (trained.errors + done.stderr).splitlines()
    assert [line for line in said if "hostname of the client socket" not in line] == []
    assert "Stra" in done.stdout
    assert done.stdout.isascii()
    for output in (trained.output, done.stdout):
        assert all(letter.isprintable() or letter == "\n" for letter in output)
