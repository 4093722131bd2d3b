"""Does everything work on these GPUs? Ten minutes, one file to send: gpus-report.json.

    python tools/test_gpus.py                     2 to 8 GPUs of this machine
    python tools/test_gpus.py --share --ranks 2   two ranks on one GPU: what they compute, no times
    python tools/test_gpus.py --device cpu        tiny, on CPU ranks over gloo
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        tools/test_gpus.py                        on each of two machines; rank 0 writes the file

Every check runs in processes of its own. One that gives no sign of life for --limit seconds is
killed, with the stacks of its ranks in the report, and the next one begins. Exits with 0 if all
that ran has passed. Under torchrun (or srun with its variables) the whole commands are left out.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from gpus import equality, group, runs
from gpus.meeting import Alone, Meeting
from gpus.report import CUT, ENDED, FAILED, HANG, PASSED, Outcome, Report

from segtrain.distributed.machine import LOOPBACK

SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"
OLD_NCCL = (
    "NCCL {} cannot let ranks share a device, 2.30 can: give the libnccl.so.2 of one by --nccl, "
    "as the newest torch brings it along"
)
CHECKS = ("sums", "ends", "bits", "speed", "soak")
_SOAK_S = {"cuda": 180.0, "cpu": 15.0}
_RETRIES = 2  # of a check whose ranks hang or die, for the items behind
_ORDER = (PASSED, CUT, FAILED, ENDED, HANG)


class Check(NamedTuple):
    """Something to run.

    kind: of `CHECKS`. module: of gpus, for a group of `ranks`; None: `command` is a function of
    gpus.runs. needs_s: it does not begin with less time left.
    """

    kind: str
    name: str
    ranks: int
    module: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    environ: dict[str, str] = {}  # noqa: RUF012
    command: Any = None
    needs_s: float = 30.0


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    args = _parser().parse_args(arguments)
    # A rank whose stack is taken would leave gigabytes behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    meeting = Meeting() if "RANK" in os.environ else Alone()
    with tempfile.TemporaryDirectory(prefix="gpus-") as folder:
        places = {Path(folder): "runs", args.output.resolve().parent: "here"}
        report = Report(args.output, places, silent=meeting.rank > 0)
        tool = Tool(args, Path(folder), meeting, report)
        machines = meeting.everyone(tool.machine())
        report.describe(machines)
        problem = problem_of(machines, shared=tool.shared)
        if problem:
            report.add(Outcome("the devices", FAILED, problems=[problem]))
        else:
            tool.run(plan(tool.device, tool.ranks, args, shared=tool.shared))
        if meeting.rank == 0:
            print(f"\n{report.summary()[0]}\nthe report: {args.output}", flush=True)
        return 0 if report.is_good else 1


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = __doc__.partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=f"{summary}\n\n{rest}", formatter_class=kind)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--ranks", type=int, help="default: one for each device; 2 if there is one")
    parser.add_argument("--minutes", type=float, default=10, help="default: 10")
    parser.add_argument("--share", action="store_true", help="ranks share devices (NCCL 2.30)")
    parser.add_argument("--nccl", type=Path, metavar="FILE", help="a libnccl.so.2 for all ranks")
    parser.add_argument("--limit", type=float, default=30, help="seconds without news; default: 30")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument("--sets", type=int, default=16, help="of options; default: all 16")
    parser.add_argument("--output", type=Path, default=Path("gpus-report.json"))
    return parser


def plan(device: str, ranks: int, args: argparse.Namespace, *, shared: bool) -> list[Check]:
    """All checks, in the order of what matters most."""
    images = ranks if ranks % 2 == 0 else ranks + 1  # some sets take groups of two
    options = {"images": max(4, images + 2 * (ranks > 3)), "most": ranks, "sets": args.sets}
    sizes = sorted({1, min(2, ranks), ranks})
    found = [Check("sums", f"sums over {ranks} ranks", ranks, "collectives")]
    commands = {
        "a run ends by itself": runs.ends_by_itself,
        "a rank is killed": runs.survives_a_kill,
        "a rank has no memory for a graph": runs.goes_on_without_memory,
        "pause, SIGTERM, --resume": runs.pauses_and_resumes,
        "train.graph auto": runs.proves_its_graph,
    }
    ends = [Check("ends", name, ranks, command=call, needs_s=60) for name, call in commands.items()]
    bits = [Check("bits", f"bits, {n} ranks", n, "equality", options) for n in sizes]
    found += [*ends[:1], *bits, *ends[1:], *_speeds(device, ranks, shared=shared)]
    every = 200 if device == "cuda" else 10
    soak = partial(runs.endures, every=every)
    found.append(Check("soak", "soak", ranks, command=soak, needs_s=60))
    return [check for check in found if check.kind in args.only]


def _speeds(device: str, ranks: int, *, shared: bool) -> list[Check]:
    whole, short = {"cases": 2, "profile": True}, {"cases": 1, "profile": False}
    if shared:  # times would mean nothing
        only = {"cases": 0, "profile": True}
        return [Check("speed", f"kernels of a step, {ranks} ranks", ranks, "speed", only)]
    sizes = sorted({n for n in (1, 2, 4, 8) if n < ranks} | {ranks}, reverse=True)
    found = [
        Check("speed", f"a step, {n} ranks", n, "speed", whole if n == ranks else short)
        for n in sizes
    ]
    for engine, register in product("01", "01") if device == "cuda" else ():
        names = ("TORCH_DIST_USE_NCCL2", "NCCL_GRAPH_REGISTER", "NCCL_LOCAL_REGISTER")
        environ = dict(zip(names, (engine, register, register), strict=True))
        name = f"a step, {ranks} ranks, NCCL engine {engine}, registration {register}"
        found.append(Check("speed", name, ranks, "speed", short, environ))
    return found


def problem_of(machines: list[dict[str, Any]], *, shared: bool) -> str:
    """Why nothing can be checked; empty: it can."""
    for machine in machines:
        if machine["device"] == "none":
            return "torch finds no CUDA device; --device cpu runs all of it tiny on the CPU"
        if shared and machine["device"] == "cuda":
            version = machine["NCCL"]
            if tuple(map(int, version.split(".")[:2])) < (2, 30):
                return OLD_NCCL.format(version)
    return ""


class Tool:
    """Runs checks until the time is over, and reports them.

    device: cpu, cuda or none. ranks: of all machines. shared: some share a device.
    """

    def __init__(
        self, args: argparse.Namespace, folder: Path, meeting: Alone | Meeting, report: Report
    ) -> None:
        self._args, self._folder, self._meeting, self._report = args, folder, meeting, report
        self._end = time.monotonic() + 60 * args.minutes
        self._preload = {} if args.nccl is None else {"LD_PRELOAD": str(args.nccl.resolve())}
        self._machine = self._describe()
        self.device, devices = self._machine["device"], len(self._machine["devices"])
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        here = here or args.ranks or (3 if self.device == "cpu" else max(2, devices))
        self.ranks = meeting.size if meeting.size > 1 else here
        self.shared = args.share or (self.device == "cuda" and here > devices)
        self._lab: runs.Lab | None = None
        self._alone: dict[str, Any] = {}  # the figures of one rank

    def machine(self) -> dict[str, Any]:
        """What this machine is, for the report."""
        return self._machine | {"ranks": self.ranks, "shared": self.shared}

    def run(self, checks: list[Check]) -> None:
        """Runs them in order."""
        if self.shared:
            self._report.leave_out("times", "ranks share a device, so they would mean nothing")
        for number, check in enumerate(checks):
            is_part = check.command is not None or check.ranks not in (1, self.ranks)
            if is_part and isinstance(self._meeting, Meeting):
                self._report.leave_out(check.name, "asked on one machine only")
                continue
            enough = self._end - time.monotonic() > check.needs_s
            if not self._meeting.everyone(enough)[0]:  # rank 0 decides
                self._report.leave_out(check.name, "no time was left")
                continue
            folder = self._folder / str(number)
            folder.mkdir()
            self._report.add(self._outcome(check, folder))

    def _outcome(self, check: Check, folder: Path) -> Outcome:
        if check.command is not None:
            return self._command(check)
        outcome = self._group(check, folder)
        found = self._meeting.everyone(None if outcome is None else outcome._asdict())
        outcome = joined([Outcome(**one) for one in found if one is not None])
        if check.module == "equality":
            if check.ranks == 1:
                self._alone = outcome.figures
            elif problems := equality.beside_one_rank(self._alone, outcome.figures):
                outcome = joined([outcome, Outcome(check.name, FAILED, problems=problems)])
            # Losses of each step: whoever wants to see them asks for the bits.
            short = {name: one["sha256"] for name, one in outcome.figures.items()}
            outcome = outcome._replace(figures={"sha256": short})
        return outcome

    def _command(self, check: Check) -> Outcome:
        if self._lab is None:
            environ = self._environ(check)
            about = self.ranks, self.device, environ, 3 * self._args.limit
            self._lab = runs.Lab(self._folder, *about)
        call = check.command
        if check.kind == "soak":
            seconds = min(_SOAK_S[self.device], self._end - time.monotonic() - 40)
            call = partial(call, seconds=seconds)
        return runs.outcome(check.name, self._lab, call)

    def _group(self, check: Check, folder: Path) -> Outcome | None:
        """On the ranks of this process; None: it has none of them.

        Where ranks hang or die in an item, those behind it get other ranks.
        """
        skip, found = [], []
        for attempt in range(1 + _RETRIES):
            place = self._place(check)
            if not place.ranks:
                return None
            at = folder / str(attempt)
            at.mkdir()
            options = check.options | {"device": self.device, "skip": skip}
            about = check.name, f"gpus.{check.module}", place, options, at
            outcome, last = group.run(*about, self._args.limit, self._end)
            found.append(outcome)
            over = time.monotonic() > self._end or isinstance(self._meeting, Meeting)
            if outcome.status in (PASSED, FAILED, CUT) or over or not outcome.figures:
                break
            skip = [*skip, *outcome.figures, last]
        return joined(found)

    def _environ(self, check: Check) -> dict[str, str]:
        found = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self._folder / "cache")}
        found |= self._preload | check.environ
        if self.device == "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ""
        elif self.shared:
            found[SHARED] = "1"
        return group.environment(**found)

    def _place(self, check: Check) -> group.Place:
        environ = self._environ(check)
        if isinstance(self._meeting, Meeting) and check.ranks > 1:
            # They meet in the store of this process, as they would in that of torchrun.
            elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            elastic["TORCHELASTIC_RUN_ID"] = environ.get("TORCHELASTIC_RUN_ID", "gpus")
            return group.Place(environ | elastic, {self._meeting.rank: {}})
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environ = {k: v for k, v in environ.items() if not k.startswith("TORCHELASTIC")}
        size = str(check.ranks)
        environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": str(port)}
        environ |= {"MASTER_ADDR": "127.0.0.1"}
        environ |= {"NCCL_SOCKET_IFNAME": LOOPBACK, "GLOO_SOCKET_IFNAME": LOOPBACK}
        mine = range(check.ranks) if self._meeting.rank == 0 else ()
        return group.Place(environ, {r: {"RANK": str(r), "LOCAL_RANK": str(r)} for r in mine})

    def _describe(self) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "gpus.stack", self._args.device],
            env=group.environment(**self._preload),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])


def joined(outcomes: list[Outcome]) -> Outcome:
    """One outcome of several of the same check; the worst status."""
    return Outcome(
        outcomes[0].name,
        max((one.status for one in outcomes), key=_ORDER.index),
        sum(one.seconds for one in outcomes),
        {name: value for one in outcomes for name, value in one.figures.items()},
        [problem for one in outcomes for problem in one.problems],
        "\n".join(one.said for one in outcomes if one.said),
    )


if __name__ == "__main__":
    sys.exit(main())
