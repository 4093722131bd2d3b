"""The survey: what a folder holds, as facts; what to make of them is for `decide`.

Names and headers of all files are read; contents of a sample, where a sample is enough. The labels
that are going to be used are counted whole, since one rare value decides whether training works.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from segtrain.data.read import image_formats
from segtrain.data.read.find_tiles import tile_boxes
from segtrain.data.read.tiles import TileBox
from segtrain.desk.annotations import detect, roi_files
from segtrain.desk.survey import file_names, pairs, reasons
from segtrain.desk.survey.contents import Color, LabelFacts
from segtrain.desk.survey.equal_sets import equal_sets
from segtrain.desk.survey.file_names import (
    FileName,
    fits,
)
from segtrain.desk.survey.image_facts import ImageFacts, read_bands
from segtrain.desk.survey.image_kinds import Image, facts_of, note_all, similar_images, with_headers
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.label_sets import label_sets
from segtrain.desk.survey.list_names import list_files
from segtrain.desk.survey.listings import with_splits, with_val_list
from segtrain.desk.survey.names import Legend, is_called_legend, read_legend
from segtrain.desk.survey.pair_lists import listed_pairs
from segtrain.desk.survey.pairs import Matches
from segtrain.desk.survey.questions import Answers
from segtrain.desk.survey.roles import is_preview, roles_of, sample_facts
from segtrain.errors import ConfigError, DataError
from segtrain.files import os_errors_as, walk
from segtrain.text import first_of


@dataclass(frozen=True)
class Survey:
    """What a folder holds."""

    root: Path
    images: tuple[Image, ...]
    sets: tuple[LabelSet, ...]
    equal_sets: Mapping[frozenset[str], Mapping[int, Color]]  # as `equal_sets` has them
    legends: tuple[Legend, ...]
    facts: Mapping[str, ImageFacts]  # of a sample of images
    similar: frozenset[tuple[str, str]]  # images that are nearly alike, by their paths
    moving: bool  # whether neighbours by name are more alike than others, as frames of a video
    tiles: Mapping[str, TileBox]  # where images lie in a larger picture, by their paths
    split_source: str  # what says the splits; "" if nothing does
    pair_source: str  # the tables that say which label is whose; "" if names do
    annotations: Mapping[str, tuple[Path, ...]]  # files by format
    notes: tuple[str, ...]  # what is odd about the folder, and what is not used
    # For the balance: all pictures and other files, lists that are used, files that name classes,
    # and pictures that are left out before anything is decided, by the reason.
    pictures: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unlike: Mapping[str, str] = field(default_factory=dict)  # images of labels that look like none
    tried: tuple[str, ...] = ()  # how many labels each convention of pairs accounts for
    rival_lists: tuple[str, ...] = ()  # of images to evaluate on, which contradict each other


def survey(folder: Path, answers: Answers | None = None) -> Survey:
    """Looks at all files below `folder`; writes nothing. None: nothing is answered.

    Raises:
        ConfigError: `answers.images` names no image.
        DataError: the folder cannot be read, or there is no image in it.
    """
    answers = answers or Answers()
    val_list = Path(answers.val) if isinstance(answers.val, str) else None
    pictures, others = _files(folder)
    legends = {path: read_legend(folder / path, path) for path in others}

    names = file_names.parse_names(pictures)
    samples = sample_facts(folder, names, answers.threshold)
    names, not_chosen = _chosen_images(names, samples, answers.images)
    roles, image_names, label_names, matches = matched(names, samples, answers.pairs)
    if not image_names:  # drawn images may look like labels
        raise DataError(f"{folder}: all pictures look like labels, none like an image")

    notes: list[str] = []
    lists = list_files(others, pictures)
    pattern_of = {name.path: name.pattern for name in label_names}
    # What a list says counts, whatever names say.
    listed, pair_tables = listed_pairs(folder, lists, image_names, label_names)
    _check_listed(folder, lists, names, samples, {*listed})
    if listed:
        matches = pairs.with_pairs(matches, image_names, listed, pattern_of)
    images = with_headers(folder, image_names, matches, listed, notes)
    # Images that cannot be read are left out, and their labels with them.
    there = {image.path for image in images}
    left_out = _left_out(names, roles, images, matches)
    left_out[reasons.NOT_CHOSEN] = not_chosen
    kept = {path: files for path, files in matches.labels.items() if path in there}
    matches = matches._replace(labels=kept)
    facts = facts_of(folder, images, notes)
    if not facts:
        raise DataError(f"{folder}: no image can be read; {first_of(notes)}")
    if any(image_facts.has_nan for image_facts in facts.values()):
        notes.append("pixels of images without a value (NaN or GDAL_NODATA) count as no data")
    if val_list is None:
        given = with_splits(folder, images, lists)
    else:
        given = with_val_list(folder, images, lists, val_list)
    images = given.images
    notes += given.notes
    similar, moving = similar_images(folder, images)

    _note_pictures(notes, matches, roles, samples)
    _note_files(notes, folder, others, legends)
    by_path = {name.path: name for name in (*image_names, *label_names)}
    # Where classes may overlap, all words are some.
    classes = None if answers.task else answers.names or ()
    sets = tuple(label_sets(folder, matches, by_path, samples, classes))
    return Survey(
        root=folder,
        images=tuple(images),
        sets=sets,
        equal_sets=dict(equal_sets(folder, sets)),
        legends=tuple(filter(None, legends.values())),
        facts=facts,
        similar=similar,
        moving=moving,
        tiles=_tiles(folder, images),
        split_source=given.source,
        pair_source=", ".join(pair_tables),
        annotations={kind: tuple(files) for kind, files in detect(folder).items()},
        notes=tuple(notes),
        pictures=tuple(pictures),
        others=tuple(others),
        lists=tuple(dict.fromkeys((*given.lists, *pair_tables))),
        tables=tuple(path for path, legend in legends.items() if legend),
        left_out=left_out,
        unlike=_owners(image_names, [x for x in names if x.path in {*left_out[reasons.UNLIKE]}]),
        tried=tuple(matches.tried),
        rival_lists=given.rivals,
    )


def _left_out(
    names: Sequence[FileName],
    roles: Mapping[str, str],
    images: Sequence[Image],
    matches: Matches,
) -> dict[str, list[str]]:
    """The pictures that are not used whatever is decided, by the reason."""
    there = {image.path for image in images}
    made = [name for name in names if roles[name.pattern] == "made"]
    kept = {file for image in images for file in image.files}
    seconds = [x for first, bands in matches.bands.items() if first in there for x in bands]
    of_images = [name.path for name in names if roles[name.pattern] == "image"]
    labels_of_lost = (files for image, files in matches.labels.items() if image not in there)
    return {
        reasons.WITHOUT_IMAGE: matches.alone,
        reasons.OF_SEVERAL_IMAGES: matches.unclear,
        reasons.PREVIEWS: [name.path for name in made if is_preview(name.pattern)],
        reasons.UNLIKE: [x.path for x in made if not is_preview(x.pattern)],
        reasons.SECOND_PICTURES: [path for path in seconds if path not in kept],
        reasons.UNREADABLE: [path for path in of_images if path not in kept],
        reasons.LABELS_OF_UNREADABLE: [x for files in labels_of_lost for x in files],
    }


def _owners(images: Sequence[FileName], labels: Sequence[FileName]) -> dict[str, str]:
    """The image of each of these, where one convention says it."""
    with suppress(ConfigError):
        found = pairs.match(images, labels)[1].labels
        return {file: image for image, files in found.items() for file in files}
    return {}


def _note_pictures(
    notes: list[str],
    matches: Matches,
    roles: Mapping[str, str],
    samples: Mapping[str, Sequence[LabelFacts]],
) -> None:
    """Which pictures are neither image nor label, or of no image."""
    one, many = "picture looks like a label", "pictures look like labels"
    note_all(notes, matches.alone, f"{one}, but has no image", f"{many}, but have no image")
    note_all(notes, matches.unclear, "label fits several images", "labels fit several images")
    made = sorted(pattern for pattern, role in roles.items() if role == "made")
    for i, pattern in enumerate(made):
        whys = [one.why for one in samples[pattern] if one.why]
        made[i] += f" ({whys[0]})" if whys else ""
    note_all(notes, made, "kind of picture is not used", "kinds of pictures are not used")


def _note_files(
    notes: list[str], folder: Path, others: Sequence[str], legends: Mapping[str, Legend | None]
) -> None:
    """Which other files are not read, though they might say something of the labels."""
    if not any(legends.values()):
        unread = [path for path in others if is_called_legend(path)]
        note_all(notes, unread, *(f"{x} no names of classes" for x in ("file has", "files have")))
    rois = [str(path.relative_to(folder)) for path in roi_files(folder / x for x in others)]
    note_all(notes, rois, *(f"{x} of ImageJ's ROIs, not read" for x in ("file", "files")))


def _check_listed(
    folder: Path,
    lists: Sequence[str],
    names: Sequence[FileName],
    samples: Mapping[str, Sequence[LabelFacts]],
    labelled: Set[str],
) -> None:
    """Stops where a list gives images labels that cannot be read: others must not replace them.

    labelled: images to which a list gives a label that can be read.

    DataError: there are such images.
    """
    roles = roles_of(names, samples)
    why = {pattern: next((x.why for x in facts if x.why), "") for pattern, facts in samples.items()}
    images = [x for x in names if roles[x.pattern] == "image" and x.path not in labelled]
    # Not called a preview, so it is meant as a label, and cannot be read as one.
    unread = {
        x.path: why[x.pattern]
        for x in names
        if roles[x.pattern] == "made" and not is_preview(x.pattern)
    }
    others = [x for x in names if x.path in unread]
    listed, tables = listed_pairs(folder, lists, images, others)
    if listed:
        image, label = next(iter(listed.items()))
        reason = unread[label] or "looks like a picture"
        source = ", ".join(tables)
        raise DataError(f"{folder / label}: the label of {image} by {source}: {reason}")


def _tiles(folder: Path, images: Sequence[Image]) -> dict[str, TileBox]:
    boxes = tile_boxes(
        [image.name for image in images],
        [image.size for image in images],
        [image.map_place for image in images],
        lambda i: read_bands([folder / file for file in images[i].files]),
    )
    return {x.path: box for x, box in zip(images, boxes, strict=True) if box is not None}


def _files(folder: Path) -> tuple[list[str], list[str]]:
    """Paths of the pictures and of all other files, relative to the folder."""
    with os_errors_as(DataError):
        paths = [
            (here / name).relative_to(folder).as_posix()
            for here, names in walk(folder, hidden=False)
            for name in names
        ]
    suffixes = {path: PurePosixPath(path).suffix.lower() for path in paths}
    pictures = [path for path in paths if suffixes[path] in image_formats.SUFFIXES]
    if not pictures:
        most = Counter(suffixes.values()).most_common(5)
        kinds = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in most)
        if any(path.lower().endswith((".nii", ".nii.gz", ".dcm")) for path in paths):
            kinds += f"; of volumes segtrain data import {shlex.quote(str(folder))} makes slices"
        raise DataError(
            f"{folder}: no images ({' '.join(image_formats.SUFFIXES)}); found {kinds or 'no files'}"
        )
    return pictures, [path for path in paths if suffixes[path] not in image_formats.SUFFIXES]


def _chosen_images(
    names: Sequence[FileName], samples: Mapping[str, Sequence[LabelFacts]], chosen: str | None
) -> tuple[Sequence[FileName], list[str]]:
    """The names without images that are not `chosen`, and these."""
    if chosen is None:
        return names, []
    roles = roles_of(names, samples)
    others = {x.path for x in names if roles[x.pattern] == "image" and not fits(x.path, chosen)}
    if not any(roles[x.pattern] == "image" and x.path not in others for x in names):
        raise ConfigError(f"--images {chosen}: no image has such a path")
    return [name for name in names if name.path not in others], sorted(others)


def matched(
    names: Sequence[FileName],
    samples: Mapping[str, Sequence[LabelFacts]],
    convention: str | None = None,
) -> tuple[dict[str, str], list[FileName], list[FileName], Matches]:
    """The role of each pattern, names of images and of labels, and which belong together."""
    roles = roles_of(names, samples)
    images = [name for name in names if roles[name.pattern] == "image"]
    labels = [name for name in names if roles[name.pattern] == "label"]
    images, matches = pairs.match(images, labels, convention)
    return roles, images, labels, matches
