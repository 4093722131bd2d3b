"""Joining the process group: the device of this rank, and how the ranks find each other.

In a program of your own, started by torchrun or alone:

    device = device_for("auto")
    with process_group(device, timeout_s=600):
        train(device)
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

# Its functions have the group that exists when they are imported as a default argument. Imported
# later (torch does it for its own needs) it would keep the group and its threads alive; one of them
# may still release a tensor while Python ends, and then the process aborts.
import torch.distributed.nn.functional

from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness, machine
from segtrain.distributed.machine import unusable_device
from segtrain.distributed.shared_sum import SharedSum, is_possible
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError, LostRanksError, UserError
from segtrain.text import counted, say

# Of NCCL 2.30 and later: without it, NCCL refuses ranks that share a device.
_SHARED_DEVICES = "NCCL_MULTI_RANK_GPU_ENABLE"

# NCCL aborts the process where gloo raises an error. So it waits longer than the host does, which
# raises one after train.timeout_s (`training.step_sync`).
_NCCL_FACTOR = 1.5
# Unless the user has set them; README.md says why.
_NCCL_SETTINGS = {machine.NCCL_ENGINE: "0", "NCCL_GRAPH_REGISTER": "0", "NCCL_LOCAL_REGISTER": "0"}
# How long leaving the group may take once all ranks have come to it.
LEAVE_LIMIT_S = 20.0


def device_for(name: str) -> torch.device:
    """The device of this rank for `auto`, `cpu` or `cuda`; ConfigError: there is none for it.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment ranks share devices, in turn.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if dist.local_rank() == 0 and (problem := unusable_device()):
            say(f"warning: {problem}; going on without it, on the CPU")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = unusable_device() or "no CUDA device is visible to torch"
        raise ConfigError(f"--device cuda: {why}; use --device cpu")
    index, visible = dist.local_rank(), torch.cuda.device_count()
    if visible == 1 and not liveness.has_launcher():
        # SLURM's --gpus-per-task=1 shows each task its own device only. Should the tasks share one,
        # NCCL refuses it.
        index = 0
    if os.environ.get(_SHARED_DEVICES) == "1" and dist.local_world_size() > visible:
        if dist.local_rank() == 0:
            ranks = f"{dist.local_world_size()} ranks share {counted(visible, 'device', 'devices')}"
            say(f"warning: {ranks} ({_SHARED_DEVICES}=1): times mean nothing")
        index %= visible
    if index >= visible:
        raise ConfigError(
            f"--nproc: rank {index} of this machine has no device of its own, "
            f"there are {visible}; start at most that many ranks"
        )
    return torch.device("cuda", index)


@contextmanager
def process_group(device: torch.device, *, timeout_s: float) -> Iterator[None]:
    """Joins the group that RANK, WORLD_SIZE, MASTER_ADDR ... describe; leaves it at the end.

    Without these variables the process stays alone. A group that exists is used and kept. Ranks of
    one machine on CPUs add small tensors through shared memory. Collective.

    After an error this rank says nothing more to the others, but its connections stay open until
    the process ends or joins a group again: NCCL may wait for ranks that wait for this one, and
    the message must come before.

    Raises:
        LostRanksError: other ranks did not come, or their connection was lost.
        ExecutionError: this machine has no network interface for them.
    """
    # The connections of a group that failed before in this process: now they may go.
    liveness.deferred_abort()
    if "RANK" not in os.environ or dist.is_distributed():
        try:
            yield
        finally:
            dist.release_recordings()  # whose group it is leaves it later
        return
    liveness.beat("setup", 0)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
        for name, value in _NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
    # Before the group is made, which reads the variables that these set.
    _choose_interface()
    timeout = timedelta(seconds=timeout_s * (_NCCL_FACTOR if is_cuda else 1))
    dist.use_timeout(timeout, wait_s=timeout_s)
    store: dict[str, Any] = {}  # none: a TCPStore at MASTER_ADDR
    if (path := liveness.store_file()) is not None:
        # A TCPStore would listen on every interface and let any client change its values.
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = {"store": torch_dist.FileStore(str(path), size), "rank": rank, "world_size": size}
    try:
        with _explained(in_set_up=True):
            if "TORCHELASTIC_RUN_ID" in os.environ and not liveness.has_launcher():
                store = _store_of_attempt(timeout)
            torch_dist.init_process_group(
                **store,
                backend="nccl" if is_cuda else "gloo",
                timeout=timeout,
                # With the device, NCCL connects at once, not in the first collective.
                device_id=device if is_cuda else None,
            )
        with _explained(in_set_up=False):
            if not is_cuda:
                dist.use_shared_sum(_open_shared_sum(timeout_s))
            yield
    except BaseException:
        # Later: NCCL may wait in it, and the error must be told before.
        liveness.defer_abort(dist.abort_groups)
        raise
    _leave(device)


def _leave(device: torch.device) -> None:
    """Leaves the groups; if NCCL fails or hangs, the process will end without (collective)."""
    if device.type == "cpu":
        dist.leave_groups()
        return
    problem = f"leaving the process group takes over {LEAVE_LIMIT_S:.0f} s"

    def leave() -> None:
        torch.cuda.set_device(device)  # a new thread begins with device 0
        dist.leave_groups()

    try:
        with _explained(in_set_up=False):
            dist.barrier()  # a rank that is late is waited for here, where a limit is
        if liveness.left_within(LEAVE_LIMIT_S, leave):
            return
    except (RuntimeError, LostRanksError) as error:
        problem = str(error).partition("\n")[0]
        liveness.defer_abort(dist.abort_groups, EXIT_OK)
    rank = os.environ["RANK"]
    say(f"warning: rank {rank}: {problem}; all is saved, and the process ends without")


def _store_of_attempt(timeout: timedelta) -> dict[str, Any]:
    """Where the ranks of this attempt meet, as arguments of `init_process_group` (collective).

    torchrun keeps its store when it starts the ranks again, with the addresses of the dead. How
    often it has is no name for an attempt: agents that join later count from 0. So rank 0 chooses
    one, and the others believe a name only once rank 0 has answered to them.
    """
    store, rank, size = next(torch_dist.rendezvous("env://", timeout=timeout))
    mine, call = uuid.uuid4().hex, "segtrain/attempt"
    name = mine
    # Rank 0 publishes a name, gathers a word from each rank under it, and publishes all words.
    if rank == 0:
        store.set(call, mine)
        there = [store.get(f"{mine}/{other}") for other in range(1, size)]
        store.set(f"{mine}/all", b" ".join(there))
    until = time.monotonic() + timeout.total_seconds()
    while rank != 0:
        # It may be the name of an attempt before, whose rank 0 is dead. Then this rank's word is
        # not among those that it gathered, and the loop asks again.
        name = store.get(call).decode()
        store.set(f"{name}/{rank}", mine)
        if store.check([f"{name}/all"]) and mine.encode() in store.get(f"{name}/all").split():
            break
        if time.monotonic() > until:
            raise LostRanksError(f"rank {rank}: rank 0 did not come")
        time.sleep(0.05)
    return {"store": torch_dist.PrefixStore(name, store), "rank": rank, "world_size": size}


@contextmanager
def _explained(*, in_set_up: bool) -> Iterator[None]:
    """Turns errors of torch about this machine or the other ranks into those of segtrain."""
    try:
        yield
    except LostRanksError as error:
        raise LostRanksError(f"{error}, {liveness.describe()}") from error
    except RuntimeError as error:
        user_error = meaning(error, in_set_up=in_set_up)
        if user_error is None:
            raise
        raise user_error from error


def meaning(error: RuntimeError, *, in_set_up: bool) -> UserError | None:
    """`error` of torch as a user can understand it; None: it is an error of the program."""
    text = str(error)
    lines = [line.strip() for line in text.partition("Exception raised from")[0].splitlines()]
    lines = [line for line in lines if line] or [type(error).__name__]
    # The cause: NCCL's stands in the last line, gloo's in the first.
    reason = lines[-1] if any("nccl" in line.lower() for line in lines) else lines[0]
    # torch 2.15's new back end for NCCL gives its errors no type of their own
    # (TORCH_DIST_USE_NCCL2=0 in the environment chooses the old one), and gloo's begin with the
    # place in its source.
    of_nccl = isinstance(error, torch_dist.DistBackendError) or "NCCL" in text
    if in_set_up and "/gloo/transport/tcp/device.cc" in text:
        what = reason.partition("!= nullptr. ")[2] or reason
        return ExecutionError(
            f"no network interface for the ranks: {what}; GLOO_SOCKET_IFNAME in the environment "
            "names another one"
        )
    is_here = "ncclRemoteError" not in text and "remote process" not in text
    if in_set_up and of_nccl and is_here:
        kind = ConfigError if "Duplicate GPU" in reason else ExecutionError  # too many ranks
        return kind(
            f"NCCL cannot be set up: {reason}; NCCL_DEBUG=WARN in the environment tells more"
        )
    if of_nccl or isinstance(error, torch_dist.DistError) or "/gloo/" in text:
        return LostRanksError(
            f"rank {os.environ['RANK']}: lost the connection to the other ranks "
            f"{liveness.describe()}; the log of another rank may tell the cause ({reason})"
        )
    return None


def _choose_interface() -> None:
    """Sets the network interface on which gloo and NCCL listen, unless the user has set it.

    All ranks on this machine: the loopback, which others cannot reach. Otherwise gloo listens where
    rank 0 is reached; by default it would follow this machine's host name.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if liveness.store_file() is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", machine.LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", machine.LOOPBACK)
    elif host and port.isdigit():
        address = machine.address_toward(host, int(port))
        for name, other in machine.addresses().items():
            if other == address:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _open_shared_sum(timeout_s: float) -> SharedSum | None:
    """Sums through shared memory; None unless all ranks can take part. Collective."""
    size = dist.world_size()
    if size == 1 or dist.local_world_size() != size or not is_possible():
        return None

    def create() -> str | None:
        with suppress(OSError):  # no room: gloo adds up instead
            return SharedSum.create(size)

    mine, path = None, dist.run_on_rank0(create)
    # The same on all ranks, so all leave here, or none.
    if path is None:
        return None
    with suppress(OSError):  # a rank in another container does not see the file
        mine = SharedSum(path, dist.rank(), size, timeout_s=timeout_s)
    all_can = all(dist.all_gather_object(mine is not None))
    # All have opened it by now. Without a name, nothing stays behind whatever ends the ranks.
    if dist.is_main():
        os.unlink(path)
    if mine is not None and not all_can:
        mine.close()
    return mine if all_can else None
