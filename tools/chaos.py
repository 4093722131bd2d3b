"""Kills one run many times, at random moments, and compares the model it ends with.

Beside it the same experiment is left alone. Victims are a rank, rank 0, a loader worker, the
launcher, or all of them at once; what is killed gets SIGKILL. A run that is asked to stop gets
SIGTERM at its launcher. Where the launcher survives it starts the ranks again; where it does not,
the tool does, with --resume.

    python tools/chaos.py runs/chaos --kills 50
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bits import sha256
from commands import DEMO, command, draw_scenes, settings

from segtrain.checkpoint.format import load
from segtrain.distributed.liveness import Heartbeat, read_heartbeats
from segtrain.distributed.machine import children, descendants, is_alive

RANKS = 2
ASKED = "asked to stop"
VICTIMS = ("rank", "rank 0", "worker", "launcher", "group", ASKED)
PHASES = ("setup", "training", "evaluation", "checkpoint")

# Whatever could remember something: augmentation, dropout, an average of the weights, momentum,
# loader workers, and cadences that do not divide each other or an epoch.
SETTINGS = (
    "data.num_workers=1",
    "augment.crop_size=[48, 64]",
    "augment.scale_range=[0.5, 1.5]",
    "augment.color_prob=0.5",
    "model.backbone=mobilenet_v2",
    "model.head_channels=32",
    "train.batch_size=5",
    "optim.ema_decay=0.99",
    "train.timeout_s=60",
    "log.every_steps=1",
    "eval.every_steps=7",
    "checkpoint.every_steps=3",
)
# What a machine may need after a death until nothing of the run is left.
GONE_WITHIN_S = 15
_PATIENCE_S = 300


class Kill(NamedTuple):
    """One kill, as it happened.

    phase, step: of rank 0 at that moment.
    gone_s: until the last process of the run had ended; None where the launcher was left alive.
    """

    victim: str
    phase: str
    step: int
    gone_s: float | None


class Campaign:
    """One run in `directory`, started again whenever nothing of it is left."""

    def __init__(self, directory: Path, data: Path, steps: int) -> None:
        self.directory = directory
        # Short, since the paths of the workers' sockets must not be longer than 108 characters.
        self._temporary = Path(tempfile.mkdtemp(prefix="chaos"))
        self._arguments = [
            *("train", DEMO, "--nproc", RANKS, "--device", "cpu", "--max-restarts", 1000),
            *("--output", directory, *settings(*SETTINGS, data__root=data, train__steps=steps)),
        ]
        self.process = self._start()

    def _start(self, *more: str) -> subprocess.Popen:
        shutil.rmtree(self._temporary)
        self._temporary.mkdir()
        with self.directory.with_suffix(".out").open("ab") as output:
            return subprocess.Popen(
                command(*self._arguments, *more),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def ranks(self) -> list[Heartbeat]:
        """The ranks that are alive, with what they are doing."""
        for notes in self._temporary.glob("segtrain-*"):
            # They may come and go while they are being read.
            with contextlib.suppress(OSError):
                return [rank for rank in read_heartbeats(notes) if is_alive(rank.pid)]
        return []

    def kill(self, victim: str, phase: str, step: int, rng: random.Random) -> Kill:
        """Kills `victim` once the run has passed `step` and is in `phase`."""
        while True:
            first = self._wait_for(phase, step)
            # Somewhere in it; setup takes seconds, the others less.
            time.sleep(rng.random() * {"setup": 1.5, "training": 0.4}.get(phase, 0.05))
            now = {rank.rank: rank for rank in self.ranks()}
            victims = self._processes(victim, now)
            if victims and 0 in now and now[0].phase == phase and now[0].pid == first.pid:
                break
        everyone = descendants(self.process.pid)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if victim == ASKED else signal.SIGKILL)
        gone_s = None
        if victim in ("launcher", "group", ASKED):
            gone_s = seconds_until_gone(everyone, self.process)
            resume = ["--resume"] if (self.directory / "config.yaml").exists() else []
            self.process = self._start(*resume)
        return Kill(victim, phase, now[0].step, gone_s)

    def _wait_for(self, phase: str, step: int) -> Heartbeat:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            for rank in self.ranks():
                if rank.rank == 0 and rank.phase == phase and rank.step >= step:
                    return rank
            if self.process.poll() is not None:
                raise SystemExit(
                    f"the run ended by itself, with {self.process.returncode}, before it came to "
                    f"{phase} at step {step}; see {self.directory.with_suffix('.out')}"
                )
            if time.monotonic() > deadline:
                raise SystemExit(f"the run did not come to {phase} at step {step}")
            time.sleep(0.002)

    def _processes(self, victim: str, ranks: dict[int, Heartbeat]) -> list[int]:
        if victim in ("launcher", ASKED):
            return [self.process.pid]
        if victim == "group":
            return descendants(self.process.pid)
        if victim == "worker":
            workers = [pid for rank in ranks.values() for pid in loader_workers(rank.pid)]
            return workers[:1]
        return [rank.pid for rank in ranks.values() if (rank.rank == 0) == (victim == "rank 0")]

    def finish(self) -> None:
        """Returns when the run has ended well."""
        code = self.process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if code != 0:
            raise SystemExit(f"ended with {code}; see {self.directory.with_suffix('.out')}")


def main() -> int:
    """Runs both, prints the table, and returns 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where data and runs are written")
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="default: 150")
    options = parser.parse_args()
    directory = options.directory
    if directory.exists():
        raise SystemExit(f"{directory}: exists; name another directory")
    directory.mkdir(parents=True)
    data = draw_scenes(directory / "data", 24, 24, (64, 96))

    alone = Campaign(directory / "alone", data, options.steps)
    alone.finish()
    print(f"left alone: {fingerprint(alone.directory)}", flush=True)

    rng = random.Random(0)
    disturbed = Campaign(directory / "killed", data, options.steps)
    kills = []
    for i, (victim, phase) in enumerate(schedule(options.kills, rng)):
        # The kills are spread over the run, and a run that has just begun is killed too.
        step = 0 if phase == "setup" else i * (options.steps - 10) // options.kills
        kills.append(disturbed.kill(victim, phase, step, rng))
        print(f"{i + 1:3}  {line_of(kills[-1])}", flush=True)
    disturbed.finish()
    return report(directory, kills)


def schedule(num_kills: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Who is killed and in which phase: every pair once before one comes again, in random order."""
    # Loader workers live in training only.
    pairs = [
        (victim, phase)
        for victim in VICTIMS
        for phase in PHASES
        if victim != "worker" or phase == "training"
    ]
    # As often as the others, for all that.
    pairs += [("worker", "training")] * (len(PHASES) - 1)
    while num_kills > 0:
        rng.shuffle(pairs)
        yield from pairs[:num_kills]
        num_kills -= len(pairs)


def report(directory: Path, kills: list[Kill]) -> int:
    """Prints what happened, writes kills.json, and tells whether it made a difference."""
    (directory / "kills.json").write_text(json.dumps([kill._asdict() for kill in kills], indent=1))
    counts = Counter((kill.victim, kill.phase) for kill in kills)
    print("\n| killed | " + " | ".join(PHASES) + " |\n| --- |" + " ---: |" * len(PHASES))
    for victim in VICTIMS:
        print(f"| {victim} | " + " | ".join(str(counts[victim, phase]) for phase in PHASES) + " |")
    slowest = max((kill.gone_s for kill in kills if kill.gone_s is not None), default=0.0)
    one, other = (fingerprint(directory / name) for name in ("alone", "killed"))
    curves = [curve(directory / name) for name in ("alone", "killed")]
    print(f"\nleft alone: {one}\nkilled:     {other}")
    print(f"lines of the curves: {len(curves[0])} and {len(curves[1])}, equal: ", end="")
    print(curves[0] == curves[1])
    print(f"nothing left {slowest:.1f} s after the launcher's death, at the latest")
    return 0 if one == other and curves[0] == curves[1] and slowest <= GONE_WITHIN_S else 1


def fingerprint(run: Path) -> str:
    """A hash over every bit of what training made: weights, their average, optimizer, scores."""
    record = load(run / "checkpoints" / "last.pt")
    return sha256([getattr(record, name) for name in ("model", "average", "optimizer", "best")])


def curve(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, without those that tell the time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: line[key] for key in line if key.startswith(("step", "train/", "eval/"))}
        for line in lines
    ]


def line_of(kill: Kill) -> str:
    """For the log."""
    gone = "" if kill.gone_s is None else f"  all gone after {kill.gone_s:.1f} s"
    return f"{kill.victim:13}  {kill.phase:10}  step {kill.step:4}{gone}"


def seconds_until_gone(pids: list[int], launcher: subprocess.Popen) -> float:
    """Until none of them is left."""
    began = time.monotonic()
    launcher.wait()
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() - began > _PATIENCE_S:
            raise SystemExit(f"left behind: {[pid for pid in pids if is_alive(pid)]}")
        time.sleep(0.02)
    return time.monotonic() - began


def loader_workers(pid: int) -> list[int]:
    """The processes that read for a rank: they are started by a server of Python's."""
    return [one for one in descendants(pid)[1:] if not children(one) and _is_worker(one)]


def _is_worker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"resource_tracker" not in command


if __name__ == "__main__":
    sys.exit(main())
