"""Several machines for tests on one: network namespaces on one switch, and nothing else between."""

import subprocess
from collections.abc import Sequence


def ip(*arguments: str) -> None:
    """Runs the command ip, of iproute2; CalledProcessError with its message if it fails."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def join(names: Sequence[str], address: str) -> None:
    """Makes the namespaces; "{}" in `address` is 1 for the first, 2 for the second and so on.

    The switch stands in a namespace of its own, named as the first with "-switch".
    """
    switch = f"{names[0]}-switch"
    for name in (switch, *names):
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    ip("-n", switch, "link", "add", "switch", "type", "bridge")
    ip("-n", switch, "link", "set", "switch", "up")
    for i, name in enumerate(names, start=1):
        cable = ["link", "add", "eth0", "netns", name, "type", "veth"]
        ip(*cable, "peer", "name", f"port{i}", "netns", switch)
        ip("-n", switch, "link", "set", f"port{i}", "master", "switch", "up")
        ip("-n", name, "addr", "add", f"{address.format(i)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")


def remove(names: Sequence[str]) -> None:
    """Removes the namespaces that are there; the cables go with their ends."""
    for name in (*names, f"{names[0]}-switch"):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
