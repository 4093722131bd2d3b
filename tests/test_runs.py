"""`segtrain runs`: what the list says of each run, and what clearing one removes."""

import json
import os
import re
import shutil

import pytest
from experiments import refusal, small, train, write_config, write_data

from segtrain.desk.results.runs import read_run
from segtrain.errors import CheckpointError
from segtrain.files import manifest
from segtrain.files.manifest import Entry
from segtrain.run.directory import RunLock

LOCK = range(1, 100)  # bytes of the file


def sizes(directory):
    return {str(p.relative_to(directory)): p.stat().st_size for p in directory.rglob("*.*")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two complete runs, and one that was paused."""
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    write_data(home / "data")
    kept = {"keep_every_steps": 2, "every_steps": 1}
    for name, steps in (("done", 3), ("short", 2), ("cut", 9)):
        options = small(
            home / "data",
            train={"steps": steps},
            eval={"every_steps": 2 if name == "done" else None},
            checkpoint=kept,
        )
        config = write_config(home / f"{name}.yaml", options)
        until = {"until": 1} if name == "cut" else {}
        assert train(config, home / "runs" / name, **until) == 0
    return home / "runs"


def test_the_list_says_what_the_files_of_each_run_say(runs, tmp_path, lab, monkeypatch):
    monkeypatch.chdir(runs.parent)
    before = sizes(runs)
    with RunLock(runs / "short"):
        lines = lab.done("runs", "--json", tmp_path / "x.json").out.splitlines()
    records = {r["directory"]: r for r in json.loads((tmp_path / "x.json").read_text())}
    assert list(records) == ["runs/cut", "runs/done", "runs/short"]
    for name, record in records.items():
        run = read_run(runs.parent / name)
        best = run.best and [*run.best]
        assert (record["step"], record["steps"]) == (run.step, run.config.train.steps)
        assert (record["best"], record["training_s"]) == (best, pytest.approx(run.training_s))
        assert record["num_bytes"] - run.disk_bytes() in (LOCK if run.name == "short" else [0])
    assert [record["state"] for record in records.values()] == ["stopped", "complete", "training"]
    assert lines[1].split() == [
        *("runs/cut", "-", "-", "1/9", "0.0", f"{records['runs/cut']['num_bytes'] / 1e9:.2f}"),
        *["stopped:", "segtrain", "train", "runs/cut", "--resume"],
    ]
    assert lines[-1].startswith("3 runs, ")
    again = f"segtrain train {runs / 'cut'} --resume"
    (runs / "folds.json").touch()
    assert f"stopped: segtrain folds {runs} --resume" in lab.done("runs", runs / "cut").out
    (runs / "folds.json").unlink()
    ended = runs / "cut/ending.json"
    for code, shown in (
        (5, "diverged: no number\n"),
        (3, f"failed: no number: once that is mended, {again}\n"),
    ):
        ended.write_text(json.dumps({"exit_code": code, "message": "no number"}))
        assert lab.done("runs", runs / "cut").out.splitlines(keepends=True)[1].endswith(shown)
    ended.unlink()
    assert sizes(runs) == before
    lines = lab.done("runs", runs / "short", runs).out.splitlines()  # each once
    assert [line.split()[-1] for line in lines[1:3]] == ["complete", "--resume"]


def test_a_run_behind_a_link_is_found(runs, tmp_path, lab):
    (tmp_path / "linked").symlink_to(runs / "done")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert lab.done("runs", tmp_path).out.splitlines()[1].startswith(f"{tmp_path / 'linked'} ")


def test_a_folder_without_runs(tmp_path, lab):
    assert lab.done("runs", tmp_path).out == "0 runs, 0.00 GB\n"


def test_what_is_damaged_or_of_another_version_is_listed_all_the_same(runs, tmp_path, lab):
    (tmp_path / "config.yaml").write_text("train: {steps: 7, unknown: 1}")
    (tmp_path / "environment.json").write_text("{}")
    lines = '{"step": 5, "eval/mIoU": null, "time/step_s": 0.5}', '{"step": 6, "time/step_s": 0.1'
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert "    0/7  " in lab.done("runs", tmp_path).out  # nothing is saved
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.pt").touch()
    assert "    5/7  " in lab.done("runs", tmp_path).out  # a copy without its manifest
    entries = {"last.pt": [Entry(3, 0, "")], "best.pt": [Entry(4, 0, "")]}
    manifest.write(tmp_path / "checkpoints", entries)
    assert "    3/7  " in lab.done("runs", tmp_path).out  # where it would go on
    (tmp_path / "checkpoints/manifest.json").write_text("[")
    assert "cannot be read: " in lab.done("runs", tmp_path).out


def test_a_cleared_run_can_be_used_but_not_trained_on(runs, lab):
    run = runs / "done"
    own = [run / "checkpoints" / name for name in ("step_0000009.pt", "previous.pt")]
    for path in own:
        path.write_bytes(b"of the user")
    before, photos = sizes(run), runs.parent / "data/images/val"
    said = lab.done("runs", "--clear", run).out
    after = sizes(run)
    gone = {"last.pt", "step_0000002.pt"}
    assert before.keys() - after.keys() == {f"checkpoints/{name}" for name in gone}
    freed = sum(before[f"checkpoints/{name}"] for name in gone)
    assert f"freed {freed / 1e9:.2f} GB; it cannot be trained on" in said
    assert {path.read_bytes() for path in own} == {b"of the user"}
    for command in (
        ("eval", run),
        ("predict", run, photos, "--output", runs.parent / "out"),
        ("report", run),
        ("compare", run, runs / "short"),
        ("runs", "--clear", run),
    ):
        lab.done(*command, *(() if command[0] == "runs" else ("--device", "cpu")))
    assert "complete and cleared" in lab.done("runs", runs).out
    kind, _, message = refusal(lambda: train(run / "config.yaml", run, resume=True))
    assert kind == CheckpointError.__name__
    assert "best.pt alone is left (segtrain runs --clear)" in message


def test_an_evaluation_says_of_windows_that_they_serve_large_images_alone(runs, lab):
    words = ("eval", runs / "short", "--device", "cpu", "--set")
    warning = "warning: eval.crop_size: with eval.mode whole, only images that are too large"
    assert warning in lab.done(*words, "eval.crop_size=[40, 40]").err
    assert "warning: eval" not in lab.done(*words, "eval.flip=true").err


def test_what_is_not_complete_or_in_use_is_not_cleared(runs, lab):
    lab.folder = runs
    with RunLock(runs / "short"):
        said = lab.refused("runs", "--clear", runs / "short", runs / "cut", runs)
    assert re.search(r"short: in use by process \d+ on \S+; wait for it to end\n", said)
    assert "cut: not complete, step 1 of 9; go on with segtrain train" in said
    assert "runs: expected the directory of a run" in said


def test_a_refused_clearing_changes_nothing(runs, tmp_path, lab):
    """Not even the lock file of a killed run, by which `watch` knows it."""
    for name in ("early", "half"):
        killed = tmp_path / name
        shutil.copytree(runs / "cut", killed)
        if name == "early":
            shutil.rmtree(killed / "checkpoints")
        (killed / ".lock").write_text("process 1 on host\n")
        (killed / "checkpoints").mkdir(exist_ok=True)
        (killed / "checkpoints/.last.pt.abcdefgh.tmp").touch()
        before = {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()}
        said = lab.refused("runs", "--clear", killed)
        assert ("has no checkpoint to clear" if name == "early" else "not complete") in said
        after = {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()}
        assert after == before


def test_without_best_the_newest_checkpoint_stays(runs, lab, capsys):
    run = runs / "short"
    os.rename(run / "checkpoints/best.pt", run / "elsewhere.pt")
    names = {path.name for path in (run / "checkpoints").glob("*.pt")}
    lab.done("runs", "--clear", run)
    assert names - {path.name for path in (run / "checkpoints").glob("*.pt")} == {"previous.pt"}
    assert train(run / "config.yaml", run, resume=True) == 0
    assert "already complete" in capsys.readouterr().out
