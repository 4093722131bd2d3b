"""Which label belongs to which image: all conventions are asked, and their claims are compared."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from types import ModuleType
from typing import NamedTuple

from segtrain.desk.survey.conventions import (
    equal_names,
    equal_numbers,
    folder_around_both,
    folder_of_bands,
    folder_per_image,
    label_per_folder,
    name_inside,
    numbered_channels,
    word_inside,
)
from segtrain.desk.survey.conventions.claims import OwnerClaim
from segtrain.desk.survey.file_names import LABEL_WORDS, FileName, words_of
from segtrain.desk.survey.questions import Reading, UndecidedError
from segtrain.text import first_of


class Convention(NamedTuple):
    """One way in which names say whose a label is: a module of `conventions`.

    words: what it says, for questions and for errors.
    """

    module: ModuleType
    words: str


CONVENTIONS = {
    "names": Convention(equal_names, "image and label have one name"),
    "inside": Convention(name_inside, "the name of the image begins or ends that of the label"),
    "between": Convention(word_inside, "the name of the label has one word more in its midst"),
    "folders": Convention(folder_per_image, "a folder of labels is called as its image"),
    "numbers": Convention(equal_numbers, "image and label have one number"),
    "places": Convention(folder_around_both, "an image and its labels lie in one folder"),
    "channels": Convention(
        numbered_channels, "each channel of an image is a file, as nnU-Net has it"
    ),
    "bands": Convention(folder_of_bands, "a folder for each scene, and a file for each band"),
    "scenes": Convention(
        label_per_folder, "a label is called as a folder, and is that of each image in it"
    ),
}
"""By the word that `--pairs` has for each. Of equal claims the first one counts."""
# Claims that differ by less account for as many labels: some strays are among any.
_NEARLY = 0.9


class Matches(NamedTuple):
    """labels: the labels of each image that has any, by path; in the order of the names.

    bands: further files of an image, each of another group: perhaps its bands.
    unclear: labels that fit several images equally well.
    alone: labels without an image, also those that a list replaces; see `with_pairs`.
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
    most of them. What it leaves, another one may account for. One label for several images is
    asked about, and only where no label is of one image.

    answer: a key of `CONVENTIONS`, where two of them claim as much.

    Raises:
        UndecidedError: two conventions account for as many labels and images, and differ, or each
            label is of several images.
    """
    labels = [*labels]
    by_path = {image.path: image for image in images}
    owners: dict[str, str] = {}
    bands: dict[str, list[str]] = {}
    unclear: list[str] = []
    alone: list[str] = []
    tried: list[str] = []
    for group in groups_of_labels(labels):
        rest = group
        claims = _claims_of(rest, by_path.values())
        tried += _reach(claims, len(group))
        while True:
            best = _best(claims, images, answer)
            owners |= best.owners
            bands |= {first: [*further] for first, further in best.bands.items()}
            by_path |= best.renamed
            # What the best one doubts, no other one may take.
            unclear += best.unclear
            alone += best.others
            done = {*best.owners, *best.unclear, *best.others}
            rest = [label for label in rest if label.path not in done]
            if not rest or not best.owners:
                break
            claims = _claims_of(rest, by_path.values())
        alone += [label.path for label in rest]
    by_image: dict[str, list[str]] = defaultdict(list)
    if not owners and (found := _shared(images, labels, answer)).owners:
        owners, unclear, alone = {**found.owners}, [], []
        for label, further in found.shared.items():
            for image in further:
                by_image[image].append(label)
    for label, image in owners.items():
        by_image[image].append(label)
    found = {path: sorted(by_image[path]) for path in by_path if path in by_image}
    return [*by_path.values()], Matches(found, bands, unclear, alone, tried)


def groups_of_labels(labels: Iterable[FileName]) -> list[list[FileName]]:
    """Labels whose folders say the same words for labels: those of one kind."""
    groups: dict[tuple[str, ...], list[FileName]] = defaultdict(list)
    for label in labels:
        folders = PurePosixPath(label.path).parts[:-1]
        groups[tuple(x for x in folders if not LABEL_WORDS.isdisjoint(words_of(x)))].append(label)
    return [*groups.values()]


def _claims_of(labels: Sequence[FileName], images: Collection[FileName]) -> dict[str, OwnerClaim]:
    """What each convention says of these labels, by its key in `CONVENTIONS`."""
    claims = {name: one.module.claim([*images], labels) for name, one in CONVENTIONS.items()}
    return {name: claim for name, claim in claims.items() if not claim.shared}


def _shared(
    images: Sequence[FileName], labels: Sequence[FileName], answer: str | None
) -> OwnerClaim:
    """The claim of labels that are of several images each.

    UndecidedError: nobody has said that they are.
    """
    found = label_per_folder.claim(images, labels)
    if found.owners and answer != "scenes":
        label, further = next(iter(found.shared.items()))
        files = found.owners[label], label
        what = f"{label} is called as the folder of {1 + len(further)} images, such as {files[0]}"
        words = "it is the label of each of them, as of a camera that does not move"
        raise UndecidedError(what, [Reading(words, "--pairs scenes", files=files)])
    return found


def _reach(claims: Mapping[str, OwnerClaim], number: int) -> list[str]:
    """How far each convention came that accounts for any label."""
    return [
        f"{CONVENTIONS[name].words}: {len(claim.owners)} of {number} labels"
        for name, claim in claims.items()
        if claim.owners
    ]


def _best(
    claims: Mapping[str, OwnerClaim], images: Sequence[FileName], answer: str | None
) -> OwnerClaim:
    """The claim that wins over all others; see `match`."""
    if answer in claims and claims[answer].owners:
        return claims[answer]
    names = [name for name, claim in claims.items() if claim.owners]
    if not names:
        # img/s1/1.jpg, img/s2/1.jpg, gt/1.png: equal names still say that the label fits both.
        return claims["names"]
    for name in names:
        if all(_wins(claims[name], claims[x], images) for x in names if x != name):
            return claims[name]
    unbeaten = [
        x for x in names if not any(_wins(claims[y], claims[x], images) for y in names if y != x)
    ]
    # A question needs two answers.
    raise _undecided(claims, unbeaten if len(unbeaten) > 1 else names)


def _wins(one: OwnerClaim, other: OwnerClaim, images: Sequence[FileName]) -> bool:
    """Whether a claim is to be taken rather than another one.

    The first of these rules that fits the two claims decides:

    1. They name the same image for each label that both have: the one with more labels wins.
    2. Only one has labels found by whole names with letters, as img_3/1.png beside img_3.jpg: this
       is no accident, and it wins if nearly all of its labels are.
    3. One has clearly fewer labels: the other wins.
    4. One has labels for twice as many images: it wins.
    5. One has all images of the other, and more, and nearly all that there are: it wins.

    Objects, as 3/1.png of 3.jpg, reach all images by their folders, and few by their numbers.
    """
    common = one.owners.keys() & other.owners.keys()
    if all(one.owners[label] == other.owners[label] for label in common):
        return len(one.owners) >= len(other.owners)
    if bool(one.whole) != bool(other.whole):
        return len(one.whole) >= _NEARLY * len(one.owners)
    if len(other.owners) < _NEARLY * len(one.owners):
        return True
    if len(one.owners) < _NEARLY * len(other.owners):
        return False
    if 2 * len(other.images) <= len(one.images):
        return True
    folders = {path.rpartition("/")[0] for path in one.images | other.images}
    nearly_all_images = _NEARLY * sum(image.folder in folders for image in images)
    return other.images < one.images and len(one.images) >= nearly_all_images


def _undecided(claims: Mapping[str, OwnerClaim], names: Sequence[str]) -> UndecidedError:
    """The question which of these claims is right, with one label of which they say most images."""
    labels = list(dict.fromkeys(label for name in names for label in claims[name].owners))
    said = {label: {claims[name].owners.get(label) for name in names} - {None} for label in labels}
    label = max(labels, key=lambda x: len(said[x]))
    readings = []
    for name in names:
        image = claims[name].owners.get(label)
        words = f"{CONVENTIONS[name].words} ({label} is of {image or 'no image'})"
        files = (image, label) if image else ()
        readings.append(Reading(words, f"--pairs {name}", files=files))
    differing = [label for label in labels if len(said[label]) > 1]
    what = f"{len(names)} ways to find the images of labels: {first_of(differing, 3)}"
    return UndecidedError(what, readings)


def with_pairs(
    matches: Matches,
    images: Sequence[FileName],
    pairs: Mapping[str, str],
    pattern_of: Mapping[str, str],
) -> Matches:
    """`matches`, but the label of an image in `pairs` is that, and no other of its pattern.

    Where a list gives 0.jpg the label fix0.png, labels/0.png has no image. Nor is an image in
    `pairs` a band of another one.
    """
    placed = set(pairs.values())
    labels = {}
    displaced = []
    for image in images:
        own = pairs.get(image.path)
        # What a list gives to another image is taken from this one.
        files = [x for x in matches.labels.get(image.path, ()) if x not in placed]
        if own is not None:
            displaced += [x for x in files if pattern_of[x] == pattern_of[own]]
            files = [*(x for x in files if pattern_of[x] != pattern_of[own]), own]
        if files:
            labels[image.path] = sorted(files)
    unclear = [x for x in matches.unclear if x not in placed]
    alone = [*(x for x in matches.alone if x not in placed), *displaced]
    bands = {first: x for first, x in matches.bands.items() if pairs.keys().isdisjoint(x)}
    return matches._replace(labels=labels, bands=bands, unclear=unclear, alone=alone)
