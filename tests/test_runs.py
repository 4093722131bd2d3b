"""`segtrain runs`: what the list says of each run, and what clearing one removes."""

import json
import os
import re

import pytest
from experiments import refusal, segtrain, small, train, write_config, write_data

from segtrain.errors import CheckpointError
from segtrain.files import manifest
from segtrain.files.manifest import Entry
from segtrain.results.runs import read_run
from segtrain.run.directory import RunLock

LOCK = range(1, 100)  # bytes of the file


def sizes(directory):
    return {str(p.relative_to(directory)): p.stat().st_size for p in directory.rglob("*.*")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A complete run, one that ended early by itself, and one that was paused."""
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    write_data(home / "data")
    kept = {"keep_every_steps": 2, "every_steps": 1}
    for name, steps, more in (("done", 4, {}), ("early", 50, {"max_hours": 1e-6}), ("cut", 9, {})):
        options = small(
            home / "data",
            train={"steps": steps, **more},
            eval={"every_steps": 3 if name == "done" else None},
            checkpoint=kept,
        )
        config = write_config(home / f"{name}.yaml", options)
        until = {"until": 3} if name == "cut" else {}
        assert train(config, home / "runs" / name, **until) == 0
    return home / "runs"


def test_the_list_says_what_the_files_of_each_run_say(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(runs.parent)
    before = sizes(runs)
    with RunLock(runs / "early"):
        assert segtrain("runs", "--json", tmp_path / "x.json") == 0
    records = {r["directory"]: r for r in json.loads((tmp_path / "x.json").read_text())}
    assert list(records) == ["runs/cut", "runs/done", "runs/early"]
    for name, record in records.items():
        run = read_run(runs.parent / name)
        best = run.best and [*run.best]
        assert (record["step"], record["steps"]) == (run.step, run.config.train.steps)
        assert (record["best"], record["training_s"]) == (best, pytest.approx(run.training_s))
        assert record["num_bytes"] - run.disk_bytes() in (LOCK if run.name == "early" else [0])
    assert [record["state"] for record in records.values()] == ["stopped", "complete", "training"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        *("runs/cut", "-", "-", "3/9", "0.0", f"{records['runs/cut']['num_bytes'] / 1e9:.2f}"),
        *["stopped:", "segtrain", "train", "runs/cut", "--resume"],
    ]
    assert lines[-1].startswith("3 runs, ")
    (runs / "folds.json").touch()
    assert segtrain("runs", runs / "cut") == 0
    assert f"stopped: segtrain folds {runs} --resume" in capsys.readouterr().out
    (runs / "folds.json").unlink()
    assert sizes(runs) == before
    assert segtrain("runs", runs / "early", runs) == 0  # each once
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        "complete",
        "--resume",
    ]


def test_a_run_behind_a_link_is_found(runs, tmp_path, capsys):
    (tmp_path / "linked").symlink_to(runs / "done")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert segtrain("runs", tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{tmp_path / 'linked'} ")


def test_a_folder_without_runs_and_a_missing_one(tmp_path, capsys):
    assert segtrain("runs", tmp_path) == 0
    assert capsys.readouterr().out == "0 runs, 0.00 GB\n"
    assert segtrain("runs", tmp_path / "none") == 2
    assert segtrain("runs", "--clear") == 2


def test_what_is_damaged_or_of_another_version_is_listed_all_the_same(runs, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("train: {steps: 7, unknown: 1}")
    (tmp_path / "environment.json").write_text("{}")
    lines = '{"step": 5, "eval/mIoU": null, "time/step_s": 0.5}', '{"step": 6, "time/step_s": 0.1'
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert segtrain("runs", tmp_path) == 0
    assert "    0/7  " in capsys.readouterr().out  # nothing is saved
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.pt").touch()
    assert segtrain("runs", tmp_path) == 0
    assert "    5/7  " in capsys.readouterr().out  # a copy without its manifest
    entries = {"last.pt": [Entry(3, 0, "")], "best.pt": [Entry(4, 0, "")]}
    manifest.write(tmp_path / "checkpoints", entries)
    assert segtrain("runs", tmp_path) == 0
    assert "    3/7  " in capsys.readouterr().out  # where it would go on
    (tmp_path / "checkpoints/manifest.json").write_text("[")
    assert segtrain("runs", tmp_path) == 0
    assert "cannot be read: " in capsys.readouterr().out


def test_a_cleared_run_can_be_used_but_not_trained_on(runs, capsys, monkeypatch):
    run = runs / "done"
    own = [run / "checkpoints" / name for name in ("step_0000009.pt", "previous.pt")]
    for path in own:
        path.write_bytes(b"of the user")
    before, photos = sizes(run), runs.parent / "data/images/val"
    assert segtrain("runs", "--clear", run) == 0
    after = sizes(run)
    gone = {"last.pt", "step_0000002.pt"}
    assert before.keys() - after.keys() == {f"checkpoints/{name}" for name in gone}
    freed = sum(before[f"checkpoints/{name}"] for name in gone)
    assert f"freed {freed / 1e9:.2f} GB; it cannot be trained on" in capsys.readouterr().out
    assert {path.read_bytes() for path in own} == {b"of the user"}
    for command in (
        ("eval", run),
        ("predict", run, photos, "--output", runs.parent / "out"),
        ("report", run),
        ("compare", run, runs / "early"),
        ("runs", "--clear", run),
    ):
        assert segtrain(*command, *(() if command[0] == "runs" else ("--device", "cpu"))) == 0
    capsys.readouterr()
    assert segtrain("runs", runs) == 0
    assert "complete and cleared" in capsys.readouterr().out
    kind, _, message = refusal(lambda: train(run / "config.yaml", run, resume=True))
    assert kind == CheckpointError.__name__
    assert "best.pt alone is left (segtrain runs --clear)" in message


def test_what_is_not_complete_or_in_use_is_not_cleared(runs, capsys):
    before = sizes(runs)
    with RunLock(runs / "early"):
        assert segtrain("runs", "--clear", runs / "early", runs / "cut", runs) == 2
    said = capsys.readouterr().err
    assert re.search(r"early: in use by process \d+ on \S+; wait for it to end\n", said)
    assert "cut: not complete, step 3 of 9; go on with segtrain train" in said
    assert "runs: expected the directory of a run" in said
    assert sizes(runs) == before


def test_without_best_the_newest_checkpoint_stays(runs, capsys):
    run = runs / "early"
    os.rename(run / "checkpoints/best.pt", run / "elsewhere.pt")
    names = {path.name for path in (run / "checkpoints").glob("*.pt")}
    assert segtrain("runs", "--clear", run) == 0
    assert names - {path.name for path in (run / "checkpoints").glob("*.pt")} == {"previous.pt"}
    assert train(run / "config.yaml", run, resume=True) == 0
    assert "already complete" in capsys.readouterr().out
