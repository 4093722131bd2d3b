"""Notes on what is odd about a folder: what was found is counted, and the first of it is named."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from segtrain.desk.annotations import roi_files
from segtrain.desk.survey.contents import LabelFacts
from segtrain.desk.survey.names import Legend, is_called_legend
from segtrain.desk.survey.pairs import Matches
from segtrain.text import counted, first_of


def counted_note(found: Sequence[str], one: str, many: str) -> list[str]:
    """A note that counts and names what was found; none, if nothing was."""
    return [f"{counted(len(found), one, many)}: {first_of(found, 3)}"] if found else []


def notes_on_pictures(
    matches: Matches, roles: Mapping[str, str], samples: Mapping[str, Sequence[LabelFacts]]
) -> list[str]:
    """Which pictures are neither image nor label, or of no image."""
    one, many = "picture looks like a label", "pictures look like labels"
    made = sorted(pattern for pattern, role in roles.items() if role == "made")
    for i, pattern in enumerate(made):
        whys = [one.why for one in samples[pattern] if one.why]
        made[i] += f" ({whys[0]})" if whys else ""
    return [
        *counted_note(matches.alone, f"{one}, but has no image", f"{many}, but have no image"),
        *counted_note(matches.unclear, "label fits several images", "labels fit several images"),
        *counted_note(made, "kind of picture is not used", "kinds of pictures are not used"),
    ]


def notes_on_files(
    folder: Path, others: Sequence[str], legends: Mapping[str, Legend | None]
) -> list[str]:
    """Which other files are not read, though they might say something of the labels."""
    is_named = any(legends.values())
    unread = [] if is_named else [path for path in others if is_called_legend(path)]
    rois = [str(path.relative_to(folder)) for path in roi_files(folder / x for x in others)]
    return [
        *counted_note(unread, "file has no names of classes", "files have no names of classes"),
        *counted_note(rois, "file of ImageJ's ROIs, not read", "files of ImageJ's ROIs, not read"),
    ]
