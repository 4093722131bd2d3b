"""`log.prometheus`: metrics.prom says what the log, the checkpoint and the end of a run say."""

import json
import os
import re
import signal
import time

import pytest
from experiments import last, small, stopped_after, train, unread, write_config

from segtrain.run import prometheus
from segtrain.run.log import RunLog
from segtrain.run.prometheus import MetricsFile
from segtrain.run.trackers import Trackers, senders

# prometheus.io/docs/instrumenting/exposition_formats: a metric has its HELP, its TYPE, its values.
NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
LABEL = r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\["\\n])*)"'
VALUE = re.compile(rf"([a-zA-Z_:][\w:]*)\{{({LABEL}(?:,{LABEL})*)\}} ({NUMBER})", re.A)
STATES = ("training", "complete", "failed", "stopped")


def parsed(text):
    """{metric: {its labels but run: value}}, and the runs; anything else fails."""
    assert text.endswith("\n")
    found, runs, kinds, name = {}, set(), {}, None
    for line in text.splitlines():
        if match := re.fullmatch(r"# HELP (\w+) [^\\]+", line):
            name = match[1]
            assert name not in found  # the values of a metric stand together
            found[name] = {}
        elif match := re.fullmatch(r"# TYPE (\w+) (gauge|counter)", line):
            assert (match[1], name in kinds, found[name]) == (name, False, {})
            kinds[name] = match[2]
        else:
            match = VALUE.fullmatch(line)
            assert match, line
            assert match[1] == name
            labels = dict(re.findall(LABEL, match[2]))
            runs.add(re.sub(r"\\(.)", r"\1", labels.pop("run")))
            key = tuple(sorted(labels.items()))
            assert key not in found[name]
            found[name][key] = float(match[match.lastindex])
    assert kinds.keys() == found.keys()
    return found, runs


def values(run):
    """{name: value}, and the state."""
    found, runs = parsed((run / "metrics.prom").read_text())
    assert runs == {str(run.resolve())}
    states = {key[0][1]: value for key, value in found.pop("segtrain_state").items()}
    assert (tuple(states), sorted(states.values())) == (STATES, [0, 0, 0, 1])
    (state,) = [name for name, value in states.items() if value]
    numbers = {}
    for name, values in found.items():
        ((labels, number),) = values.items()
        assert labels == ()
        numbers[name.removeprefix("segtrain_")] = number
    return numbers, state


def newest(run):
    """{tag: value} of the last line with each tag in metrics.jsonl."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        found |= json.loads(line)
    return found


def options(data, **sections):
    section = {"train": {"steps": 8}, "eval": {"every_steps": 4}, "log": {"every_steps": 2}}
    values = small(data, **section | sections)
    values["log"] |= {"prometheus": True, "charts": False}
    return values


def test_the_file_of_a_run_and_of_its_resumption(run_ranks, tmp_path, data):
    config, run = write_config(tmp_path / "c.yaml", options(data)), tmp_path / "run"
    began = time.time()
    assert run_ranks(1, stopped_after, 5, config, run) == [143]
    numbers, state = values(run)
    stopped_at = last(run).step
    assert (state, stopped_at) == ("stopped", 7)
    assert (numbers["step"], numbers["train_steps"]) == (6, 8)
    assert numbers["eval_miou"] == numbers["best_score"] == last(run).best["score"]
    assert numbers["checkpoint_timestamp_seconds"] == (run / "checkpoints/last.pt").stat().st_mtime
    assert began < numbers["written_timestamp_seconds"] < time.time()

    assert run_ranks(1, train, config, run, True) == [0]
    numbers, state = values(run)
    logged = newest(run)
    assert (state, numbers["step"]) == ("complete", 8)
    for tag in ("train/loss", "train/lr", "images_per_s", "eval/mIoU"):
        assert numbers[tag.replace("/", "_").lower()] == logged[tag]
    assert numbers["best_score"] == last(run).best["score"]
    assert numbers.keys() == {
        *("step", "train_steps", "train_loss", "train_lr", "images_per_s", "eval_miou"),
        *("best_score", "checkpoint_timestamp_seconds", "written_timestamp_seconds"),
    }
    assert not list(run.glob("*.id"))


def test_a_run_that_dies_stays_in_training_with_the_time_of_its_last_line(
    tmp_path, data, forkserver
):
    config, run = write_config(tmp_path / "c.yaml", options(data)), tmp_path / "run"
    words = (5, config, run, False, signal.SIGKILL)
    process = forkserver.Process(target=stopped_after, args=words)
    process.start()
    process.join()
    numbers, state = values(run)
    assert state == "training"
    assert numbers["written_timestamp_seconds"] <= (run / "metrics.prom").stat().st_mtime + 0.01


def test_nothing_is_written_that_nobody_asked_for(tmp_path):
    assert senders(tmp_path, unread(), resumes=False) == []


@pytest.fixture
def metrics(tmp_path):
    """Makes the file of a run of 9 steps in a folder of that name."""

    def make(name='a"b\\c d', **options):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        return directory, MetricsFile(directory, unread(train={"steps": 9}, **options))

    return make


def test_the_best_score_of_the_lines_before_is_kept_and_a_damaged_line_left_out(metrics, tmp_path):
    (tmp_path / "run").mkdir()
    lines = [{"step": 2, "eval/mIoU": 0.5, "train/loss": 2.0}, {"step": 4, "eval/mIoU": None}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run/metrics.jsonl").write_text(text + '{"step": 5, "train/l')
    run, file = metrics("run")
    assert [values(run)[0][name] for name in ("step", "train_loss", "eval_miou")] == [4, 2.0, 0.5]
    file.scalars(6, {"eval/mIoU": 0.25})
    assert [values(run)[0][name] for name in ("eval_miou", "best_score")] == [0.25, 0.5]
    file.scalars(8, {"eval/mIoU": 0.75})
    assert [values(run)[0][name] for name in ("eval_miou", "best_score")] == [0.75, 0.75]


def test_names_and_numbers_of_any_kind(metrics):
    run, file = metrics()
    file.scalars(3, {"train/loss": 1e-9, "train/lr": 2.5e20})
    numbers, _ = values(run)
    assert (numbers["train_loss"], numbers["train_lr"]) == (1e-9, 2.5e20)
    assert not {"eval_miou", "best_score", "checkpoint_timestamp_seconds"} & numbers.keys()
    classes, file = metrics("classes", eval={"best": ("car", "road")})
    file.scalars(3, {"eval/IoU_of_best": 0.5, "eval/mIoU": 0.75})
    assert values(classes)[0]["best_score"] == 0.5


@pytest.mark.parametrize(("error", "state"), [(None, "complete"), (ValueError, "failed")])
def test_how_a_run_ends(tmp_path, error, state):
    run = tmp_path / "run"
    made = Trackers(senders(run, unread(log={"prometheus": True}), resumes=False))
    try:
        with RunLog(run, enabled=True, trackers=made) as log:
            log.scalars(1, {"train/loss": 0.5})
            if error:
                raise error
    except ValueError:
        pass
    made.finish("FINISHED")
    assert values(run)[1] == state


def test_a_reader_never_sees_a_part_and_a_full_disk_is_one_warning(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    made = Trackers(senders(run, unread(log={"prometheus": True}), resumes=False))
    write, replaced = prometheus.write_atomic, []

    def fails_later(path, text, **options):
        replaced.append(os.path.exists(path) and parsed(path.read_text()))
        if len(replaced) > 3:
            raise OSError(28, "No space left on device")
        write(path, text, **options)

    monkeypatch.setattr(prometheus, "write_atomic", fails_later)
    with RunLog(run, enabled=True, trackers=made) as log:
        for step in range(9):
            log.scalars(step, {"train/loss": 0.5})
    made.finish("FINISHED")
    assert len(replaced) == 4
    assert capsys.readouterr().out == (
        "warning: log.prometheus: metrics.prom gets nothing any more: OSError: [Errno 28] "
        "No space left on device\n"
    )
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 9
