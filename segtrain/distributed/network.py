"""Which of this machine's addresses and interfaces lead to the other ranks."""

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def address_toward(host: str, port: int) -> str | None:
    """This machine's own address on the way to `host`.

    None if there is no way, or only one inside this machine, so that others could not come back.
    The name of a machine would not do: many resolve their own to 127.0.1.1.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


def interface_toward(host: str, port: int) -> str | None:
    """The name of this machine's interface on the way to `host`; None where it cannot be told."""
    address = address_toward(host, port)
    return None if address is None or ":" in address else _interface_with(address)


def loopback_interface() -> str | None:
    """The name of the interface that leads to this machine only; None where it cannot be told."""
    return _interface_with("127.0.0.1")


def _interface_with(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
