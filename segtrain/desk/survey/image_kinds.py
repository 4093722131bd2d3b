"""The images of a folder: headers, splits, facts about a sample, and which are nearly alike."""

import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from segtrain.data.check.scan import OF_DAMAGE
from segtrain.data.read import image_formats, thumbnails
from segtrain.data.read.decode import Info, printed_lines
from segtrain.data.read.find import Window
from segtrain.data.read.georeference import MapPlace, place_of
from segtrain.desk.survey import file_names
from segtrain.desk.survey.contents import spread
from segtrain.desk.survey.file_names import FileName, words_of
from segtrain.desk.survey.image_facts import ImageFacts, image_facts
from segtrain.desk.survey.pairs import Matches
from segtrain.desk.survey.questions import Reading, UndecidedError
from segtrain.errors import DataError
from segtrain.text import counted, first_of

_SAMPLE = 200
# How much more alike neighbours are in a video than any two of its images.
_ALIKE_BESIDE = 0.15
_NEAREST, _MOST_THUMBS = 3, 4000


@dataclass(frozen=True)
class Image:
    """An image of the folder; paths are relative to it.

    files: its file, or its bands in order. size: (height, width). channels: of all bands.
    alpha: whether the last channel is marked as transparency.
    split: train, val or test, if a folder or a list says so. scene: its folder without words of
        role and split. sequence: its name without the last number. orientation: of EXIF.
    window: the part that it is of its file, with this size; None: all of it.
    """

    files: tuple[str, ...]
    size: tuple[int, int]
    channels: int
    alpha: bool
    dtype: str
    split: str | None
    scene: str
    sequence: str
    map_place: MapPlace | None = None
    orientation: int = 1
    window: Window | None = None

    @property
    def path(self) -> str:
        """The path of the first file, by which the image is known."""
        return self.files[0]

    @property
    def name(self) -> str:
        """The path without its suffix."""
        return posixpath.splitext(self.path)[0]

    @property
    def place(self) -> tuple[str, str, str]:
        """What images are sorted by as frames, whichever split they are in."""
        return self.scene, self.sequence, PurePosixPath(self.path).name


def note_all(notes: list[str], found: Sequence[str], one: str, many: str) -> None:
    """Adds a note that counts and names what was found, if there is any."""
    if found:
        notes.append(f"{counted(len(found), one, many)}: {first_of(found, 3)}")


def with_headers(
    folder: Path,
    names: Sequence[FileName],
    matches: Matches,
    listed: Collection[str],
    notes: list[str],
) -> list[Image]:
    """The images with their headers; those that cannot be read and oddities go into `notes`.

    listed: images that a list names.

    Raises:
        UndecidedError: several pictures belong to one label, and neither words nor a list choose.
        DataError: so, and no folder tells them apart.
    """
    name_of = {name.path: name for name in names}
    further = {band for bands in matches.bands.values() for band in bands}
    readable, unreadable, unclear, twins = [], [], [], []
    for name in names:
        if name.path in further:
            continue
        files = (name.path, *matches.bands.get(name.path, ()))
        try:
            infos = [image_formats.read_info(folder / path) for path in files]
        except DataError as error:
            unreadable.append(str(error))
            continue
        # A photo beside depth or infrared is chosen; two photos, as of two dates, need a list.
        first, *others = file_names.are_photos([name_of[path] for path in files])
        is_the_photo = first and not any(others)
        if len(files) > 1 and not _are_bands(infos, is_the_photo):
            is_chosen = is_the_photo or name.path in listed
            if is_chosen:
                twins.append(" and ".join(files))
            else:
                unclear.append(files)
            files, infos = files[:1], infos[:1]
        readable.append(_image(folder, name, files, infos))
    if unclear:
        raise _which_images(folder, unclear)
    _check_bands(folder, names, readable)
    note_all(notes, unreadable, "image is left out", "images are left out")
    what = "label fits", "labels fit"
    note_all(notes, twins, *(f"{one} several pictures, the first is used" for one in what))
    turned = [image.path for image in readable if image.orientation != 1]
    what = "an EXIF orientation, which is ignored: pixels count as stored"
    note_all(notes, turned, f"image carries {what}", f"images carry {what}")
    return readable


def _which_images(folder: Path, pictures: Sequence[Sequence[str]]) -> UndecidedError | DataError:
    """The question which of several pictures are the images; pictures: those of each label."""
    what = f"several pictures for one label: {' and '.join(pictures[0])}"
    parts = [{*PurePosixPath(path).parts} for path in pictures[0]]
    readings = []
    for path, own in zip(pictures[0], parts, strict=True):
        others = set().union(*(part for part in parts if part is not own))
        # The outermost folder that the others do not have.
        folders = [x for x in PurePosixPath(path).parts[:-1] if x not in others]
        if folders:
            option = f"--images {shlex.quote(folders[0])}"
            readings.append(Reading(f"those in {folders[0]}", option, files=(path,)))
    if len(readings) < len(parts):
        repair = "move the others elsewhere, or name image and label by a list"
        return DataError(f"{folder}: {what}; {repair}")
    return UndecidedError(f"{folder}: {what}", readings)


def _image(folder: Path, name: FileName, files: tuple[str, ...], infos: Sequence[Info]) -> Image:
    """The image of these files, each with its header."""
    folders = PurePosixPath(name.path).parent.parts
    return Image(
        files=files,
        size=infos[0].size,
        channels=sum(info.channels for info in infos),
        alpha=infos[-1].alpha,
        dtype=str(infos[0].dtype),
        split=name.split,
        scene="/".join(x for x in folders if not all(map(_is_said, words_of(x)))),
        # 0016e5_ of 0016E5_00390.png, as CamVid has it.
        sequence=re.sub(r"\d+\D*$", "", name.core),
        map_place=place_of(folder / files[0], infos[0]),
        orientation=infos[0].orientation,
    )


def _are_bands(infos: Sequence[Info], is_the_photo: bool) -> bool:
    """Whether several files are the bands of one image, and not pictures of several kinds.

    is_the_photo: whether the first alone is called a photo; one in colour is whole.
    """
    first, *others = infos
    # t0_B02.tif and t0_B03.tif have a channel each. A photo in colour beside infrared is whole.
    form = first.size, first.dtype, 1
    are_alike = all((x.size, x.dtype, x.channels) == form for x in others)
    return are_alike and not (is_the_photo and first.channels > 1)


def _check_bands(folder: Path, names: Sequence[FileName], images: Sequence[Image]) -> None:
    """Stops where images in several files do not have the same bands, in the same order.

    DataError: they have not; as many others would be taken for them.
    """
    by_path = {name.path: {*words_of(name.pattern)} for name in names}
    bands: dict[str, tuple[frozenset[str], ...]] = {}
    for image in images:
        words = [by_path[file] for file in image.files]
        if len(words) > 1:  # those that all files of an image have are of a place
            bands[image.path] = tuple(frozenset(x - set.intersection(*words)) for x in words)
    usual = Counter(bands.values()).most_common(1)
    if others := [path for path, found in bands.items() if found != usual[0][0]]:
        what = counted(len(others), "image has", "images have")
        raise DataError(f"{folder}: {what} other bands than most: {first_of(others, 3)}")


def _is_said(word: str) -> bool:
    """Whether a word of a folder says a role or a split, and no scene."""
    return word in file_names.ROLE_WORDS or file_names.split_of(word) is not None


def facts_of(folder: Path, images: Sequence[Image], notes: list[str]) -> dict[str, ImageFacts]:
    """Facts about a sample of the images, spread over all; what is wrong with others: a note."""
    facts, problems, odd = {}, [], []
    for image in spread(images, _SAMPLE):
        try:
            # libjpeg prints what is wrong in the middle of a file, and goes on.
            with printed_lines(OF_DAMAGE) as said:
                facts[image.path] = image_facts([folder / path for path in image.files])
        except DataError as error:
            problems.append(str(error))
        odd += [image.path] if said else []
    note_all(notes, problems, "image is damaged", "images are damaged")
    what = "damaged in the middle, as libjpeg says; data check finds all such"
    note_all(notes, odd, f"image is {what}", f"images are {what}")
    return facts


def similar_images(
    folder: Path, images: Sequence[Image]
) -> tuple[frozenset[tuple[str, str]], bool]:
    """Pairs of nearly equal images of a sample; whether neighbours by name are alike.

    In each pair the first image is the one before the other in the order of `place`.
    """
    chosen = spread(sorted(images, key=lambda image: image.place), _MOST_THUMBS)
    rows = np.stack([thumbnails.thumbnail(folder / image.path) for image in chosen])  # (N, pixels)
    pairs = set()
    for start in range(0, len(rows), 512):
        # In blocks, which need less memory than all pairs at once.
        alike = rows[start : start + 512] @ rows.T
        # The nearest ones only: of images of one colour all are alike.
        nearest = np.argsort(-alike, axis=1)[:, : _NEAREST + 1]
        close = np.take_along_axis(alike, nearest, axis=1) > thumbnails.ALIKE
        for i, rank in zip(*np.nonzero(close), strict=True):
            first, second = sorted((start + int(i), int(nearest[i, rank])))
            if first != second:
                pairs.add((chosen[first].path, chosen[second].path))
    # Neighbours by name against neighbours in a random order: in a video the former are more alike.
    order = np.random.default_rng(0).permutation(len(rows))
    beside, apart = (
        float(np.median((vectors[1:] * vectors[:-1]).sum(axis=1))) if len(rows) > 2 else 0.0
        for vectors in (rows, rows[order])
    )
    return frozenset(pairs), len(images) == len(chosen) and beside > apart + _ALIKE_BESIDE
