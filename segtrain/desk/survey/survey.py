"""The survey: what a folder holds, as facts; what to make of them is for `decide`.

Names and headers of all files are read; contents of a sample, where a sample is enough. The labels
that are going to be used are counted whole, since one rare value decides whether training works.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from segtrain.data.read import image_formats
from segtrain.data.read.find import unread
from segtrain.data.read.find_tiles import tile_boxes
from segtrain.data.read.tiles import TileBox
from segtrain.desk.annotations import detect
from segtrain.desk.survey import pairs, reasons
from segtrain.desk.survey.affixes import parse_names
from segtrain.desk.survey.contents import Color, LabelFacts
from segtrain.desk.survey.equal_sets import equal_sets
from segtrain.desk.survey.file_names import FileName
from segtrain.desk.survey.folder_notes import notes_on_files, notes_on_pictures
from segtrain.desk.survey.image_facts import ImageFacts, read_bands
from segtrain.desk.survey.image_headers import with_headers
from segtrain.desk.survey.image_kinds import Image, facts_of, similar_images
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.label_sets import label_sets
from segtrain.desk.survey.list_names import list_files
from segtrain.desk.survey.listings import with_splits, with_val_list
from segtrain.desk.survey.names import Legend, read_legend
from segtrain.desk.survey.paired_names import PairedNames, paired_names
from segtrain.desk.survey.pairs import Matches
from segtrain.desk.survey.questions import Answers
from segtrain.desk.survey.roles import is_preview, sample_facts
from segtrain.errors import ConfigError, DataError
from segtrain.files import os_errors_as, walk
from segtrain.text import first_of

# Files that may hold all images and labels.
_PACKED = {".parquet", ".arrow", ".tfrecord", ".h5", ".hdf5", ".mat", ".zarr"}


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
    low_inside: bool = False  # whether of two values the lower one lies inside of the higher one
    rival_lists: tuple[str, ...] = ()  # of images to evaluate on, which contradict each other


def survey(folder: Path, answers: Answers | None = None) -> Survey:
    """Looks at all files below `folder`; writes nothing. None: nothing is answered.

    Raises:
        ConfigError: `answers.images` names no image.
        DataError: the folder cannot be read, or there is no image in it.
    """
    answers = answers or Answers()
    # 1. Files: pictures, files that name classes, and files that may be lists.
    pictures, others = _files(folder)
    legends = {path: read_legend(folder / path, path) for path in others}
    lists = list_files(others, pictures)
    # 2. Pairs: which pictures are images and labels, and which label is whose.
    names = parse_names(pictures)
    samples = sample_facts(folder, names, answers.threshold)
    paired = paired_names(folder, names, samples, lists, answers)
    # 3. Images that can be read. Others are left out, and their labels with them.
    read = _read_images(folder, paired)
    left_out = _left_out(paired.names, paired.roles, read.images, paired.matches)
    left_out[reasons.NOT_CHOSEN] = paired.not_chosen
    # 4. Splits: of lists or folders, and which images are alike or overlap.
    annotations = detect(folder)
    if isinstance(answers.val, str):  # a fraction is for later
        given = with_val_list(folder, read.images, lists, Path(answers.val))
    else:  # outlines may be the labels of any image
        given = with_splits(folder, read.images, lists, () if annotations else read.matches.labels)
    similar, moving = similar_images(folder, given.images)
    # 5. Label sets: the labels of each kind, and what is no data.
    sets = _label_sets(folder, paired, read.matches, samples, answers)
    unlike = [x for x in paired.names if x.path in {*left_out[reasons.UNLIKE]}]
    odd = notes_on_pictures(read.matches, paired.roles, samples)
    odd += notes_on_files(folder, others, legends)
    return Survey(
        root=folder,
        images=tuple(given.images),
        sets=sets,
        equal_sets=dict(equal_sets(folder, sets)),
        legends=tuple(filter(None, legends.values())),
        facts=read.facts,
        similar=similar,
        moving=moving,
        tiles=_tiles(folder, given.images),
        split_source=given.source,
        pair_source=", ".join(paired.tables),
        annotations={kind: tuple(files) for kind, files in annotations.items()},
        notes=(*read.notes, *given.notes, *odd),
        pictures=tuple(pictures),
        others=tuple(others),
        lists=tuple(dict.fromkeys((*given.lists, *paired.tables))),
        tables=tuple(path for path, legend in legends.items() if legend),
        left_out=left_out,
        unlike=_owners(paired.images, unlike),
        tried=tuple(paired.matches.tried),
        rival_lists=given.rivals,
    )


class _ReadImages(NamedTuple):
    """Images that can be read, and the labels of these; facts: of a sample."""

    images: list[Image]
    matches: Matches
    facts: Mapping[str, ImageFacts]
    notes: list[str]


def _read_images(folder: Path, paired: PairedNames) -> _ReadImages:
    """Reads the headers of all images, and the pixels of a sample."""
    images, notes = with_headers(folder, paired.images, paired.matches, paired.listed)
    facts, damage = facts_of(folder, images)
    notes += damage
    if not facts:
        raise DataError(f"{folder}: no image can be read; {first_of(notes)}")
    if any(image_facts.has_nan for image_facts in facts.values()):
        notes.append("pixels of images without a value (NaN or GDAL_NODATA) count as no data")
    there = {image.path for image in images}
    kept = {path: files for path, files in paired.matches.labels.items() if path in there}
    return _ReadImages(images, paired.matches._replace(labels=kept), facts, notes)


def _label_sets(
    folder: Path,
    paired: PairedNames,
    matches: Matches,
    samples: Mapping[str, Sequence[LabelFacts]],
    answers: Answers,
) -> tuple[LabelSet, ...]:
    """The labels of the images that can be read, by kind."""
    by_path = {name.path: name for name in (*paired.images, *paired.labels)}
    # Where classes may overlap, all words are some.
    classes = None if answers.task else answers.names or ()
    return tuple(label_sets(folder, matches, by_path, samples, classes))


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
        kinds += unread(map(Path, paths))
        if _PACKED & {*suffixes.values()}:
            kinds += "; write each image of such a file as JPEG or PNG, and its label as PNG of ids"
        raise DataError(
            f"{folder}: no images ({' '.join(image_formats.SUFFIXES)}); found {kinds or 'no files'}"
        )
    return pictures, [path for path in paths if suffixes[path] not in image_formats.SUFFIXES]
