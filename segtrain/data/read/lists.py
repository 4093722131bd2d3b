"""Text files that name images and labels: strict about what a line may hold.

Such files are downloaded and passed around, so no line may name a place outside of the folders
data.root and data.labels_dir. Links there are followed, as in every layout: their owner has put
them there.
"""

import csv
import io
import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from segtrain.data.read.find import (
    IMAGE_SUFFIXES,
    LABEL_SUFFIXES,
    Listing,
    Pair,
    Window,
    case_clashes,
    there_are,
)
from segtrain.errors import DataError
from segtrain.files import os_errors_as, read_bytes
from segtrain.text import MAX_NAME, counted, first_of, printable

_MAX_BYTES = 256 << 20  # some two million lines
_QUOTED = re.compile(r'"[^"]*"')
_WINDOW = re.compile(r"#xywh=(\d+),(\d+),(\d+),(\d+)(?![\d,])")


def list_pairs(path: Path, root: Path, labels_root: Path) -> Listing:
    """The images and labels that the list file at `path` names, in its order.

    A line names the files of an image, in the order of its channels, and then its label. Images lie
    below `root`, labels below `labels_root`. `big.tif#xywh=X,Y,WIDTH,HEIGHT` is a window of image
    and label.

    Raises:
        DataError: there is no such file, or it is no text.
    """
    if not path.is_file():
        if (here := Path(os.path.relpath(path, root))).is_file():
            what = "no such list file; write the full path of the one in the working folder"
            raise DataError(f"{printable(path)}: {what}: {printable(here.resolve())}")
        texts = sorted(file.name for suffix in ("txt", "csv") for file in root.glob(f"*.{suffix}"))
        raise DataError(f"{printable(path)}: no such list file; {there_are('text files', texts)}")
    listed: dict[str, Pair] = {}
    first_user: dict[str, str] = {}  # of each label
    problems, shared = [], []

    @cache
    def files_in(folder: str) -> set[str]:
        # One look at a folder takes less time than a look for each of its files.
        try:
            with os.scandir(folder) as entries:
                return {entry.name for entry in entries if entry.is_file()}
        except OSError:
            return set()

    def file_problem(folder: Path, name: str, suffixes: tuple[str, ...]) -> str:
        above, file = posixpath.split(name)
        if not file.lower().endswith(suffixes):
            return f"{printable(name)}: expected a file {' '.join(suffixes)}"
        # Some disks hold a name in other letters than they list it.
        if file not in files_in(os.path.join(folder, above)) and not os.path.isfile(folder / name):
            return f"{printable(name)}: no such file below {printable(folder)}"
        return ""

    for line, text in _lines(path):
        images, label, problem = _images_and_label(text)
        windows = {*filter(None, map(_window_of, images))}
        images = [_WINDOW.sub("", image) for image in images]
        for image in images:
            problem = problem or file_problem(root, image, IMAGE_SUFFIXES)
        problem = problem or file_problem(labels_root, label, LABEL_SUFFIXES)
        name = images[0].rpartition(".")[0] if images else ""
        # Any file of an image may name its window; two that differ are refused below.
        window = next(iter(windows), None)
        name += window.ending if window else ""
        if len(windows) > 1:
            problem = problem or f"{printable(images[0])}: its files have different windows"
        if not problem and name in listed:
            problem = f"{printable(images[0])}: already listed, or another image of this name"
        if problem:
            problems.append(f"{printable(path)}:{line}: {problem}")
            continue
        first, *bands = (root / image for image in images)
        listed[name] = Pair(first, labels_root / label, name, tuple(bands), window)
        # Windows of one label are meant to share its file.
        if window is None and name != (user := first_user.setdefault(label, name)):
            shared.append(f"{labels_root / label} by {user} and {name}")
    # As a rule a line was copied and changed in one column.
    notes = [f"labels are used by several images: {first_of(shared, 3)}"] if shared else []
    return Listing(list(listed.values()), problems, [*notes, *case_clashes(listed)])


def listed_images(path: Path) -> list[str]:
    """The first file of each image that a list file names, whether it is there or not."""
    return [images[0] for _, text in _lines(path) if (images := _images_and_label(text)[0])]


def _window_of(image: str) -> Window | None:
    """The window that the name of a file ends with; None: it does not."""
    match = _WINDOW.search(image)
    if match is None or match.end() < len(image):
        return None
    left, top, width, height = map(int, match.groups())
    return Window(top, left, height, width)


def list_text(pairs: Iterable[Pair], root: Path, labels_root: Path) -> str:
    """The list file that `list_pairs` reads as these images and labels, which lie below the roots.

    ValueError: a file lies elsewhere.
    """
    text = io.StringIO()
    table = csv.writer(text, delimiter="\t", lineterminator="\n")
    for pair in pairs:
        first, *bands = (image.relative_to(root).as_posix() for image in pair.images)
        # A line that begins with # would be left out.
        # `list_pairs` normalizes the path, so this prefix is gone when the list is read.
        first = f"./{first}" if first.startswith("#") else first
        first += pair.window.fragment if pair.window else ""
        table.writerow([first, *bands, pair.label.relative_to(labels_root).as_posix()])
    return text.getvalue()


def list_file_words(path: Path) -> tuple[list[str], list[str]]:
    """The names in a file, one a line, and the problems of its other lines."""
    names: dict[str, None] = {}
    problems = []
    for number, name in _lines(path):
        place, shown = f"{printable(path)}:{number}", f"'{printable(name, MAX_NAME)}'"
        if name.startswith(("/", "\\")) or ".." in name.split("/") or len(name.split()) != 1:
            problems.append(
                f"{place}: expected one image name without folder and suffix, found {shown}; "
                "layout 'list' reads lines of an image and a label"
            )
        elif name in names:
            problems.append(f"{place}: {shown} is already listed")
        else:
            names[name] = None
    return list(names), problems


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and stripped text of each line with content that does not begin with #.

    Bytes that are not UTF-8 become surrogates.
    """
    with os_errors_as(DataError, path):
        data = read_bytes(path, _MAX_BYTES)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{printable(path)}: the file is UTF-16; save it as UTF-8")
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        text = raw.decode("utf-8", "surrogateescape").strip()
        if text and not text.startswith("#"):
            yield number, text


def _images_and_label(text: str) -> tuple[list[str], str, str]:
    """The columns of a line, normalized, and why it is refused, or empty.

    Columns are separated by a tab, else by a comma, else by blanks; names with blanks or commas can
    stand in double quotes.

    >>> _images_and_label("red/1.tif infrared/1.tif ./labels/1.png")
    (['red/1.tif', 'infrared/1.tif'], 'labels/1.png', '')
    >>> _images_and_label("images/1.png, ../labels/1.png")[2]
    "'../labels/1.png': '..' is not allowed"
    """
    # Commas in quotes and in windows separate no columns.
    unquoted = _WINDOW.sub("", _QUOTED.sub("", text))
    delimiter = "\t" if "\t" in unquoted else "," if "," in unquoted else " "
    reader = csv.reader([text], delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        columns = [column.strip() for column in next(reader)]
    except csv.Error as error:
        return [], "", str(error)
    # A name that was cut at a blank has parts without suffix.
    is_cut = len(columns) > 2 and not all(posixpath.splitext(column)[1] for column in columns)
    if len(columns) < 2 or not all(columns) or is_cut:
        shown = counted(len(columns), "column", "columns")
        problem = (
            f"expected image and label, found {shown}; "
            "separate names that hold blanks by a tab or put them in double quotes"
        )
        return [], "", problem
    problem = next(filter(None, map(_path_problem, columns)), "")
    *images, label = map(posixpath.normpath, columns)
    if twice := [image for i, image in enumerate(images) if image in images[:i]]:
        problem = problem or f"{printable(twice[0])}: named twice as a file of the image"
    return images, label, problem


def _path_problem(name: str) -> str:
    """Why `name` in a list file is refused; empty if it is relative and without `..`."""
    if not name.isprintable():
        what = "control characters and bytes that are not UTF-8 are not allowed in names"
    elif name.startswith("/") or name[1:3] in (":\\", ":/"):
        what = "expected a path relative to data.root, or of a label to data.labels_dir"
    elif ".." in name.replace("\\", "/").split("/"):
        what = "'..' is not allowed"
    else:
        return ""
    return f"'{printable(name, MAX_NAME)}': {what}"
