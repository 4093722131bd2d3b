import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
from experiments import curve, fill, small, train, write_config, write_data
from processes import REPOSITORY

from segtrain.desk.results.runs import State, summarize
from segtrain.errors import DataError, NonFiniteError
from segtrain.run import console
from segtrain.run.console import ProgressBar, progress_words, say
from segtrain.run.log import RunLog


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def board(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def run_python(code, **options):
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, "-c", code], env=environ, text=True, **options)


def test_values_go_to_json_and_tensorboard_which_reads_all_back(tmp_path):
    with RunLog(tmp_path, enabled=True) as run:
        run.text("config", "train:\n  lr: 0.1\n")
        run.picture(3, "eval/0", np.full((7, 5, 3), 200, dtype=np.uint8))
        run.scalars(2, {"train/loss": 0.5, "train/lr": 0.1})
        run.scalars(3, {"train/loss": float("nan"), "train/lr": float("inf")})
        run.scalars(3, {"eval/mIoU": 0.25})
    assert lines(tmp_path) == [
        {"step": 2, "train/loss": 0.5, "train/lr": 0.1},
        {"step": 3, "train/loss": None, "train/lr": None},
        {"step": 3, "eval/mIoU": 0.25},
    ]
    read = board(tmp_path)
    (picture,) = read.Images("eval/0")
    assert (picture.step, picture.height, picture.width) == (3, 7, 5)
    (text,) = read.Tensors("config/text_summary")
    assert b"    train:\n      lr: 0.1" in text.tensor_proto.string_val[0]
    assert curve(tmp_path, "train/lr")[0] == (2, pytest.approx(0.1))
    assert curve(tmp_path, "eval/mIoU") == [(3, 0.25)]


def test_any_ranks_show_the_same_pictures_of_the_whole_split(run_ranks, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_data(data)  # 3 images to evaluate
    options = small(data, train={"steps": 1, "shares": 2}, log={"charts": True})
    config = write_config(tmp_path / "c.yaml", options)
    pictures = []
    train(config, tmp_path / "1")
    run_ranks(2, train, config, tmp_path / "2")
    for ranks in (1, 2):
        read = board(tmp_path / f"{ranks}")
        tags = [f"eval/{i}" for i in range(3)]
        found = {tag for tag in read.Tags()["images"] if tag.startswith("eval/")}
        assert found == {*tags, "eval/confusion"}
        pictures.append([read.Images(tag)[0].encoded_image_string for tag in tags])
    assert pictures[0] == pictures[1]


def test_values_after_the_step_of_resumption_are_dropped(tmp_path, monkeypatch):
    """A killed run has logged steps after its last checkpoint, and may evaluate the last again."""
    from tensorboard.summary.writer import event_file_writer

    # TensorBoard numbers the files of a process, and reads 10 before 9 if they are of one second.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with RunLog(tmp_path, enabled=True) as run:
        for step in range(1, 8):
            run.scalars(step, {"train/loss": 1.0})
    with RunLog(tmp_path, enabled=True, start_step=4) as run:
        for step in range(5, 10):
            run.scalars(step, {"train/loss": 2.0})
    wanted = [(step, 1.0) for step in range(1, 5)] + [(step, 2.0) for step in range(5, 10)]
    assert [(line["step"], line["train/loss"]) for line in lines(tmp_path)] == wanted
    assert curve(tmp_path, "train/loss") == wanted
    with RunLog(tmp_path, enabled=True) as run:  # it begins again
        run.scalars(1, {"train/loss": 3.0})
    assert lines(tmp_path) == [{"step": 1, "train/loss": 3.0}]
    assert curve(tmp_path, "train/loss") == [(1, 3.0)]
    with RunLog(tmp_path, enabled=True) as run:
        for step, tag in [(2, "eval/mIoU"), (4, "train/loss"), (4, "eval/mIoU")]:
            run.scalars(step, {tag: 1.0})
    with RunLog(tmp_path, enabled=True, start_step=4, evaluated_step=2) as run:
        run.begin()
    kept = [(2, "eval/mIoU"), (4, "train/loss")]
    assert [(line["step"], list(line)[1]) for line in lines(tmp_path)] == kept


def test_damaged_lines_are_dropped_at_a_resumption_and_only_then_the_file_is_written(tmp_path):
    path, good = tmp_path / "metrics.jsonl", '{"step": 1, "train/loss": 1.0}\n'
    damaged = [b"[1]\n", b'{"loss": 1}\n', b"7\n", b"\xff\xfe\n", b'{"step": "x"}\n', b'{"step": 2']
    path.write_bytes(good.encode() + b"".join(damaged))
    found = []
    for _ in range(2):
        with RunLog(tmp_path, enabled=True, start_step=3) as run:
            run.begin()
        assert path.read_text() == good
        found.append(path.stat())
    assert os.path.samestat(*found)


@pytest.mark.parametrize(
    ("error", "state"),
    [(NonFiniteError, State.DIVERGED), (DataError, State.FAILED), (KeyboardInterrupt, "stopped")],
)
def test_how_a_run_ended_is_kept_until_it_goes_on(tmp_path, error, state):
    """Not by an attempt that comes to no step."""

    def attempt(*values):
        with pytest.raises(error), RunLog(tmp_path, enabled=True) as run:  # noqa: PT012
            for value in values:
                run.scalars(value, {})
            raise error(f"too bad after {values}\nhere and there")

    attempt(1)
    attempt()
    why = "" if state == "stopped" else "too bad after (1,)"
    assert (summarize(tmp_path).state, summarize(tmp_path).why) == (state, why)
    with RunLog(tmp_path, enabled=True) as run:
        run.begin()
    assert (summarize(tmp_path).state, summarize(tmp_path).why) == (State.STOPPED, "")


def test_lines_are_shown_and_kept_and_the_end_too(tmp_path, capsys):
    with pytest.raises(ValueError), RunLog(tmp_path, enabled=True) as run:  # noqa: PT012, PT011
        run.lines(["one", "zwei: ü"])
        raise ValueError("no good")
    say("after the run")
    assert capsys.readouterr().out == "one\nzwei: ü\nafter the run\n"
    kept = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    ending = "ended by ValueError: no good"
    assert [line.split(" INFO ")[1] for line in kept] == ["one", "zwei: ü", ending]
    assert console.log_files == []


def test_other_ranks_write_nothing(tmp_path, capsys):
    with RunLog(tmp_path / "run", enabled=False) as run:
        run.lines(["x"])
        run.scalars(1, {"a": 1.0})
        run.picture(1, "a", np.zeros((2, 2, 3), dtype=np.uint8))
        run.text("a", "b")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.fault(26)
def test_a_full_disk_silences_each_writer_once_and_the_run_goes_on(small_disk, capfd):
    directory = small_disk / "run"
    with RunLog(directory, enabled=True) as run:
        run.scalars(1, {"train/loss": 1.0})
        # What fits into the last block of each file still does.
        fill(small_disk)
        for step in range(2, 40):
            run.scalars(step, {f"train/{name}": 1.0 for name in range(20)})
            run.lines(["x" * 200])
            run.picture(step, "train/batch", np.zeros((99, 99, 3), dtype=np.uint8))
    said = capfd.readouterr()
    warnings = [line for line in said.out.splitlines() if line.startswith("warning")]
    files = ["TensorBoard", "metrics.jsonl", "train.log"]
    assert sorted(line.split()[1] for line in warnings) == files
    assert all("No space left on device" in line for line in warnings)
    assert said.err == ""
    assert said.out.count("x" * 200) == 38


@pytest.mark.fault(88)
def test_a_closed_console_does_not_end_a_run():
    code = "from segtrain.run.console import say\nfor i in range(5): say('x' * 70000)\n"
    code += "import sys; print('went on', file=sys.stderr)"
    reader, writer = os.pipe()
    os.close(reader)
    done = run_python(code, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "went on\n")


def test_without_a_terminal_progress_is_a_plain_line_every_ten_seconds(monkeypatch, capsys):
    monkeypatch.setattr(console, "_PLAIN_EVERY_S", 10)
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with ProgressBar(100, 90, "train", enabled=True) as bar:
        for _ in range(10):
            now[0] += 4
            bar.describe("loss 0.5")
            bar.update()
    with ProgressBar(1, 0, "train", enabled=False) as bar:  # on other ranks
        bar.update()
    said = capsys.readouterr()
    assert said.err == ""
    to_go = {93: "  00:28 to go", 96: "  00:16 to go", 99: "  00:04 to go", 100: ""}
    wanted = [f"train {step}/100  loss 0.5{left}" for step, left in to_go.items()]
    assert said.out.splitlines() == wanted
    values = {"train/loss": 0.5, "train/lr": 1e-10, "images_per_s": 3.0}
    assert progress_words(values, None) == ["loss 0.5000", "lr 1.0e-10", "3.0 img/s"]


def test_on_a_terminal_progress_is_a_bar_and_the_log_file_has_plain_lines(tmp_path):
    code = (
        "from pathlib import Path\n"
        "from segtrain.run import console, log\n"
        "console._PLAIN_EVERY_S = -1\n"
        f"log.RunLog(Path({str(tmp_path)!r}), enabled=True)\n"
        "with console.ProgressBar(3, 0, 'train', enabled=True) as bar:\n"
        "    for i in range(3):\n"
        "        bar.describe(f'loss 0.{i}')\n"
        "        bar.update()\n"
        "    console.say('a line')\n"
    )
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    done = run_python(code, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = os.read(screen, 100_000).decode()
    os.close(screen)
    assert done.returncode == 0
    assert all(part in shown for part in ("3/3", "loss 0.2", "step/s", "\r", "a line\r\n"))
    pictures = [part for line in shown.split("\n") for part in line.split("\r")]
    assert max(map(len, pictures)) in (79, 80)
    assert "train 3/3  loss" not in shown  # the plain form
    kept = [line.split(" INFO ")[1] for line in (tmp_path / "train.log").read_text().splitlines()]
    assert kept == [f"train {i + 1}/3  loss 0.{i}" for i in range(3)] + ["a line"]


@pytest.mark.fault(26)
def test_a_disk_that_is_full_at_a_resumption_keeps_the_old_lines(small_disk, capfd):
    lines = "".join(f'{{"step": {step}, "train/loss": 1.0}}\n' for step in range(1, 2001))
    (small_disk / "metrics.jsonl").write_text(lines)
    fill(small_disk)
    with RunLog(small_disk, enabled=True, start_step=1500) as run:
        run.scalars(1501, {"train/loss": 1.0})
    said = capfd.readouterr()
    assert "warning: metrics.jsonl cannot be written any more" in said.out
    assert "Traceback" not in said.err
    # Not even the new line: after the dropped steps the curve would run back.
    assert (small_disk / "metrics.jsonl").read_text() == lines
    assert list(small_disk.glob("*.tmp")) + list(small_disk.glob(".*")) == []
