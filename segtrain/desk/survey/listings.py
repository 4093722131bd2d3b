"""Which images lists put on each side: those of the folder, or --val; and lists that nothing uses.

`split_lists` reads the lists of splits and weighs them against each other.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from segtrain.desk.survey.file_names import words_of
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.list_files import read_list
from segtrain.desk.survey.list_names import is_called_fold, is_called_list, list_files, said_split
from segtrain.desk.survey.list_text import SPLIT_COLUMNS, ListFile
from segtrain.desk.survey.listed_images import ImageNames, named_images
from segtrain.desk.survey.split_lists import (
    ListedSplits,
    SplitList,
    notes_on,
    read_split_lists,
    taken_together,
)
from segtrain.errors import ConfigError
from segtrain.text import first_of

# A class and four numbers, as YOLO has boxes.
_BOX_CELLS = 5
# A list of more of the images than this divides none: it says the camera of each, or a licence.
_MOST_NAMED = 0.9


class GivenSplits(NamedTuple):
    """Images with the splits that lists or folders say.

    source: what says them, in words; "" if nothing does. lists: of the folder that say them.
    rivals: lists of images to evaluate on that contradict each other, of which --val names one.
    """

    source: str
    images: list[Image]
    lists: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def with_splits(
    folder: Path, images: list[Image], lists: Sequence[str], labelled: Collection[str] = ()
) -> GivenSplits:
    """The splits that lists of the folder say, else its folders.

    labelled: paths of images with a label, if they are known: lists of others alone say nothing.
    """
    found, notes = read_split_lists(folder, lists, images)
    every = taken_together(found, images)
    known = [x for x in every if any(images[i].path in labelled for i in x.split_of)]
    if labelled and len(known) < len(every):
        which = first_of((one.path for x in every if x not in known for one in x.lists), 3)
        notes = [*notes, f"{which}: no image of these lists has a label: they are not used"]
        every = known
    if not every:
        has_folders = len({image.split for image in images} - {None}) > 1
        return GivenSplits("folders" if has_folders else "", images, notes=tuple(notes))
    best, *others = [x for x in every if x.is_of_task == every[0].is_of_task]
    rivals = [x for x in others if x.contradicts(best)]
    # Each scene may have lists of its own.
    for other in others:
        if best.split_of.keys().isdisjoint(other.split_of):
            best = ListedSplits((*best.lists, *other.lists), {**best.split_of, **other.split_of})
    used = tuple(x.path for x in best.lists)
    return GivenSplits(
        source=", ".join(used),
        images=_marked(images, best.split_of),
        lists=used,
        rivals=tuple(x.evaluated for x in (best, *rivals)) if rivals else (),
        notes=(*notes, *notes_on(best, images)),
    )


def with_val_list(
    folder: Path, images: list[Image], lists: Sequence[str], val_list: Path
) -> GivenSplits:
    """The images that `val_list` names to evaluate on; lists of the folder beside it say others.

    Raises:
        ConfigError: the file names no image to evaluate on, or a row of it none.
    """
    source, place = str(val_list), val_list.resolve()
    is_inside = place.is_relative_to(folder.resolve())
    used = (place.relative_to(folder.resolve()).as_posix(),) if is_inside else ()
    found, _ = read_split_lists(folder, lists, images)
    for together in taken_together(found, images):
        for one in together.lists:
            if (folder / one.path).resolve() == place:
                divided = _evaluated_on(val_list, one, together, images)
                return GivenSplits(source, divided, used, notes=tuple(notes_on(together, images)))
    return GivenSplits(source, _split_by(val_list, images), used)


def _evaluated_on(
    val_list: Path, chosen: SplitList, together: ListedSplits, images: Sequence[Image]
) -> list[Image]:
    """The images of a list as val; other images that are not trained on as test."""
    if "val" in chosen.split_of.values():
        return _marked(images, together.split_of)
    evaluated = {*chosen.split_of}
    if not chosen.by_name:
        split = _split_to_evaluate(val_list, {*chosen.split_of.values()})
        evaluated = {i for i, said in chosen.split_of.items() if said == split}
    split_of = {i: x if x == "train" else "test" for i, x in together.split_of.items()}
    return _marked(images, split_of | dict.fromkeys(evaluated, "val"))


def _split_by(val_list: Path, images: Sequence[Image]) -> list[Image]:
    """The images that the file names to evaluate on, others to train on; test images stay so."""
    file = read_list(val_list)
    named = named_images(file, ImageNames(images))
    if not named:
        raise ConfigError(f"--val {val_list}: it lists no image")
    if () in named:
        i = named.index(())
        line, text = file.rows[i].line, first_of([file.rows[i].text])
        row = f"entry {i + 1}" if line is None else f"line {line}"
        what = f"{row} names no image, or several: {text}".removesuffix(": ")
        raise ConfigError(
            f"--val {val_list}: {what}; take it out if it is gone, else write its path"
        )
    said = {row.split for row in file.rows} - {None}
    split = _split_to_evaluate(val_list, said) if said else None
    rows = zip(file.rows, named, strict=True)
    split_of = {i: row.split for row, found in rows for i in found}
    chosen = {i for i, said_of_row in split_of.items() if said_of_row == split}
    if len(chosen) == len(images):
        raise ConfigError(f"--val {val_list}: it names all images, so none is left to train on")
    is_test = [x.split == "test" or split_of.get(i) == "test" for i, x in enumerate(images)]
    rest = ["test" if test else "train" for test in is_test]
    return [replace(x, split="val" if i in chosen else rest[i]) for i, x in enumerate(images)]


def _split_to_evaluate(val_list: Path, said: Set[str]) -> str:
    """The split of `said`, those of the rows of a file, to evaluate on: val, else test."""
    for split in ("val", "test"):
        if split in said:
            return split
    raise ConfigError(f"--val {val_list}: its rows say train alone, expected val or test")


def _marked(images: Sequence[Image], split_of: Mapping[int, str]) -> list[Image]:
    return [replace(x, split=split_of.get(i, "unlisted")) for i, x in enumerate(images)]


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
        is_list = 2 * sum(map(bool, rows)) >= len(rows)
        # Of a column `split` whose words nobody knows, as `holdout`, all rows say something.
        most = 1.0 if _has_split_column(file) else _MOST_NAMED
        names_some = 1 < len(named) <= most * len(images)
        if is_list and names_some and not _says_nothing(path, file, named, images):
            found[path] = len(named)
    return found


def _says_splits(path: str, file: ListFile) -> bool:
    is_called = said_split(path) is not None or is_called_fold(path)
    return is_called or any(row.split for row in file.rows)


def _has_split_column(file: ListFile) -> bool:
    return any(not SPLIT_COLUMNS.isdisjoint(words_of(cell)) for cell in file.header)


def _says_nothing(
    path: str, file: ListFile, named: Collection[int], images: Sequence[Image]
) -> bool:
    """Whether a list names those of train/ as train.txt, or all images that have a split."""
    split = said_split(path)
    if split is not None and all(images[i].split == split for i in named):
        return True
    # Kaggle's sample_submission.csv names the test, and annotations name all of a folder's split.
    of_named = {images[i].split for i in named}
    if len(of_named) == 1 and not of_named & {None, "unlisted"}:
        number = sum(image.split in of_named for image in images)
        return of_named == {"test"} or len(named) >= _MOST_NAMED * number
    others = [image for i, image in enumerate(images) if i not in named]
    is_plain = is_called_list(path) or all(len(row.cells) == 1 for row in file.rows)
    return is_plain and all(image.split == "unlisted" for image in others)


def _are_boxes(file: ListFile) -> bool:
    """Whether most rows are numbers alone: a class and the sides of a box."""
    boxes = [
        len(row.cells) >= _BOX_CELLS and all(x.replace(".", "").isdecimal() for x in row.cells)
        for row in file.rows
    ]
    return 2 * sum(boxes) > len(boxes)
