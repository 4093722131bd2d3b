"""The images of a folder: headers, splits, facts about a sample, and which are nearly alike."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from segtrain.data.read import image_formats, thumbnails
from segtrain.errors import ConfigError, DataError
from segtrain.files import read_bytes
from segtrain.survey import contents, pairing
from segtrain.survey.contents import ImageFacts, spread
from segtrain.survey.names import decoded
from segtrain.survey.pairing import FileName, Matches
from segtrain.text import counted, first_of

_SAMPLE = 200
# How much more alike neighbours are in a video than any two of its images.
_ALIKE_BESIDE = 0.15
_NEAREST, _MOST_THUMBS = 3, 4000
_MAX_LIST_BYTES = 64 << 20
_LIST_WORDS = {"list", "lists", "filelist", "pairs"}


@dataclass(frozen=True)
class Image:
    """An image of the folder; paths are relative to it.

    files: its file, or its bands in order. size: (height, width). channels: of all bands.
    alpha: whether the last channel is marked as transparency.
    split: train, val or test, if a folder or a list says so. scene: its folder without words of
        role and split. sequence: its name without the last number.
    """

    files: tuple[str, ...]
    size: tuple[int, int]
    channels: int
    alpha: bool
    dtype: str
    split: str | None
    scene: str
    sequence: str

    @property
    def path(self) -> str:
        """The path of the first file, by which the image is known."""
        return self.files[0]

    @property
    def name(self) -> str:
        """The path without its suffix."""
        return str(PurePosixPath(self.path).with_suffix(""))

    @property
    def place(self) -> tuple[str, str, str]:
        """What images are sorted by as frames, whichever split they are in."""
        return self.scene, self.sequence, PurePosixPath(self.path).name


def note_all(notes: list[str], found: Sequence[str], one: str, many: str) -> None:
    """Adds a note that counts and names what was found, if there is any."""
    if found:
        notes.append(f"{counted(len(found), one, many)}: {first_of(found, 3)}")


def with_headers(
    folder: Path, names: Sequence[FileName], matches: Matches, notes: list[str]
) -> list[Image]:
    """The images with their headers; those that cannot be read and oddities go into `notes`."""
    further = {band for bands in matches.bands.values() for band in bands}
    found, unreadable, twins, turned = [], [], [], []
    for name in names:
        if name.path in further:
            continue
        files = (name.path, *matches.bands.get(name.path, ()))
        try:
            infos = [image_formats.read_info(folder / path) for path in files]
        except DataError as error:
            unreadable.append(str(error))
            continue
        if len({info.size for info in infos}) > 1 or any(i.channels > 1 for i in infos[1:]):
            twins.append(" and ".join(files))  # no bands, but other pictures of the same name
            files, infos = files[:1], infos[:1]
        if infos[0].orientation != 1:
            turned.append(name.path)
        folders = PurePosixPath(name.path).parent.parts
        found.append(
            Image(
                files=files,
                size=infos[0].size,
                channels=sum(info.channels for info in infos),
                alpha=infos[-1].alpha,
                dtype=str(infos[0].dtype),
                split=name.split,
                scene="/".join(x for x in folders if not all(map(_is_said, pairing.words_of(x)))),
                sequence=re.sub(r"\d+\D*$", "", name.core),
            )
        )
    note_all(notes, unreadable, "image is left out", "images are left out")
    what = "label fits", "labels fit"
    note_all(notes, twins, *(f"{one} several pictures, the first is used" for one in what))
    what = "an EXIF orientation, which is ignored: pixels count as stored"
    note_all(notes, turned, f"image carries {what}", f"images carry {what}")
    return found


def _is_said(word: str) -> bool:
    """Whether a word of a folder says a role or a split, and no scene."""
    return word in pairing.ROLE_WORDS or pairing.split_of(word) is not None


def facts_of(folder: Path, images: Sequence[Image], notes: list[str]) -> dict[str, ImageFacts]:
    """Facts about a sample of the images, spread over all; what is wrong with others: a note."""
    found, problems = {}, []
    for image in spread(images, _SAMPLE):
        try:
            found[image.path] = contents.image_facts([folder / path for path in image.files])
        except DataError as error:
            problems.append(str(error))
    note_all(notes, problems, "image is damaged", "images are damaged")
    return found


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
        alike = rows[start : start + 512] @ rows.T
        # The nearest ones only: of images of one colour all are alike.
        nearest = np.argsort(-alike, axis=1)[:, : _NEAREST + 1]
        close = np.take_along_axis(alike, nearest, axis=1) > thumbnails.ALIKE
        for i, rank in zip(*np.nonzero(close), strict=True):
            first, second = sorted((start + int(i), int(nearest[i, rank])))
            if first != second:
                pairs.add((chosen[first].path, chosen[second].path))
    order = np.random.default_rng(0).permutation(len(rows))
    beside, apart = (
        float(np.median((one[1:] * one[:-1]).sum(axis=1))) if len(rows) > 2 else 0.0
        for one in (rows, rows[order])
    )
    return frozenset(pairs), len(images) == len(chosen) and beside > apart + _ALIKE_BESIDE


def with_splits(
    folder: Path, images: list[Image], lists: Sequence[str], notes: list[str]
) -> tuple[str, list[Image]]:
    """What says the splits, and the images with them: list files, else folders."""
    sources = _chosen_lists(folder, lists, _by_name(images))
    found = _splits_of_lists(sources, images, notes)
    if set(found.values()) == {"val"} and 2 * len(found) < len(images):
        found = dict.fromkeys(range(len(images)), "train") | found  # fastai's valid.txt
    if len(set(found.values())) > 1:
        marked = [replace(x, split=found.get(i, "unlisted")) for i, x in enumerate(images)]
        return ", ".join(sources), marked
    has_folders = len({image.split for image in images} - {None}) > 1
    return ("folders" if has_folders else ""), images


class _SplitList(NamedTuple):
    """A list of the images of a split, by index. lost: lines that name no image, or several."""

    split: str
    indices: list[int]
    lost: int


def _chosen_lists(
    folder: Path, lists: Sequence[str], by_name: Mapping[str, list[int]]
) -> dict[str, _SplitList]:
    """The lists that say the splits, by their paths; all are of one folder."""
    by_folder: dict[PurePosixPath, dict[str, _SplitList]] = defaultdict(dict)
    for path in map(PurePosixPath, lists):
        found = _split_list(folder / path, by_name)
        if found is not None:
            by_folder[path.parent][str(path)] = found
    if not by_folder:
        return {}
    task = max(by_folder, key=lambda one: _fitness(one, by_folder[one].values()))
    chosen = by_folder[task]
    stems = {path: PurePosixPath(path).stem for path in chosen}
    if {"train", "val"} <= {*stems.values()}:
        chosen = {path: found for path, found in chosen.items() if stems[path] != "trainval"}
    return chosen


def _split_list(path: Path, by_name: Mapping[str, list[int]]) -> _SplitList | None:
    """A list that is called after a split; None: it is not, or most lines name no image."""
    split = next(filter(None, map(pairing.split_of, pairing.words_of(path.stem))), None)
    if split is None:
        return None
    lines = list(_listed(path, by_name))
    indices = [i for i in lines if i is not None]
    if not indices or 2 * len(indices) < len(lines):
        return None
    return _SplitList(split, indices, len(lines) - len(indices))


def _fitness(task: PurePosixPath, lists: Iterable[_SplitList]) -> tuple[bool, int]:
    """What the lists of a folder are chosen by, where several hold some, as those of VOC's tasks.

    Whether it is called after labels (ImageSets/Segmentation), then how many images it names.
    """
    named = {i for one in lists for i in one.indices}
    return bool(pairing.LABEL_WORDS & set(pairing.words_of(task.name))), len(named)


def _splits_of_lists(
    sources: Mapping[str, _SplitList], images: Sequence[Image], notes: list[str]
) -> dict[int, str]:
    """The split of each image by index, the last one that a list says; oddities go to `notes`."""
    found: dict[int, str] = {}
    for path, (split, indices, lost) in sources.items():
        if lost:
            lines = counted(lost, "line names", "lines name")
            notes.append(f"{path}: {lines} no image, or several")
        twice = [images[i].name for i in indices if found.get(i, split) != split]
        if twice:
            notes.append(f"{path} and another list name the same images: {first_of(twice, 3)}")
        found |= dict.fromkeys(indices, split)
    return found


def split_by(val_list: Path, images: Sequence[Image]) -> list[Image]:
    """The images that the file names to evaluate on, others to train on; test images stay so."""
    indices = list(_listed(val_list, _by_name(images)))
    if not indices or None in indices:
        line = indices.index(None) + 1 if indices else 1
        raise ConfigError(f"--val {val_list}: line {line} names no image, or several")
    chosen = set(indices)
    rest = ["test" if image.split == "test" else "train" for image in images]
    return [replace(x, split="val" if i in chosen else rest[i]) for i, x in enumerate(images)]


def _by_name(images: Sequence[Image]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for i, image in enumerate(images):
        for key in {image.name.lower(), PurePosixPath(image.name).name.lower()}:
            found[key].append(i)
    return found


def listed_pairs(
    folder: Path, lists: Sequence[str], images: Sequence[FileName], labels: Sequence[FileName]
) -> dict[str, str]:
    """The label of each image, by path, of lists whose lines name both, as PaddleSeg's do."""
    known_images, known_labels = (
        {name.path.lower(): name.path for name in x} for x in (images, labels)
    )
    found: dict[str, str] = {}
    for path in lists:
        words = pairing.words_of(PurePosixPath(path).stem)
        if not any(map(pairing.split_of, words)) and not _LIST_WORDS & {*words}:
            continue  # there may be a file for each image
        for line in _lines_of(folder / path):
            image, label, *_ = (*re.split(r"[\t,; ]+", line.lower()), "")
            image, label = _place_of(image, known_images), _place_of(label, known_labels)
            if image and label:
                found.setdefault(image, label)
    return found


def _place_of(listed: str, known: Mapping[str, str]) -> str | None:
    """The file that a list names, perhaps with folders above this one, as of another machine.

    >>> _place_of("/home/ann/voc/images/1.jpg", {"images/1.jpg": "images/1.JPG"})
    'images/1.JPG'
    """
    parts = PurePosixPath(listed).parts
    ends = ("/".join(parts[i:]) for i in range(len(parts)))
    return next((known[end] for end in ends if end in known), None)


def _lines_of(path: Path) -> Iterator[str]:
    """The lines of a list, with `/` between folders; none if it is unreadable."""
    with suppress(OSError, ValueError):
        text = decoded(read_bytes(path, _MAX_LIST_BYTES)).replace("\\", "/")
        yield from filter(None, map(str.strip, text.splitlines()))


def _listed(path: Path, by_name: Mapping[str, list[int]]) -> Iterator[int | None]:
    """The image that each line names; None for a line that names none, or several."""
    for line in _lines_of(path):
        first = re.split(r"[\t,; ]", line)[0].lower()
        plain = str(PurePosixPath(first).with_suffix("")) if "." in first else first
        keys = (plain, PurePosixPath(plain).name)
        candidates = next((by_name[key] for key in keys if key in by_name), [])
        yield candidates[0] if len(candidates) == 1 else None
