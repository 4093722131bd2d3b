"""The process group: who we are, and the few collectives the program needs.

Every function is the identity in a single process, so callers never branch on the number of ranks.
Those marked *collective* must be called by all ranks in the same order, or they wait for each other
until the timeout. Nothing else in the package imports torch.distributed but the launcher and its
rendezvous.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from segtrain import errors
from segtrain.distributed import exit_status, heartbeat, network, virtual_ranks
from segtrain.distributed.shared_sum import SharedSum
from segtrain.distributed.shared_sum import is_possible as can_share_memory
from segtrain.errors import ConfigError, LostRanksError, UserError


def is_distributed() -> bool:
    """Whether this process belongs to a group, even one of a single rank."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    """This process's number, 0 to world_size() - 1."""
    return torch_dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """The number of processes that train together."""
    return torch_dist.get_world_size() if is_distributed() else 1


def local_rank() -> int:
    """This process's number on its own machine, which chooses its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this rank writes files and logs."""
    return rank() == 0


def device_for(name: str) -> torch.device:
    """The device of this rank for `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: CUDA is asked for and missing, or this machine has fewer devices than ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device is visible to torch; use --device cpu")
    if local_rank() >= torch.cuda.device_count():
        raise ConfigError(
            f"--nproc: rank {local_rank()} of this machine has no device of its own, "
            f"there are {torch.cuda.device_count()}; start at most that many ranks"
        )
    return torch.device("cuda", local_rank())


@contextmanager
def process_group(device: torch.device, *, timeout_s: float) -> Iterator[None]:
    """Joins the group that the environment (RANK, WORLD_SIZE, MASTER_ADDR, ...) describes.

    Without these variables the process stays alone; a group that exists already is used and kept.
    Collective on entry.

    Raises:
        LostRanksError: other ranks have not come, or have gone.
    """
    if "RANK" not in os.environ or is_distributed():
        yield
        return
    heartbeat.at("setup", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _choose_interface()
    try:
        torch_dist.init_process_group(
            **_meeting(),
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
            # Binding the device lets NCCL set itself up at once instead of in the first collective.
            device_id=device if device.type == "cuda" else None,
        )
        if device.type == "cpu":
            _share_memory(timeout_s)
        yield
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        reason = str(error).splitlines()[0]
        raise LostRanksError(
            f"rank {os.environ['RANK']}: lost the connection to the other ranks "
            f"{heartbeat.where()}; see what one of them says ({reason})"
        ) from error
    except LostRanksError as error:
        raise LostRanksError(f"{error}, {heartbeat.where()}") from error
    finally:
        _groups.clear()
        _stop_sharing_memory()
        if is_distributed():
            torch_dist.destroy_process_group()


# How the ranks add up small tensors where all of them run on this machine's cores.
_shared_sum: SharedSum | None = None


def _share_memory(timeout_s: float) -> None:
    """Sets up sums through shared memory, if all ranks can take part (collective)."""
    global _shared_sum
    if world_size() == 1 or local_world_size() != world_size() or not can_share_memory():
        return
    path = None
    if is_main():
        with suppress(OSError):  # no room: gloo does it
            path = SharedSum.create(world_size())
    path = broadcast_object(path)
    if path is None:
        return
    try:
        mine = SharedSum(path, rank(), world_size(), timeout_s=timeout_s)
    except OSError:  # a machine in name only: another container, say
        mine = None
    everyone_can = all(all_gather_object(mine is not None))
    if is_main():
        os.unlink(path)
    if everyone_can:
        _shared_sum = mine
    elif mine is not None:
        mine.close()


def _stop_sharing_memory() -> None:
    global _shared_sum
    if _shared_sum is not None:
        _shared_sum.close()
        _shared_sum = None


def _meeting() -> dict[str, Any]:
    """How the ranks find each other, for init_process_group; empty: by MASTER_ADDR."""
    path = exit_status.meeting_file()
    if path is None:
        return {}
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A TCPStore would listen on every interface and let whoever connects rewrite it.
    return {"store": torch_dist.FileStore(str(path), size), "rank": number, "world_size": size}


def _choose_interface() -> None:
    """Lets gloo listen where rank 0 is reached, instead of where this machine's name leads.

    Where all ranks are on this machine nobody else has to reach them, nor NCCL's.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if exit_status.meeting_file() is not None:
        interface, names = (
            network.loopback_interface(),
            ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        )
    elif host and port.isdigit():
        interface, names = network.interface_toward(host, int(port)), ("GLOO_SOCKET_IFNAME",)
    else:
        return
    for name in names:
        if interface is not None:
            os.environ.setdefault(name, interface)


def _is_lost_connection(error: RuntimeError) -> bool:
    # gloo's errors have no type of their own; they begin with the place in its source.
    return isinstance(error, torch_dist.DistError) or "/gloo/" in str(error)


def group_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks in `group`, by default all, each counted with its virtual ranks."""
    together = virtual_ranks.current()
    return _num_processes(group) * (1 if together is None else together.num_slots)


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Where tensors must lie that the ranks of `group` send each other."""
    if torch_dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _num_processes(group: ProcessGroup | None) -> int:
    return torch_dist.get_world_size(group) if is_distributed() else 1


def group_ranks(group: ProcessGroup) -> tuple[int, ...]:
    """The ranks in `group`; `group_of` finds the group again from them."""
    ranks = tuple(torch_dist.get_process_group_ranks(group))
    _groups.setdefault(ranks, group)
    return ranks


def node_ranks() -> tuple[int, ...]:
    """The ranks on this machine, by LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them.

    Raises:
        RuntimeError: there are several ranks, and the variables are not set.
    """
    if world_size() > 1 and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        raise RuntimeError(
            "which ranks are on this machine cannot be told: set LOCAL_RANK and LOCAL_WORLD_SIZE "
            "in the environment, as torchrun does"
        )
    first = rank() - local_rank()
    return tuple(range(first, first + local_world_size()))


# Groups are found by their ranks, so that modules can be copied and pickled: a ProcessGroup cannot.
_groups: dict[tuple[int, ...], ProcessGroup] = {}


def group_of(ranks: tuple[int, ...] | None) -> ProcessGroup | None:
    """The group of `ranks`; None means all (collective over `ranks` the first time)."""
    if ranks is None or not is_distributed():
        return None
    if rank() not in ranks:
        raise ValueError(f"rank {rank()} asks for a group it does not belong to: {list(ranks)}")
    if not torch.compiler.is_compiling() and ranks in _groups and not _exists(_groups[ranks]):
        del _groups[ranks]  # somebody has ended all groups and begun anew
    if ranks not in _groups:
        if ranks == tuple(range(world_size())):
            return None
        # Only the members make the group: other ranks may be in groups of their own.
        _groups[ranks] = torch_dist.new_group(list(ranks), use_local_synchronization=True)
    return _groups[ranks]


def _exists(group: ProcessGroup) -> bool:
    return group in torch_dist.distributed_c10d._world.pg_map


def all_reduce_sum(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """`tensor`, overwritten with the sum over the ranks of `group`, by default all (collective).

    Every rank ends with the same bits. Virtual ranks add up first, in their order.
    """
    together = virtual_ranks.current()
    if together is None:
        return _sum_processes(tensor, group)
    # Added up in a copy, and copied by each: what one does to its result is its own affair.
    total = together.meet(tensor, lambda parts: _sum_processes(_sum(parts), group))
    return tensor.copy_(total)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _sum_processes(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    if _num_processes(group) > 1:
        shared = None if torch.compiler.is_compiling() else _shared_sum
        if shared is not None and group is None and shared.takes(tensor):
            return shared.add(tensor)
        torch_dist.all_reduce(tensor, group=group)
    return tensor


def all_gather(tensor: Tensor) -> Tensor:
    """Every rank's `tensor` of the same shape (...), stacked to (ranks, ...) (collective).

    Virtual ranks count as ranks.
    """
    together = virtual_ranks.current()
    if together is None:
        return _gather_processes(tensor.unsqueeze(0))
    return together.meet(tensor, lambda parts: _gather_processes(torch.stack(parts)))


def _gather_processes(rows: Tensor) -> Tensor:
    """Every process's `rows` (n, ...), one below the other."""
    if world_size() == 1:
        return rows
    # Flat, which all backends split alike.
    gathered = rows.new_empty(world_size() * rows.numel())
    torch_dist.all_gather_into_tensor(gathered, rows.flatten())
    return gathered.view(world_size() * len(rows), *rows.shape[1:])


def start_sum(tensor: Tensor) -> Callable[[], object]:
    """Starts to overwrite `tensor` with the sum over all processes; the result waits for it.

    Collective. Every rank ends with the same bits, which do not depend on when ranks come. On CUDA
    the sum is ordered after the current stream, and waiting holds up that stream, not the host.
    """
    return torch_dist.all_reduce(tensor, async_op=True).wait


def broadcast_from_rank0(tensors: Iterable[Tensor]) -> None:
    """Overwrites `tensors` with those of rank 0 (collective)."""
    if world_size() == 1:
        return
    for tensor in tensors:
        values = tensor.detach().contiguous()  # ranks may differ in strides
        torch_dist.broadcast(values, src=0)
        tensor.detach().copy_(values)


def all_gather_object(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value`, in the order of ranks (collective).

    It is plain data and travels as JSON, so tuples arrive as lists; torch's own function would
    unpickle, and so run, whatever the connections bring.

    Raises:
        TypeError: `value` is not plain data.
    """
    data = json.dumps(value).encode()
    size = _num_processes(group)
    if size == 1:
        return [json.loads(data)]
    device = _device_of(group)
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    length = torch.tensor([len(data)], device=device)
    torch_dist.all_gather_into_tensor(lengths, length, group=group)
    longest = int(lengths.max())
    mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8).to(device)
    everyone = torch.empty(size * longest, dtype=torch.uint8, device=device)
    torch_dist.all_gather_into_tensor(everyone, mine, group=group)
    rows = everyone.view(size, longest).cpu().numpy()
    return [json.loads(row.tobytes()) for row in rows]


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, plain data as for `all_gather_object`, on every rank (collective)."""
    return all_gather_object(value if is_main() else None)[0]


_USER_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, UserError)
}


def run_on_all_ranks(function: Callable[[], Any]) -> list[Any]:
    """What `function` returns on each rank, plain data as for `all_gather_object` (collective).

    Raises:
        UserError: that of the first rank with one, everywhere: no rank is left waiting for one
            that has given up.
    """
    try:
        reply = {"value": function()}
    except UserError as error:
        reply = {"error": type(error).__name__, "message": str(error)}
    replies = all_gather_object(reply)
    for reply in replies:
        if "error" in reply:
            raise _USER_ERRORS[reply["error"]](reply["message"])
    return [reply["value"] for reply in replies]


def run_on_rank0(function: Callable[[], Any]) -> Any:
    """What `function` returns or refuses on rank 0, on every rank: see `run_on_all_ranks`."""
    return run_on_all_ranks(function if is_main() else lambda: None)[0]


def barrier() -> None:
    """Returns when every rank has come here (collective)."""
    if world_size() > 1:
        torch_dist.barrier()
