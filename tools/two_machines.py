"""Two machines for tests on one: network namespaces joined by a cable, and nothing else between."""

import subprocess
from collections.abc import Sequence


def ip(*arguments: str) -> None:
    """Runs the command ip, of iproute2; CalledProcessError with its message if it fails."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def join(names: Sequence[str], address: str) -> None:
    """Makes two namespaces; "{}" in `address` is 1 for the first and 2 for the second."""
    for name in names:
        ip("netns", "add", name)
    cable = ["link", "add", "eth0", "netns", names[0], "type", "veth"]
    ip(*cable, "peer", "name", "eth0", "netns", names[1])
    for i, name in enumerate(names, start=1):
        ip("-n", name, "addr", "add", f"{address.format(i)}/30", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")


def remove(names: Sequence[str]) -> None:
    """Removes the namespaces that are there; the cable goes with its ends."""
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
