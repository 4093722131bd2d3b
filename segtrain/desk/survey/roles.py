"""Which pictures are images, which are labels, and which were made for people to look at.

Names say it, and what files hold: a label has flat areas of few values.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Literal

from segtrain.desk.survey import contents, file_names
from segtrain.desk.survey.contents import LabelFacts, spread
from segtrain.desk.survey.file_names import IMAGE_WORDS, LABEL_WORDS, MADE_WORDS, FileName, words_of
from segtrain.errors import DataError

Role = Literal["image", "label", "made"]
_WORDS: dict[Role, frozenset[str]] = {
    "made": MADE_WORDS,
    "image": IMAGE_WORDS,
    "label": LABEL_WORDS,
}
_HEAT_WORDS = {"ir", "infrared", "thermal", "nir", "lwir"}
# They say a role if they stand alone: `x/` and `y/`, but not `class-x/`.
_LETTERS = {"x", "y", "l"}
# Files of a kind that are read to know what it holds.
_SAMPLE = 6
# A pattern is one of labels if so many of its names go on from those of photos; the other photos
# may have been deleted.
_ENOUGH = 0.5


def sample_facts(
    folder: Path, names: Sequence[FileName], threshold: float | None
) -> dict[str, list[LabelFacts]]:
    """Facts about some files of each pattern; patterns that differ in folders alone share them.

    threshold: divides the greys of files that are called labels, and not of images.
    """
    shared = _shared({name.pattern for name in names})
    by_form: dict[str, list[FileName]] = defaultdict(list)
    for name in names:
        # train/ and val/, or s01/ and s02/, hold the same kind of files: one sample is enough.
        by_form[file_names.form_of(name.pattern)].append(name)
    by_pattern: dict[str, list[LabelFacts]] = {}
    for members in by_form.values():
        facts: list[LabelFacts] = []
        for name in spread(members, _SAMPLE):
            # A damaged file tells no kind. It is named where all files are read.
            with suppress(DataError):
                is_label = _called(name.pattern, shared) == {"label"}
                cut = threshold if is_label else None
                facts.append(contents.label_facts(folder, name.path, cut))
        by_pattern |= dict.fromkeys((name.pattern for name in members), facts)
    return by_pattern


def roles_of(
    names: Sequence[FileName], samples: Mapping[str, Sequence[LabelFacts]]
) -> dict[str, Role]:
    """The role of each pattern; samples: of `sample_facts`."""
    shared = _shared(samples)
    # Photos are called IMG_7.jpg, and their labels IMG_7.png: the word says nothing of these.
    unsaid = {
        word
        for pattern, facts in samples.items()
        if not _is_flat(facts)
        for word in _words_in(pattern.rpartition("/")[2])
    }
    roles = {
        pattern: _role(pattern, facts, shared, unsaid if _is_flat(facts) else ())
        for pattern, facts in samples.items()
    }
    return roles | dict.fromkeys(_labels_that_go_on(names, samples, roles), "label")


def _labels_that_go_on(
    names: Sequence[FileName],
    samples: Mapping[str, Sequence[LabelFacts]],
    roles: Mapping[str, Role],
) -> list[str]:
    """Patterns of labels that are called images: 1_sky.png beside 1.jpg in images/.

    They look like labels, and their names go on from those of photos in the same folder.
    """
    photos: dict[str, set[str]] = defaultdict(set)
    unsure: dict[str, list[FileName]] = defaultdict(list)
    for name in names:
        if not _is_flat(samples[name.pattern]):
            photos[name.folder].add(name.stem)
        elif roles[name.pattern] == "image":
            unsure[name.pattern].append(name)
    return [
        pattern
        for pattern, own in unsure.items()
        if sum(_goes_on(name.stem, photos[name.folder]) for name in own) >= _ENOUGH * len(own)
    ]


def _goes_on(stem: str, others: Set[str]) -> bool:
    """Whether a name begins with another one, up to a sign: 1_sky with 1."""
    return any(stem[: sign.start()] in others for sign in re.finditer(r"[_\-. ]", stem))


def is_preview(pattern: str) -> bool:
    """Whether a file is called as what is made for people to look at, or a prediction."""
    return not MADE_WORDS.isdisjoint(_words_in(pattern))


def _shared(patterns: Collection[str]) -> set[str]:
    """Words that all patterns have, and that say nothing therefore."""
    words = [set(_words_in(pattern)) for pattern in patterns]
    shared = set.intersection(*words) if len(words) > 1 else set()
    if not _HEAT_WORDS.isdisjoint(set().union(*words)):
        shared |= {"vis"}  # visible light, and no visualization
    return shared


def _words_in(part: str) -> tuple[str, ...]:
    return words_of(part.replace("*", " "))


def _is_flat(facts: Sequence[LabelFacts]) -> bool:
    """Whether most files of a sample look like labels."""
    return sum(file.kind != "picture" for file in facts) > len(facts) / 2


def _role(
    pattern: str, facts: Sequence[LabelFacts], shared: Set[str], unsaid_in_name: Collection[str]
) -> Role:
    """By words in the name and the nearest folder, and by what files hold; see `_called`.

    A label must look like one: what is called so and does not was made for people, or blurred.
    """
    called = _called(pattern, shared, unsaid_in_name)
    # Previews and predictions look like labels or images: their name counts, before all else.
    if "made" in called:
        return "made"
    like_label = _is_flat(facts)
    # masks/frame/1.png and masks/x/1.png are of classes that are called as images are.
    if like_label and _is_below_labels(pattern, shared):
        return "label"
    if "label" in called and (like_label or "image" not in called):
        return "label" if like_label else "made"
    # Without a word for labels: a label if it looks like one, unless it is called an image.
    return "image" if "image" in called or not like_label else "label"


def _is_below_labels(pattern: str, shared: Set[str]) -> bool:
    """Whether any folder says a label."""
    *folders, _ = pattern.split("/")
    return any("label" in _roles_of_words(_telling_words(x, shared)) for x in folders)


def _called(pattern: str, shared: Set[str], unsaid_in_name: Collection[str] = ()) -> set[Role]:
    """The roles that the name says, and those that the nearest folder that says any does.

    masks/crack/1_rgb.png: an image by its name; a label by masks/, since crack/ says nothing.
    It is made for people if any folder says so, as in previews/masks/1.png.

    shared: words that say nothing; unsaid_in_name: nor these in the name, unless it is made.
    """
    *folders, name = pattern.split("/")
    words_of_name = _telling_words(name, shared) - ({*unsaid_in_name} - MADE_WORDS)
    by_name = _roles_of_words(words_of_name)
    by_folder = [_roles_of_words(_telling_words(x, shared)) for x in reversed(folders)]
    nearest = next(filter(None, by_folder), set())
    is_made = any("made" in roles for roles in by_folder)
    return by_name | nearest | ({"made"} if is_made else set())


def _telling_words(part: str, shared: Set[str]) -> set[str]:
    """The words of a name or a folder that may say a role."""
    words = {*_words_in(part)} - shared
    return words - _LETTERS if len(words) > 1 else words


def _roles_of_words(words: Set[str]) -> set[Role]:
    return {role for role, known in _WORDS.items() if words & known}
