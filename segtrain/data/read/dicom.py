"""Series of DICOM files by SimpleITK: which files are slices, their order, place and values."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from segtrain.data.read.decode import damage_named, printed_lines
from segtrain.errors import ConfigError, DataError
from segtrain.text import counted, first_of, install_line, printable

# The first data element where a DICOM file has no preamble: its group, and a VR or a short length.
_ELEMENT = re.compile(rb"[\2\10]\0.\0([A-Z]{2}|..\0\0)", re.DOTALL)
_PIXEL_DATA = b"\xe0\x7f\x10\0"  # the tag, which reports, outlines and directories do not have
_FILLED = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")
_MOST_FILLED = 16  # bytes
# In the bytes of a file whose header cannot be read: a tag, and the length of its UID.
_RAW_CLASS, _RAW_SERIES = (
    re.compile(b"(?:%b)(?:UI(..)|(..)\\0\\0)" % tag, re.DOTALL)
    for tag in (rb"\x02\0\x02\0|\x08\0\x16\0", rb"\x20\0\x0e\0")
)
_PATIENT, _SERIES, _CLASS, _NUMBER = "0010|0020", "0020|000e", "0008|0016", "0020|0011"
_KIND, _INSTANCE, _IMAGES = "0028|0004", "0020|0013", "0020|1002"
_THICKNESS, _POSITION, _TURN, _SPACING = "0018|0050", "0020|0032", "0020|0037", "0028|0030"
_PLACES = {_POSITION: "ImagePositionPatient", _TURN: "ImageOrientationPatient"}
_PLACES |= {_SPACING: "PixelSpacing"}
# Steps between slices may differ by this fraction, and numbers that files round to six digits.
_STEP, _ROUNDED = 0.05, 1e-4


class Series(NamedTuple):
    """The files of one folder with one SeriesInstanceUID.

    patient, number: PatientID and SeriesNumber. kind: the SOPClassUID. They are empty where files
    say none or cannot be read. name: what tells it from the others of the folder; empty: it is the
    only one.
    """

    folder: Path
    uid: str
    files: tuple[Path, ...]
    patient: str = ""
    number: str = ""
    kind: str = ""
    name: str = ""

    @property
    def about(self) -> str:
        """Which one it is, without the name of a patient."""
        said = f"PatientID {self.patient or 'not said'}, SeriesNumber {self.number or 'not said'}"
        return printable(f"{said}, SeriesInstanceUID {self.uid or 'not said'}")


def dicom_library() -> ModuleType:
    """SimpleITK; ConfigError: it is not installed."""
    try:
        import SimpleITK
    except ImportError:
        what = "DICOM is read by SimpleITK, which is not installed"
        raise ConfigError(f"{what}; {install_line('medical')}") from None
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    return SimpleITK


def is_dicom(path: Path) -> bool:
    """By its content: names often have no suffix, or a number."""
    with path.open("rb") as file:
        start = file.read(132)
    return start[128:] == b"DICM" or _ELEMENT.match(start) is not None


def find_series(paths: Iterable[Path]) -> tuple[list[Series], list[Path]]:
    """The series of DICOM files, and the files of none.

    A file that cannot be read belongs to the series of its folder that it may be a slice of: they
    are refused when they are loaded, as they would be a slice short.
    """
    found: dict[tuple[Path, str], Series] = {}
    broken: list[Path] = []
    for path in paths:
        try:
            header = header_of(path)
        except DataError:
            broken.append(path)
            continue
        uid, *said = (value_of(header, key) for key in (_SERIES, _PATIENT, _NUMBER, _CLASS))
        one = found.get((path.parent, uid), Series(path.parent, uid, (), *said))
        found[path.parent, uid] = one._replace(files=(*one.files, path))
    alone = []
    for path in broken:
        content = path.read_bytes()
        uid, kind = _raw_uid(content, _RAW_SERIES), _raw_uid(content, _RAW_CLASS)
        fits = [
            key
            for key, one in found.items()
            if one.folder == path.parent and uid in ("", one.uid) and kind in ("", one.kind)
        ]
        if not fits and _PIXEL_DATA in content:
            fits = [(path.parent, uid)]
        for key in fits:
            one = found.get(key, Series(*key, (), kind=kind))
            found[key] = one._replace(files=(*one.files, path))
        alone += [] if fits else [path]
    by_folder: dict[Path, list[Series]] = defaultdict(list)
    for _, one in sorted(found.items()):
        by_folder[one.folder].append(one)
    return [one for beside in by_folder.values() for one in _named(beside)], alone


def _named(beside: Sequence[Series]) -> list[Series]:
    """The series of a folder with names that are the same in each call."""
    ways = (
        [one.number and f"{one.patient}_{one.number}" for one in beside],
        [one.uid and f"{one.patient}_{one.uid[-8:]}" for one in beside],
        [one.uid or "none" for one in beside],
    )
    for way in ways if len(beside) > 1 else ():
        names = [re.sub(r"[^\w-]+", "-", name).strip("_-") for name in way]
        if "" not in names and len({x.casefold() for x in names}) == len(names):
            return [one._replace(name=x) for one, x in zip(beside, names, strict=True)]
    return [*beside]


def _raw_uid(content: bytes, key: re.Pattern[bytes]) -> str:
    """The first UID behind a tag in the bytes of a file; empty: none is found."""
    if (found := key.search(content)) is None:
        return ""
    length = int.from_bytes(found[1] or found[2], "little")
    return content[found.end() :][:length].decode("ascii", "replace").strip(" \0")


def header_of(path: Path) -> Any:
    """A reader of SimpleITK that has read the header; DataError: it cannot, or has no picture."""
    reader = dicom_library().ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    with damage_named(path, "DICOM file"):
        os.fspath(path).encode()  # of other names SimpleITK aborts the process
        reader.SetFileName(os.fspath(path))
        try:
            reader.ReadImageInformation()
        except RuntimeError as error:  # its text names files of C++
            raise DataError(f"{printable(path)}: damaged DICOM file") from error
    return reader


def value_of(header: Any, key: str) -> str:
    """Of a data element, as in the file; empty: it has none."""
    return header.GetMetaData(key).strip(" \0") if header.HasMetaDataKey(key) else ""


def _numbers(header: Any, key: str, *default: float) -> np.ndarray:
    """As many as `default`, which holds where the file says none."""
    with damage_named(header.GetFileName(), "DICOM file"):
        text = value_of(header, key)
        return np.array(text.split("\\") if text else default, float).reshape(len(default))


def ordered(folder: Path, files: Sequence[Path]) -> tuple[list[Any], np.ndarray, dict[str, str]]:
    """The headers of a DICOM series in order of their positions, its affine, and what is doubtful.

    no_spacing: why it has none. doubt: why a slice may be missing. Empty: nothing is doubtful.
    """
    place = printable(folder)
    headers = [header_of(path) for path in files]
    for key, keyword in _PLACES.items():
        lack = [i for i, header in enumerate(headers) if not value_of(header, key)]
        if lack and len(files) > 1 and (key == _POSITION or len(lack) < len(files)):
            which = first_of(files[i].name for i in lack)
            raise DataError(f"{place}: {which}: no {keyword}; write it there, or move it away")
    turns = np.stack([_numbers(x, _TURN, 1, 0, 0, 0, 1, 0) for x in headers])
    spacings = np.stack([_numbers(x, _SPACING, 1, 1) for x in headers])
    positions = np.stack([_numbers(x, _POSITION, 0, 0, 0) for x in headers])
    along = turns[0].reshape(2, 3)
    normal = np.cross(*along)
    # Names may be in any order; the position along the normal is what orders slices.
    order = np.argsort(positions @ normal, kind="stable")
    names = [printable(files[i].name) for i in order]
    grids = [[x.GetSize()[:2] for x in headers], spacings, turns]
    if problem := _other_grid(np.concatenate(grids, axis=1)[order], names):
        raise DataError(f"{place}: {problem}")
    positions = positions[order]
    if problem := _uneven(positions, names):
        raise DataError(f"{place}: {problem}")
    steps = np.diff(positions, axis=0)  # (N - 1, 3)
    step = steps.mean(0) if len(steps) else normal * _numbers(headers[0], _THICKNESS, 1)
    down_mm, right_mm = spacings[0]
    affine = np.eye(4)
    # Rows are counted along the second direction, by the first of the spacings (C.7.6.2.1.1).
    affine[:3] = np.column_stack([along[0] * right_mm, along[1] * down_mm, step, positions[0]])
    affine[:2] *= -1  # DICOM counts to the left and to the back
    needed = [_SPACING] if len(steps) else [_SPACING, _THICKNESS]
    is_said = all(value_of(header, key) for header in headers for key in needed)
    why = "" if is_said else "its files say no PixelSpacing, or one slice no SliceThickness"
    return [headers[i] for i in order], affine, {"no_spacing": why, "doubt": _missing(headers)}


def _missing(headers: Sequence[Any]) -> str:
    """Why a slice at an end may be missing, where steps are even; empty: numbers say nothing."""
    numbers = [value_of(header, _INSTANCE) for header in headers]
    there = counted(len(headers), "slice", "slices")
    if all(map(str.isdecimal, numbers)) and len({*map(int, numbers)}) == len(numbers):
        first, last = min(map(int, numbers)), max(map(int, numbers))
        if first > 1 or last - first >= len(numbers):
            what = f"{there}, whose InstanceNumber goes from {first} to {last}"
            return f"{what}: is one missing at an end?"
    said = value_of(headers[0], _IMAGES)
    if said.isdecimal() and int(said) > len(headers):
        return f"{there}, and ImagesInAcquisition says {int(said)}: are some missing?"
    return ""


def _other_grid(grids: np.ndarray, names: Sequence[str]) -> str:
    """Which slices have another size, spacing or orientation (N, K) than most; empty: none."""
    usual = grids[np.lexsort(grids.T)[len(grids) // 2]]  # a row that most share lies in the middle
    odd = np.abs(grids - usual).max(1) > _ROUNDED
    if not odd.any():
        return ""
    which = first_of(name for name, is_odd in zip(names, odd, strict=True) if is_odd)
    what = "differ from the other slices in size, spacing or orientation, as a localizer does"
    return f"{which}: {what}; move it away"


def _uneven(positions: np.ndarray, names: Sequence[str]) -> str:
    """Where slices at (N, 3), in order, are not at even steps; empty: they are."""
    steps = np.diff(positions, axis=0)
    lengths = np.linalg.norm(steps, axis=1)
    # Without zeros, which are the majority where several slices lie at each place.
    usual = float(np.median(lengths[lengths > 0])) if lengths.any() else 0.0
    twice = np.flatnonzero(lengths <= _STEP * usual)
    if len(twice):
        pairs = first_of(f"{names[i]} and {names[i + 1]}" for i in twice)
        what = "slices lie at one place, as echoes or times do; give each a folder of its own"
        return f"{what}: {pairs}"
    if not len(steps) or np.abs(steps - steps.mean(0)).max() <= _STEP * usual:
        return ""
    i = int(np.abs(steps - np.median(steps, axis=0)).max(1).argmax())
    what = f"{names[i]} and {names[i + 1]} lie {lengths[i]:.6g} mm from each other"
    return f"its slices are not at even steps: {what}, others {usual:.6g}; is one missing?"


def slice_values(header: Any) -> np.ndarray:
    """(rows, columns) float32: what the numbers mean, bright where the tissue is."""
    place = printable(header.GetFileName())
    if header.GetSize()[2:] != (1,) or not value_of(header, _KIND).startswith("MONOCHROME"):
        raise DataError(f"{place}: expected one grey picture in each DICOM file")
    header.SetOutputPixelType(dicom_library().sitkFloat32)
    try:
        with printed_lines() as said:
            values = dicom_library().GetArrayFromImage(header.Execute())[0]
    except RuntimeError as error:  # its text names files of C++
        raise DataError(f"{place}: damaged DICOM file") from error
    # All that the decoder of JPEG does about damage.
    if problems := [line for line in said if not _is_harmless(line, Path(header.GetFileName()))]:
        raise DataError(f"{place}: damaged DICOM file: {printable(problems[0])}")
    return values


def _is_harmless(line: str, path: Path) -> bool:
    """Whether a line of GDCM's JPEG decoders tells of a healthy picture.

    It tries one for 8 bits first. Some writers fill up with zeros before the marker of the end.
    """
    if line.startswith(("Unsupported JPEG data precision", "Invalid SOS parameters")):
        return True
    filled = _FILLED.match(line)
    if filled is None:
        return False
    content, number = path.read_bytes(), int(filled[1])
    stream = content[: content.rfind(b"\xff\xd9")]
    # A block that was lost is zeros as well, of which the decoder takes some for pixels.
    zeros = len(stream) - len(stream.rstrip(b"\0"))
    return number <= _MOST_FILLED and number <= zeros <= number + 2
