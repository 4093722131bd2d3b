"""Answers, on one CUDA device and in half an hour, what a CPU cannot tell.

    python tools/gpu_check.py                     all checks; goes on where it was cut
    python tools/gpu_check.py --only steps_713    one of them
    python tools/gpu_check.py --again             also those that have been answered

Each check is a process with a time limit, so a crash, a hang or a lack of memory ends no other. A
check that has ended, well or not, is not repeated with the same code, torch and device. On a CPU
the checks are smaller, and what needs a CUDA device says so. DIR gets report.md, report.json, and
results and output of each check. Exits with 1 if a check failed or found no time.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_checks import CHECKS
from gpu_checks.children import run_limited
from gpu_checks.findings import Finding, read_findings
from gpu_checks.report import (
    CRASHED,
    NOT_RUN,
    TIMED_OUT,
    Result,
    as_json,
    as_markdown,
    status_of,
)

from segtrain.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
# What decides the answers; a copy of the repository need not have git.
_SOURCES = ("segtrain/**/*.py", "tools/**/*.py", "tests/test_norm*.py", "configs/demo.yaml")
_MACHINE_LIMIT_S = 180
_WIDEST = 300  # characters of an error that the table shows
_ERROR = re.compile(r"[\w.]*(Error|Exception|Exit): |Fatal Python error: ")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    args = parse(arguments)
    # As Ctrl-C does, it ends the check that is under way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.output.mkdir(parents=True, exist_ok=True)
    with locked(args.output):
        return answer(args)


def answer(args: argparse.Namespace) -> int:
    """Runs the checks, writes the report, prints it, and returns the exit code."""
    deadline = time.monotonic() + 60 * args.minutes
    machine, code = machine_of(args.device, args.output), revision()
    folder = args.output / key_of(machine, code)
    folder.mkdir(exist_ok=True)
    print(f"{machine['name']}, torch {machine['torch']}, code {code}", flush=True)

    for name in args.only or CHECKS:
        file = folder / f"{name}.result.json"
        if file.exists() and not args.again:
            print(f"{name}: answered before", flush=True)
            continue
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            print(f"{name}: {NOT_RUN}, no time is left", flush=True)
            continue
        file.unlink(missing_ok=True)
        print(f"{name}: {CHECKS[name].question}", flush=True)
        result = ask(name, machine["device"], folder, min(CHECKS[name].limit_s, left_s))
        if result.status == TIMED_OUT and left_s < CHECKS[name].limit_s:
            result = result._replace(status=NOT_RUN, detail="")  # it was not its own limit
        else:
            write_atomic(file, json.dumps(result._asdict()) + "\n")
        print(f"{name}: {result.status} {result.detail} ({result.seconds:.0f} s)", flush=True)
        write_report(args.output, machine, code, folder)

    results = write_report(args.output, machine, code, folder)
    chosen = [result for result in results if result.name in (args.only or CHECKS)]
    print(f"\n{(args.output / 'report.md').read_text()}")
    return int(any(result.is_broken or result.status == NOT_RUN for result in chosen))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuses a second one in the same folder: each would end the processes of the other."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{folder}: another gpu_check.py is at work here") from None
        yield


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=Path("runs/gpu_check"),
        metavar="DIR",
        help="default: %(default)s",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    add(
        "--only",
        action="append",
        choices=CHECKS,
        metavar="NAME",
        help=f"one of {', '.join(CHECKS)}",
    )
    add("--again", action="store_true", help="repeat what has been answered")
    add("--minutes", type=float, default=30, metavar="M", help="for all together (default: 30)")
    return parser.parse_args(arguments)


def ask(name: str, device: str, folder: Path, limit_s: float) -> Result:
    """Runs one check and says how it ended."""
    check = CHECKS[name]
    found, log = folder / f"{name}.findings.json", folder / f"{name}.log"
    found.unlink(missing_ok=True)
    # Not in /tmp: what a killed one has left, which may be gigabytes, is found and removed here.
    work = (folder / f"{name}.work").resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        environment = child_environment() | dict(check.environment)
        command = child_command(check.place, device, found, work)
        ending = run_limited(command, log, limit_s, environment, mark=str(folder.parent.resolve()))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    findings, has_ended = read_findings(found)
    status, detail = status_of(findings), ""
    if ending.code is None:
        status, detail = TIMED_OUT, f"killed after {limit_s:.0f} s; see {log.name}"
    elif ending.code != 0 or not has_ended:
        status, detail = CRASHED, f"exit code {ending.code}; {reason(log)}"
    return Result(name, status, detail, ending.seconds, findings)


def machine_of(device: str, folder: Path) -> dict[str, Any]:
    """The machine, described by a process of its own: the driver may hang or crash.

    Raises:
        SystemExit: it cannot be described, such as `cuda` without a device.
    """
    file, log = folder / "machine.json", folder / "machine.log"
    file.unlink(missing_ok=True)
    command = child_command("machine", device, file, folder)
    ending = run_limited(
        command, log, _MACHINE_LIMIT_S, child_environment(), mark=str(folder.resolve())
    )
    if ending.code != 0:
        raise SystemExit(f"the machine cannot be described: {reason(log)}")
    return json.loads(file.read_text())


def child_command(place: str, device: str, file: Path, folder: Path) -> list[str]:
    """What runs the check at `place`, with its findings in `file`."""
    return [sys.executable, "-m", "gpu_checks", place, device, str(file), str(folder)]


def child_environment() -> dict[str, str]:
    """Of every check: they find this repository wherever they are started."""
    paths = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    added = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1", **added}


def revision() -> str:
    """The first digits of a hash of the code that answers."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def key_of(machine: dict[str, Any], code: str) -> str:
    """The name of the folder for the results of this code, torch and device."""
    parts = [code, *(str(machine[name]) for name in ("device", "name", "torch", "driver"))]
    return f"{code}-{machine['device']}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:6]}"


def write_report(output: Path, machine: dict[str, Any], code: str, folder: Path) -> list[Result]:
    """Writes what has been answered on this machine by this code; returns it."""
    results = [read_result(name, folder) for name in CHECKS]
    write_atomic(output / "report.md", as_markdown(machine, code, results))
    content = json.dumps(as_json(machine, code, results), indent=1)
    write_atomic(output / "report.json", content + "\n")
    return results


def read_result(name: str, folder: Path) -> Result:
    """The answer of a check; "not run" where there is none."""
    file = folder / f"{name}.result.json"
    if not file.exists():
        return Result(name, NOT_RUN, "", 0.0, [])
    content = json.loads(file.read_text())
    findings = [Finding(*line) for line in content.pop("findings")]
    return Result(**content, findings=findings)


def reason(log: Path) -> str:
    """The last error in the output of a check; without any its last line that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # NCCL and the interpreter say more on their way out.
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["no output"])[-1][:_WIDEST]


if __name__ == "__main__":
    sys.exit(main())
