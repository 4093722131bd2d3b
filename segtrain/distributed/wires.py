"""Messages between rank 0 and each other rank, over connections of their own.

Not over gloo's: where a process dies in the midst of a tensor, gloo tells nobody who waits for that
one. After the timeout it closes the connections to all ranks. A socket's error comes at once.
"""

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness
from segtrain.errors import ExecutionError, LostRanksError

_LENGTH = struct.Struct("!Q")
_GREETING = struct.Struct("!32sI")  # the word of rank 0, and the rank that says it
_GREETING_LIMIT_S = 10.0
_LOCALHOST = "127.0.0.1"


class GoneError(LostRanksError):
    """The process at the other end of a wire has ended."""


class Wire:
    """One end of the connection to another rank.

    While it waits, handlers of signals run.

    Args:
        connection: which `close` closes.
        peer: the other rank, for messages; it keeps this name when ranks get new numbers.
        timeout_s: how long the other end may send or take in nothing.
    """

    def __init__(self, connection: socket.socket, peer: int, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        # A short message is not kept back until the other end has answered to the one before.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self.peer, self._timeout_s = connection, peer, timeout_s

    def send(self, value: Any, tensor: Tensor) -> None:
        """Sends `value`, as JSON, and a contiguous tensor on the CPU.

        Raises:
            GoneError: nobody is left to read it.
            LostRanksError: the other end does not read.
        """
        data = json.dumps(value).encode()
        with self._told():
            self._connection.sendall(_LENGTH.pack(len(data)) + data)
            self._connection.sendall(_bytes(tensor))

    def receive(self, tensor: Tensor) -> Any:
        """The value that the other end sends, and its tensor into `tensor`; raises as `send`."""
        with self._told():
            (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
            data = self.read(length)
            self._fill(_bytes(tensor))
        return json.loads(data)

    def read(self, size: int) -> bytes:
        """So many bytes; OSError: they do not come."""
        found = bytearray(size)
        self._fill(memoryview(found))
        return bytes(found)

    def fileno(self) -> int:
        """For `ready`."""
        return self._connection.fileno()

    def close(self) -> None:
        """The other end finds nobody there."""
        self._connection.close()

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self._connection.recv_into(view[done:])
            if count == 0:
                raise ConnectionError("it has closed the connection")
            done += count

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            limit = f"{self._timeout_s:.0f} s (train.timeout_s)"
            raise LostRanksError(f"rank {self.peer} did not answer for {limit}") from error
        except OSError as error:
            raise GoneError(f"rank {self.peer} is gone ({error})") from error


def ready(wires: Sequence[Wire], timeout_s: float) -> list[Wire]:
    """Those on which a message begins or whose other end is gone; empty: none by `timeout_s`."""
    return wait(wires, max(timeout_s, 0.0))


def to_rank0(timeout_s: float) -> dict[int, Wire]:
    """Of rank 0 the wires to all others, by rank; of another its wire to rank 0. Collective.

    Rank 0 listens where the others reach it, at MASTER_ADDR; only those who have a word that it
    chose are let in.

    Raises:
        LostRanksError: a rank does not come.
        ExecutionError: rank 0 cannot listen, or is not reached there.
    """
    is_local = liveness.store_file() is not None or "MASTER_ADDR" not in os.environ
    host = _LOCALHOST if is_local else os.environ["MASTER_ADDR"]
    server: list[socket.socket] = []

    def listen() -> tuple[int, str]:
        try:
            server.append(_listener(is_local))
        except OSError as error:
            raise ExecutionError(f"rank 0 cannot listen for the others ({error})") from error
        return server[0].getsockname()[1], secrets.token_hex(16)

    port, word = dist.run_on_rank0(listen)
    if dist.is_main():
        with server[0]:
            return _let_in(server[0], word, timeout_s)
    with _reached(host, port):
        connection = socket.create_connection((host, port), timeout_s)
        connection.sendall(_GREETING.pack(word.encode(), dist.rank()))
    return {0: Wire(connection, 0, timeout_s)}


def _listener(is_local: bool) -> socket.socket:
    if is_local:
        return socket.create_server((_LOCALHOST, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _let_in(server: socket.socket, word: str, timeout_s: float) -> dict[int, Wire]:
    """The wires to all other ranks, which say `word` and their number."""
    found: dict[int, Wire] = {}
    until = time.monotonic() + timeout_s
    while len(found) < dist.world_size() - 1:
        server.settimeout(max(until - time.monotonic(), 0.001))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = sorted({*range(1, dist.world_size())} - found.keys())
            raise LostRanksError(f"ranks {missing} did not come") from None
        if (rank := _who(connection, word)) is None:
            connection.close()
        else:
            found[rank] = Wire(connection, rank, timeout_s)
    return found


def _who(connection: socket.socket, word: str) -> int | None:
    """The rank at the other end; None: it does not know the word, as a scanner of ports."""
    stranger = Wire(connection, -1, _GREETING_LIMIT_S)
    with suppress(OSError):
        known, rank = _GREETING.unpack(stranger.read(_GREETING.size))
        return rank if hmac.compare_digest(known, word.encode()) else None
    return None


@contextmanager
def _reached(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"rank 0 at {host}, port {port} (MASTER_ADDR, and a port that it chose)"
        raise ExecutionError(f"rank {dist.rank()} does not reach {where}: {error}") from error


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
