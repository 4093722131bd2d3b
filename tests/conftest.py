"""Fixtures shared by all tests."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

# Tests run beside each other on few cores; the ranks they start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_TESTS = Path(__file__).resolve().parent
_GPU = _TESTS / "gpu"

# Started by nohup, the tests would inherit that SIGHUP is ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Compiling for a processor without vector units took 460 s beside other programs.
_RANKS_TIMEOUT_S = 900


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", metavar="FILE", help="write there what each test costs; see tests/times.py"
    )
    parser.addoption(
        "--since",
        metavar="COMMIT",
        help="of the slow tests those whose folders have changed since; --since= those of all",
    )
    group = parser.getgroup("tests for a CUDA device (pytest -m gpu)")
    group.addoption(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: run them tiny on the CPU"
    )
    group.addoption(
        "--figures",
        default="runs/gpu/figures.json",
        metavar="FILE",
        help="outcome and figures of each of them (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("times"):
        from times import Times

        config.pluginmanager.register(Times(Path(file), getattr(config, "workeroutput", None)))
    # On a machine with devices the other tests would run on them. What CUDA sees is decided once in
    # a process, so a session of pytest has devices for all tests or for none.
    if _is_for_gpu(config) and config.getoption("numprocesses", None):
        raise pytest.UsageError("-m gpu: the tests share one device; leave -n out")
    if not _is_for_gpu(config) or config.getoption("device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Triton reads it when it is imported, also by torch. Only tests/kernels use it.
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` only tests/gpu is imported, and without it everything else."""
    if _is_for_gpu(config):
        return True if collection_path.suffix == ".py" and collection_path.parent != _GPU else None
    return True if collection_path == _GPU else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commit = config.getoption("since")
    if commit is not None:
        changed = changed_folders(commit) if commit else None
        left_out = [item for item in items if not is_due(item, changed)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_due(item, changed)]


def changed_folders(commit: str) -> set[str]:
    """The folders and modules of segtrain in which a file differs from `commit`."""
    command = ["git", "diff", "--name-only", commit, "--", "segtrain"]
    names = subprocess.check_output(command, cwd=_TESTS.parent, text=True).splitlines()
    return {name.split("/")[1].removesuffix(".py") for name in names}


def is_due(item: pytest.Item, changed: set[str] | None) -> bool:
    """Whether continuous integration runs a test; changed: folders, None if that is not known."""
    about = [{*mark.args} for mark in item.iter_markers("slow")]
    return all(folders and (changed is None or folders & changed) for folders in about)


def _is_for_gpu(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "gpu"


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    """A run that a failed test has left behind would take the processor from all others."""
    yield
    from processes import end_all

    end_all()
    # It also leaves signals ignored, and tests that come later fail for no reason of their own.
    assert "SEGTRAIN_OUTCOMES" not in os.environ, "a launcher ran in this process: use Command"


@pytest.fixture(autouse=True)
def processor(monkeypatch) -> None:
    """Nothing depends on this one: bfloat16 is as fast as float32."""
    from preloaded import same_seconds

    monkeypatch.setattr("segtrain.models.precision._convolution_s", same_seconds)


@pytest.fixture(scope="session")
def forkserver() -> Any:
    """Starts processes from one that has imported torch, which takes 0.1 s instead of 5."""
    from preloaded import fork_server

    return fork_server()


@pytest.fixture(scope="session")
def run_ranks(forkserver) -> Callable[..., list[Any]]:
    """`run_ranks(world_size, function, *args, **kwargs)`: what `function` returns on every rank.

    The ranks are joined in a gloo group on this machine. `function` must be one of a module.
    """
    return partial(_run, forkserver, "cpu")


@pytest.fixture(scope="session")
def spawn_ranks() -> Callable[..., list[Any]]:
    """As `run_ranks`, for ranks that use CUDA, which does not survive a fork."""
    return partial(_run, multiprocessing.get_context("spawn"), "cpu")


@pytest.fixture(scope="session")
def spawn_nccl_ranks() -> Callable[..., list[Any]]:
    """As `spawn_ranks`, with a device for each rank and an NCCL group."""
    return partial(_run, multiprocessing.get_context("spawn"), "cuda")


@pytest.fixture
def lab(tmp_path, capsys) -> Any:
    """Runs commands in this process, with the folder of the test as theirs; see lab.py."""
    from lab import Lab

    return Lab(tmp_path, capsys)


@pytest.fixture
def stop(monkeypatch, run_ranks) -> dict[Any, Any]:
    """Folds and seeds train in processes; {n: step} stops the n-th there, 0: before it."""
    from experiments import train_member

    from segtrain.desk.commands import programs

    stop, count = {}, []

    def run(_, arguments, show):
        count.append(arguments)
        step = stop.get(len(count))
        if step == 0:
            raise KeyboardInterrupt
        return run_ranks(1, train_member, arguments, step)[0]

    monkeypatch.setattr(programs.Programs, "run", run)
    stop["ran"] = count
    return stop


@pytest.fixture
def handlers() -> Iterator[None]:
    """Handlers of signals are put back after the test."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """A clock that stands still; `now[0] += 1` lets a second pass."""
    found = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: found[0])
    return found


@pytest.fixture
def fake() -> Any:
    """Rank 0 of 8 on a CUDA device that does not exist; see fake_device.py."""
    from fake_device import fake_ranks

    with fake_ranks() as watch:
        yield watch


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The root of a small data set."""
    from experiments import write_data

    root = tmp_path_factory.mktemp("data")
    write_data(root)
    return root


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 4 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "segtrain-test", where], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    yield where
    # Lazily: a test that fails may hold a file open.
    subprocess.run(["umount", "--lazy", where], check=True)


@pytest.fixture(scope="session")
def little_shared_memory() -> list[str]:
    """What comes before a command that is to find 1 MB in /dev/shm."""
    mount = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    return _checked(["unshare", "--mount", "sh", "-c", mount, "sh"], "mounting")


@pytest.fixture(scope="session", params=["-o ro none /dev/shm", "none /dev/shm/.."])
def no_shared_memory(request) -> list[str]:
    """What comes before a command that finds /dev/shm read-only, or nothing there."""
    null = "test -e /dev/null || mknod -m 666 /dev/null c 1 3; mknod -m 666 /dev/urandom c 1 9"
    mount = f'mount -t tmpfs {request.param} && {{ {null}; }} 2>/dev/null; exec "$@"'
    return _checked(["unshare", "--mount", "sh", "-c", mount, "sh"], "mounting")


@pytest.fixture(scope="session")
def no_network() -> list[str]:
    """What comes before a command that is to find no network but its own machine."""
    up = 'ip link set lo up && exec "$@"'
    return _checked(["unshare", "--net", "sh", "-c", up, "sh"], "leaving the network")


def _checked(wrapper: list[str], what: str) -> list[str]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip(f"{what} takes root on Linux")
    done = subprocess.run([*wrapper, "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{what} is not allowed here: {done.stderr.strip()}")
    return wrapper


def _run(
    context: Any,
    device: str,
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> list[Any]:
    from processes import free_port

    port = free_port()
    # As bytes: through multiprocessing's own pickler tensors would travel as shared memory,
    # which ends with the process that made it.
    task = pickle.dumps((function, args, kwargs))
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(theirs, device, rank, world_size, port, task)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_result(rank, pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result(rank: int, pipe: Any) -> Any:
    if not pipe.poll(_RANKS_TIMEOUT_S):
        pytest.fail(f"rank {rank} did not answer within {_RANKS_TIMEOUT_S} s")
    try:
        value, error = pickle.loads(pipe.recv_bytes())
    except EOFError:
        pytest.fail(f"rank {rank} died")
    if error is not None:
        pytest.fail(f"rank {rank}:\n{error}")
    return value


def _rank_main(pipe: Any, device: str, rank: int, world_size: int, port: int, task: bytes) -> None:
    import torch
    from preloaded import same_seconds

    from segtrain.checkpoint import format as checkpoint_format
    from segtrain.distributed.process_group import device_for, process_group
    from segtrain.models import precision

    precision._convolution_s = same_seconds
    # A file is read again as soon as it is saved, a fifth of a short run: see test_checkpoint.py.
    load = checkpoint_format.load
    checkpoint_format.load = lambda path, verified=False: None if verified else load(path)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        function, args, kwargs = pickle.loads(task)
        with process_group(device_for(device), timeout_s=60):
            pipe.send_bytes(pickle.dumps((function(*args, **kwargs), None)))
    except BaseException:  # the test shows it, whatever it is
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
