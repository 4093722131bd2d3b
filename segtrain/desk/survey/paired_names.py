"""Which pictures are images and labels, and which label is whose: by names, and by lists."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.desk.survey import pairs
from segtrain.desk.survey.contents import LabelFacts
from segtrain.desk.survey.file_names import FileName, fits
from segtrain.desk.survey.pair_lists import listed_pairs
from segtrain.desk.survey.pairs import Matches
from segtrain.desk.survey.questions import Answers
from segtrain.desk.survey.roles import is_preview, roles_of
from segtrain.errors import ConfigError, DataError


class PairedNames(NamedTuple):
    """The pictures of a folder, by role, and which belong together.

    names: of all pictures but those `not_chosen`, images that --images leaves out.
    roles: of each pattern. tables: the lists that say which label is whose; listed: the images of
    which they say it.
    """

    names: Sequence[FileName]
    not_chosen: list[str]
    roles: Mapping[str, str]
    images: list[FileName]
    labels: list[FileName]
    matches: Matches
    listed: frozenset[str]
    tables: tuple[str, ...]


def paired_names(
    folder: Path,
    names: Sequence[FileName],
    samples: Mapping[str, Sequence[LabelFacts]],
    lists: Sequence[str],
    answers: Answers,
) -> PairedNames:
    """Images and labels among the pictures of a folder; samples: facts about some of each pattern.

    What a list says counts, whatever names say.

    Raises:
        ConfigError: `answers.images` names no image, or lists contradict each other.
        DataError: there is no image, or a list names labels that cannot be read.
        UndecidedError: names may be read in two ways.
    """
    roles = roles_of(names, samples)
    if answers.images is not None:
        # Rendered images may look like labels: whoever names them knows better.
        named = {name.pattern for name in names if fits(name.path, answers.images)}
        others = {name.pattern for name in names if not fits(name.path, answers.images)}
        roles |= dict.fromkeys(named - others, "image")
    names, not_chosen = _chosen(names, roles, answers.images)
    images, labels, matches = matched(names, roles, answers.convention)
    if not images:  # drawn images may look like labels
        raise DataError(f"{folder}: all pictures look like labels, none like an image")
    label_of, tables = listed_pairs(folder, lists, images, labels)
    made = [x for x in names if roles[x.pattern] == "made" and not is_preview(x.pattern)]
    rest = [image for image in images if image.path not in label_of]
    _check_listed(folder, lists, rest, made, samples)
    if label_of:
        pattern_of = {label.path: label.pattern for label in labels}
        matches = pairs.with_pairs(matches, images, label_of, pattern_of)
    return PairedNames(
        names, not_chosen, roles, images, labels, matches, frozenset(label_of), tables
    )


def matched(
    names: Sequence[FileName], roles: Mapping[str, str], convention: str | None = None
) -> tuple[list[FileName], list[FileName], Matches]:
    """The names of images and of labels, and which belong together; roles: of each pattern."""
    images = [name for name in names if roles[name.pattern] == "image"]
    labels = [name for name in names if roles[name.pattern] == "label"]
    images, matches = pairs.match(images, labels, convention)
    return images, labels, matches


def _chosen(
    names: Sequence[FileName], roles: Mapping[str, str], chosen: str | None
) -> tuple[Sequence[FileName], list[str]]:
    """The names without images that --images leaves out, and the paths of these."""
    if chosen is None:
        return names, []
    images = [name.path for name in names if roles[name.pattern] == "image"]
    others = {path for path in images if not fits(path, chosen)}
    if len(others) == len(images):
        raise ConfigError(f"--images {chosen}: no image has such a path")
    return [name for name in names if name.path not in others], sorted(others)


def _check_listed(
    folder: Path,
    lists: Sequence[str],
    images: Sequence[FileName],
    made: Sequence[FileName],
    samples: Mapping[str, Sequence[LabelFacts]],
) -> None:
    """Stops where a list gives images labels that cannot be read: others must not replace them.

    images: to which no list gives a label that can be read. made: pictures that are not called
    previews, so they are meant as labels, and cannot be read as such.

    DataError: there are such images.
    """
    label_of, tables = listed_pairs(folder, lists, images, made)
    if label_of:
        image, label = next(iter(label_of.items()))
        pattern = next(name.pattern for name in made if name.path == label)
        why = next((x.why for x in samples[pattern] if x.why), "looks like a picture")
        source = ", ".join(tables)
        raise DataError(f"{folder / label}: the label of {image} by {source}: {why}")
