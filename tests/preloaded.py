"""`python -m segtrain` without the start of Python: forks of a process that has imported torch.

Imports cost a command and each of its ranks 5 s of a processor, a fork 0.1 s. The rest is done as a
shell and the launcher do it: sessions, environments, standard streams, exit codes.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from segtrain.distributed import liveness, signals

# In the environment of a command, how its ranks start loader workers, as if on CUDA.
LOADER_START = "TEST_LOADER_START"


@cache
def fork_server() -> Any:
    """The context of multiprocessing whose processes are forked from the one that has imported."""
    context = multiprocessing.get_context("forkserver")
    # The last ones are what making an optimizer and torch.compile import.
    libraries = ["albumentations", "matplotlib.backends.backend_agg", "torch.utils.tensorboard"]
    libraries += ["torch._inductor", "torch._dynamo"]
    launcher = "segtrain.distributed.launcher"
    context.set_forkserver_preload(["segtrain.trainer.loop", launcher, *libraries])
    return context


def same_seconds(dtype: Any, backward: bool) -> float:
    """In place of `precision._convolution_s`: no log depends on what this processor is good at."""
    return 1.0


class Fork:
    """`segtrain ARGUMENTS`, or `-c CODE`, forked; with what tests use of subprocess.Popen.

    wrapper: what would come before a command; it gets the network and the mounts that this makes.
    folder: becomes a link to the folder of the launcher once ranks are there; None: does not.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        output: Path,
        errors: Path,
        folder: Path | None = None,
        wrapper: Sequence[str] = (),
    ):
        streams = Path(os.devnull), output, errors
        with _inside(wrapper) as place:
            words = list(arguments), dict(environ), streams, folder, place
            self._process = fork_server().Process(target=_command, args=words)
            self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("segtrain", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PipedFork(Fork):
    """In place of subprocess.Popen, for a program that reads what `python -m segtrain` says."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], encoding: str, **_: Any):
        with tempfile.TemporaryDirectory() as folder:
            pipe = Path(folder, "pipe")
            os.mkfifo(pipe)
            super().__init__(
                command[command.index("segtrain") + 1 :], env, output=pipe, errors=pipe
            )
            self.stdout = pipe.open(encoding=encoding)

    def __enter__(self) -> "PipedFork":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.returncode = self.wait()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@contextmanager
def _inside(wrapper: Sequence[str]) -> Iterator[int | None]:
    """The id of a process behind `wrapper`; on leaving, waits for the fork that ends it."""
    if not wrapper:
        yield None
        return
    command = [*wrapper, "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid


class _Rank(subprocess.Popen):
    """A rank that was forked before its launcher had threads, and gets its command now."""

    waiting: ClassVar[list[tuple[int, int]]] = []  # process id, and the pipe that it reads

    def _execute_child(self, args, *others):
        environ = others[5]
        self.pid, pipe = self.waiting.pop(0)
        self._child_created = True
        with open(pipe, "wb") as file:
            pickle.dump((args[args.index("segtrain") + 1 :], environ), file)


def _command(
    arguments: list[str],
    environ: dict[str, str],
    streams: Sequence[Path],
    folder: Path | None,
    place: int | None,
) -> None:
    """Becomes the command, and in its forks the ranks."""
    from segtrain import cli
    from segtrain.distributed import launcher
    from segtrain.models import precision
    from segtrain.trainer import training

    precision._convolution_s = same_seconds
    os.setsid()
    # Each once: a pipe's name is gone as soon as it has been opened.
    files = {path: os.open(path, os.O_RDWR | os.O_APPEND) for path in set(streams)}
    for number, path in enumerate(streams):
        os.dup2(files[path], number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if place is not None:
        _enter(place)
    tempfile.tempdir = None  # that of the process before
    multiprocessing.set_start_method(None, force=True)
    is_code = arguments[0] == "-c"
    num_ranks = 0 if is_code else _num_ranks(cli._parser().parse_args(arguments), environ)
    for _ in range(num_ranks):
        mine, theirs = os.pipe()
        if pid := os.fork():
            os.close(mine)
            _Rank.waiting.append((pid, theirs))
            continue
        signals.die_with_parent(signal.SIGKILL)
        os.setsid()
        for pipe in (theirs, *(pipe for _, pipe in _Rank.waiting)):
            os.close(pipe)
        with open(mine, "rb") as file:
            content = file.read()
        if not content:  # the launcher has ended without a use for this one
            os._exit(0)
        arguments, environ = pickle.loads(content)
        if folder is not None:
            with suppress(FileExistsError):
                folder.symlink_to(environ[liveness.FOLDER_VARIABLE])
        break
    launcher.Popen = _Rank
    os.environ.clear()
    os.environ.update(environ)
    if way := environ.get(LOADER_START):
        loader = training.TrainLoader
        training.TrainLoader = lambda *a, **o: loader(*a, **o | {"start_method": way})
    if is_code:
        exec(compile(arguments[1], "-c", "exec"), {"__name__": "__main__"})
        sys.exit()
    sys.exit(cli.main(arguments))


def _enter(place: int) -> None:
    """Moves this process to the network and the mounts of process `place`, and ends that one."""
    here = Path.cwd()
    for kind in ("net", "mnt"):
        with open(f"/proc/{place}/ns/{kind}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0, f"setns {kind}"
    os.chdir(here)
    os.kill(place, signal.SIGKILL)


def _num_ranks(args: Any, environ: Mapping[str, str]) -> int:
    """How many ranks the command may start here, those of further attempts included."""
    num_ranks = getattr(args, "nproc", "auto")
    num_ranks = 1 if num_ranks == "auto" else int(num_ranks)
    attempts = 1 + getattr(args, "max_restarts", 0)
    attempts += "GRAPHS_REPLAY" in environ  # after a replay that did not come back
    return num_ranks * attempts if max(num_ranks, attempts) > 1 else 0
