"""How a finding about a data set is said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from segtrain.data.read.find import indented
from segtrain.text import first_of

_MAX_NAMES = 3


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong ("error") or odd ("warning"), and the places where it occurs.

    split: empty if it is about both splits. kind: a short name, for programs.
    places: the files, or names of images, by what is found there; "" if the text says it. No names
        where what is found names its file itself.
    """

    severity: Literal["error", "warning"]
    split: str
    kind: str
    text: str
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Its text; below, what is found, a line each, with its first files.

        If only one thing is found, it stands on the line of the text.
        """
        text = f"split {self.split!r}: {self.text}" if self.split else self.text
        facts = [
            ": ".join(filter(None, (what, first_of(names, _MAX_NAMES))))
            for what, names in self.places.items()
        ]
        if len(facts) == 1:
            return [f"{text}: {facts[0]}"]
        return [text, *indented(facts)]
