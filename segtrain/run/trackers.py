"""What a run logs, for W&B and MLflow (`log.trackers`).

Each tracker has a thread of its own: training never waits for a network. A tracker that fails
prints one warning and is not used again. Where they send to, and with which key, is their own
affair: `wandb login`, WANDB_*, MLFLOW_*. Their ids are kept in the run directory, so
that a resumed run goes on in the same one there.
"""

import math
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from segtrain.config import Config
from segtrain.errors import ConfigError
from segtrain.files import read_bytes, write_atomic
from segtrain.run.console import say
from segtrain.run.directory import flat
from segtrain.text import first_of, install_line, printable

_PROJECT = "segtrain"
# Steps that wait to be sent; then the tracker is too slow, or there is no network.
_MOST_WAITING = 10_000
# How long the end of a run waits for what is left: one that is complete, and any other.
_PATIENCE_S, _SHORT_PATIENCE_S = 60.0, 5.0


class Tracker(Protocol):
    """A run in a service; its methods may wait for a network, and raise what they like."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""

    def finish(self, results: Mapping[str, float], files: Sequence[Path], status: str) -> None:
        """Adds results and files; status: FINISHED, FAILED or KILLED."""


Keep = Callable[[str], None]
"""Writes the id of a run down, with which its resumption goes on."""


class _Wandb:
    def __init__(self, directory: Path, config: Config, kept: str | None, keep: Keep) -> None:
        wandb = import_module("wandb")
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConnectionError("no key; use  wandb login, or set WANDB_API_KEY")
        self.id = kept or uuid.uuid4().hex
        keep(self.id)  # init waits for a network, and a stop meanwhile would make another run
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=directory.resolve().name,
            id=self.id,
            resume="allow",
            config=flat(config),
            dir=str(directory),
            settings=wandb.Settings(
                console="off", save_code=False, silent=True, finish_timeout=_PATIENCE_S
            ),
        )
        # Its own count of steps only grows: after a crash, steps that are repeated would be lost.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def finish(self, results: Mapping[str, float], files: Sequence[Path], status: str) -> None:
        self._run.summary.update(results)
        for path in files:
            self._run.log_artifact(str(path), name=f"{path.stem}-{self.id}", type=path.stem)
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


class _Mlflow:
    # What a request may hold.
    _PARAMS, _METRICS, _VALUE = 100, 1000, 6000

    def __init__(self, directory: Path, config: Config, kept: str | None, keep: Keep) -> None:
        mlflow = import_module("mlflow")
        self._entities = import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        if kept is not None:
            self.id = kept
            self._client.update_run(kept, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        if (place := os.environ.get("MLFLOW_EXPERIMENT_ID")) is None:
            known = self._client.get_experiment_by_name(name)
            place = self._client.create_experiment(name) if known is None else known.experiment_id
        self.id = self._client.create_run(place, run_name=directory.resolve().name).info.run_id
        keep(self.id)
        options = [(key, str(value)[: self._VALUE]) for key, value in flat(config).items()]
        params = [self._entities.Param(*option) for option in options]
        for start in range(0, len(params), self._PARAMS):
            self._client.log_batch(self.id, params=params[start : start + self._PARAMS])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        points = [
            self._entities.Metric(_mlflow_name(tag), value, now_ms, step)
            for tag, value in values.items()
        ]
        for start in range(0, len(points), self._METRICS):
            self._client.log_batch(self.id, metrics=points[start : start + self._METRICS])

    def finish(self, results: Mapping[str, float], files: Sequence[Path], status: str) -> None:
        if results:
            self.scalars(0, results)
        for path in files:
            self._client.log_artifact(self.id, str(path))
        self._client.set_terminated(self.id, status)


TRACKERS: dict[str, Callable[[Path, Config, str | None, Keep], Tracker]] = {
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def check_installed(names: Sequence[str]) -> None:
    """Refuses trackers whose library is missing."""
    # A folder that wandb has left in the current one would be found as a package without a file.
    missing = [name for name in names if (s := find_spec(name)) is None or s.origin is None]
    if missing:
        raise ConfigError(
            f"log.trackers: {first_of(missing)} not installed; {install_line('trackers')}"
        )


class Trackers:
    """Those of one run; by default none."""

    def __init__(self, senders: Sequence["Sender"] = ()) -> None:
        self._ready = senders
        self._senders: Sequence[Sender] = ()

    def begin(self) -> None:
        """Starts sending; before, nothing is known outside of this process."""
        self._senders = self._ready
        for sender in self._senders:
            sender.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Sends values by tag; NaN and infinities, which not every service takes, are left out."""
        finite = {tag: value for tag, value in values.items() if math.isfinite(value)}
        for sender in self._senders:
            sender.put(lambda tracker: tracker.scalars(step, finite))

    def finish(
        self, status: str, results: Mapping[str, float] | None = None, files: Sequence[Path] = ()
    ) -> None:
        """Sends what is left, and ends the runs; waits for it for a limited time.

        status: FINISHED, FAILED or KILLED.
        """
        senders, self._senders = self._senders, ()
        # All are asked before the first is waited for: they share the time.
        for sender in senders:
            sender.put(lambda tracker: tracker.finish(results or {}, files, status))
            sender.put(None)
        end = time.monotonic() + (_PATIENCE_S if status == "FINISHED" else _SHORT_PATIENCE_S)
        for sender in senders:
            sender.join(max(0.0, end - time.monotonic()))
            if sender.is_alive():
                sender.give_up("it has not taken all of the run in time")


def senders(directory: Path, config: Config, *, resumes: bool) -> list["Sender"]:
    """Those of the config's log. resumes: the run goes on, with the ids in `directory`."""
    return [Sender(name, directory, config, resumes) for name in config.log.trackers]


class Sender(threading.Thread):
    """Calls one tracker, in a thread."""

    def __init__(self, name: str, directory: Path, config: Config, resumes: bool) -> None:
        super().__init__(name=name, daemon=True)
        self._arguments = directory, config, resumes
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MOST_WAITING)
        self._has_failed = False
        # Now: a loader's worker that is forked during an import may wait for its lock for ever.
        with suppress(Exception):  # it fails again in the thread, which tells
            import_module(name)

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Lets the tracker do `call`; None: there will be no more."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.give_up("it does not keep up")

    def give_up(self, reason: str) -> None:
        """Says once why the tracker is not used any more."""
        if not self._has_failed:
            self._has_failed = True
            say(f"warning: log.trackers: {self.name} gets nothing any more: {printable(reason)}")

    def run(self) -> None:
        """Opens the tracker and makes the calls, in their order."""
        try:
            tracker = self._open()
            for call in self._waiting():
                call(tracker)
        except Exception as error:  # of libraries that raise kinds of their own
            lines = str(error).splitlines() or [""]
            self.give_up(f"{type(error).__name__}: {lines[0]}")

    def _waiting(self) -> Iterator[Callable[[Tracker], None]]:
        while (call := self._calls.get()) is not None and not self._has_failed:
            yield call

    def _open(self) -> Tracker:
        directory, config, resumes = self._arguments
        file, kept = directory / f"{self.name}.id", None
        if resumes:
            with suppress(OSError):  # it was not tracked before
                kept = read_bytes(file, 1000).decode().strip()
        return TRACKERS[self.name](
            directory, config, kept, lambda known: write_atomic(file, known + "\n", durable=False)
        )


def _mlflow_name(tag: str) -> str:
    """`tag` in letters that MLflow takes; different tags stay different."""
    return re.sub(r"[^\w\-. :/]|_(?=x[0-9a-f]+_)", lambda match: f"_x{ord(match[0]):x}_", tag)
