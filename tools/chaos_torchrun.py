"""Lets torchrun's agents join, leave and die while one run trains, and compares what it ends with.

Two agents of one machine stand for two machines; the first serves torchrun's store. In random order
the second joins, is asked to leave (SIGTERM) or is killed with its rank, and a rank is killed on
either. Where torchrun itself gives up, both are started again, as a person would. Beside it the
same experiment is left alone.

    python tools/chaos_torchrun.py runs/agents --events 20
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from chaos import SETTINGS, curve, fingerprint
from commands import DEMO, draw_scenes, segtrain, settings

from segtrain.distributed.machine import children, descendants

EVENTS = ("join", "join", "leave", "kill the agent", "kill a rank")
_PATIENCE_S = 300
_SMALL = {
    "train__batch_size": 4,
    "train__shares": 4,
    "augment__crop_size": "[33, 41]",
    "model__backbone": "resnet18",
    "model__num_stages": 2,
    "model__output_stride": 8,
    "model__head_channels": 16,
    "eval__every_steps": 100,
    "checkpoint__every_steps": 10,
}


class Agents:
    """The two agents of one run, of which the second comes and goes."""

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        self.directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{probe.getsockname()[1]}"
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", "chaos"]
        size = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1000"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *size, *meeting]
        self._command = [*torchrun, "--local-addr", "127.0.0.1", "-m", "segtrain", *arguments]
        self._log = directory.with_suffix(".out").open("ab")
        self.first = self._start()
        self.second: subprocess.Popen | None = None
        self.given_up = 0

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen(
            [*self._command, "--output", str(self.directory), "--resume"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            start_new_session=True,
        )

    def goes_on(self) -> bool:
        """Whether the run has not ended well; starts it again where torchrun has given up."""
        if self.first.poll() is None:
            return True
        if self.first.returncode == 0:
            return False
        self.end()
        self.given_up, self.first, self.second = self.given_up + 1, self._start(), None
        return True

    def happen(self, event: str, rng: random.Random) -> str:
        """Lets `event` happen, or else the second agent join; says what did."""
        if self.second is not None and self.second.poll() is not None:
            self.second = None
        if self.second is None and event != "kill a rank":
            self.second = self._start()
            return "join"
        agents = [agent for agent in (self.first, self.second) if agent is not None]
        victims = {
            "kill the agent": self.second and descendants(self.second.pid),
            "kill a rank": children(rng.choice(agents).pid),
        }.get(event, self.second and [self.second.pid])
        is_asked = event not in ("kill the agent", "kill a rank")
        for victim in victims or ():
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGTERM if is_asked else signal.SIGKILL)
        return "leave" if is_asked else event

    def step(self) -> int:
        """The last that was logged."""
        with suppress(OSError, IndexError, ValueError):
            lines = (self.directory / "metrics.jsonl").read_text().splitlines()
            return json.loads(lines[-1])["step"]
        return 0

    def end(self) -> None:
        """Kills what is left."""
        for agent in (self.first, self.second):
            for pid in [] if agent is None or agent.poll() is not None else descendants(agent.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if agent is not None:
                agent.wait()


def main() -> int:
    """Runs both and prints what happened; 0 if nothing made a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where data and runs are written")
    parser.add_argument("--events", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="default: 500")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    options = parser.parse_args()
    if options.directory.exists():
        raise SystemExit(f"{options.directory}: exists; name another directory")
    options.directory.mkdir(parents=True)
    data = draw_scenes(options.directory / "data", 24, 8, (64, 96))
    values = settings(*SETTINGS, data__root=data, train__steps=options.steps, **_SMALL)
    arguments = ["train", str(DEMO), "--device", "cpu", *map(str, values)]
    alone = options.directory / "alone"
    segtrain(*arguments, "--nproc", 1, "--output", alone, quiet=True)
    print(f"left alone: {fingerprint(alone)}", flush=True)

    agents = Agents(options.directory / "agents", arguments)
    try:
        longest = run(agents, options)
    finally:
        agents.end()
    same = fingerprint(alone) == fingerprint(agents.directory)
    curves = [curve(one) for one in (alone, agents.directory)]
    print(f"with agents that came and went: {fingerprint(agents.directory)}, equal: {same}")
    print(f"lines of the curves: {len(curves[0])} and {len(curves[1])}, ", end="")
    print(
        f"equal: {curves[0] == curves[1]}; longest time without a new step {longest:.0f} s; ",
        end="",
    )
    print(f"torchrun gave up {agents.given_up} times")
    return 0 if same and curves[0] == curves[1] else 1


def run(agents: Agents, options: argparse.Namespace) -> float:
    """Lets everything happen, then waits for the end; the longest time without a new step."""
    rng, longest, best, reached = random.Random(options.seed), 0.0, 0, 0
    since, due, left = time.monotonic(), time.monotonic() + 10, options.events
    while agents.goes_on():
        time.sleep(0.05)
        now, step = time.monotonic(), agents.step()
        if step > best:
            longest, since, best = max(longest, now - since), now, step
        if now - since > _PATIENCE_S:
            raise SystemExit(f"stuck at step {best}; see {agents.directory.with_suffix('.out')}")
        if left and now > due and step > reached and step < options.steps - 20:
            reached, due, left = step, now + rng.uniform(1, 10), left - 1
            what = agents.happen(rng.choice(EVENTS), rng)
            print(f"{options.events - left:3}  step {best:4}  {what}", flush=True)
    return longest


if __name__ == "__main__":
    sys.exit(main())
