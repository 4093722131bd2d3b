"""The images that a user names for prediction: which they are, and their pixels."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segtrain.data.read.decode import MAX_PHOTO_PIXELS
from segtrain.data.read.find import IMAGE_SUFFIXES, VIDEO_SUFFIXES, first_lines, unread
from segtrain.data.read.image import ImageForm, num_channels, read_image, set_dtype
from segtrain.data.read.image_formats import Info, open_stored, read_info
from segtrain.errors import DataError
from segtrain.files import os_errors_as, walk
from segtrain.text import counted, first_of, printable

# Of a range of values: fractions within -1..1 are then nearly one level of 8 bits.
_WIDE = 100
_MOST = 0.5


class Photo(NamedTuple):
    """An image as stored, (H, W, C) of its form, and the header of its file."""

    image: np.ndarray
    form: ImageForm
    info: Info


def read_photo(path: Path, form: ImageForm) -> Photo:
    """Reads an image for a model that was trained on images of `form`.

    Its dtype may be another one, as long as the values mean the same: 8 and 16 bits use their whole
    range, or `form.value_range` says what they are.

    Raises:
        DataError: missing, unreadable, damaged, too large, or of a refused kind.
    """
    # Read once: the header and the pixels are then of the same bytes.
    _, info, content, _ = open_stored(path)
    own = form_of_info(info, form, path)
    image = read_image([path], own, contents=[content], max_pixels=MAX_PHOTO_PIXELS)
    if problem := other_unit(image, form):
        raise DataError(f"{printable(path)}: {problem}")
    return Photo(image, own, info)


def other_unit(image: np.ndarray, trained: ImageForm) -> str:
    """Why (H, W, C) are surely other values than those of a training; empty: they may be the same.

    Most are fractions, all within -1..1, as of reflectances, and those were whole, up to hundreds.
    """
    low, high = trained.limits
    if image.dtype.kind != "f" or trained.dtype.kind != "u" or high - low < _WIDE:
        return ""
    known = image[np.isfinite(image)]
    if not known.size or np.abs(known).max() > 1 or (known % 1 > 0).mean() < _MOST:
        return ""
    found = f"fractions from {known.min():.3g} to {known.max():.3g}"
    wanted = f"the model was trained on whole numbers of [{low:g}, {high:g}]"
    return f"{found}, and {wanted}: convert them as those were, such as reflectances times 10000"


def form_of_file(path: Path, form: ImageForm) -> ImageForm:
    """`form` with the dtype of the file; DataError: its values are of another kind."""
    return form_of_info(read_info(path), form, path)


def form_of_info(info: Info, form: ImageForm, path: Path) -> ImageForm:
    """As `form_of_file`, of a header that is read; path: for messages."""
    form = form._replace(dtype=set_dtype(info.dtype), scaling=info.scaling)
    if (count := num_channels(info, form.channels)) != form.channels:
        raise DataError(
            f"{printable(path)}: {count} channels, and the model was trained on {form.channels}: "
            "it needs the same bands in the same order"
        )
    try:
        form.check()
    except DataError:
        values = "all of 8 or 16 bits" if form.value_range is None else [*form.value_range]
        raise DataError(
            f"{printable(path)}: values of {form.dtype}, and the model was trained on values of "
            f"{values}: convert them as those of the training were"
        ) from None
    return form


class PhotoFile(NamedTuple):
    """An image and the unique name of its prediction: a relative path without suffix."""

    path: Path
    name: str


def find_images(inputs: Sequence[str | Path], output: Path) -> tuple[list[PhotoFile], str]:
    """The images and videos among `inputs`, files or folders searched to any depth, each once.

    Names are relative to the given folder. If another image already has the name, in upper or lower
    case, the file's suffix is appended, then a number. Files in `output` are left out, so that a
    second run does not predict the pictures of the first.

    Also a line that names other files in the folders; empty if there are none.

    Raises:
        DataError: an input is missing, of another format, or a folder without images.
    """
    photos: list[PhotoFile] = []
    others: list[Path] = []
    problems, suffixes = [], (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
    kinds = " ".join(suffixes)
    for given in map(Path, inputs):
        place, num_before = printable(given), len(photos)
        if not given.exists():
            problems.append(f"{place}: no such file or folder")
        elif not given.is_dir():
            photos.append(PhotoFile(given, given.stem))
            if given.suffix.lower() not in suffixes:
                problems.append(f"{place}: expected an image or a video ({kinds})")
        else:
            for path in _files_below(given, output):
                if path.suffix.lower() in suffixes:
                    name = path.relative_to(given).with_suffix("").as_posix()
                    photos.append(PhotoFile(path, name))
                elif path.name[0] != ".":
                    others.append(path)
            if len(photos) == num_before:
                what = f"no images ({kinds}) in it, except in --output{unread(others)}"
                problems.append(f"{place}: {what}")
    if problems:
        raise DataError(first_lines("input", problems))
    skipped = f"skipped {counted(len(others), 'file', 'files')}: {first_of(others)}"
    skipped += unread(others)
    return _with_unique_names(photos), skipped if others else ""


def _files_below(folder: Path, output: Path) -> Iterator[Path]:
    # Resolved on both sides: a link is no other folder.
    output = output.resolve()
    with os_errors_as(DataError):
        for here, names in walk(folder, hidden=True):
            files = (here / name for name in names)
            yield from (file for file in files if not file.resolve().is_relative_to(output))


def _with_unique_names(photos: Iterable[PhotoFile]) -> list[PhotoFile]:
    sources: dict[Path, PhotoFile] = {}
    taken: set[str] = set()
    for path, name in photos:
        place = path.parent.resolve() / path.name  # links of a store of equal files are images too
        if place in sources:
            continue
        unique, number = name, 2
        while unique.casefold() in taken:
            # x, x_png, x_3, x_4, ...
            unique = f"{name}_{number if number > 2 else path.suffix[1:].lower()}"
            number += 1
        taken.add(unique.casefold())
        sources[place] = PhotoFile(path, unique)
    return list(sources.values())
