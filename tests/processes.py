"""The `segtrain` command as processes of its own, to be watched, signalled and killed."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from preloaded import Fork

from segtrain.distributed import liveness
from segtrain.distributed.liveness import Heartbeat, read_heartbeats
from segtrain.distributed.machine import children, descendants, is_alive

REPOSITORY = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 240

# What the README promises after a death, on a busy machine too: an orphan has 8 s to save.
GONE_WITHIN_S = 15


_started: list["Command"] = []


def end_all() -> None:
    """Kills the commands that a test has left running, as when an assertion in its midst fails."""
    while _started:
        command = _started.pop()
        if command.process.poll() is None:
            command.kill()


class Command:
    """`python -m segtrain ARGS`, running in a session of its own.

    It and its ranks are forks of a process that has imported torch, see preloaded.py. Python itself
    starts with a `program` before segtrain, or with `fresh`, for what is decided at its start.
    `wrapper` is what comes before Python, such as `ip netns exec NAME`.
    """

    def __init__(
        self,
        where: Path,
        *args: object,
        program: Sequence[str] = (),
        wrapper: Sequence[str] = (),
        fresh: bool = False,
        **environ: str,
    ):
        self.errors_file = where / f"stderr{time.monotonic_ns()}"
        self.output_file = self.errors_file.with_suffix(".out")
        self._folder = self.errors_file.with_suffix(".folder")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        paths = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environ = inherited | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environ
        words = list(map(str, args))
        streams = {"output": self.output_file, "errors": self.errors_file}
        for path in streams.values():
            path.touch()
        self.process: subprocess.Popen | Fork
        if not (program or fresh):
            self.process = Fork(words, environ, **streams, folder=self._folder, wrapper=wrapper)
        else:
            with self.errors_file.open("wb") as errors, self.output_file.open("wb") as output:
                self.process = subprocess.Popen(
                    [*wrapper, sys.executable, "-m", *(program or ("segtrain",)), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=environ,
                    start_new_session=True,
                )
        _started.append(self)

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    @property
    def errors(self) -> str:
        return self.errors_file.read_text()

    def ranks(self) -> list[int]:
        """The ids of the processes that the launcher has started, in the order of ranks."""
        return [pid for pid in children(self.process.pid) if b"segtrain" in _command_line(pid)]

    def folder(self) -> Path | None:
        """What launcher and ranks tell each other there; None: no rank has begun."""
        if self._folder.is_symlink():
            return self._folder.readlink()
        for pid in self.ranks():
            if root := _environ(pid).get(liveness.FOLDER_VARIABLE):
                return Path(root)
        return None

    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeats of the ranks."""
        folder = self.folder()
        return [] if folder is None or not folder.is_dir() else read_heartbeats(folder)

    def wait_for_phase(self, phase: str) -> None:
        """Returns as soon as rank 0 is in `phase`."""
        self.wait_until(lambda: any((r.rank, r.phase) == (0, phase) for r in self.heartbeats()))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"it did not come to that:\n{self.output}\n{self.errors}")
            time.sleep(0.005)

    def wait(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end:\n{self.output}\n{self.errors}") from None

    def wait_for_step(self, directory: Path, step: int) -> None:
        """Returns when metrics.jsonl has a line for `step`."""
        self.wait_until(lambda: step in logged_steps(directory))

    def kill(self) -> None:
        for pid in descendants(self.process.pid):
            with_signal(pid, signal.SIGKILL)
        self.process.wait()


def save_and_stop(command: Command, directory: Path) -> int:
    """Asks a run to save and go on, later to stop; the step after which it stopped, saved."""
    from experiments import last

    command.wait_for_step(directory, 3)
    os.kill(command.process.pid, signal.SIGUSR1)
    command.wait_until(lambda: "as SIGUSR1 asked for" in command.output)
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.wait() == 143, command.errors
    step = last(directory).step
    assert 3 <= step == max(logged_steps(directory))
    return step


def run_python(
    code: str, *, forked: bool = False, wrapper: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a process of its own; `forked`: with torch imported already."""
    code, environ = textwrap.dedent(code), os.environ | {"PYTHONPATH": str(REPOSITORY)} | environ
    if not forked:
        command = [*wrapper, sys.executable, "-c", code]
        options = {"text": True, "capture_output": True, "timeout": _TIMEOUT_S}
        return subprocess.run(command, env=environ, **options)
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        output.touch(), errors.touch()
        process = Fork(["-c", code], environ, output=output, errors=errors)
        status = process.wait(_TIMEOUT_S)
        return subprocess.CompletedProcess(code, status, output.read_text(), errors.read_text())


# Below the ports that a system gives to whoever asks for any (32768 and up), one of which could be
# taken between the probe and the ranks. Each process begins elsewhere.
_first_port = 10_000 + 101 * os.getpid() % 20_000
_ports = itertools.cycle((*range(_first_port, 30_000), *range(10_000, _first_port)))


def free_port() -> int:
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports never end")


def with_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def logged_steps(directory: Path) -> list[int]:
    """The steps of the training lines of metrics.jsonl."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    values = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line["step"] for line in values if "train/loss" in line]


def left_after(pids: Sequence[int], seconds: float) -> list[int]:
    """Those of `pids` that are still alive when `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_alive(pid)]


def _environ(pid: int) -> dict[str, str]:
    try:
        listed = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in listed if "=" in pair)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
