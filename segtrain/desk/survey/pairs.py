"""Which label belongs to which image: all conventions are asked, and their claims are compared."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from segtrain.desk.survey.conventions import (
    equal_names,
    equal_numbers,
    folder_around_both,
    folder_of_bands,
    folder_per_image,
    name_inside,
    numbered_channels,
)
from segtrain.desk.survey.conventions.claims import OwnerClaim
from segtrain.desk.survey.file_names import LABEL_WORDS, FileName, words_of
from segtrain.desk.survey.questions import Reading, UndecidedError
from segtrain.text import first_of

CONVENTIONS = {
    "names": equal_names,
    "inside": name_inside,
    "folders": folder_per_image,
    "numbers": equal_numbers,
    "places": folder_around_both,
    "channels": numbered_channels,
    "bands": folder_of_bands,
}
"""By the word that `--pairs` has for each. Of equal claims the first one counts."""
_WORDS = {
    "names": "image and label have one name",
    "inside": "the name of the image begins or ends that of the label",
    "folders": "a folder of labels is called as its image",
    "numbers": "image and label have one number",
    "places": "an image and its labels lie in one folder",
    "channels": "each channel of an image is a file, as nnU-Net has it",
    "bands": "a folder for each scene, and a file for each band",
}
# Claims that differ by less account for as many labels: some strays are among any.
_NEARLY = 0.9


class Matches(NamedTuple):
    """labels: the labels of each image that has any, by path; in the order of the names.

    bands: further files of an image, each of another group: perhaps its bands.
    unclear: labels that fit several images equally well. alone: labels without an image.
    tried: how many labels each convention accounts for, in words.
    """

    labels: dict[str, list[str]]
    bands: dict[str, list[str]]
    unclear: list[str]
    alone: list[str]
    tried: Sequence[str] = ()


def match(
    images: Sequence[FileName], labels: Iterable[FileName], answer: str | None = None
) -> tuple[list[FileName], Matches]:
    """The images, perhaps with other parts of names, and the labels of each.

    Labels below folders of the same words follow one convention: the one that accounts for the
    most of them. What it leaves, another one may account for.

    answer: a key of `CONVENTIONS`, where two of them claim as much.

    Raises:
        UndecidedError: two conventions account for as many labels and images, and differ.
    """
    by_path = {image.path: image for image in images}
    owners: dict[str, str] = {}
    result = Matches({}, {}, [], [], [])
    for group in groups_of_labels(labels):
        rest = group
        while rest:
            claims = {name: of.claim([*by_path.values()], rest) for name, of in CONVENTIONS.items()}
            if rest is group:
                result.tried.extend(_reach(claims, len(group)))
            best = _best(claims, images, answer)
            if not best.owners:
                break
            owners |= best.owners
            result.bands.update({first: [*further] for first, further in best.bands.items()})
            by_path |= best.renamed
            # What the best one doubts, no other one may take.
            result.unclear.extend(best.unclear)
            result.alone.extend(best.others)
            done = {*best.owners, *best.unclear, *best.others}
            rest = [label for label in rest if label.path not in done]
        result.alone.extend(label.path for label in rest)
    by_image: dict[str, list[str]] = defaultdict(list)
    for label, image in owners.items():
        by_image[image].append(label)
    found = {path: sorted(by_image[path]) for path in by_path if path in by_image}
    return [*by_path.values()], result._replace(labels=found)


def groups_of_labels(labels: Iterable[FileName]) -> list[list[FileName]]:
    """Labels whose folders say the same words for labels: those of one kind."""
    groups: dict[tuple[str, ...], list[FileName]] = defaultdict(list)
    for label in labels:
        folders = PurePosixPath(label.path).parts[:-1]
        groups[tuple(x for x in folders if not LABEL_WORDS.isdisjoint(words_of(x)))].append(label)
    return [*groups.values()]


def _reach(claims: Mapping[str, OwnerClaim], number: int) -> list[str]:
    """How far each convention came that accounts for any label."""
    return [
        f"{_WORDS[name]}: {len(claim.owners)} of {number} labels"
        for name, claim in claims.items()
        if claim.owners
    ]


def _best(
    claims: Mapping[str, OwnerClaim], images: Sequence[FileName], answer: str | None
) -> OwnerClaim:
    """The claim that accounts for the most; see `match`."""
    if answer in claims and claims[answer].owners:
        return claims[answer]
    names = [name for name, claim in claims.items() if claim.owners]
    for name in names:
        rivals = [x for x in names if x != name and not _is_clear(claims[name], claims[x], images)]
        if not rivals:
            return claims[name]
    if not names:
        # They may still say why they account for none.
        return claims["names"]
    best = [x for x in names if not any(_is_clear(claims[y], claims[x], images) for y in names)]
    raise _undecided(claims, best or names)


def _is_clear(one: OwnerClaim, other: OwnerClaim, images: Sequence[FileName]) -> bool:
    """Whether a claim accounts for more than another one, or says no other thing."""
    common = one.owners.keys() & other.owners.keys()
    if all(one.owners[label] == other.owners[label] for label in common):
        return len(one.owners) >= len(other.owners)
    # img_3/1.png beside img_3.jpg: the whole name of an image, with letters, is no accident.
    if bool(one.whole) != bool(other.whole):
        return len(one.whole) >= _NEARLY * len(one.owners)
    for a, b in ((one, other), (other, one)):
        if len(b.owners) < _NEARLY * len(a.owners):
            return a is one
    # Objects reach all images by their folders, and few by their numbers.
    places = {path.rpartition("/")[0] for path in one.images | other.images}
    most = _NEARLY * sum(image.folder in places for image in images)
    return 2 * len(other.images) <= len(one.images) or (
        other.images < one.images and len(one.images) >= most
    )


def _undecided(claims: Mapping[str, OwnerClaim], names: Sequence[str]) -> UndecidedError:
    # A label that shows how they differ.
    first = claims[names[0]].owners
    label = next(x for x in first if len({claims[name].owners.get(x) for name in names}) > 1)
    readings = []
    for name in names:
        image = claims[name].owners.get(label)
        words = f"{_WORDS[name]} ({label} is of {image or 'no image'})"
        files = (image, label) if image else ()
        readings.append(Reading(words, f"--pairs {name}", files=files))
    return UndecidedError(f"two ways to find the images of labels: {first_of(first, 3)}", readings)


def with_pairs(
    matches: Matches,
    images: Sequence[FileName],
    pairs: Mapping[str, str],
    pattern_of: Mapping[str, str],
) -> Matches:
    """`matches`, but the label of an image in `pairs` is that, and no other of its pattern.

    Nor is such an image a band of another one.
    """
    placed = set(pairs.values())
    labels = {}
    for image in images:
        own = pairs.get(image.path)
        # What a list gives to another image is taken from this one.
        files = [x for x in matches.labels.get(image.path, ()) if x not in placed]
        if own is not None:
            files = [*(x for x in files if pattern_of[x] != pattern_of[own]), own]
        if files:
            labels[image.path] = sorted(files)
    unclear, alone = (
        [x for x in paths if x not in placed] for paths in (matches.unclear, matches.alone)
    )
    bands = {first: x for first, x in matches.bands.items() if pairs.keys().isdisjoint(x)}
    return matches._replace(labels=labels, bands=bands, unclear=unclear, alone=alone)
