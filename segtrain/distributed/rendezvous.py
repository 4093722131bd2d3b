"""How the launchers of a run find each other, without trusting others who can connect.

torch elastic keeps the state of a rendezvous as a pickle in a TCPStore, which listens on every
interface and lets any client replace any value: who reaches the port can execute code. So on one
machine no store listens, and between machines the state is signed with the key of the run.
"""

import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from segtrain.errors import ConfigError, ExecutionError
from segtrain.files import os_errors_as
from segtrain.text import say

_SECRET_BYTES = 32


def shared_secret(path: Path) -> bytes:
    """The key of a run, from the file `path`, which is made if missing.

    Raises:
        ConfigError: others could have read or written the file.
        ExecutionError: the file cannot be written or read.
    """
    with os_errors_as(ExecutionError, path, "the key that the machines share"):
        if not os.path.lexists(path):
            _create(path)
        return _read(path)


def _create(path: Path) -> None:
    """Writes a new key to `path`; if several machines do so at once, the first one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, secrets.token_bytes(_SECRET_BYTES))
        os.fsync(handle)
        with suppress(FileExistsError):
            os.link(temporary, path)  # never a half-written file, never over another's key
    finally:
        os.close(handle)
        temporary.unlink()


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        is_key = stat.S_ISREG(found.st_mode) and found.st_size == _SECRET_BYTES
        if not is_key or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path}: expected a key of segtrain that only this user may read (mode 600); "
                "remove it on all machines"
            )
        return os.read(handle, _SECRET_BYTES)
    finally:
        os.close(handle)


# Names of the two kinds of rendezvous, for torch's LaunchConfig.
ONE_MACHINE, MACHINES = "segtrain-one-machine", "segtrain-machines"

_BACKLOG = 2048
_STORE_TIMEOUT = timedelta(seconds=60)
_DIGEST_BYTES = 32  # of SHA-256


def register() -> None:
    """Makes both kinds of rendezvous known to torch elastic."""
    rendezvous_handler_registry.register(ONE_MACHINE, OneMachine)
    rendezvous_handler_registry.register(MACHINES, _machines)


class OneMachine(StaticTCPRendezvous):
    """The rendezvous of a single launcher: its store is memory of its own process."""

    use_agent_store = False

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__("127.0.0.1", 0, rank=0, world_size=1, run_id=params.run_id, timeout=0)

    def get_backend(self) -> str:
        """The name in the registry."""
        return ONE_MACHINE

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store for each attempt, so that none sees the values of another."""
        no_server = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(HashStore(), self.rank, self.world_size, no_server)


class SignedBackend(RendezvousBackend):
    """A backend that signs the state and checks the signature before torch unpickles it.

    The signature covers the name of the run too, since runs may share a key. Others can still
    remove or repeat a state: that can disturb a run, but not execute code.
    """

    def __init__(self, backend: RendezvousBackend, secret: bytes, run_id: str) -> None:
        self._backend = backend
        self._secret = secret
        self._run_id = run_id.encode()

    @property
    def name(self) -> str:
        """The name in the registry."""
        return MACHINES

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; RendezvousStateError: not signed with the key of this run."""
        return self._verified(self._backend.get_state())

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[Any, ...] | None:
        """The state that counts, its token, whether it is `state`; errors as `get_state`."""
        return self._verified(self._backend.set_state(self._digest(state) + state, token))

    def _digest(self, state: bytes) -> bytes:
        message = len(self._run_id).to_bytes(8, "big") + self._run_id + state
        return hmac.digest(self._secret, message, hashlib.sha256)

    def _verified(self, response: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """The answer of the backend, without the signature of its state."""
        if response is None:
            return None
        signed, *rest = response
        digest, state = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(state)):
            raise RendezvousStateError(
                "the state was not written with the key of this run: do all machines have it?"
            )
        return (state, *rest)


class MachineRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous of several machines, but with a new store for each attempt.

    Dead ranks leave their addresses in the store, and restarted ranks would dial them. The store
    listens only at the address by which the other machines reach this one.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store; the rest as the base class."""
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return super().next_rendezvous()

    # Called by the base class.
    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return listening_store(master_addr, master_port)[0]


def _machines(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous at `params.endpoint`; its key is read from the file `secret_file`."""
    secret, run_id = shared_secret(Path(params.get("secret_file"))), params.run_id
    store = _meeting_store(params)
    backend = SignedBackend(C10dRendezvousBackend(store, run_id), secret, run_id)
    nodes = params.min_nodes, params.max_nodes
    return MachineRendezvous.from_backend(
        run_id, store, backend, *nodes, params.local_addr, RendezvousTimeout()
    )


def _meeting_store(params: RendezvousParameters) -> Store:
    """The store at the meeting point: served by this machine or by another."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=0)
    try:
        if not params.get_as_bool("is_host"):
            return TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)
        store, exposed = listening_store(host, port)
    except (OSError, ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error).splitlines()[0]) from error
    if exposed:
        say(
            f"warning: --rdzv-endpoint {host}: no address of this machine for others; "
            "listening on every interface"
        )
    return store


def listening_store(host: str, port: int) -> tuple[TCPStore, bool]:
    """A store that listens at `host`, and whether it listens on every interface instead.

    It has to where the others could not reach it otherwise: behind a router `host` may be no
    address of this machine, and /etc/hosts may map it to the loopback. Port 0: any free port.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    exposed = ipaddress.ip_address(address[0]).is_loopback and not is_loopback(host)
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if not exposed:
                listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            exposed = True
        if exposed:
            listener.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        listener.listen(_BACKLOG)
        store = TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            # By itself TCPStore listens on every interface. It owns this socket from here on.
            master_listen_fd=listener.detach(),
        )
    return store, exposed


def is_loopback(host: str) -> bool:
    """Whether `host` is localhost or a loopback address, and so another machine for each reader."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
