"""Lets machines join, leave, fail and die while one run trains, and compares what it ends with.

Each machine is a network namespace with a launcher of `--nnodes 1:4` and one rank. In random
order a machine joins, is asked to leave (SIGTERM), has a rank or its launcher killed, dies
as a whole (SIGKILL to all) or loses its cable. Beside it the same experiment is left alone.

    python tools/chaos_machines.py runs/machines --events 50
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from chaos import SETTINGS, curve, fingerprint
from commands import DEMO, command, draw_scenes, segtrain, settings
from two_machines import ip, join, remove

from segtrain.distributed.machine import children, descendants

ADDRESS = "10.79.0.{}"
EVENTS = ("join", "join", "leave", "kill a rank", "kill the launcher", "kill all", "cut")
MOST = 4
_PATIENCE_S = 300


class Machines:
    """The machines on which one run trains."""

    def __init__(self, directory: Path, arguments: list[object]) -> None:
        self.directory, self._arguments = directory, arguments
        self.names = [f"chaos-{os.getpid()}-{i}" for i in range(MOST)]
        self.up: dict[str, subprocess.Popen] = {}
        self.codes: list[int] = []
        self._log = directory.with_suffix(".out").open("ab")

    def start(self, name: str) -> None:
        """A launcher on machine `name`."""
        words = command(*self._arguments, "--nproc", 1, "--nnodes", f"1:{MOST}")
        self.up[name] = subprocess.Popen(
            ["ip", "netns", "exec", name, *words, "--output", self.directory],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def collect(self) -> None:
        """Takes machines off the list whose launchers have ended."""
        for name, process in list(self.up.items()):
            if process.poll() is not None:
                self.codes.append(self.up.pop(name).returncode)

    def happen(self, event: str, rng: random.Random) -> str:
        """Lets `event` happen to a machine; says to which."""
        free = [name for name in self.names if name not in self.up]
        if event == "join" and not free:
            event = "leave"
        if event == "join" or not self.up:
            name, event = rng.choice(free), "join"
            self.start(name)
            return f"{event} {name[-1]}"
        name = rng.choice(list(self.up))
        pid, killed = self.up[name].pid, signal.SIGKILL
        if event == "cut":
            self._cut(name, rng)
            return f"{event} {name[-1]}"
        ranks = children(pid)
        victims = {
            "leave": [pid],
            "kill the launcher": [pid],
            "kill all": descendants(pid),
            "kill a rank": ranks and [rng.choice(ranks)],
        }[event]
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGTERM if event == "leave" else killed)
        return f"{event} {name[-1]}"

    def _cut(self, name: str, rng: random.Random) -> None:
        """Takes the cable from a machine; that is noticed by nothing but silence."""
        ip("-n", name, "link", "set", "eth0", "down")
        time.sleep(rng.uniform(1, 5))
        for pid in descendants(self.up[name].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.up[name].wait()
        ip("-n", name, "link", "set", "eth0", "up")

    def step(self) -> int:
        """The last that was logged."""
        with suppress(OSError, IndexError, ValueError):
            return json.loads((self.directory / "metrics.jsonl").read_text().splitlines()[-1])[
                "step"
            ]
        return 0


def main() -> int:
    """Runs both and prints what happened; 0 if nothing made a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where data and runs are written")
    parser.add_argument("--events", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="default: 500")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    options = parser.parse_args()
    if options.directory.exists():
        raise SystemExit(f"{options.directory}: exists; name another directory")
    options.directory.mkdir(parents=True)
    data = draw_scenes(options.directory / "data", 24, 8, (64, 96))
    values = {"data__root": data, "train__steps": options.steps, "train__batch_size": 4}
    values |= {"augment__crop_size": "[33, 41]", "model__backbone": "resnet18"}
    values |= {"model__num_stages": 2, "model__output_stride": 8, "model__head_channels": 16}
    more = {"train__shares": 4, "eval__every_steps": 100, "checkpoint__every_steps": 10}
    arguments = ["train", DEMO, "--device", "cpu", *settings(*SETTINGS, **values, **more)]

    alone = options.directory / "alone"
    segtrain(*arguments, "--nproc", 1, "--output", alone, quiet=True)
    print(f"left alone: {fingerprint(alone)}", flush=True)

    rng = random.Random(options.seed)
    machines = Machines(options.directory / "machines", arguments)
    try:
        join(machines.names, ADDRESS)
        longest = run(machines, options, rng)
    finally:
        for process in machines.up.values():
            process.kill()
        remove(machines.names)
    same = fingerprint(alone) == fingerprint(machines.directory)
    curves = [curve(run) for run in (alone, machines.directory)]
    print(f"with machines that came and went: {fingerprint(machines.directory)}, equal: {same}")
    print(f"lines of the curves: {len(curves[0])} and {len(curves[1])}, ", end="")
    print(f"equal: {curves[0] == curves[1]}; longest time without a new step {longest:.0f} s")
    print(f"exit codes: {sorted(machines.codes)}")
    return 0 if same and curves[0] == curves[1] else 1


def run(machines: Machines, options: argparse.Namespace, rng: random.Random) -> float:
    """Lets everything happen, then waits for the end; the longest time without a new step."""
    machines.start(machines.names[0])
    longest, since, best = 0.0, time.monotonic(), 0
    due = time.monotonic() + 10
    left, finished, reached = options.events, False, 0
    while machines.up or not finished:
        time.sleep(0.05)
        machines.collect()
        finished = (machines.directory / "report.html").exists()
        now, step = time.monotonic(), machines.step()
        if step > best:
            longest, since, best = max(longest, now - since), now, step
        if now - since > _PATIENCE_S:
            raise SystemExit(f"stuck at step {best}; see {machines.directory.with_suffix('.out')}")
        if left and now > due and (step > reached or now - due > 30) and not finished:
            reached = step
            what = machines.happen(rng.choice(EVENTS), rng)
            left -= 1
            due = now + rng.uniform(1, 25)
            print(f"{options.events - left:3}  step {best:4}  {what}", flush=True)
        elif not machines.up and not finished:
            machines.start(rng.choice(machines.names))
    return longest


if __name__ == "__main__":
    sys.exit(main())
