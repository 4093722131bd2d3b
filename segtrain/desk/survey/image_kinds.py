"""The images of a folder: facts about a sample, and which are nearly alike."""

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from segtrain.data.check.scan import OF_DAMAGE
from segtrain.data.read import thumbnails
from segtrain.data.read.decode import printed_lines
from segtrain.data.read.find import Window
from segtrain.data.read.georeference import MapPlace
from segtrain.desk.survey.contents import spread
from segtrain.desk.survey.folder_notes import counted_note
from segtrain.desk.survey.image_facts import ImageFacts, image_facts
from segtrain.errors import DataError

# Images whose pixels are read for facts.
_SAMPLE = 200
# How much more alike neighbours are in a video than any two of its images.
_ALIKE_BESIDE = 0.15
# Images that are compared, and the nearest ones of each that may be its copies.
_MOST_THUMBS = 4000
_NEAREST = 3
# Thumbnails whose products with all others are in memory at once.
_BLOCK = 512


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


def facts_of(folder: Path, images: Sequence[Image]) -> tuple[dict[str, ImageFacts], list[str]]:
    """Facts about a sample of the images, spread over all; and notes on those that are damaged."""
    facts, problems, odd = {}, [], []
    for image in spread(images, _SAMPLE):
        try:
            # libjpeg prints what is wrong in the middle of a file, and goes on.
            with printed_lines(OF_DAMAGE) as said:
                facts[image.path] = image_facts([folder / path for path in image.files])
        except DataError as error:
            problems.append(str(error))
        odd += [image.path] if said else []
    what = "damaged in the middle, as libjpeg says; data check finds all such"
    notes = counted_note(problems, "image is damaged", "images are damaged")
    notes += counted_note(odd, f"image is {what}", f"images are {what}")
    return facts, notes


def similar_images(
    folder: Path, images: Sequence[Image]
) -> tuple[frozenset[tuple[str, str]], bool]:
    """Pairs of nearly equal images of a sample; whether neighbours by name are alike.

    In each pair the first image is the one before the other in the order of `place`.
    """
    chosen = spread(sorted(images, key=lambda image: image.place), _MOST_THUMBS)
    rows = np.stack([thumbnails.thumbnail(folder / image.path) for image in chosen])  # (N, pixels)
    pairs = frozenset((chosen[i].path, chosen[j].path) for i, j in _near_rows(rows))
    return pairs, len(images) == len(chosen) and _are_frames(rows)


def _near_rows(rows: np.ndarray) -> set[tuple[int, int]]:
    """The pairs of thumbnails that are nearly equal; rows: (N, pixels), each of length 1."""
    pairs = set()
    # In blocks, which need less memory than all pairs at once.
    for start in range(0, len(rows), _BLOCK):
        alike = rows[start : start + _BLOCK] @ rows.T
        # The nearest ones only: of images of one colour all are alike.
        nearest = np.argsort(-alike, axis=1)[:, : _NEAREST + 1]
        close = np.take_along_axis(alike, nearest, axis=1) > thumbnails.ALIKE
        for i, rank in zip(*np.nonzero(close), strict=True):
            first, second = sorted((start + int(i), int(nearest[i, rank])))
            if first != second:
                pairs.add((first, second))
    return pairs


def _are_frames(rows: np.ndarray) -> bool:
    """Whether neighbours are more alike than thumbnails in a random order, as in a video."""
    if len(rows) <= 2:
        return False
    order = np.random.default_rng(0).permutation(len(rows))
    beside, apart = (float(np.median((x[1:] * x[:-1]).sum(axis=1))) for x in (rows, rows[order]))
    return beside > apart + _ALIKE_BESIDE
