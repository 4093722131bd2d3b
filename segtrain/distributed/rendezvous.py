"""How the launchers of a run find each other: on one machine, or by files in the run's directory.

torch elastic keeps the state of a rendezvous as a pickle that it loads. By torch's own means it
lies in a TCPStore, which listens on every interface, lets any client replace any value, and is
gone with the machine that serves it. So on one machine no store listens, and several machines
keep the state in a folder that they share, which only this user may write: no machine is needed
for others to go on, and nobody who reaches a port executes code.
"""

import fcntl
import math
import os
import pickle
import socket
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import FileStore, HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
    _RendezvousExitOp,
    _RendezvousState,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from segtrain.errors import ConfigError, ExecutionError
from segtrain.files import os_errors_as, write_atomic

T = TypeVar("T")

_ROUND = "round"
_BACKLOG = 2048
_STORE_TIMEOUT = timedelta(seconds=20)

# A machine that has not written for 12 s is gone. Clocks of the machines may differ by less.
_KEEP_ALIVE_S, _MISSED = 2, 6
# How long a round that has enough machines waits for more of them.
_LAST_CALL_S = 5
# Of the shared folder: for how long a lock that another holds, or an error, is waited out.
_PATIENCE_S = 30.0


class OneMachine(StaticTCPRendezvous):
    """The rendezvous of a single launcher: its store is memory of its own process."""

    use_agent_store = False

    def __init__(self) -> None:
        run_id = uuid.uuid4().hex
        super().__init__("127.0.0.1", 0, rank=0, world_size=1, run_id=run_id, timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store for each attempt, so that none sees the values of another."""
        no_server = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(HashStore(), self.rank, self.world_size, no_server)

    def leave(self) -> None:
        """There is nobody else."""


class SharedFolder(RendezvousBackend):
    """The state of a rendezvous in a file, which all machines read and replace.

    Raises:
        ConfigError: others than this user may write into the folder.
        ExecutionError: it cannot be made.
    """

    name = "segtrain"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with os_errors_as(ExecutionError, folder, "the machines cannot meet there"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            found = folder.lstat()
        owned = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not owned or found.st_mode & 0o022:
            raise ConfigError(
                f"{folder}: expected a folder of this user into which nobody else may write; "
                "remove it"
            )

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its number; RendezvousConnectionError: the folder cannot be used."""
        return self._alone(self._read)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[Any, ...] | None:
        """The state that counts, its number, whether it is `state`; errors as `get_state`.

        It is, if `token` is the number of the state before (None: there was none).
        """

        def work() -> tuple[Any, ...] | None:
            now = self._read()
            if (now and now[1]) == token:
                return state, self._write(state, token), True
            return now and (*now, False)

        return self._alone(work)

    def open_anew(self) -> None:
        """Lets machines meet although an earlier rendezvous was closed, or its state is gone."""

        def work() -> None:
            if (now := self._read()) is None:
                self._remove_stores()
            elif (old := pickle.loads(now[0])).closed:
                state = _RendezvousState()
                state.round = old.round + 1
                self._write(pickle.dumps(state), now[1])

        self._alone(work)

    def store(self, number: int) -> Store:
        """What the launchers tell each other in a round; those of earlier rounds are removed."""
        self._remove_stores(before=number)
        store = FileStore(str(self._folder / f"{_ROUND}{number}"), -1)
        store.set_timeout(_STORE_TIMEOUT)
        return store

    def _remove_stores(self, before: float = math.inf) -> None:
        for path in self._folder.glob(f"{_ROUND}*"):
            if int(path.name.removeprefix(_ROUND)) < before:
                path.unlink(missing_ok=True)

    def _read(self) -> tuple[bytes, int] | None:
        try:
            content = (self._folder / "state").read_bytes()
        except FileNotFoundError:
            return None
        return content[8:], int.from_bytes(content[:8], "big")

    def _write(self, state: bytes, token: int | None) -> int:
        number = 1 + (token or 0)
        # Not durable: no state outlives the machines that share it.
        write_atomic(self._folder / "state", number.to_bytes(8, "big") + state, durable=False)
        return number

    def _alone(self, work: Callable[[], T]) -> T:
        """The result of `work`, while no thread and no machine is in here; NFS hands locks on."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with (self._folder / "lock").open("ab") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return work()
            except OSError as error:
                if time.monotonic() > deadline:
                    what = f"{self._folder}: {error.strerror or error}"
                    raise RendezvousConnectionError(what) from error
            time.sleep(0.01)


class SeveralMachines(DynamicRendezvousHandler):
    """torch's rendezvous of several machines, in a folder, with a new store for each attempt.

    Dead ranks leave their addresses in the store, and restarted ranks would dial them. The ranks'
    store listens only at the address by which the other machines reach this one.

    limits: the fewest and the most machines. patience_s: how long to wait for the fewest.
    """

    @classmethod
    def at(
        cls, folder: Path, limits: tuple[int, int], address: str, patience_s: float
    ) -> "SeveralMachines":
        """The rendezvous in `folder`, as the machine at `address`; errors as `SharedFolder`."""
        shared = SharedFolder(folder)
        shared.open_anew()
        timeout = RendezvousTimeout(
            join=timedelta(seconds=patience_s), last_call=timedelta(seconds=_LAST_CALL_S)
        )
        made = cls.from_backend(
            shared.name,
            HashStore(),  # `_get_store` gives others
            shared,
            *limits,
            address,
            timeout,
            keep_alive_interval=_KEEP_ALIVE_S,
            keep_alive_max_attempt=_MISSED,
        )
        made._shared = shared
        return made

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store; the rest as the base class."""
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return super().next_rendezvous()

    def members(self) -> set[Any]:
        """The machines of this round that are alive."""
        with self._heartbeat_lock:
            self._state_holder.sync()
            return set(self._state_holder.state.participants)

    def leave(self) -> None:
        """Lets the others go on without this machine, without waiting for a sign of life of it."""
        self._stop_heartbeats()
        with suppress(RendezvousError):
            deadline = self._get_deadline(self._settings.timeout.close)
            self._op_executor.run(_RendezvousExitOp(), deadline)

    # Called by the base class.
    def _get_store(self) -> Store:
        return self._shared.store(self._state_holder.state.round)

    # Called by the base class.
    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return listening_store(master_addr)


def listening_store(address: str) -> TCPStore:
    """A store that listens at `address`, one of this machine, and nowhere else; at a free port."""
    family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        listener.bind(place)
        listener.listen(_BACKLOG)
        return TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            # By itself TCPStore listens on every interface. It owns this socket from here on.
            master_listen_fd=listener.detach(),
        )
