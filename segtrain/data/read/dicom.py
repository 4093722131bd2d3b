"""Series of DICOM files by SimpleITK: which files are slices, their order, place and values."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from segtrain.data.read.decode import damage_named, printed_lines
from segtrain.errors import ConfigError, DataError
from segtrain.text import first_of, install_line, printable

PATIENT, SERIES = "0010|0020", "0020|000e"
# The first data element where a DICOM file has no preamble: its group, and a VR or a short length.
_ELEMENT = re.compile(rb"[\2\10]\0.\0([A-Z]{2}|..\0\0)", re.DOTALL)
_PIXEL_DATA = b"\xe0\x7f\x10\0"  # the tag, which reports, outlines and directories do not have
_FILLED = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")
_MOST_FILLED = 16  # bytes
_KIND = "0028|0004"
_THICKNESS, _POSITION, _TURN, _SPACING = "0018|0050", "0020|0032", "0020|0037", "0028|0030"
# Steps between slices may differ by this fraction, and numbers that files round to six digits.
_STEP, _ROUNDED = 0.05, 1e-4


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


def header_of(path: Path) -> Any:
    """A reader of SimpleITK that has read the header; None: the file has no picture."""
    reader = dicom_library().ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    with damage_named(path, "DICOM file"):
        os.fspath(path).encode()  # of other names SimpleITK aborts the process
        reader.SetFileName(os.fspath(path))
        try:
            reader.ReadImageInformation()
        except RuntimeError as error:  # its text names files of C++
            if _PIXEL_DATA not in path.read_bytes():
                return None
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


def ordered(folder: Path, files: Sequence[Path]) -> tuple[list[Any], np.ndarray, str]:
    """The headers of a DICOM series in order of their positions, its affine, why no spacing."""
    place = printable(folder)
    headers = [header_of(path) for path in files]
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
    return [headers[i] for i in order], affine, why


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
