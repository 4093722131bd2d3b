"""The survey: what a folder holds, as facts; what to make of them is for `decide`.

Names and headers of all files are read; contents of a sample, where a sample is enough. The labels
that are going to be used are counted whole, since one rare value decides whether training works.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from segtrain.annotations import detect
from segtrain.data.read import formats
from segtrain.errors import DataError
from segtrain.files import os_errors_as, walk
from segtrain.survey import contents, pairing
from segtrain.survey.contents import ImageFacts, LabelFacts, spread
from segtrain.survey.images import (
    Image,
    facts_of,
    similar_images,
    split_by,
    with_channel_ends,
    with_headers,
    with_splits,
)
from segtrain.survey.label_sets import SAMPLE, LabelSet, equal_sets, label_sets
from segtrain.survey.names import Legend, read_legend
from segtrain.survey.pairing import FileName
from segtrain.text import first_of

# Pictures made for people, or predictions: neither images nor labels to train on.
_PICTURES = (
    "overlay overlays vis viz visual visualization visualizations preview previews blend "
    "blended debug pred preds prediction predictions contact thumbs thumbnails"
)
_MADE_OF_BOTH = frozenset(_PICTURES.split())


@dataclass(frozen=True)
class Survey:
    """What a folder holds."""

    root: Path
    images: tuple[Image, ...]
    sets: tuple[LabelSet, ...]
    equal_sets: frozenset[tuple[str, str]]  # patterns of sets that divide the images alike
    legends: tuple[Legend, ...]
    facts: Mapping[str, ImageFacts]  # of a sample of images
    similar: frozenset[tuple[str, str]]  # images that are nearly alike, by their first files
    moving: bool  # whether neighbours by name are more alike than others, as frames of a video
    split_source: str  # what says the splits; "" if nothing does
    alone: tuple[str, ...]  # labels without an image
    unclear: tuple[str, ...]  # labels that fit several images
    unreadable: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # patterns of pictures that are made of images and labels
    annotations: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)  # files by format
    notes: tuple[str, ...] = field(default=())


def survey(folder: Path, *, val_list: Path | None = None, jobs: int | None = None) -> Survey:
    """Looks at all files below `folder`; writes nothing.

    val_list: a file that names the images to evaluate on; None: splits are those of the folder.

    Raises:
        DataError: there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    with os_errors_as(DataError):
        paths = [
            name if here == folder else f"{here.relative_to(folder).as_posix()}/{name}"
            for here, names in walk(folder, hidden=False)
            for name in names
        ]
    suffixes = [PurePosixPath(path).suffix.lower() for path in paths]
    pictures = [p for p, s in zip(paths, suffixes, strict=True) if s in formats.SUFFIXES]
    others = [p for p, s in zip(paths, suffixes, strict=True) if s not in formats.SUFFIXES]
    if not pictures:
        kinds = ", ".join(
            f"{n} {s or 'without suffix'}" for s, n in Counter(suffixes).most_common(5)
        )
        raise DataError(
            f"{folder}: no images ({' '.join(formats.SUFFIXES)}); found {kinds or 'no files'}"
        )
    legends = [read_legend(folder / path, path) for path in others]
    names = pairing.parse_names(pictures)
    groups = _sampled(folder, names)
    for trusted in (True, False):  # a word that all names have says nothing about the role
        roles = {pattern: _role(pattern, facts, trusted) for pattern, facts in groups.items()}
        image_names, label_names = (
            [name for name in names if roles[name.pattern] == role] for role in ("image", "label")
        )
        matches = pairing.match(image_names, label_names)
        if len(matches.labels) < len(image_names) / 2 and matches.alone:
            image_names, matches = with_channel_ends(image_names, label_names, matches)
        if matches.labels:
            break
    if not image_names:  # drawn images may look like labels
        raise DataError(f"{folder}: all pictures look like labels, none like an image")
    notes: list[str] = []
    images, unreadable = with_headers(folder, image_names, matches, notes)
    if not images:
        raise DataError(f"{folder}: no image can be read: {first_of(unreadable, 3)}")
    facts, damaged = facts_of(folder, images)
    if not facts:
        raise DataError(f"{folder}: no image can be read: {first_of(damaged, 3)}")
    notes += [f"damaged: {problem}" for problem in damaged]
    lists = [path for path in others if path.endswith((".txt", ".csv"))]
    if val_list is None:
        split_source, images = with_splits(folder, images, lists, notes)
    else:
        split_source, images = str(val_list), split_by(val_list, images)
    blurred = sorted(
        p for p, role in roles.items() if role == "made" and p.endswith(contents.LOSSY)
    )
    if blurred and not label_names:
        notes.append(
            f"{first_of(blurred, 3)} are called labels, but JPEG has blurred their values: "
            "save them as PNG"
        )
    similar, moving = similar_images(folder, images)
    sets = tuple(label_sets(folder, matches, {n.path: n.pattern for n in label_names}, groups))
    return Survey(
        root=folder,
        images=tuple(images),
        sets=sets,
        equal_sets=frozenset(equal_sets(folder, sets)),
        legends=tuple(one for one in legends if one is not None),
        facts=facts,
        similar=similar,
        moving=moving,
        split_source=split_source,
        alone=tuple(matches.alone),
        unclear=tuple(matches.unclear),
        unreadable=tuple(unreadable),
        annotations={kind: tuple(files) for kind, files in detect(folder).items()},
        notes=tuple(notes),
        left_out=tuple(sorted(p for p, role in roles.items() if role == "made")),
    )


# Roles


def _sampled(folder: Path, names: Sequence[FileName]) -> dict[str, list[LabelFacts]]:
    """Facts about some files of each group, by its pattern; groups of one form share them."""
    by_form: dict[str, list[FileName]] = defaultdict(list)
    for name in names:
        by_form[_form(name.pattern)].append(name)
    found = {}
    for members in by_form.values():
        patterns = {name.pattern for name in members}
        chosen = [members[i] for i in spread(len(members), SAMPLE)]
        facts = []
        for name in chosen:
            try:
                facts.append(contents.label_facts(folder / name.path))
            except DataError:
                continue
        found |= dict.fromkeys(patterns, facts)
    return found


def _form(pattern: str) -> str:
    """The pattern with folders that say no role as `*`, where many folders are alike."""
    *folders, name = pattern.split("/")
    words = [pairing.words_of(part) for part in folders]
    roles = pairing.IMAGE_WORDS | pairing.LABEL_WORDS
    kept = [
        part
        if roles & set(found) or _MADE_OF_BOTH & set(found) or not re.search(r"\d", part)
        else "*"
        for part, found in zip(folders, words, strict=True)
    ]
    return "/".join([*kept, name])


def _role(pattern: str, facts: Sequence[LabelFacts], trusted: bool) -> str:
    """image, label or made; by words in the name and the nearest folder, and by what files hold.

    A label must look like one: what is called so and does not was made for people, or blurred.
    trusted: whether a word in the name makes an image of what looks like a label.
    """
    said, has_folder = set(), False
    for i, part in enumerate(reversed(pattern.split("/"))):
        words = set(pairing.words_of(part.replace("*", " ")))
        if words & _MADE_OF_BOTH:
            return "made"
        kinds = {
            name
            for name, known in (("image", pairing.IMAGE_WORDS), ("label", pairing.LABEL_WORDS))
            if words & known
        }
        if i == 0:
            said |= kinds if trusted else kinds - {"image"}
        elif kinds and not has_folder:
            said |= kinds
            has_folder = True
    like_label = sum(one.kind != "picture" for one in facts) > len(facts) / 2
    if "label" in said and (like_label or "image" not in said):
        return "label" if like_label else "made"
    return "image" if "image" in said or not like_label else "label"
