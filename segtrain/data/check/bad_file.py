"""Files that cannot be used, grouped by the reason."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from segtrain.errors import DataError
from segtrain.text import printable


class BadFile(NamedTuple):
    """A file that cannot be used, and why."""

    place: str
    reason: str

    @classmethod
    def of(cls, path: Path, error: DataError) -> "BadFile":
        """The bad file at `path`, with which the message of `error` begins."""
        place = printable(path)
        return cls(place, str(error).removeprefix(f"{place}: "))


def by_reason(files: Iterable[BadFile]) -> dict[str, list[str]]:
    """The places for each reason: a wrong setting is wrong for all files and is reported once."""
    places: dict[str, list[str]] = {}
    for place, reason in files:
        places.setdefault(reason, []).append(place)
    return places
