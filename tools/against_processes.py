"""The processes of the contenders of bench_against.py.

Each is started with what it is to do, and then does as many units of it as a line of its standard
input says: `python against_processes.py SPEC`.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_WARMUP = 2  # units before the first round


class Contender:
    """A process that does what it is told, one order at a time."""

    def __init__(self, spec: dict[str, Any], threads: int) -> None:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve())]
        variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        self._process = subprocess.Popen(
            [*command, json.dumps(spec | {"threads": threads})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables, "NO_ALBUMENTATIONS_UPDATE": "1"},
        )
        self._process_name = spec["contender"]

    def do(self, count: int) -> dict[str, float]:
        """Does `count` units; returns the seconds, and the peak_mib so far."""
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print, too
                return json.loads(line)
        raise RuntimeError(f"{self._process_name} ended early; its message is above")

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def contenders(specs: dict[str, dict[str, Any]], threads: int) -> Iterator[dict[str, Contender]]:
    """The processes of these contenders, ready."""
    with ExitStack() as stack:
        found = {}
        for name, spec in specs.items():
            found[name] = Contender(spec, threads)
            stack.callback(found[name].close)
        for contender in found.values():
            contender.do(_WARMUP)
        yield found


def worker(spec: dict[str, Any]) -> None:
    """Does what its standard input asks for, a number of units a line."""
    import torch

    torch.set_num_threads(spec.pop("threads"))
    section = spec.pop("section")
    if section == "data":
        from against_data import samples as make
    elif section == "eval":
        from against_steps import evaluation as make
    else:
        from against_steps import training as make
    name = spec.pop("contender")
    run = make(name, **{k: tuple(v) if isinstance(v, list) else v for k, v in spec.items()})
    for line in sys.stdin:
        began = time.perf_counter()
        run(int(line))
        taken = {"seconds": time.perf_counter() - began, "peak_mib": _peak_mib()}
        print(json.dumps(taken), flush=True)


def _peak_mib() -> float:
    """The most resident memory of this program.

    Not ru_maxrss: it begins with that of the process which started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
