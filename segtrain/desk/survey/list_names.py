"""What the name of a file says of a list: that it may be one, and of which split."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

from segtrain.desk.survey.file_names import ROLE_WORDS, split_of, words_of

TEXT_SUFFIXES = (".txt", ".csv", ".tsv", ".lst", ".list", "")
_SUFFIXES = (*TEXT_SUFFIXES, ".json", ".yaml", ".yml", ".xml", ".manifest")
_LIST_WORDS = {"list", "lists", "filelist", "files", "names", "ids", "pairs", "set"}
_LIST_WORDS |= {"split", "splits"}
# Lists of these are not read: nobody knows which of their arrays or sheets says what.
_UNREAD = (".mat", ".pkl", ".pickle", ".npz", ".h5", ".hdf5", ".parquet", ".pt", ".rds")
_UNREAD += (".xlsx", ".xls", ".ods", ".sqlite", ".sqlite3", ".db")
_FOLD = re.compile(r"(fold|cv)s?\d*")
# More files of one form, or in one folder, are of single images: boxes/0001.txt.
_MOST_ALIKE = 20


def list_files(paths: Iterable[str], pictures: Iterable[str]) -> list[str]:
    """The files among `paths` that may be lists of images, without reading them.

    A file for each picture is none: it is called as the picture, or as many others are.
    """
    stems = {PurePosixPath(picture).stem.lower() for picture in pictures}
    maybe = []
    for path in paths:
        place = PurePosixPath(path)
        if place.suffix.lower() not in _SUFFIXES:
            continue
        # Of files without a suffix only those that are called so: no LICENSE, no Makefile.
        if is_called_list(path) or (place.suffix and place.stem.lower() not in stems):
            maybe.append(path)
    forms = {path: re.sub(r"\d+", "0", path) for path in maybe}
    alike = Counter(forms.values())
    beside = Counter(PurePosixPath(path).parent for path in maybe)
    return [
        path
        for path in maybe
        if is_called_list(path)
        or max(alike[forms[path]], beside[PurePosixPath(path).parent]) <= _MOST_ALIKE
    ]


def unread_splits(paths: Iterable[str]) -> list[str]:
    """The files that are called after splits, in a form that is not read: split.mat, train.pkl."""
    says = {"split", "splits", "partition", "partitions"}
    maybe = [path for path in paths if PurePosixPath(path).suffix.lower() in _UNREAD]
    called = [path for path in maybe if says & {*words_of(PurePosixPath(path).stem)}]
    return [x for x in maybe if x in called or split_in(x) or is_called_fold(x)]


def is_called_list(path: str) -> bool:
    """Whether the name says a list and nothing else: `train.txt`, `val_list.csv`, `fold_0.txt`."""
    words = words_of(PurePosixPath(path).stem)
    others = other_words(path)
    if any(map(_FOLD.fullmatch, words)):
        others = [x for x in others if not (x.isdecimal() or _FOLD.fullmatch(x))]
    return not others and any(x not in ROLE_WORDS for x in words)


def other_words(path: str) -> list[str]:
    """The words of a name beside those of splits, lists and images: `cat` of `cat_train.txt`."""
    words = words_of(PurePosixPath(path).stem)
    known = _LIST_WORDS | ROLE_WORDS
    return [word for word in words if not split_of(word) and word not in known]


def is_called_fold(path: str) -> bool:
    """Whether the name says a fold by its number, and no split: `fold_0.txt`."""
    stem = PurePosixPath(path).stem
    says_fold = any(map(_FOLD.fullmatch, words_of(stem))) and re.search(r"\d", stem)
    return bool(says_fold) and is_called_list(path) and split_in(path) is None


def split_in(text: str) -> str | None:
    """The split that a word, a key or the name of a list says; None: none, or other things too."""
    return said_split(text) if is_called_list(text) else None


def said_split(path: str) -> str | None:
    """The first split among the words of a name: of `instances_val2017.json` val."""
    splits = [split for word in words_of(PurePosixPath(path).stem) if (split := split_of(word))]
    # train_val.txt is to train on, as trainval.txt is.
    return "train" if {*splits} == {"train", "val"} else next(iter(splits), None)
