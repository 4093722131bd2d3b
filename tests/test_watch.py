"""`segtrain watch`: the state of runs and since when, their speed, and curves, from files alone."""

import json
import os
import re
import signal
import time

import pytest
from experiments import small, stopped_after, train, write_config, write_data

from segtrain.desk.commands import watch
from segtrain.desk.commands.watch import chart, screen
from segtrain.desk.results.runs import read_run
from segtrain.files import manifest
from segtrain.files.manifest import Entry
from segtrain.run.directory import RunLock

NOW = time.mktime((2026, 11, 28, 12, 0, 0, 0, 0, -1))
CONFIG = "train: {steps: 100}\neval: {best: miou, every_steps: 25}\n"


@pytest.fixture
def made(tmp_path):
    """Makes a run of which a line is logged every 10 steps of 2 s, `age` seconds ago."""

    def make(name="run", *, step=40, age=5, evaluated=(25,), saved=None, lock=None, ending=0):
        run = tmp_path / "runs" / name
        (run / "checkpoints").mkdir(parents=True)
        lines = [
            {"step": at, "train/loss": 100 / at, "time/step_s": 2.0, "images_per_s": 4.0}
            for at in range(10, step + 1, 10)
        ]
        lines += [{"step": at, "eval/mIoU": at / 100} for at in evaluated]
        text = "".join(json.dumps(x) + "\n" for x in sorted(lines, key=lambda x: x["step"]))
        files = {"environment.json": "{}", "config.yaml": CONFIG, "metrics.jsonl": text}
        if lock:
            files[".lock"] = f"process 1 on {lock}\n"
        if ending:
            files["ending.json"] = json.dumps({"exit_code": ending, "message": "why"})
        for file, content in files.items():
            (run / file).write_text(content)
        if saved:
            (run / "checkpoints/last.pt").touch()
            manifest.write(run / "checkpoints", {"last.pt": [Entry(saved, 0, "")]})
        for path in (*run.iterdir(), *run.glob("checkpoints/*")):
            os.utime(path, (NOW - age, NOW - age))
        return run

    return make


def row(*folders, name="run"):
    """The cells of a run in the table, by their titles."""
    lines = screen(folders, NOW, 80)
    titles, *rows = [re.split(r"  +", line.strip()) for line in lines[1:]]
    (cells,) = [cells for cells in rows if cells[0].endswith(name)]
    return dict(zip(titles, cells, strict=True))


def test_runs_that_are_named_one_by_one_are_a_table_without_curves(made):
    runs = sorted([made(name="a"), made(name="b")])
    lines = screen(runs, NOW, 80)
    assert lines[0].endswith("2 runs: 2 stopped")
    assert len(lines) == 1 + 1 + len(runs)


def test_speed_and_the_time_that_is_left_are_of_the_newest_lines(made):
    run = made(saved=25)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "train/loss": 9.5, "time/step_s": 0.')  # as it is just written
    with RunLock(run):
        os.utime(run / "metrics.jsonl", (NOW - 5, NOW - 5))
        found = row(run.parent)
    speed = {"step": "40/100", "steps/s": "0.50", "img/s": "4.0", "to go": "0:02:00"}
    scores = {"best": "mIoU 0.2500", "at step": "25", "loss": "2.5000"}
    saved = {"saved": "25", "ago": "0:00:05"}
    assert found == {"run": str(run), "state": "training"} | speed | saved | scores


def test_the_newest_checkpoint_is_the_one_that_training_goes_on_from(made):
    run = made(saved=25)
    (run / "checkpoints/best.pt").touch()
    entries = {"last.pt": [Entry(25, 0, "")], "step_0000030.pt": [Entry(30, 0, "")]}
    manifest.write(run / "checkpoints", entries)
    os.utime(run / "checkpoints/last.pt", (NOW - 4000, NOW - 4000))
    found = row(run.parent)
    assert (found["saved"], found["ago"]) == ("25", "1:06:40")
    (run / "checkpoints/manifest.json").unlink()  # a copy without it
    assert row(run.parent)["saved"] == "?"
    (run / "checkpoints/last.pt").unlink()
    found = row(run.parent)
    assert (found["saved"], found["ago"]) == ("-", "-")


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({"age": 199}, "training"),  # ten times the 20 s between two lines
        ({"age": 201}, "stuck since 11:56:39"),
        ({"age": 899, "step": 0, "evaluated": ()}, "training"),
        ({"age": 3 * 86400, "step": 0, "evaluated": ()}, "stuck since 2026-11-25 12:00"),
        ({"age": 5000, "step": 50, "saved": 50}, "evaluating since 10:36:40"),
        ({"age": 5000, "step": 40, "saved": 50}, "evaluating since 10:36:40"),
        ({"age": 201, "step": 50, "saved": 50, "evaluated": (25, 50)}, "stuck since 11:56:39"),
        ({"age": 5000, "step": 100, "evaluated": (25, 50, 75)}, "evaluating since 10:36:40"),
    ],
)
def test_a_run_in_use_trains_evaluates_or_is_stuck(made, options, state):
    run = made(**options)
    with RunLock(run):
        assert row(run.parent)["state"] == state


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({"age": 60}, "stopped since 11:59:00"),
        ({"age": 60, "lock": "here"}, "killed since 11:59:00"),
        # No lock is seen there, where the file system has none.
        ({"age": 60, "lock": "there"}, "training"),
        ({"age": 201, "lock": "there"}, "killed since 11:56:39"),
        ({"step": 100, "evaluated": (25, 50, 75, 100)}, "complete"),
        ({"age": 60, "ending": 5}, "diverged since 11:59:00: why"),
    ],
)
def test_a_run_that_is_not_in_use_was_stopped_killed_or_is_elsewhere(
    made, monkeypatch, options, state
):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    found = row(made(**options).parent)
    assert found["state"] == state
    assert (found["steps/s"] == "-") == (state != "training")


def test_what_no_run_has_written_is_a_dash_and_the_first_line_counts(made, tmp_path):
    made("a", step=0, evaluated=())
    made("b", lock="elsewhere", age=9000)
    (tmp_path / "runs/c").mkdir()
    (tmp_path / "runs/c/environment.json").write_text("{}")
    lines = screen([tmp_path / "runs"], NOW, 80)
    assert lines[0] == "12:00:00  3 runs: 1 killed, 2 stopped"
    assert row(tmp_path / "runs", name="c")["step"] == "0/?"
    assert row(tmp_path / "runs", name="a")["loss"] == "-"


def test_a_number_that_the_beginning_of_the_tail_cuts_is_not_read(made, monkeypatch):
    run = made(step=40)
    text = (run / "metrics.jsonl").read_bytes()
    # From the second digit of the step before the last on.
    monkeypatch.setattr(watch, "_TAIL_BYTES", len(text) - text.index(b"0, ", text.index(b"30, ")))
    with RunLock(run):
        found = watch.read_signs(watch.summarize(run))
    assert found.values["train/loss"] == 2.5
    assert found.silence_s == watch._AT_FIRST_S  # there is one line only


def test_a_chart_shows_each_value_by_its_height():
    points = [(10 * i, float(value)) for i, value in enumerate((0, 31, 15, 7, 31), start=1)]
    _, *rows = chart("x", points, 41)
    heights = [
        sum(" ▁▂▃▄▅▆▇█".index(line[i]) if i < len(line) else 0 for line in rows)
        for i in range(len(rows[-1]))
    ]
    assert heights == [1] * 10 + [32] * 10 + [16] * 10 + [8] * 10 + [32]
    title, *rows = chart("x", [(i, i % 100) for i in range(10000)], 50)
    assert len(rows[-1]) == 50  # each column is a mean of two hundreds
    assert title == "x  now 99, 49.5 to 49.5, steps 0 to 9999"


def test_one_screen_of_a_finished_and_of_a_killed_run(tmp_path, lab, forkserver):
    write_data(tmp_path)
    options = small(tmp_path, train={"steps": 2}, eval={"every_steps": 1})
    config = write_config(tmp_path / "c.yaml", options)
    assert train(config, tmp_path / "runs/done") == 0
    words = (2, config, tmp_path / "runs/dead", False, signal.SIGKILL)
    process = forkserver.Process(target=stopped_after, args=words)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    lines = lab.done("watch", "--once", tmp_path / "runs").out.splitlines()
    assert lines[0].endswith("2 runs: 1 complete, 1 killed")
    assert re.search(r"dead +1/2 .* killed since \d\d:\d\d:\d\d$", lines[2])
    run = read_run(tmp_path / "runs/done")
    lines = lab.done("watch", "--once", run.directory).out.splitlines()
    assert f"mIoU {run.best[1]:.4f}" in lines[2]
    assert lines[2].endswith("  complete")
    titles = [line for line in lines if "steps" in line][1:]
    losses, scores = (run.curves[tag][1] for tag in ("train/loss", "eval/mIoU"))
    assert titles == [
        f"{tag}  now {x[-1]:.4g}, {min(x):.4g} to {max(x):.4g}, steps 1 to 2"
        for tag, x in (("train/loss", losses), ("eval/mIoU", scores))
    ]
