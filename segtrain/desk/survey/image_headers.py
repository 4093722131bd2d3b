"""The images of a folder with their headers: size, channels, bands in several files."""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from segtrain.data.read import image_formats
from segtrain.data.read.decode import Info
from segtrain.data.read.georeference import place_of
from segtrain.desk.survey import file_names
from segtrain.desk.survey.file_names import FileName, words_of
from segtrain.desk.survey.folder_notes import counted_note
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.pairs import Matches
from segtrain.desk.survey.questions import Reading, UndecidedError
from segtrain.errors import DataError
from segtrain.text import counted, first_of


def with_headers(
    folder: Path, names: Sequence[FileName], matches: Matches, listed: Collection[str]
) -> tuple[list[Image], list[str]]:
    """The images whose headers can be read; and notes on the others, and on oddities.

    listed: images whose label a list names.

    Raises:
        UndecidedError: several pictures belong to one label, and neither words nor a list choose.
        DataError: so, and no folder tells them apart; or images have different bands.
    """
    name_of = {name.path: name for name in names}
    further = {band for bands in matches.bands.values() for band in bands}
    images, unreadable, unclear, twins = [], [], [], []
    for name in names:
        if name.path in further:
            continue
        files = (name.path, *matches.bands.get(name.path, ()))
        try:
            infos = [image_formats.read_info(folder / path) for path in files]
        except DataError as error:
            unreadable.append(str(error))
            continue
        first_is_photo = _first_is_photo([name_of[path] for path in files])
        if len(files) > 1 and not _are_bands(infos, first_is_photo):
            # A photo beside depth or infrared is chosen; two photos, as of two dates, need a list.
            is_chosen = first_is_photo or name.path in listed
            (twins if is_chosen else unclear).append(files)
            files, infos = files[:1], infos[:1]
        images.append(_image(folder, name, files, infos))
    if unclear:
        raise _which_images(folder, unclear)
    _check_bands(folder, name_of, images)
    return images, _notes(images, unreadable, twins)


def _notes(
    images: Sequence[Image], unreadable: Sequence[str], twins: Sequence[Sequence[str]]
) -> list[str]:
    """What is odd about headers; twins: pictures of one label, of which the first is used."""
    joined = [" and ".join(files) for files in twins]
    turned = [image.path for image in images if image.orientation != 1]
    exif = "an EXIF orientation, which is ignored: pixels count as stored"
    first = "several pictures, the first is used"
    return [
        *counted_note(unreadable, "image is left out", "images are left out"),
        *counted_note(joined, f"label fits {first}", f"labels fit {first}"),
        *counted_note(turned, f"image carries {exif}", f"images carry {exif}"),
    ]


def _first_is_photo(files: Sequence[FileName]) -> bool:
    """Whether the first file alone is called a photo: rgb/1.png, and not depth/1.png."""
    first, *others = file_names.are_photos(files)
    return first and not any(others)


def _which_images(folder: Path, pictures: Sequence[Sequence[str]]) -> UndecidedError | DataError:
    """The question which of several pictures are the images; pictures: those of each label."""
    what = f"several pictures for one label: {' and '.join(pictures[0])}"
    parts = [{*PurePosixPath(path).parts} for path in pictures[0]]
    readings = []
    for path, own in zip(pictures[0], parts, strict=True):
        others = set().union(*(part for part in parts if part is not own))
        # The outermost folder that the others do not have.
        folders = [x for x in PurePosixPath(path).parts[:-1] if x not in others]
        if folders:
            option = f"--images {shlex.quote(folders[0])}"
            readings.append(Reading(f"those in {folders[0]}", option, files=(path,)))
    if len(readings) < len(parts):
        repair = "move the others elsewhere, or name image and label by a list"
        return DataError(f"{folder}: {what}; {repair}")
    return UndecidedError(f"{folder}: {what}", readings)


def _image(folder: Path, name: FileName, files: tuple[str, ...], infos: Sequence[Info]) -> Image:
    """The image of these files, each with its header."""
    folders = PurePosixPath(name.path).parent.parts
    return Image(
        files=files,
        size=infos[0].size,
        channels=sum(info.channels for info in infos),
        alpha=infos[-1].alpha,
        dtype=str(infos[0].dtype),
        split=name.split,
        scene="/".join(x for x in folders if not all(map(_is_said, words_of(x)))),
        # 0016e5_ of 0016E5_00390.png, as CamVid has it.
        sequence=re.sub(r"\d+\D*$", "", name.core),
        map_place=place_of(folder / files[0], infos[0]),
        orientation=infos[0].orientation,
    )


def _are_bands(infos: Sequence[Info], first_is_photo: bool) -> bool:
    """Whether several files are the bands of one image, and not pictures of several kinds.

    t0_B02.tif and t0_B03.tif have a channel each. A photo in colour beside infrared is whole.
    """
    first, *others = infos
    form = first.size, first.dtype, 1
    are_alike = all((x.size, x.dtype, x.channels) == form for x in others)
    return are_alike and not (first_is_photo and first.channels > 1)


def _check_bands(folder: Path, name_of: Mapping[str, FileName], images: Sequence[Image]) -> None:
    """Stops where images in several files do not have the same bands, in the same order.

    DataError: they have not; as many others would be taken for them.
    """
    bands: dict[str, tuple[frozenset[str], ...]] = {}
    for image in images:
        words = [{*words_of(name_of[file].pattern)} for file in image.files]
        if len(words) > 1:  # those that all files of an image have are of a place
            bands[image.path] = tuple(frozenset(x - set.intersection(*words)) for x in words)
    usual = Counter(bands.values()).most_common(1)
    if others := [path for path, found in bands.items() if found != usual[0][0]]:
        what = counted(len(others), "image has", "images have")
        raise DataError(f"{folder}: {what} other bands than most: {first_of(others, 3)}")


def _is_said(word: str) -> bool:
    """Whether a word of a folder says a role or a split, and no scene."""
    return word in file_names.ROLE_WORDS or file_names.split_of(word) is not None
