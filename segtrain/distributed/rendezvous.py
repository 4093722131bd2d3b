"""How launchers of one run find each other, without trusting whoever else can connect.

torch elastic keeps the state of a rendezvous as a pickle in a TCPStore. Such a store listens on
every interface, lets any client replace any value, and the launchers unpickle what they find: code
execution for everybody who reaches the port. So on one machine there is no store that listens, and
between machines the state is signed with a key that only the machines of the run know.
"""

import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

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
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

from segtrain.errors import ConfigError, ExecutionError

# Names of the two ways to meet, for torch's LaunchConfig.
ONE_MACHINE, MACHINES = "segtrain-one-machine", "segtrain-machines"

# Holds the key as text, where the run directory cannot hold it in a file.
SECRET_VARIABLE = "SEGTRAIN_SECRET"
_SECRET_BYTES = 32
_MIN_TEXT = 16

_DEFAULT_PORT = 29400
_BACKLOG = 2048
_STORE_TIMEOUT = timedelta(seconds=60)
_DIGEST = hashlib.sha256
_DIGEST_BYTES = 32


def register() -> None:
    """Makes both ways to meet known to torch elastic."""
    rendezvous_handler_registry.register(ONE_MACHINE, OneMachine)
    rendezvous_handler_registry.register(MACHINES, _machines)


class OneMachine(RendezvousHandler):
    """The rendezvous of a launcher that is alone: its store is memory of its own process.

    The ranks meet through a file of the launcher's directory (`dist.process_group`).
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._closed = False

    def get_backend(self) -> str:
        """As the base class says."""
        return ONE_MACHINE

    def next_rendezvous(self) -> RendezvousInfo:
        """As the base class says; with a new store each time, so that no attempt sees another's."""
        nowhere = RendezvousStoreInfo(master_addr="127.0.0.1", master_port=0)
        return RendezvousInfo(HashStore(), 0, 1, nowhere)

    def is_closed(self) -> bool:
        """As the base class says."""
        return self._closed

    def set_closed(self) -> None:
        """As the base class says."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """As the base class says."""
        return 0

    def get_run_id(self) -> str:
        """As the base class says."""
        return self._run_id

    def shutdown(self) -> bool:
        """As the base class says."""
        self._closed = True
        return True


class SignedBackend(RendezvousBackend):
    """A backend whose state carries a keyed digest, which is checked before it is unpickled.

    The digest covers the name of the run as well, so that the state of one run is not taken for
    that of another with the same key. It does not keep anybody from removing or repeating a state:
    that can disturb a run, but not run code.
    """

    def __init__(self, backend: RendezvousBackend, secret: bytes, run_id: str) -> None:
        self._backend = backend
        self._secret = secret
        self._run_id = run_id.encode()

    @property
    def name(self) -> str:
        """As the base class says."""
        return MACHINES

    def get_state(self) -> tuple[bytes, Token] | None:
        """As the base class says.

        Raises:
            RendezvousStateError: the state was not written with the key of this run.
        """
        response = self._backend.get_state()
        if response is None:
            return None
        signed, token = response
        return self._verified(signed), token

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """As the base class says.

        Raises:
            RendezvousStateError: as `get_state`; another state was there.
        """
        response = self._backend.set_state(self._digest(state) + state, token)
        if response is None:
            return None
        signed, new_token, has_set = response
        return self._verified(signed), new_token, has_set

    def _digest(self, state: bytes) -> bytes:
        message = len(self._run_id).to_bytes(8, "big") + self._run_id + state
        return hmac.digest(self._secret, message, _DIGEST)

    def _verified(self, signed: bytes) -> bytes:
        digest, state = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(state)):
            raise RendezvousStateError(
                "what stands there was not written with the key of this run: the machines have "
                "different keys, or somebody else writes there"
            )
        return state


class Machines(DynamicRendezvousHandler):
    """torch's rendezvous of several machines, with a store for the ranks that is new each time.

    Dead ranks leave their addresses in the store that they used, and restarted ones would dial
    them. The store listens at this machine's address on the way to the others only.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """As the base class says."""
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        store, _ = listening_store(master_addr, master_port)
        return store


def _machines(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous at `params.endpoint`; its key is read from the file `secret_file`."""
    secret = shared_secret(Path(params.get("secret_file")))
    store = _meeting_store(params)
    backend = SignedBackend(C10dRendezvousBackend(store, params.run_id), secret, params.run_id)
    return Machines.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(),
    )


def _meeting_store(params: RendezvousParameters) -> Store:
    """The store at the meeting point: served here, or by another machine."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=_DEFAULT_PORT)
    serves = params.get_as_bool("is_host")
    if serves or (serves is None and _matches_machine_hostname(host)):
        try:
            store, exposed = listening_store(host, port)
        except (OSError, RuntimeError) as error:
            if serves:
                raise RendezvousConnectionError(f"cannot listen there: {error}") from error
        else:
            if exposed:
                print(
                    f"segtrain: warning: --rdzv-endpoint {host}: is not the address by which other "
                    "machines reach this one; listening on every interface",
                    file=sys.stderr,
                )
            return store
    try:
        return TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error).splitlines()[0]) from error


def listening_store(host: str, port: int) -> tuple[TCPStore, bool]:
    """A store that listens at this machine's address `host` only; port 0 is a free one.

    Where `host` is no address of this machine, as behind a router that translates addresses, or is
    a name that leads back to it, as in many a machine's /etc/hosts, the others could not come
    there: then it listens on every interface.

    Returns:
        the store, and whether it listens on every interface.

    Raises:
        OSError: the port is taken, or the name unknown.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    leads_back = ipaddress.ip_address(address[0]).is_loopback and not is_this_machine(host)
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        exposed = leads_back or not _binds(listener, address)
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
            # TCPStore itself binds every interface whatever the host is. It owns the socket now.
            master_listen_fd=listener.detach(),
        )
    return store, exposed


def is_this_machine(host: str) -> bool:
    """Whether `host` means this very machine wherever it is said: localhost or 127.0.0.1, say."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _binds(listener: socket.socket, address: tuple[object, ...]) -> bool:
    """Binds `listener`; False where `address` is no address of this machine."""
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return False
    return True


def shared_secret(path: Path) -> bytes:
    """The key of a run: SEGTRAIN_SECRET, else what is in the file `path`, which may be made here.

    The machines of a run share its directory, and the first one to come writes the file, for the
    eyes of its user alone.

    Raises:
        ConfigError: the file could have been read or written by others, or the variable is short.
        ExecutionError: it cannot be written or read.
    """
    text = os.environ.get(SECRET_VARIABLE)
    if text is not None:
        if len(text) < _MIN_TEXT:
            raise ConfigError(
                f"environment: {SECRET_VARIABLE}: expected at least {_MIN_TEXT} characters, the "
                f"same on all machines, got {len(text)}"
            )
        return hashlib.sha256(os.fsencode(text)).digest()
    try:
        _make_secret(path)
        return _read_secret(path)
    except OSError as error:
        raise ExecutionError(
            f"{path}: the key that the machines share: {(error.strerror or str(error)).lower()}; "
            f"give all machines the same long random text in {SECRET_VARIABLE} instead"
        ) from error


def _make_secret(path: Path) -> None:
    """Writes a new key to `path` unless there is one; whole, whoever comes at the same time."""
    if os.path.lexists(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, secrets.token_bytes(_SECRET_BYTES))
        os.fsync(handle)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.close(handle)
        temporary.unlink()


def _read_secret(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size != _SECRET_BYTES:
            raise ConfigError(f"{path}: is no key of segtrain's; remove it on all machines")
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path}: expected a file of this user that nobody else may read (mode 600), found "
                f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}; remove it, or set "
                f"{SECRET_VARIABLE} on all machines"
            )
        return os.read(handle, _SECRET_BYTES)
    finally:
        os.close(handle)
