"""Which label belongs to which image, by tables whose lines name both."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from segtrain.desk.survey import file_names
from segtrain.desk.survey.file_names import FileName
from segtrain.desk.survey.list_files import read_list
from segtrain.desk.survey.list_names import is_called_list, said_split
from segtrain.desk.survey.list_text import ListFile
from segtrain.desk.survey.listed_images import ends_of
from segtrain.errors import ConfigError

_ROLES = (file_names.IMAGE_WORDS, file_names.LABEL_WORDS)


def listed_pairs(
    folder: Path, lists: Sequence[str], images: Sequence[FileName], labels: Sequence[FileName]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The label of each image, by path, of tables whose lines name both; and these tables.

    Raises:
        ConfigError: two tables give an image different labels.
    """
    if not lists:
        return {}, ()
    pictures, masks = _Files(images), _Files(labels)
    label_of: dict[str, tuple[str, str]] = {}  # and the table that says it
    for path in lists:
        file = read_list(folder / path)
        pairs = list(_pairs_of(file, pictures, masks))
        is_list = is_called_list(path) or said_split(path) is not None
        if not is_list and len(pairs) < max(2, len(file.rows) / 2):
            continue  # it is about something else
        for image, label in pairs:
            before, where = label_of.setdefault(image, (label, path))
            if before != label:
                raise ConfigError(
                    f"{folder}: {image} has the label {before} in {where} and {label} in {path}; "
                    "keep the list that is right"
                )
    tables = sorted({where for _, where in label_of.values()})
    return {image: label for image, (label, _) in label_of.items()}, tuple(tables)


def _pairs_of(file: ListFile, pictures: "_Files", masks: "_Files") -> Iterator[tuple[str, str]]:
    """Image and label of each line that names both.

    images/1.png and masks/1.png: a cell `1.png` may be either. A header `mask,image` says which is
    first; without one, it is the image.
    """
    header = [file_names.words_of(cell) for cell in file.header]
    roles = [known for cell in header for known in _ROLES if known & {*cell}]
    label_is_first = roles[:2] == [file_names.LABEL_WORDS, file_names.IMAGE_WORDS]
    for row in file.rows:
        named = [(x, y) for cell in row.cells if any((x := pictures[cell], y := masks[cell]))]
        if len(named) < 2:
            continue
        (image, own_label), (other_image, label) = named[:2]
        is_swapped = own_label and other_image
        if image and label and not (is_swapped and label_is_first):
            yield image, label
        elif is_swapped:
            yield other_image, own_label


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
        ends = list(ends_of(listed.lower()))
        path = next((self._by_path[end] for end in ends if end in self._by_path), None)
        return path or self._by_name.get(ends[-1] if ends else "")
