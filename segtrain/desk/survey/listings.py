"""What lists in a folder say of splits: which images are to train and to evaluate on."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from segtrain.desk.survey import file_names
from segtrain.desk.survey.file_names import words_of
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.list_files import (
    ListFile,
    is_called_fold,
    is_called_list,
    list_files,
    other_words,
    read_list,
    said_split,
    split_in,
)
from segtrain.desk.survey.listed_images import ImageNames, named_images
from segtrain.errors import ConfigError
from segtrain.text import counted, first_of

# An image that several lists name is of the last of these.
_ORDER = "train", "test", "val"
# A class and four numbers, as YOLO has boxes.
_BOX_CELLS = 5


class SplitList(NamedTuple):
    """A list of the images of splits.

    split_of: by the index of an image. rows, lost: how many there are, and how many of them name
    no image, or several. note: what else to say.
    """

    path: str
    split_of: Mapping[int, str]
    rows: int
    lost: int
    note: str


class ListedSplits(NamedTuple):
    """What lists that belong together say: train.txt and val.txt of one folder."""

    lists: tuple[SplitList, ...]
    split_of: Mapping[int, str]

    @property
    def is_of_task(self) -> bool:
        """Whether the folder is called after labels: ImageSets/Segmentation, and not Main."""
        task = PurePosixPath(self.lists[0].path).parent.name
        return not file_names.LABEL_WORDS.isdisjoint(words_of(task))

    @property
    def evaluated(self) -> str:
        """The list that names the images to evaluate on."""
        return max(self.lists, key=lambda x: max(map(_ORDER.index, x.split_of.values()))).path

    def contradicts(self, other: "ListedSplits") -> bool:
        """Whether an image is trained on by one, and evaluated on by the other."""
        both = self.split_of.keys() & other.split_of.keys()
        return any((self.split_of[i] == "train") != (other.split_of[i] == "train") for i in both)


def with_splits(
    folder: Path,
    images: list[Image],
    lists: Sequence[str],
    notes: list[str],
    val_list: Path | None = None,
) -> tuple[str, list[Image], tuple[str, ...]]:
    """What says the splits, and the images with them: list files, else folders; and rival lists.

    val_list: names the images to evaluate on; lists of the folder beside it say the others.
    rival lists: such as val_list could be, where lists contradict each other.

    Raises:
        ConfigError: a line of `val_list` names no image.
    """
    every = _listed_splits(folder, lists, images, notes if val_list is None else [])
    if val_list is not None:
        for found in every:
            if any((folder / x.path).resolve() == val_list.resolve() for x in found.lists):
                notes += _notes_on(found, images)
                return str(val_list), _evaluated_on(val_list.name, found, images), ()
        return str(val_list), split_by(val_list, images), ()
    if not every:
        has_folders = len({image.split for image in images} - {None}) > 1
        return ("folders" if has_folders else ""), images, ()
    best = every[0]
    rivals = [x for x in every if x.is_of_task == best.is_of_task and x.contradicts(best)]
    # Each scene may have lists of its own.
    for other in every[1:]:
        is_apart = not best.split_of.keys() & other.split_of.keys()
        if is_apart and other.is_of_task == best.is_of_task:
            best = ListedSplits((*best.lists, *other.lists), {**best.split_of, **other.split_of})
    notes += _notes_on(best, images)
    source = ", ".join(x.path for x in best.lists)
    names = tuple(x.evaluated for x in (best, *rivals)) if rivals else ()
    return source, _marked(images, best.split_of), names


def split_by(val_list: Path, images: Sequence[Image]) -> list[Image]:
    """The images that the file names to evaluate on, others to train on; test images stay so.

    Of a file that says splits itself, those of val.
    """
    file = read_list(val_list)
    named = named_images(file, ImageNames(images))
    if not named or () in named:
        line = named.index(()) + 1 if named else 1
        raise ConfigError(f"--val {val_list}: line {line} names no image, or several")
    says_val = any(row.split == "val" for row in file.rows)
    rows = zip(file.rows, named, strict=True)
    chosen = {i for row, found in rows if row.split == "val" or not says_val for i in found}
    rest = ["test" if image.split == "test" else "train" for image in images]
    return [replace(x, split="val" if i in chosen else rest[i]) for i, x in enumerate(images)]


# A list of more images than this is one of all.
_MOST_NAMED = 0.9


def unused_lists(
    folder: Path, lists: Sequence[str], used: Collection[str], images: Sequence[Image]
) -> dict[str, int]:
    """How many images each list names that is not used, by its path; of several images only.

    used: lists of splits and of pairs, and tables of classes. Where lists say the splits, others
    that are called after splits are no surprise: trainval.txt, or VOC's lists of objects.
    """
    maybe = list_files(lists, (file for image in images for file in image.files))
    files = {path: read_list(folder / path) for path in maybe}
    say_splits = {path for path, file in files.items() if _says_splits(path, file)}
    # These were weighed against each other: what they say of others is known.
    known = {*used, *(say_splits if not say_splits.isdisjoint(used) else ())}
    names, found = ImageNames(images), {}
    for path, file in files.items():
        if path in known or not file.rows or _are_boxes(file):
            continue
        rows = named_images(file, names)
        named = {i for row in rows for i in row}
        # A list, and no text in which a few words are names.
        is_list = len(named) > 1 and 2 * sum(map(bool, rows)) >= len(rows)
        # What is said of all images divides none: patients and cameras, or a licence.
        is_list = is_list and len(named) <= _MOST_NAMED * len(images)
        if is_list and not _says_nothing(path, file, named, images):
            found[path] = len(named)
    return found


def _says_splits(path: str, file: ListFile) -> bool:
    called = said_split(path) is not None or is_called_fold(path)
    return called or any(row.split for row in file.rows)


def _says_nothing(
    path: str, file: ListFile, named: Collection[int], images: Sequence[Image]
) -> bool:
    """Whether a list names those of train/ as train.txt, or all images that have a split."""
    split = said_split(path)
    if split is not None and all(images[i].split == split for i in named):
        return True
    others = [image for i, image in enumerate(images) if i not in named]
    is_plain = is_called_list(path) or all(len(row.cells) == 1 for row in file.rows)
    return is_plain and all(image.split == "unlisted" for image in others)


def _are_boxes(file: ListFile) -> bool:
    numbers = [
        len(row.cells) >= _BOX_CELLS and all(x.replace(".", "").isdecimal() for x in row.cells)
        for row in file.rows
    ]
    return 2 * sum(numbers) > len(numbers)


# Splits


def _listed_splits(
    folder: Path, lists: Sequence[str], images: Sequence[Image], notes: list[str]
) -> list[ListedSplits]:
    """What lists say, those first that count: of this task, then of the most images.

    notes: gets lists of splits that name no image.
    """
    if not lists:
        return []
    names = ImageNames(images)
    together: dict[tuple[str, ...], list[SplitList]] = defaultdict(list)
    for path in lists:
        if found := _split_list(folder, path, names, notes):
            # fold_0/train and fold_0/val go together, and so do train_a and val_a.
            own = [path] if said_split(path) is None else other_words(path)
            together[str(PurePosixPath(path).parent), *own].append(found)
    every = [_merged(found) for found in together.values()]
    whole = [x for x in every if {*x.split_of.values()} > {"train"}]
    # Lists that say what is trained on are no rivals of those that leave it open.
    every = whole or [y for x in every if (y := _with_rest(x, len(images)))]
    # Of equal ones that with the shortest names: train, and not aeroplane_train.
    return sorted(
        every, key=lambda x: (not x.is_of_task, -len(x.split_of), len(x.lists[0].path), x.lists)
    )


def _split_list(folder: Path, path: str, names: ImageNames, notes: list[str]) -> SplitList | None:
    """A list whose name or rows say splits; None: it is not, or most of it names no image."""
    file, called = read_list(folder / path), said_split(path)
    called = "val" if is_called_fold(path) else called
    called = None if any(row.split for row in file.rows) else called
    splits = [row.split or called for row in file.rows]
    if not any(splits):
        return None
    named = named_images(file, names)
    rows = sum(split is not None for split in splits)
    lost = sum(split is not None and not row for split, row in zip(splits, named, strict=True))
    # Of a list that is called so and nothing else the images that are left count, however few.
    is_list = is_called_list(path) or called is None
    if lost == rows or (2 * lost > rows and not is_list):
        if lost < rows or split_in(path):
            notes.append(f"{path}: {_lost_lines(lost, rows)}: it is not used")
        return None
    pairs = ((i, x) for x, row in zip(splits, named, strict=True) if x for i in row)
    return SplitList(path, _last_said(pairs), rows, lost, file.note)


def _last_said(pairs: Iterable[tuple[int, str]]) -> dict[int, str]:
    """The split of each image, by its index; where several are said, the last of `_ORDER`."""
    return dict(sorted(pairs, key=lambda pair: _ORDER.index(pair[1])))


def _merged(lists: Sequence[SplitList]) -> ListedSplits:
    """What lists say together."""
    # trainval.txt repeats what train.txt and val.txt say.
    others = [x for x in lists if not _is_trainval(x.path)]
    if {"train", "val"} <= {split for x in others for split in x.split_of.values()}:
        lists = others
    return ListedSplits(tuple(lists), _last_said(y for x in lists for y in x.split_of.items()))


def _is_trainval(path: str) -> bool:
    words = words_of(PurePosixPath(path).stem)
    return "trainval" in words or {"train", "val"} <= {*map(file_names.split_of, words)}


def _with_rest(found: ListedSplits, number: int) -> ListedSplits | None:
    """All other images to train on, where lists name those to evaluate on; None: they do not."""
    splits = {*found.split_of.values()}
    # fastai's valid.txt. A single list of most images names what there is, and no split.
    if "train" in splits or (len(splits) == 1 and 2 * len(found.split_of) >= number):
        return None
    return found._replace(split_of=dict.fromkeys(range(number), "train") | {**found.split_of})


def _marked(images: Sequence[Image], split_of: Mapping[int, str]) -> list[Image]:
    return [replace(x, split=split_of.get(i, "unlisted")) for i, x in enumerate(images)]


def _evaluated_on(name: str, found: ListedSplits, images: Sequence[Image]) -> list[Image]:
    """The images of the list of this name as val; other images that are not trained on as test."""
    chosen = next(x for x in found.lists if PurePosixPath(x.path).name == name).split_of
    if "val" in chosen.values():
        return _marked(images, found.split_of)
    split_of = {i: split if split == "train" else "test" for i, split in found.split_of.items()}
    return _marked(images, split_of | dict.fromkeys(chosen, "val"))


def _notes_on(found: ListedSplits, images: Sequence[Image]) -> Iterator[str]:
    """What is odd about lists that are used."""
    for one in found.lists:
        if one.lost:
            yield f"{one.path}: {_lost_lines(one.lost, one.rows)}"
        if one.note:
            yield f"{one.path}: {one.note}"
    for one in found.lists:
        twice = [i for i, split in one.split_of.items() if found.split_of[i] != split]
        if twice:
            splits = first_of(sorted({found.split_of[i] for i in twice}))
            which = first_of((images[i].name for i in twice), 3)
            what = counted(len(twice), "image is", "images are")
            yield f"{one.path} and another list: {what} in both, and count as {splits}: {which}"


def _lost_lines(lost: int, rows: int) -> str:
    verb = "names" if lost == 1 else "name"
    return f"{lost} of {counted(rows, 'line', 'lines')} {verb} no image, or several"
