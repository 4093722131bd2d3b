"""This machine: its cores, memory, processes and network interfaces. Imports no torch."""

import ctypes
import fcntl
import ipaddress
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from segtrain import plugins
from segtrain.distributed.signals import die_with_parent
from segtrain.text import say

# Linux: files here are memory that processes can share.
SHARED_MEMORY = Path("/dev/shm")

# The network interface that no other machine reaches.
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

# In the environment: which of torch's two engines for NCCL it uses.
NCCL_ENGINE = "TORCH_DIST_USE_NCCL2"

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def num_cores() -> int:
    """The cores that this process may use, which a container or a scheduler can restrict."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# The part of the memory that `--fit` leaves free: evaluations, checkpoints and crops vary.
MEMORY_MARGIN = 0.1


def host_memory() -> int:
    """Bytes that all processes here may have together: the machine's, or those of a container."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_group_limits()])


def available_memory() -> int:
    """The part of `host_memory` that other programs of the machine leave free now."""
    kilobytes = _numbers(_MACHINE).get("MemAvailable")
    return host_memory() if kilobytes is None else min(host_memory(), 1024 * kilobytes)


def process_memory() -> int | None:
    """Bytes that this process may have resident by its own limits (ulimit); None: no limit.

    Libraries take address space without memory: a limit of 4 GiB leaves torch some 1.5.
    """
    own, limits = _numbers(_PROCESS), []
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and name in own:
            limits.append(limit - 1024 * (own[name] - own["VmRSS"]))
    return min(limits, default=None)


def resident_bytes(pid: int) -> int:
    """The memory of process `pid`, what it shares with others in parts; 0 if that is not known."""
    return 1024 * _numbers(Path(f"/proc/{pid}/smaps_rollup")).get("Pss", 0)


def most_resident_bytes() -> int:
    """The most memory that this process has had."""
    # Not ru_maxrss, which begins with the memory of the process that started this one.
    if kilobytes := _numbers(_PROCESS).get("VmHWM"):
        return 1024 * kilobytes
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# Linux: files of lines "name: number kB".
_MACHINE, _PROCESS = Path("/proc/meminfo"), Path("/proc/self/status")
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _numbers(file: Path) -> dict[str, int]:
    """The numbers in a file of /proc, in its units; none if there is no such file."""
    with suppress(OSError):
        pairs = re.findall(r"^(\w+):\s+(\d+) kB$", file.read_text(), re.MULTILINE)
        return {name: int(number) for name, number in pairs}
    return {}


def _group_limits() -> Iterator[int]:
    """The limits of the control groups (version 1 and 2) around this process."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = _GROUPS, "memory.max"
            if controllers:
                root, name = _GROUPS / "memory", "memory.limit_in_bytes"
            if controllers and "memory" not in controllers.split(","):
                continue
            # Inside a container its own group is the root, whatever it is called outside.
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # no such group here, or "max"
                    yield int((folder / name).read_text())
                if folder == root:
                    break


def free_shared_memory() -> int | None:
    """Bytes that are free in SHARED_MEMORY; None: processes share memory otherwise here."""
    if sys.platform != "linux" or not SHARED_MEMORY.is_dir():
        return None
    return shutil.disk_usage(SHARED_MEMORY).free


def semaphore_problem() -> str | None:
    """Why no semaphore can be made here, which processes need to share work; None: one can be."""
    try:
        multiprocessing.get_context("fork").Lock()  # others would leave a tracker running
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return f"{SHARED_MEMORY}: no semaphore can be made there: {reason}"
    return None


def _begin(sources: Sequence[str]) -> None:
    """What each process of a pool does first. sources: of plugins that it may be sent."""
    import cv2

    die_with_parent(signal.SIGKILL)
    cv2.setNumThreads(0)  # else a thread for each core in each of them
    keep_freed_memory()
    for source in sources:
        plugins.load(source)


class _Pool(ProcessPoolExecutor):
    """Its processes never see Ctrl-C, which a terminal sends to all: this one ends them.

    Else each of them would show a traceback, from wherever it is in its start.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As ProcessPoolExecutor's, which starts processes here; they inherit what is blocked."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.shutdown(cancel_futures=kind is not None)


def process_pool(processes: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """`processes`, ended after the block or with this one; None: this one is to do."""
    problem = semaphore_problem() if processes > 1 else None
    if problem:
        say(f"warning: one process instead of {processes}: {problem}")
    if processes <= 1 or problem:
        return nullcontext()
    # Spawned, because a fork of a process that runs threads (OpenCV, torch) can hang.
    context, sources = multiprocessing.get_context("spawn"), plugins.loaded()
    return _Pool(processes, context, _begin, (sources,))


def is_alive(pid: int) -> bool:
    """Whether process `pid` exists and is not a zombie."""
    try:
        # The state comes after the name, which stands in parentheses and may hold any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that still belong to it, sorted."""
    # The kernel lists the children of each thread apart.
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return sorted(int(child) for line in lists for child in line.split())


def descendants(pid: int) -> list[int]:
    """`pid`, its children, their children and so on."""
    return [pid, *(process for child in children(pid) for process in descendants(child))]


def address_toward(host: str, port: int) -> str | None:
    """This machine's own address on the way to `host`; None: there is no way, or only the loopback.

    The host name would not do: on many machines it resolves to 127.0.1.1.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


def addresses() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by its name."""
    by_name = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with suppress(OSError):  # this interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                by_name[name] = socket.inet_ntoa(answer[20:24])
    return by_name


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>
_KEPT_BYTES = 1 << 30  # the largest tensor that is kept for reuse


def keep_freed_memory() -> None:
    """Has glibc keep freed blocks for the next allocation; does nothing with another C library.

    Every step allocates the same large tensors, and every sample the same large images: by default
    as fresh pages that the kernel clears.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_FIRST_DEVICE = Path("/dev/nvidia0")


def unusable_device() -> str | None:
    """Why torch cannot use the NVIDIA device of this machine; None: it can, or there is none."""
    import torch

    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    is_for_cpus = torch.version.cuda is None
    if is_for_cpus or is_hidden or not _FIRST_DEVICE.exists() or torch.cuda.is_available():
        return None
    return (
        f"{_FIRST_DEVICE} exists, but torch {torch.__version__} finds no CUDA device: the driver "
        f"may be too old for CUDA {torch.version.cuda} (see nvidia-smi), or this user may not use "
        "the device"
    )


def driver_version() -> str | None:
    """That of NVIDIA's driver; None: there is none, or it does not say.

    Its file reads `NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Wed ...`.
    """
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split() if file.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), None)
