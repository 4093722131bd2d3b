"""What lists in a folder say: which images are to train on, and which label belongs to which."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from segtrain.desk.survey import file_names
from segtrain.desk.survey.file_names import FileName
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.names import decoded
from segtrain.errors import ConfigError
from segtrain.files import read_bytes
from segtrain.text import counted, first_of

SUFFIXES = (".txt", ".csv", ".tsv", ".lst")
_MAX_LIST_BYTES = 64 << 20
_LIST_WORDS = {"list", "lists", "filelist", "pairs"}
# More in one folder are files of single images.
_MOST_TABLES = 20
_ROLES = (file_names.IMAGE_WORDS, file_names.LABEL_WORDS)


def with_splits(
    folder: Path, images: list[Image], lists: Sequence[str], notes: list[str]
) -> tuple[str, list[Image]]:
    """What says the splits, and the images with them: list files, else folders."""
    sources = _chosen_lists(folder, lists, _by_name(images))
    splits = _splits_of_lists(sources, images, notes)
    if set(splits.values()) == {"val"} and 2 * len(splits) < len(images):
        splits = dict.fromkeys(range(len(images)), "train") | splits  # fastai's valid.txt
    if len(set(splits.values())) > 1:
        marked = [replace(x, split=splits.get(i, "unlisted")) for i, x in enumerate(images)]
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
        split_list = _split_list(folder / path, by_name)
        if split_list is not None:
            by_folder[path.parent][str(path)] = split_list
    if not by_folder:
        return {}
    # VOC has lists for each task: ImageSets/Segmentation names fewer images than Main, but counts.
    task = max(by_folder, key=lambda parent: _fitness(parent, by_folder[parent].values()))
    chosen = by_folder[task]
    stems = {path: PurePosixPath(path).stem for path in chosen}
    # trainval.txt repeats what train.txt and val.txt say.
    if {"train", "val"} <= {*stems.values()}:
        chosen = {
            path: split_list for path, split_list in chosen.items() if stems[path] != "trainval"
        }
    return chosen


def _split_list(path: Path, by_name: Mapping[str, list[int]]) -> _SplitList | None:
    """A list that is called after a split; None: it is not, or most lines name no image."""
    split = next(filter(None, map(file_names.split_of, file_names.words_of(path.stem))), None)
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
    named = {i for split_list in lists for i in split_list.indices}
    return bool(file_names.LABEL_WORDS & set(file_names.words_of(task.name))), len(named)


def _splits_of_lists(
    sources: Mapping[str, _SplitList], images: Sequence[Image], notes: list[str]
) -> dict[int, str]:
    """The split of each image by index, the last one that a list says; oddities go to `notes`."""
    splits: dict[int, str] = {}
    for path, (split, indices, lost) in sources.items():
        if lost:
            lines = counted(lost, "line names", "lines name")
            notes.append(f"{path}: {lines} no image, or several")
        twice = [images[i].name for i in indices if splits.get(i, split) != split]
        if twice:
            notes.append(f"{path} and another list name the same images: {first_of(twice, 3)}")
        splits |= dict.fromkeys(indices, split)
    return splits


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
    by_name: dict[str, list[int]] = defaultdict(list)
    for i, image in enumerate(images):
        for key in {image.name.lower(), PurePosixPath(image.name).name.lower()}:
            by_name[key].append(i)
    return by_name


class _Files:
    """Files by the names that a list may have for them, in lower case."""

    def __init__(self, names: Iterable[FileName]) -> None:
        paths = [name.path for name in names]
        self._by_path = {path.lower(): path for path in paths}
        by_name: dict[str, set[str]] = defaultdict(set)
        for path in paths:
            by_name[PurePosixPath(path).name.lower()].add(path)
        # A bare name that two files have says nothing.
        self._by_name = {name: files.pop() for name, files in by_name.items() if len(files) == 1}

    def __getitem__(self, listed: str) -> str | None:
        """The file that is meant, perhaps by its name alone; None: none is, or several are."""
        path = _place_of(listed, self._by_path)
        return path or self._by_name.get(PurePosixPath(listed).name)


def listed_pairs(
    folder: Path, lists: Sequence[str], images: Sequence[FileName], labels: Sequence[FileName]
) -> tuple[dict[str, str], str]:
    """The label of each image, by path, of tables whose lines name both; and what these are called.

    Raises:
        ConfigError: two tables give an image different labels.
    """
    pictures, masks = _Files(images), _Files(labels)
    crowded = Counter(PurePosixPath(path).parent for path in lists)
    label_of: dict[str, tuple[str, str]] = {}
    for path in map(PurePosixPath, lists):
        words = file_names.words_of(path.stem)
        is_list = any(map(file_names.split_of, words)) or not _LIST_WORDS.isdisjoint(words)
        # labels/0001.txt beside 0002.txt and many more, as YOLO has them.
        if not is_list and crowded[path.parent] > _MOST_TABLES:
            continue  # a file for each image
        lines = list(map(_cells, _lines_of(folder / path)))
        pairs = list(_pairs_of(lines, pictures, masks))
        if not is_list and len(pairs) < max(2, len(lines) / 2):
            continue  # it is about something else
        for image, label in pairs:
            before, where = label_of.setdefault(image, (label, str(path)))
            if before != label:
                raise ConfigError(
                    f"{folder}: {image} has the label {before} in {where} and {label} in {path}; "
                    "keep the list that is right"
                )
    tables = sorted({where for _, where in label_of.values()})
    return {image: label for image, (label, _) in label_of.items()}, ", ".join(tables)


def _cells(line: str) -> list[str]:
    return re.split(r"[\t,; ]+", line.lower().replace('"', ""))


def _pairs_of(
    lines: Sequence[Sequence[str]], pictures: _Files, masks: _Files
) -> Iterator[tuple[str, str]]:
    """Image and label of each line that names both.

    Which comes first, where a name may be of either, a header says: `mask,image`.
    """
    header = [file_names.words_of(cell) for cell in lines[0]] if lines else []
    roles = [known for cell in header for known in _ROLES if known & {*cell}]
    # images/1.png and masks/1.png: a cell `1.png` may be either, so the header says which is first.
    swapped = roles[:2] == [file_names.LABEL_WORDS, file_names.IMAGE_WORDS]
    for cells in lines:
        named = [(x, y) for cell in cells if any((x := pictures[cell], y := masks[cell]))]
        if len(named) < 2:
            continue
        (image, first), (other, label) = named[:2]
        if image and label and not (swapped and first and other):
            yield image, label
        elif first and other:
            yield other, first


def _place_of(listed: str, known: Mapping[str, str]) -> str | None:
    """The file that a list names, perhaps with folders above this one, as of another machine.

    >>> _place_of("/home/ann/voc/images/1.jpg", {"images/1.jpg": "images/1.JPG"})
    'images/1.JPG'
    """
    # From the whole path to the bare name.
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
        # Further columns are labels, or the -1 and 1 of VOC's lists of objects.
        first = re.split(r"[\t,; ]", line)[0].lower()
        # VOC lists names without a suffix, others whole paths.
        plain = str(PurePosixPath(first).with_suffix("")) if "." in first else first
        # As it stands comes first: `img.v2` has no suffix, and is not img.png.
        keys = [key for name in (first, plain) for key in (name, PurePosixPath(name).name)]
        candidates = next((by_name[key] for key in keys if key in by_name), [])
        yield candidates[0] if len(candidates) == 1 else None
