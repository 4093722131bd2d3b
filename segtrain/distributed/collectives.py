"""Ranks, groups of ranks, and the collectives that segtrain needs.

Every function works in a single process too, so callers never branch on the number of ranks.
All ranks must call a function marked "Collective." in the same order, or they wait until the
timeout. Only this folder imports torch.distributed.
"""

import gc
import json
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from segtrain import errors
from segtrain.distributed import virtual_ranks
from segtrain.distributed.passes import current, passing
from segtrain.errors import LostRanksError, UserError

if TYPE_CHECKING:  # whoever uses one has it
    from segtrain.distributed.shared_sum import SharedSum


class Alone:
    """A group of this rank only: nothing is sent, so torch need not know of it."""


ALONE = Alone()
Group = ProcessGroup | Alone


def is_distributed() -> bool:
    """Whether this process belongs to a group, even to one of a single rank."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    """This process's number, 0 to world_size() - 1."""
    return torch_dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """The number of processes that train together."""
    return torch_dist.get_world_size() if is_distributed() else 1


def local_rank() -> int:
    """This process's number on its machine, which chooses its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is rank 0, which writes files and logs."""
    return rank() == 0


@contextmanager
def alone() -> Iterator[None]:
    """Inside, every collective is that of this process alone, and nothing is sent.

    `rank` and `world_size` stay what they are. For processes that train without waiting for each
    other (train.parallel hogwild), and to measure what a rank does by itself.
    """
    with passing(alone=True):
        yield


def group_size(group: Group | None = None) -> int:
    """The number of ranks in `group` (None: all), each counted with its virtual ranks."""
    virtual = virtual_ranks.current()
    processes = _num_processes(group)
    return processes if virtual is None else virtual.size(processes)


def group_rank() -> int:
    """The row of `all_gather` that is this rank's: its number among all, virtual ones counted."""
    virtual = virtual_ranks.current()
    # Alone, `all_gather` has no rows of other processes.
    number = 0 if current().alone else rank()
    return number if virtual is None else virtual.number(number)


def _num_processes(group: Group | None) -> int:
    if group is ALONE or current().alone or not is_distributed():
        return 1
    return torch_dist.get_world_size(group)


def node_ranks() -> tuple[int, ...]:
    """The ranks on this machine; RuntimeError: torchrun's variables for it are not set."""
    if world_size() > 1 and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        raise RuntimeError(
            "cannot tell which ranks are on this machine: set LOCAL_RANK and LOCAL_WORLD_SIZE in "
            "the environment, as torchrun does"
        )
    # Launchers number the ranks of a machine in one row.
    first = rank() - local_rank()
    return tuple(range(first, first + local_world_size()))


# Groups are kept by their ranks, so that modules can be copied and pickled: a ProcessGroup cannot.
_groups: dict[tuple[int, ...], ProcessGroup] = {}


def group_ranks(group: ProcessGroup) -> tuple[int, ...]:
    """The ranks in `group`; `group_of` finds the group again from them."""
    ranks = tuple(torch_dist.get_process_group_ranks(group))
    _groups.setdefault(ranks, group)
    return ranks


def group_of(ranks: tuple[int, ...] | None) -> Group | None:
    """The group of `ranks`, which `make_groups` has made; None means all.

    Raises:
        RuntimeError: the group does not exist.
        ValueError: this rank is not among `ranks`.
    """
    if ranks is None or not is_distributed():
        return None
    if rank() not in ranks:
        raise ValueError(f"rank {rank()} asks for a group it does not belong to: {list(ranks)}")
    # All ranks have the default group, unless the user has given another group of all.
    if ranks == tuple(range(world_size())):
        return _groups[ranks] if ranks in _groups and _is_made(ranks) else None
    if len(ranks) == 1:
        return ALONE
    if not _is_made(ranks):
        # Its members cannot make it here: NCCL waits for all ranks, and torch puts the number of
        # groups that a process has made into the name, by which members find each other.
        raise RuntimeError(
            f"the group of ranks {list(ranks)} does not exist: call "
            "segtrain.norm.make_groups(model) on all ranks before training"
        )
    return _groups[ranks]


def make_groups(wanted: Iterable[tuple[int, ...]]) -> None:
    """Makes the groups that any rank wants and that do not exist yet. Collective.

    wanted: the ranks of each group that this rank is going to ask for.
    """
    if not is_distributed():
        return
    # A group of one rank sends nothing, and that of all exists.
    others = [ranks for ranks in wanted if rank() in ranks and 1 < len(ranks) < world_size()]
    missing = [ranks for ranks in others if not _is_made(ranks)]
    # Also those that this rank does not belong to: NCCL waits for all ranks, in the same order.
    for ranks in sorted({tuple(ranks) for asked in all_gather_object(missing) for ranks in asked}):
        # Without a timeout it would be torch's own, half an hour for gloo.
        group = torch_dist.new_group(list(ranks), timeout=_timeout)
        if rank() in ranks:
            _groups[ranks] = group


def _is_made(ranks: tuple[int, ...]) -> bool:
    if torch.compiler.is_compiling():
        return ranks in _groups
    # After all groups were destroyed, those that are made anew are others.
    return ranks in _groups and _groups[ranks] in torch_dist.distributed_c10d._world.pg_map


_timeout: timedelta | None = None
_wait_s = 600.0


def use_timeout(timeout: timedelta | None, *, wait_s: float) -> None:
    """Gives this timeout to the groups that are made from now on; None: that of torch.

    wait_s: how long the host waits for a device that in turn waits for other ranks.
    """
    global _timeout, _wait_s
    _timeout, _wait_s = timeout, wait_s


_shared_sum: "SharedSum | None" = None


def use_shared_sum(shared_sum: "SharedSum | None") -> None:
    """Lets `all_reduce_sum` add small tensors by `shared_sum`; closes the one used before."""
    global _shared_sum
    if _shared_sum is not None:
        _shared_sum.close()
    _shared_sum = shared_sum


class Recording(Protocol):
    """What has recorded collectives, as CUDA graphs have."""

    def release(self) -> None:
        """Destroys what was recorded."""


_recordings: "weakref.WeakSet[Recording]" = weakref.WeakSet()


def release_before_leaving(recording: Recording) -> None:
    """Lets the groups be left only after `recording.release()`.

    NCCL destroys no communicator to which a CUDA graph refers: ncclCommDestroy would wait for ever.
    """
    _recordings.add(recording)


def release_recordings() -> None:
    """Destroys all that was recorded."""
    for recording in list(_recordings):
        recording.release()
        gc.collect()  # a traceback in a cycle may hold what could not be recorded


def leave_groups() -> None:
    """Destroys all groups. NCCL waits until all ranks have come here (collective)."""
    # First what refers to the groups: with a graph left, NCCL would wait for ever.
    release_recordings()
    use_shared_sum(None)
    _groups.clear()
    if is_distributed():
        torch_dist.destroy_process_group()


def abort_groups() -> None:
    """Leaves all groups after an error, without waiting for what other ranks have not done."""
    release_recordings()
    # NCCL's own leaving would wait for the other ranks.
    if is_distributed() and torch_dist.get_backend() == "nccl":
        torch_dist.distributed_c10d._abort_process_group()
    leave_groups()  # gloo has nothing to abort: this closes its connections


def all_reduce_sum(tensor: Tensor, group: Group | None = None) -> Tensor:
    """`tensor`, overwritten with the sum over the ranks of `group` (None: all). Collective.

    Every rank gets the same bits. Virtual ranks add up first, in their order; shares as in
    `ordered_sum`. The sum has no gradient: see `training/losses` for a way
    around.

    Two virtual ranks in this process have 1 and 5:

    >>> ones, fives = torch.ones(2), torch.full((2,), 5.0)
    >>> functions = [partial(all_reduce_sum, part) for part in (ones, fives)]
    >>> virtual_ranks.VirtualRanks(2).run(functions)
    [tensor([6., 6.]), tensor([6., 6.])]

    Raises:
        RuntimeError: `tensor` requires a gradient, which would be lost.
    """
    _refuse_gradient(tensor)
    virtual = virtual_ranks.current()
    if virtual is None:
        return _sum_processes(tensor, group)

    # The last thread to arrive speaks for all of this process: it alone meets other processes.
    ways = partial(_sum_processes, group=group), partial(ordered_sum, group=group)
    # Each virtual rank gets its own copy, so in-place edits cannot leak.
    return tensor.copy_(virtual.meet(tensor, lambda parts: virtual.add_up(parts, *ways)))


def ordered_sum(parts: Tensor, shares: Sequence[int], group: Group | None = None) -> Tensor:
    """The sum of the parts of the ranks of `group`, added up in the order of shares. Collective.

    Additions of floating-point numbers give other bits in another order, or in other brackets. Here
    both are always the same, whichever rank has which share.

    parts: (n, ...), one for each share of this rank.
    shares: how many each rank has, in the order of ranks.

    A process alone has three shares, added up from the first to the last:

    >>> parts = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    >>> ordered_sum(parts, [3]).item(), (parts[0] + (parts[1] + parts[2])).item()
    (0.6000000000000001, 0.6)
    """
    # Not `torch.sum`, whose brackets are torch's to choose.
    first, *others = _gather_parts(parts, shares, group)
    total = first.clone()
    for part in others:
        total += part
    return total


def _gather_parts(parts: Tensor, shares: Sequence[int], group: Group | None = None) -> Tensor:
    """The `parts` (n, ...) of the ranks of `group` in the order of shares."""
    if _num_processes(group) == 1:
        return parts
    if group is not None:
        shares = [shares[rank] for rank in group_ranks(group)]
    # All ranks must send equally much: ranks with fewer shares add rows, which are cut off below.
    most = max(shares)
    padded = parts.new_zeros(most, *parts.shape[1:])
    padded[: len(parts)] = parts
    gathered = _gather_processes(padded, group).split(most)
    return torch.cat([rows[:count] for rows, count in zip(gathered, shares, strict=True)])


def _refuse_gradient(tensor: Tensor) -> None:
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise RuntimeError(
            "no gradient flows through a collective: pass tensor.detach(), and let the gradient go "
            "through this rank's own sums, as training/losses do"
        )


_last_exchange = 0.0


def last_exchange() -> float:
    """When this rank last started an exchange with others, by time.monotonic()."""
    return _last_exchange


def _note_exchange() -> None:
    global _last_exchange
    if not torch.compiler.is_compiling():
        _last_exchange = time.monotonic()


def _sum_processes(tensor: Tensor, group: Group | None) -> Tensor:
    if _num_processes(group) > 1:
        # Before the exchange: `HostWatch` asks how long ago this rank began the last one.
        _note_exchange()
        if (shared := _sharing_memory(tensor, group)) is not None:
            return shared.add(tensor)
        torch_dist.all_reduce(tensor, group=group)
    return tensor


def _sharing_memory(tensor: Tensor, group: Group | None) -> "SharedSum | None":
    """What exchanges `tensor` through shared memory; None: the backend does it."""
    # Its slots are those of all ranks; all must decide alike, by what is the same on all of them.
    shared = None if group is not None or torch.compiler.is_compiling() else _shared_sum
    return shared if shared is not None and shared.takes(tensor) else None


def start_sum(tensor: Tensor) -> Callable[[], object]:
    """Starts overwriting `tensor` with the sum over all processes; the result waits for the end.

    Every rank gets the same bits, whichever rank comes last. On CUDA the sum follows the current
    stream, and waiting blocks that stream, not the host. Collective.
    """
    _note_exchange()
    return torch_dist.all_reduce(tensor, async_op=True).wait


def all_gather(tensor: Tensor) -> Tensor:
    """Every rank's `tensor` (...), stacked to (ranks, ...), virtual ranks too. Collective.

    Virtual ranks get one and the same tensor: do not write into it. Raises as `all_reduce_sum`.
    """
    _refuse_gradient(tensor)
    virtual = virtual_ranks.current()
    if virtual is None:
        return _gather_processes(tensor.unsqueeze(0))
    ways = _gather_processes, _gather_parts
    return virtual.meet(tensor, lambda parts: virtual.gather(parts, *ways))


def _gather_processes(tensor: Tensor, group: Group | None = None) -> Tensor:
    """Every process's `tensor` (n, ...), concatenated along the first dimension."""
    size = _num_processes(group)
    if size == 1:
        return tensor
    _note_exchange()
    if (shared := _sharing_memory(tensor, group)) is not None:
        gathered = shared.gather(tensor)
    else:
        # As a vector, which all backends split alike.
        gathered = tensor.new_empty(size * tensor.numel())
        torch_dist.all_gather_into_tensor(gathered, tensor.flatten(), group=group)
    return gathered.view(size * len(tensor), *tensor.shape[1:])


def go_on_with(ranks: Sequence[int]) -> None:
    """Leaves the ranks that are gone; `ranks`, in ascending order, get new numbers.

    Collective among them. On CPUs only: NCCL would wait for those that are gone.
    """
    if len(ranks) == world_size():
        return
    # Both are of the group that is left below. The store still has its keys, with the addresses of
    # ranks that are gone, so the new group gets a prefix of its own.
    number, store = ranks.index(rank()), torch_dist.distributed_c10d._get_default_store()
    store = torch_dist.PrefixStore("-".join(map(str, ranks)), store)
    leave_groups()
    torch_dist.init_process_group(
        "gloo", store=store, rank=number, world_size=len(ranks), timeout=_timeout
    )


def broadcast_from_rank0(tensors: Iterable[Tensor]) -> None:
    """Overwrites `tensors` with those of rank 0. Collective."""
    if _num_processes(None) == 1:
        return
    for tensor in tensors:
        values = tensor.detach().contiguous()  # ranks may differ in strides
        torch_dist.broadcast(values, src=0)
        tensor.detach().copy_(values)


# Between two looks at the device.
_POLL_S = 0.0005


def wait_for_event(event: torch.cuda.Event, timeout_s: float) -> None:
    """Returns when the device has passed `event`; handlers of signals run meanwhile.

    Not by `event.synchronize()`: where NCCL waits for a dead rank it would never return, and Python
    runs no signal handlers in it.

    Raises:
        LostRanksError: there are other ranks, and the device does not come within `timeout_s`.
    """
    began = time.monotonic()
    while not event.query():
        if time.monotonic() - began > timeout_s and world_size() > 1:
            raise LostRanksError(
                f"rank {rank()}: waited {timeout_s:.0f} s for the device, which waits for another "
                "rank"
            )
        time.sleep(_POLL_S)


def wait_for_device(device: torch.device) -> None:
    """Returns when `device` has done all that it was asked for, before its values are read.

    Raises as `wait_for_event`, by the timeout of the process group.
    """
    if device.type == "cuda" and world_size() > 1:
        event = torch.cuda.Event()
        event.record()
        wait_for_event(event, _wait_s)


def all_gather_object(value: Any, group: Group | None = None) -> list[Any]:
    """Every rank's `value`, in the order of ranks. Collective.

    Values travel as JSON, so tuples arrive as lists. torch's own function would unpickle, and so
    execute, whatever arrives.

    Raises:
        TypeError: JSON cannot hold `value`.
    """
    data = json.dumps(value).encode()
    if _num_processes(group) == 1:
        return [json.loads(data)]
    uses_nccl = torch_dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if uses_nccl else torch.device("cpu")

    def gathered(values: Tensor) -> Tensor:
        joined = _gather_processes(values.to(device), group)
        wait_for_device(device)  # with a limit, which `cpu` does not have
        return joined.cpu()

    # All ranks must send equally much, so the lengths go first; JSON may end in spaces.
    longest = int(gathered(torch.tensor([len(data)])).max())
    padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
    rows = gathered(padded.unsqueeze(0))  # (ranks, longest)
    return [json.loads(row.tobytes()) for row in rows.numpy()]


_USER_ERRORS = {name: kind for name, kind in vars(errors).items() if name.endswith("Error")}


def run_on_all_ranks(function: Callable[[], Any]) -> list[Any]:
    """What `function` returns on each rank, as JSON (see `all_gather_object`). Collective.

    Raises:
        UserError: that of the first rank that raised; on every rank, so that none waits for it.
    """
    kind = None
    try:
        value = function()
    except UserError as error:
        kind, value = type(error).__name__, str(error)
    # Ranks that succeeded come here too, and so learn of the error.
    replies = all_gather_object([kind, value])
    for kind, message in replies:
        if kind is not None:
            raise _USER_ERRORS[kind](message)
    return [value for _, value in replies]


def run_on_rank0(function: Callable[[], Any]) -> Any:
    """What `function` returns or raises on rank 0, on every rank: see `run_on_all_ranks`."""
    return run_on_all_ranks(function if is_main() else lambda: None)[0]


# In the store by which the ranks met. It stays there, since the run is going to end.
_STOP_KEY = "segtrain/stop"
_LOOK_INTERVAL_S = 0.5


class StopNews:
    """Tells this rank, without a collective, that a rank was asked to stop.

    For work that ranks divide unevenly. They must still agree at its end: a rank that waits in a
    collective sends no news.

    asked: whether this rank was asked to stop.
    """

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked, self._known, self._next_look = asked, False, 0.0
        store = torch_dist.distributed_c10d._get_default_store() if world_size() > 1 else None
        self._store, self._file = store, None
        if isinstance(underlying := getattr(store, "underlying_store", None), torch_dist.FileStore):
            self._file = underlying.path

    def __call__(self) -> bool:
        """Whether a rank was asked to stop; news of other ranks may be half a second old."""
        asked = self._asked()
        if self._known or not (asked or time.monotonic() >= self._next_look):
            return self._known
        self._known, self._next_look = asked, time.monotonic() + _LOOK_INTERVAL_S
        # torch would wait for minutes for a file that a cleaner of /tmp has removed.
        if self._store is not None and (self._file is None or os.path.exists(self._file)):
            if asked:
                self._store.set(_STOP_KEY, "1")
            else:
                self._known = self._store.check([_STOP_KEY])
        return self._known


def barrier() -> None:
    """Returns when every rank has arrived. Collective."""
    # Not torch's own: on CUDA it waits in C, where Python runs no signal handlers.
    all_gather_object(None)
