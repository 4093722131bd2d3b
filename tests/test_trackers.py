"""`log.trackers`: the services get what metrics.jsonl gets, and cannot stop a training."""

import json
import os
import struct
import time
from typing import get_args
from unittest.mock import MagicMock

import pytest
from experiments import small, train, write_config, write_data

from segtrain.commands.from_desk import write_page
from segtrain.config import Config, load_config
from segtrain.run import trackers
from segtrain.run.log import RunLog
from segtrain.run.trackers import Sender, Trackers, _mlflow_name


class Fake:
    """A service that takes everything, or fails or hangs where it is told to."""

    def __init__(self, *_, calls, fails=(), hangs=()):
        self.calls, self.fails, self.hangs = calls, fails, hangs
        self.add("open")

    def add(self, what, *values):
        if what in self.hangs:
            time.sleep(60)
        if what in self.fails:
            raise RuntimeError(f"{what} is broken\nin two lines")
        self.calls.append((what, *values))

    def scalars(self, step, values):
        self.add("scalars", step, values)

    def finish(self, results, files, status):
        self.add("finish", results, files, status)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes the trackers of a run in tmp_path, and the list of what they get."""

    def make(resumes=False, **options):
        calls, kept = [], []

        def opened(_directory, _config, identity, keep):
            kept.append(identity)
            keep("x")
            return Fake(calls=calls, **options)

        monkeypatch.setitem(trackers.TRACKERS, "fake", opened)
        return Trackers([Sender("fake", tmp_path, None, resumes)]), calls, kept

    return make


def test_a_tracker_gets_the_finite_values_in_their_order(fake, tmp_path):
    made, calls, kept = fake()
    with RunLog(tmp_path, enabled=True, trackers=made) as log:
        for step in range(1, 50):
            log.scalars(step, {"train/loss": step / 8, "eval/mIoU": float("nan")})
    made.finish("FINISHED", {"best/mIoU": 0.5}, [tmp_path / "x"])
    assert calls[0] == ("open",)
    assert calls[1:-1] == [("scalars", step, {"train/loss": step / 8}) for step in range(1, 50)]
    assert calls[-1] == ("finish", {"best/mIoU": 0.5}, [tmp_path / "x"], "FINISHED")
    again, _, kept_again = fake(resumes=True)
    with RunLog(tmp_path, enabled=True, start_step=49, trackers=again) as log:
        log.begin()
    again.finish("KILLED")
    assert (kept, kept_again) == ([None], ["x"])


@pytest.mark.parametrize("where", ["open", "scalars", "finish"])
def test_a_tracker_that_fails_is_one_warning(fake, tmp_path, capsys, where):
    made, calls, _ = fake(fails=(where,))
    with RunLog(tmp_path, enabled=True, trackers=made) as log:
        for step in range(1, 5):
            log.scalars(step, {"train/loss": 0.5})
    made.finish("FINISHED")
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warning == (
        f"warning: log.trackers: fake gets nothing any more: RuntimeError: {where} is broken"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert [call for call in calls if call[0] == "finish"] == []


def test_training_does_not_wait_for_a_tracker_that_hangs(fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "_MOST_WAITING", 20)
    monkeypatch.setattr(trackers, "_PATIENCE_S", 0.1)
    began = time.monotonic()
    for steps, reason in (
        (5, "it has not taken all of the run in time"),
        (99, "it does not keep up"),
    ):
        made, _, _ = fake(hangs=("open",))
        with RunLog(tmp_path, enabled=True, trackers=made) as log:
            for step in range(1, steps):
                log.scalars(step, {"train/loss": 0.5})
        made.finish("FINISHED")
        assert capsys.readouterr().out.count(f"fake gets nothing any more: {reason}") == 1
    assert time.monotonic() - began < 30


def test_an_error_of_the_run_ends_its_trackers(fake, tmp_path):
    made, calls, _ = fake()
    with pytest.raises(ValueError), RunLog(tmp_path, enabled=True, trackers=made) as log:  # noqa: PT011, PT012
        log.scalars(1, {"train/loss": 0.5})
        raise ValueError
    assert calls[-1] == ("finish", {}, (), "FAILED")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_id_is_kept_before_the_network_is_waited_for(name, data, lab, monkeypatch):
    """A run that is stopped meanwhile goes on in the same one."""
    seen = []

    class Library(MagicMock):
        def init(self, **options):
            self.waits(options["id"])

        def log_batch(self, identity, **_):
            self.waits(identity)

        def waits(self, identity):
            seen.append((identity, (lab.folder / f"{name}.id").read_text().strip()))
            raise ConnectionError

    library = Library()
    library.MlflowClient.return_value = library
    library.create_run.return_value.info.run_id = "made there"
    monkeypatch.setattr(trackers, "import_module", lambda _: library)
    config = load_config(lab.config(data, log={"trackers": [name]}))
    for resumes in (False, True):
        (sender,) = trackers.senders(lab.folder, config, resumes=resumes)
        library.update_run.side_effect = lambda identity, **_: library.waits(identity)
        sender.run()
    assert len(seen) == 2  # the file was there both times
    assert len({identity for pair in seen for identity in pair}) == 1


def test_a_missing_library_is_refused_at_the_start(data, monkeypatch, lab):
    config = lab.config(data, "x.yaml", log={"trackers": ["wandb"]})
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    said = lab.refused("train", config, "--output", lab.folder / "run")
    assert "x.yaml:" in said
    assert "log.trackers: wandb not installed; " in said
    assert "pip install '.[trackers]'" in said


def test_the_config_takes_every_tracker():
    (names, _) = get_args(Config.model_fields["log"].annotation.model_fields["trackers"].annotation)
    assert list(get_args(names)) == list(trackers.TRACKERS)


def test_different_tags_have_different_names_in_mlflow():
    tags = ["eval/IoU/a(b", "eval/IoU/a)b", "eval/IoU/a_x28_b", "train/loss", "eval/IoU/é"]
    names = [_mlflow_name(tag) for tag in tags]
    assert names == ["eval/IoU/a_x28_b", "eval/IoU/a_x29_b", "eval/IoU/a_x5f_x28_b", *tags[3:]]


def tracked(config, directory, environ, options):
    """Trains in a process of its own, in parts: up to each of `options`."""
    os.environ.update(environ)
    for part in options:
        assert train(config, directory, report=write_page, **part) == 0


@pytest.fixture
def run(request, tmp_path, forkserver):
    """A run of six steps with a pause if it can be, tracked by what the test names."""
    pytest.importorskip(request.param, reason="needs pip install '.[trackers]'")
    write_data(tmp_path)
    sections = {"log": {"trackers": [request.param], "charts": True}, "eval": {"every_steps": 3}}
    config = write_config(tmp_path / "x.yaml", small(tmp_path, train={"steps": 6}, **sections))
    environ = {
        "WANDB_MODE": "offline",
        "WANDB_CONFIG_DIR": str(tmp_path),
        "WANDB_CACHE_DIR": str(tmp_path),
        "WANDB_DATA_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    parts = [{"until": 4}, {"resume": True}]
    process = forkserver.Process(target=tracked, args=(config, tmp_path / "run", environ, parts))
    process.start()
    process.join()
    assert process.exitcode == 0
    return tmp_path / "run"


def logged(run):
    """{(tag, step): value} of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (tag, line["step"]): value
        for line in lines
        for tag, value in line.items()
        if tag != "step" and value is not None
    }


@pytest.mark.parametrize("run", ["mlflow"], indirect=True)
def test_mlflow_has_the_curves_of_a_run_and_its_resumption(run, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(f"file://{run.parent}/mlruns")
    (experiment,) = [e for e in client.search_experiments() if e.name == "segtrain"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.info.run_id == (run / "mlflow.id").read_text().strip()
    assert found.data.params["train.steps"] == "6"
    points = {
        (tag, point.step): point.value
        for tag in found.data.metrics
        for point in client.get_metric_history(found.info.run_id, tag)
    }
    best = points.pop(("best/mIoU", 0)), points.pop(("best/step", 0))
    expected = logged(run)
    assert points == expected
    assert len({step for _, step in points}) == 6
    assert best[0] == max(v for (tag, _), v in expected.items() if tag == "eval/mIoU")
    assert [file.path for file in client.list_artifacts(found.info.run_id)] == ["report.html"]


def records(path):
    """The records of a .wandb file: a log of LevelDB, whose blocks hold parts of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.parametrize("run", ["wandb"], indirect=True)
def test_wandb_has_the_curves_of_a_run_and_its_resumption(run):
    parts = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert {path.stem for path in parts} == {f"run-{(run / 'wandb.id').read_text().strip()}"}
    assert len(parts) == 2
    points = {}
    for record in (record for path in parts for record in records(path)):
        items = {".".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
        step = items.pop("step", None)
        points |= {(tag, int(step)): json.loads(x) for tag, x in items.items() if tag[0] != "_"}
    assert points == logged(run)
    assert "report.html" in [
        entry.path for record in records(parts[1]) for entry in record.artifact.manifest.contents
    ]
