"""Lets machines join, leave and die while torchrun trains one run, and compares what it ends with.

Two process groups stand for two machines. Both run the loop of bash in the README of
segtrain/distributed, the first as HOST0. In random order the second joins, leaves (SIGTERM) or dies
(SIGKILL for all of it), and an agent (torchrun) or a rank of either is killed. After one event in
four the next does not wait for the training to go on. The same experiment is left alone, too.

    python tools/chaos_torchrun.py runs/agents --events 20
"""

import argparse
import math
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from chaos import SETTINGS, curve, fingerprint
from commands import DEMO, ROOT, draw_scenes, logged, segtrain, settings

from segtrain.distributed.machine import children, descendants

JOIN, LEAVE, LOSS = "second joins", "second leaves", "kill -9, all of the second"
AGENT, RANK = "kill -9, agent of the", "kill -9, rank of the"
_PATIENCE_S = 300
_SMALL = """
train.batch_size=4 train.shares=4 augment.crop_size=[33,41] eval.every_steps=100
checkpoint.every_steps=10 model.backbone=resnet18 model.num_stages=2 model.output_stride=8
model.head_channels=16
"""


class Machine:
    """Runs `script` in bash, as a process group, whenever it is on."""

    def __init__(self, name: str, script: str, output: Path) -> None:
        self.name, self._script, self._output = name, script, output
        self.bash: subprocess.Popen | None = None

    def start(self) -> None:
        place = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        place["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self._output.open("ab") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            words, environ = ["bash", "-c", self._script], os.environ | place
            self.bash = subprocess.Popen(words, **streams, env=environ, start_new_session=True)

    def is_on(self) -> bool:
        return self.bash is not None and self.bash.poll() is None

    def agent(self) -> list[int]:
        """The process of torchrun; none while the loop of bash waits, or after it."""
        for child in children(self.bash.pid) if self.is_on() else ():
            with suppress(OSError):
                if b"torchrun" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return [child]
        return []

    def kill(self) -> None:
        """Kills all of it, bash first."""
        for pid in descendants(self.bash.pid) if self.is_on() else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def happen(machines: list[Machine], rng: random.Random) -> str:
    """Lets something happen that can; says what, "" if nothing."""
    second = machines[1]
    event = rng.choice((LEAVE, LOSS, AGENT, RANK) if second.is_on() else (JOIN, JOIN, AGENT, RANK))
    if event == JOIN:
        second.start()
    elif event == LEAVE:
        os.killpg(second.bash.pid, signal.SIGTERM)  # bash and torchrun; ranks are no part of it
    elif event == LOSS:
        second.kill()
    else:
        machine = rng.choice([one for one in machines if one.is_on()])
        agent = machine.agent()
        victims = agent if event == AGENT else [pid for one in agent for pid in children(one)]
        if not victims:
            return ""
        os.kill(victims[0], signal.SIGKILL)
        event += f" {machine.name}"
    return event


def main() -> int:
    """Runs both and prints what happened; 0 if nothing made a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where data and runs are written")
    parser.add_argument("--events", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="default: 1000")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    options = parser.parse_args()
    if options.directory.exists():
        raise SystemExit(f"{options.directory}: exists; name another directory")
    options.directory.mkdir(parents=True)
    data = draw_scenes(options.directory / "data", 24, 8, (64, 96))
    values = settings(*SETTINGS, *_SMALL.split(), data__root=data, train__steps=options.steps)
    words = [str(DEMO), "--device", "cpu", *values, "--output"]
    alone, run = options.directory / "alone", options.directory / "agents"
    segtrain("train", *words, alone, "--nproc", 1, quiet=True)
    print(f"left alone: {fingerprint(alone)}", flush=True)

    first, second = scripts([*words, str(run)])
    output = run.with_suffix(".out")
    machines = [Machine("first", first, output), Machine("second", second, output)]
    try:
        left, tries = disturb(machines, run, options)
    finally:
        for machine in machines:
            machine.kill()
    same, curves = fingerprint(alone) == fingerprint(run), [curve(one) for one in (alone, run)]
    print(f"disturbed:  {fingerprint(run)}, equal: {same}; starts of torchrun: {tries}")
    print(f"lines of the curves: {len(curves[0])}, equal: {curves[0] == curves[1]}")
    return 0 if same and curves[0] == curves[1] and left == 0 else 1


def scripts(arguments: list[str]) -> list[str]:
    """The README's, for HOST0 and for another machine."""
    readme = (ROOT / "segtrain" / "distributed" / "README.md").read_text()
    script = re.search(r"```\n(export .*?done)\n```", readme, re.DOTALL)[1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]} --local-addr 127.0.0.1"
    script = script.replace("1:4", "1:2").replace("per-node 8", "per-node 1")
    script = script.replace("HOST0:29400", place).replace("config.yaml", shlex.join(arguments))
    # Here either has the address of HOST0, where torchrun serves the store.
    return [script, script.replace("--rdzv-conf ", "--rdzv-conf is_host=0,")]


def disturb(machines: list[Machine], run: Path, options: argparse.Namespace) -> tuple[int, int]:
    """Waits for the end; how many events could not happen, how often torchrun was started."""
    rng, left, waits_for, since, due = random.Random(options.seed), options.events, "", 0.0, 15.0
    agents, sizes, starts, best, step, began = set(), [], 0, 0, 0, time.monotonic()
    machines[0].start()
    while machines[0].is_on():
        time.sleep(0.2)
        now, found = time.monotonic() - began, []
        with suppress(OSError):
            log = (run / "train.log").read_text()
            found = [int(size) for size in re.findall(r"devices +(\d+) x", log)]
        if len(found) != len(sizes):
            sizes, step = found, best  # ranks at each start; the step to get beyond
        best = max(int(reached) for reached in (best, *logged(run, "step")))
        agents |= {pid for machine in machines for pid in machine.agent()}
        on = sum(machine.is_on() for machine in machines)
        if waits_for and len(sizes) >= starts and sizes[-1] == on and best > step:
            print(f"; {on} trained on after {now - since:.0f} s", flush=True)
            waits_for, due = "", now + rng.uniform(1, 6)
        elif waits_for and now - since > _PATIENCE_S:
            raise SystemExit(f"; stuck, see {run.with_suffix('.out')}")
        if left and now > due and 0 < best < options.steps - 20 and (what := happen(machines, rng)):
            print("; not waited for\n" * bool(waits_for), end="")
            left, waits_for, since, step = left - 1, what, now, best
            print(f"{options.events - left:3}  step {best:4}  {what}", end="", flush=True)
            starts = len(sizes) + what.startswith((AGENT, RANK))
            due = now + rng.uniform(1, 6) if rng.random() < 0.25 else math.inf
    return left, len(agents)


if __name__ == "__main__":
    sys.exit(main())
