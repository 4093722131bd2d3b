"""The processes of this machine, by their numbers, from /proc."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """What it has started and still is its own, in the order of numbers."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        listed = [task.joinpath("children").read_text().split() for task in tasks]
    except OSError:
        return []
    return sorted(int(child) for found in listed for child in found)


def descendants(pid: int) -> list[int]:
    """`pid` and all that it has started, directly or not."""
    return [pid, *(found for child in children(pid) for found in descendants(child))]
