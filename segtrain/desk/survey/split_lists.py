"""Lists of splits in a folder: what each says, and which belong together."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from segtrain.desk.survey import file_names
from segtrain.desk.survey.file_names import words_of
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.list_files import read_list
from segtrain.desk.survey.list_names import (
    is_called_fold,
    is_called_list,
    other_words,
    said_split,
    split_in,
)
from segtrain.desk.survey.listed_images import ImageNames, named_images
from segtrain.text import counted, first_of

# A train list with at least this share of the images is a list of everything, not a split.
_MOST_TRAINED = 0.9
# An image in several lists gets the last of these: nothing is evaluated on images of training, and
# val is needed while training, test only later.
_ORDER = "train", "test", "val"


class SplitList(NamedTuple):
    """A list of the images of splits.

    split_of: by the index of an image. by_name: whether the file name says the split, not the rows.
    num_rows: the rows that have a split. num_lost: how many of them name no image, or several.
    note: what else to tell the user.
    """

    path: str
    split_of: Mapping[int, str]
    by_name: bool
    num_rows: int
    num_lost: int
    note: str

    @property
    def is_of_others(self) -> bool:
        """Whether it lists other images: no row names one of the folder.

        If the name says more than a split, as cat_train.txt, it is enough that most rows name none.
        """
        if self.num_lost == self.num_rows:
            return True
        # val.txt after images were deleted: the images left count, however few.
        may_be_few = is_called_list(self.path) or not self.by_name
        return 2 * self.num_lost > self.num_rows and not may_be_few

    @property
    def lost_rows(self) -> str:
        """A sentence that says how many rows name no image, or several."""
        verb = "names" if self.num_lost == 1 else "name"
        of_all = f"{self.num_lost} of {counted(self.num_rows, 'line', 'lines')}"
        return f"{self.path}: {of_all} {verb} no image, or several"


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
    def says_both_sides(self) -> bool:
        """Whether they name images to train on and images to evaluate on."""
        return {*self.split_of.values()} > {"train"}

    @property
    def evaluated(self) -> str:
        """The path of the list whose split is last in `_ORDER`: that of val, if any."""
        return max(self.lists, key=lambda x: max(map(_ORDER.index, x.split_of.values()))).path

    def contradicts(self, other: "ListedSplits") -> bool:
        """Whether one trains on an image on which the other evaluates."""
        both = self.split_of.keys() & other.split_of.keys()
        return any((self.split_of[i] == "train") != (other.split_of[i] == "train") for i in both)


def read_split_lists(
    folder: Path, lists: Sequence[str], images: Sequence[Image]
) -> tuple[list[SplitList], list[str]]:
    """The lists that say splits of these images, and notes on lists that are not used."""
    if not lists:
        return [], []
    names = ImageNames(images)
    found = [x for path in lists if (x := _split_list(folder, path, names))]
    # instances_train.json of another task names none of these images: no note.
    odd = [x for x in found if x.is_of_others and (x.num_lost < x.num_rows or split_in(x.path))]
    notes = [f"{x.lost_rows}: it is not used" for x in odd]
    return [x for x in found if not x.is_of_others], notes


def taken_together(lists: Iterable[SplitList], images: Sequence[Image]) -> list[ListedSplits]:
    """Groups of lists, best first: in a folder called after labels, most images, shortest path."""
    together: dict[tuple[str, ...], list[SplitList]] = defaultdict(list)
    for one in lists:
        # A group: fold_0/train and fold_0/val, or train_a and val_a.
        own = [one.path] if said_split(one.path) is None else other_words(one.path)
        together[str(PurePosixPath(one.path).parent), *own].append(one)
    every = [_merged(found) for found in together.values()]
    whole = [x for x in every if x.says_both_sides]
    if not whole and every:
        # All lists together may name both sides: Training/train_id.txt, Validation/val_id.txt.
        merged = _merged([y for x in every for y in x.lists])
        whole = [merged] if merged.says_both_sides else []
    # If any group names both sides, groups that name only one are dropped.
    every = whole or [y for x in every if (y := _with_rest(x, images))]
    # Among equals, the shortest path first: train.txt before aeroplane_train.txt.
    return sorted(
        every, key=lambda x: (not x.is_of_task, -len(x.split_of), len(x.lists[0].path), x.lists)
    )


def notes_on(found: ListedSplits, images: Sequence[Image]) -> Iterator[str]:
    """What the user should know of lists that are used: lost rows, and images in two lists."""
    for one in found.lists:
        if one.num_lost:
            yield one.lost_rows
        if one.note:
            yield f"{one.path}: {one.note}"
    for one in found.lists:
        twice = [i for i, split in one.split_of.items() if found.split_of[i] != split]
        if twice:
            splits = first_of(sorted({found.split_of[i] for i in twice}))
            which = first_of((images[i].name for i in twice), 3)
            what = counted(len(twice), "image is", "images are")
            yield f"{one.path} and another list: {what} in both, and count as {splits}: {which}"


def _split_list(folder: Path, path: str, names: ImageNames) -> SplitList | None:
    """The list in this file; None if neither its name nor its rows say a split."""
    file = read_list(folder / path)
    by_name = not any(row.split for row in file.rows)
    said = "val" if is_called_fold(path) else said_split(path)
    splits = [said if by_name else row.split for row in file.rows]
    if not any(splits):
        return None
    named = list(zip(splits, named_images(file, names), strict=True))
    of_splits = [(split, found) for split, found in named if split is not None]
    num_lost = sum(not found for _, found in of_splits)
    split_of = _last_said((i, split) for split, found in of_splits for i in found)
    return SplitList(path, split_of, by_name, len(of_splits), num_lost, file.note)


def _last_said(pairs: Iterable[tuple[int, str]]) -> dict[int, str]:
    """The split of each image, by its index; of several splits, the last in `_ORDER`."""
    return dict(sorted(pairs, key=lambda pair: _ORDER.index(pair[1])))


def _merged(lists: Sequence[SplitList]) -> ListedSplits:
    """Joins lists; leaves out trainval.txt if the others name train and val."""
    others = [x for x in lists if not _is_trainval(x.path)]
    if {"train", "val"} <= {split for x in others for split in x.split_of.values()}:
        lists = others
    return ListedSplits(tuple(lists), _last_said(y for x in lists for y in x.split_of.items()))


def _is_trainval(path: str) -> bool:
    words = words_of(PurePosixPath(path).stem)
    return "trainval" in words or {"train", "val"} <= {*map(file_names.split_of, words)}


def _with_rest(found: ListedSplits, images: Sequence[Image]) -> ListedSplits | None:
    """Adds the images that no list names: to "val" beside train lists, else to "train".

    Images in a test folder that no list names become "test". None if the lists name too many
    images to be one side: 90 % for train alone, 50 % for val or test alone, else all.
    """
    splits = {*found.split_of.values()}
    if splits == {"train"}:
        rest, most = "val", _MOST_TRAINED
    elif len(splits) > 1:  # val.txt and test.txt
        rest, most = "train", 1.0
    else:  # fastai's valid.txt
        rest, most = "train", 0.5
    others = [i for i, x in enumerate(images) if i not in found.split_of and x.split != "test"]
    number = len(found.split_of) + len(others)
    if len(found.split_of) >= most * number:
        return None
    tests = {i: "test" for i, x in enumerate(images) if x.split == "test"}
    return found._replace(split_of={**tests, **dict.fromkeys(others, rest), **found.split_of})
