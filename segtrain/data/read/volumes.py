"""Volumes as stacks of slices: NIfTI by nibabel, series of DICOM files by SimpleITK, TIFF stacks.

NIfTI and DICOM are turned so that their axes go to the right, to the front and to the head of the
patient (RAS+), whatever the order of the file. So a slice shows the same in all: along z, the front
is above; along x and y, the head is. Values are those of the file times its scale.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from segtrain.data.read.decode import damage_named, number_dtype
from segtrain.data.read.find import IMAGE_SUFFIXES
from segtrain.data.read.tiff import check_pages
from segtrain.errors import ConfigError, DataError
from segtrain.files import os_errors_as, temporary, walk
from segtrain.text import counted, first_of, install_line, printable

AXES = "xyz"
_NIFTI = (".nii", ".nii.gz")
_TIFF = (".tif", ".tiff")
# The codes of NIfTI for units of lengths; others are taken for millimetres.
_UNITS = {1: "m", 3: "µm"}
# Of the units that NIfTI, ImageJ and OME say, in millimetres.
MM = {"m": 1e3, "cm": 10.0, "mm": 1.0, "nm": 1e-6}
MM |= dict.fromkeys(("µm", "um", "micron", "microns"), 1e-3)
# The corners of an image and its label may differ by this fraction of a voxel. Axes with spacings
# this close are equally coarse.
_CORNER, _COARSER = 0.1, 1.01
# Of the cosine between two axes, 0.6 degrees: a gantry that was tilted is far beyond it.
_SHEARED = 0.01
# Of the cosine between an axis by sform and by qform: a template turns a head by less.
_SAME_WAY = 0.5


class VolumeFile(NamedTuple):
    """A volume that was found.

    name: a relative path without suffix. files: of a series of DICOM; else `path` alone.
    patient: as DICOM says; empty: nobody says. about: of a series, which one it is.
    """

    path: Path
    name: str
    files: tuple[Path, ...]
    patient: str = ""
    about: str = ""

    @property
    def is_tiff(self) -> bool:
        """Whether it is a stack of no known place in a patient."""
        return self.path.suffix.lower() in _TIFF


class Stack(NamedTuple):
    """The slices of a volume, in order.

    pixels: (N, H, W, C). ids: of the slices, such as `z0003`. spacing: of slices (NaN: not known,
    or they are times), rows and columns; None: nobody says. unit: of spacing; empty: spacing counts
    voxels. place: (4, 4) from voxels, turned to RAS+, to millimetres; None: a TIFF says none.
    note: what had to be assumed; empty: nothing. stored: shape, affine and NIfTI's code of units,
    in the order of the file.
    """

    pixels: np.ndarray
    ids: tuple[str, ...]
    spacing: tuple[float, float, float] | None
    unit: str = "mm"
    place: np.ndarray | None = None
    note: str = ""
    stored: tuple[tuple[int, ...], list[list[float]], int] | None = None

    @property
    def spacing_mm(self) -> tuple[float, ...] | None:
        """As `spacing`; None: not known, or slices are times, or axes are not at right angles."""
        if self.spacing is None or self.unit not in MM or self.ids[0].startswith("t"):
            return None
        if self.place is not None:
            axes = self.place[:3, :3] / np.linalg.norm(self.place[:3, :3], axis=0)
            if np.abs(axes.T @ axes - np.eye(3)).max() > _SHEARED:
                return None
        is_known = not np.isnan(self.spacing[0])
        return tuple(step * MM[self.unit] for step in self.spacing) if is_known else None


def nifti_library() -> ModuleType:
    """nibabel; ConfigError: it is not installed."""
    try:
        import nibabel
    except ImportError:
        what = "NIfTI is read by nibabel, which is not installed"
        raise ConfigError(f"{what}; {install_line('medical')}") from None
    return nibabel


def _suffix(path: Path) -> str:
    return ".nii.gz" if path.name.lower().endswith(".nii.gz") else path.suffix.lower()


def find_volumes(source: Path, *, stacks: bool = False) -> tuple[list[VolumeFile], list[str]]:
    """The volumes at `source`, a file or a folder searched to any depth; none: an empty list.

    Also what to say of DICOM files without a picture, and of what lies beside a series and is not
    of it. stacks: also TIFFs with several pages. A damaged file is named when it is loaded.

    DataError: a folder cannot be read, or a TIFF is damaged.
    """
    from segtrain.data.read import dicom  # what asks for a spacing alone needs none

    volumes: list[VolumeFile] = []
    others: list[Path] = []
    slices: list[Path] = []
    with os_errors_as(DataError):
        is_folder = source.is_dir()
        files = [source]
        if is_folder:
            files = [here / name for here, names in walk(source, hidden=False) for name in names]
        for path in files:
            kind = _suffix(path)
            relative = path.relative_to(source) if is_folder else Path(path.name)
            name = relative.as_posix().removesuffix(path.name[-len(kind) :] if kind else "")
            if kind in _NIFTI or (stacks and kind in _TIFF and _num_pages(path) > 1):
                volumes.append(VolumeFile(path, name, (path,)))
            elif kind not in IMAGE_SUFFIXES and path.is_file():
                (slices if dicom.is_dicom(path) else others).append(path)
        found, alone = dicom.find_series(slices)
    for one in found:
        single = source.stem if _suffix(source) in (".dcm", ".ima") else source.name
        name = one.folder.relative_to(source).as_posix() if is_folder else single
        name = one.folder.name if name == "." else name
        name += f"_{one.name}" if one.name else ""  # a folder may hold several
        volumes.append(VolumeFile(one.folder, name, one.files, one.patient, one.about))
    folders = {one.folder for one in found}
    alone = sorted([*alone, *(path for path in others if path.parent in folders)])
    what = counted(len(alone), "file is of no volume", "files are of no volume")
    short = "a volume is short if one was its slice"
    lines = [f"warning: {what}, and left out; {short}: {first_of(alone, 5)}"] if alone else []
    return volumes, lines


def _num_pages(path: Path) -> int:
    import tifffile

    with damage_named(path, "TIFF"), tifffile.TiffFile(path) as file:
        check_pages(file, path)  # with few or no pages left it would be left out
        return len(file.pages)


def load_volume(file: VolumeFile, *, headers_only: bool = False) -> Any:
    """A nibabel image (X, Y, Z) in the order of the file, its voxels not yet read.

    headers_only: of DICOM, no pixels either, and None is returned.

    DataError: it is damaged, or no volume of single numbers with even steps.
    """
    if file.path.is_dir() or len(file.files) > 1 or _suffix(file.path) not in _NIFTI:
        from segtrain.data.read import dicom

        headers, affine, extra = dicom.ordered(file.path, file.files)
        return None if headers_only else _image_of(map(dicom.slice_values, headers), affine, extra)
    nibabel = nifti_library()
    if not file.path.exists():
        raise DataError(f"{printable(file.path)}: no such file")
    with damage_named(file.path, "volume"), _logged() as said:
        image = nibabel.load(file.path)
        shape, dtype = image.shape, image.get_data_dtype()
    if dtype.kind not in "uif" or len(shape) < 3 or any(n != 1 for n in shape[3:]):
        what = f"expected a volume of single numbers, found {'x'.join(map(str, shape))} {dtype}"
        raise DataError(f"{printable(file.path)}: {what}; store each volume in a file of its own")
    if not np.isfinite(image.affine).all() or np.linalg.matrix_rank(image.affine) < 4:
        what = "its affine (sform or qform) gives voxels no volume; write the spacing there"
        raise DataError(f"{printable(file.path)}: {what}")
    # Further axes are of length 1 here.
    image = image if len(shape) == 3 else image.slicer[(..., *[0] * (len(shape) - 3))]
    image.extra["doubt"] = f"its header was mended: {'; '.join(said)}" if said else ""
    return image


@contextmanager
def _logged() -> Iterator[list[str]]:
    """What nibabel logs inside, which names no file, in the place of lines on the terminal."""
    lines, thread = [], get_ident()

    def kept(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            lines.append(printable(record.getMessage()))
        return record.thread != thread

    logger = nifti_library().imageglobals.logger
    logger.addFilter(kept)
    try:
        yield lines
    finally:
        logger.removeFilter(kept)


def no_spacing(image: Any) -> str:
    """Why the file of what `load_volume` gave says no spacing; empty: it does."""
    header, affine = image.header, image.affine
    if "no_spacing" in image.extra or int(header["xyzt_units"]) % 8:
        return image.extra.get("no_spacing", "")
    # Of `Nifti1Image(values, None)` or `Nifti1Image(values, np.eye(4))`.
    is_placed = (header["sform_code"] or header["qform_code"]) and affine[:3, 3].any()
    if is_placed or not np.array_equal(np.abs(affine[:3, :3]), np.eye(3)):
        return ""
    return "its header has voxels of 1x1x1 without a unit, as where nobody said a spacing"


def unsure_sides(image: Any) -> str:
    """Why left and right of what `load_volume` gave are not sure; empty: the file tells them."""
    header, ways = image.header, []
    if not (header["sform_code"] or header["qform_code"]):
        words = "sform and qform codes 0): left and right are a guess; write the one that is right"
        return f"its header says no orientation ({words}"
    # Of a qform that is none; the sform is what is read.
    with suppress(ValueError, nifti_library().spatialimages.HeaderDataError):
        ways = [header.get_sform(coded=True)[0], header.get_qform(coded=True)[0]]
    if not ways or any(way is None or np.linalg.matrix_rank(way) < 4 for way in ways):
        return ""
    one, other = (way[:3, :3] / np.linalg.norm(way[:3, :3], axis=0) for way in ways)
    if (one * other).sum(0).min() > _SAME_WAY:
        return ""
    to = " and ".join("".join(nifti_library().aff2axcodes(way)) for way in ways)
    return f"its sform and qform say other directions ({to}), and the sform is taken; is it right?"


def voxel_ml(image: Any) -> float:
    """The volume of a voxel in millilitres, also of a rotated or sheared grid."""
    return abs(float(np.linalg.det(image.affine[:3, :3]))) * MM[_unit(image)] ** 3 / 1000


def _unit(image: Any) -> str:
    return _UNITS.get(int(image.header["xyzt_units"]) % 8, "mm")


def _image_of(slices: Iterable[np.ndarray], affine: np.ndarray, extra: dict[str, str]) -> Any:
    """The image of slices of a series, (rows, columns) each."""
    voxels = np.stack([*slices]).transpose(2, 1, 0)
    image = nifti_library().Nifti1Image(voxels, affine, extra=extra)
    image.header.set_xyzt_units("mm")
    return image


def coarsest_axis(image: Any) -> int:
    """The axis, after the turn to RAS+, with the largest spacing; z where none is coarser."""
    # Not of the image as turned: nibabel reads all voxels to turn them.
    to_ras = nifti_library().io_orientation(image.affine)[:, 0].astype(int)
    spacing = [_spacing(image)[i] for i in np.argsort(to_ras)]
    axis = int(np.argmax(spacing))
    others = [step for i, step in enumerate(spacing) if i != axis]
    return axis if spacing[axis] > _COARSER * max(others) else 2


def _spacing(image: Any) -> list[float]:
    return [float(x) for x in nifti_library().affines.voxel_sizes(image.affine)]


def slice_dtype(file: VolumeFile) -> np.dtype:
    """The dtype in which the slices of a volume are read, without reading them."""
    if file.is_tiff:
        return read_tiff_stack(file).pixels.dtype
    data = load_volume(file).dataobj
    # A scale makes floats of whole numbers.
    has_scale = (getattr(data, "slope", 1), getattr(data, "inter", 0)) != (1, 0)
    return np.dtype(np.float32) if has_scale else _kept(data.dtype)


def _kept(dtype: np.dtype) -> np.dtype:
    """uint8 and uint16 in native order; all other numbers become float32."""
    kept = number_dtype(dtype)
    return kept if kept in (np.uint8, np.uint16) else np.dtype(np.float32)


def read_stack(file: VolumeFile, image: Any, axis: int) -> Stack:
    """The slices along an axis (0: x) of what `load_volume` gave."""
    with damage_named(file.path, "volume"):
        turned = nifti_library().as_closest_canonical(image)
        voxels = np.asanyarray(turned.dataobj)
    voxels = voxels.astype(_kept(voxels.dtype), copy=False)
    spacing = _spacing(turned)
    columns, rows = (spacing[i] for i in range(3) if i != axis)
    # Of the two axes left, the first gives columns and the second rows. RAS+ counts upwards and
    # images count downwards, so the rows are reversed.
    pixels = np.moveaxis(voxels, axis, 0).transpose(0, 2, 1)[:, ::-1]
    ids = tuple(f"{AXES[axis]}{i:04d}" for i in range(len(pixels)))
    doubts = unsure_sides(image), no_spacing(image), image.extra["doubt"]
    note = "; ".join(filter(None, doubts))
    stored = image.shape, image.affine.tolist(), int(image.header["xyzt_units"])
    steps, unit = (spacing[axis], rows, columns), "" if no_spacing(image) else _unit(image)
    return Stack(pixels[..., None], ids, steps, unit, turned.affine, note, stored)


def write_volume(path: Path, labels: np.ndarray, image: Any, axis: int) -> None:
    """Writes slices (N, H, W), of ids or floats, as NIfTI in the order and the place of `image`.

    axis: as of `read_stack`.
    """
    nibabel = nifti_library()
    # What `read_stack` did, undone in reverse order.
    voxels = np.moveaxis(labels[:, ::-1].transpose(0, 2, 1), 0, axis)
    from_ras = nibabel.orientations.axcodes2ornt("RAS")
    to_file = nibabel.io_orientation(image.affine)
    turn = nibabel.orientations.ornt_transform(from_ras, to_file)
    voxels = nibabel.orientations.apply_orientation(voxels, turn)
    header = image.header.copy()
    header.set_data_dtype(labels.dtype)
    # The range of grey levels to show, which is that of the image.
    header["cal_min"] = header["cal_max"] = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary(path, ".nii.gz") as draft:
        nibabel.save(type(image)(np.ascontiguousarray(voxels), image.affine, header), draft)
        draft.replace(path)  # a file that is there is whole


def read_tiff_stack(file: VolumeFile) -> Stack:
    """A TIFF of several pages; z and t count slices, channels are the bands of each.

    DataError: it is damaged, has several series, or parts in other files.
    """
    import tifffile

    place = printable(file.path)
    with damage_named(file.path, "TIFF"), tifffile.TiffFile(file.path) as tiff:
        series = tiff.series[0]
        if len(tiff.series) > 1 or series.is_multifile:
            raise DataError(f"{place}: expected one stack in one file")
        stored, axes = series.asarray(), series.axes
        spacing, unit = tiff_spacing(tiff, "ZYX")
        if spacing is None or "T" in axes:
            sides, unit = tiff_spacing(tiff, "YX")
            spacing = sides and (np.nan, *sides)
    # Axes that count slices: time, depth, and pages without a known meaning (Q, I).
    counted = [axis for axis in axes if axis in "TZQI"]
    if set(axes) - set("TZQICSYX") or len(counted) - len({*counted}):
        raise DataError(f"{place}: axes {axes}; store stacks of z and t, with channels at most")
    note = ""
    if set(counted) & set("QI"):
        note = "pages without an axis are taken as slices along z"
    bands = [axis for axis in axes if axis in "CS"]
    order = [axes.index(axis) for axis in (*counted, "Y", "X", *bands)]
    pixels = stored.transpose(order)
    counts = pixels.shape[: len(counted)]
    height, width = pixels.shape[len(counted) : len(counted) + 2]
    pixels = pixels.reshape(int(np.prod(counts)), height, width, -1)
    letters = ["t" if axis == "T" else "z" for axis in counted]
    ids = tuple(
        "_".join(f"{a}{i:04d}" for a, i in zip(letters, index, strict=True))
        for index in np.ndindex(*counts)
    )
    pixels = pixels.astype(number_dtype(pixels.dtype), copy=False)
    return Stack(pixels, ids, spacing, unit, note=note)


def tiff_spacing(tiff: Any, axes: str) -> tuple[tuple[float, ...] | None, str]:
    """Along each of `axes`, as ImageJ or OME says it, and its unit; None: neither does.

    tiff: of tifffile. axes: such as ZYX, for slices, rows and columns.
    """
    if tiff.is_ome:
        return _ome_spacing(tiff.ome_metadata, axes)
    metadata = tiff.imagej_metadata or {}
    tags = {axis: tiff.pages.first.tags.valueof(f"{axis}Resolution") for axis in "YX"}
    said = {axis: x[1] / x[0] for axis, x in tags.items() if metadata and x and x[0]}
    said |= {"Z": float(metadata["spacing"])} if "spacing" in metadata else {}
    if not {*axes} <= said.keys():
        return None, ""
    unit = re.sub(r"\\u00B5|μ", "µ", str(metadata.get("unit", "")), flags=re.IGNORECASE)
    return tuple(said[axis] for axis in axes), unit or "pixels"


def _ome_spacing(text: str, axes: str) -> tuple[tuple[float, ...] | None, str]:
    """As `tiff_spacing`, of the OME-XML of a file, whose unit is µm if it says none."""
    pixels = re.search(r"<(?:\w+:)?Pixels\b[^>]*>", text)
    said = dict(re.findall(r'PhysicalSize([XYZ](?:Unit)?)="([^"]*)"', pixels[0] if pixels else ""))
    units = {said.get(f"{axis}Unit", "µm") for axis in axes}
    if not {*axes} <= said.keys() or len(units) > 1:
        return None, ""
    try:
        return tuple(float(said[axis]) for axis in axes), units.pop().replace("μ", "µ")
    except ValueError:
        return None, ""


def other_grid(image: Stack, label: Stack) -> str:
    """Why a label does not lie on the voxels of its image; empty: it does."""
    if image.pixels.shape[:3] != label.pixels.shape[:3] or image.ids != label.ids:
        shapes = ("x".join(map(str, stack.pixels.shape[:3])) for stack in (label, image))
        return "label of {} voxels, image of {} (slices x rows x columns)".format(*shapes)
    if image.place is None or label.place is None:
        return ""
    # Voxels lie along x, y, z; slices along one of them, their columns and rows along the others.
    sliced = AXES.index(image.ids[0][0])
    number, rows, columns = image.pixels.shape[:3]
    lengths = np.insert([columns, rows], sliced, number)
    # Two affine maps of a box differ most at one of its corners.
    ends = np.array([(*corner, 1) for corner in np.ndindex(2, 2, 2)], float)
    ends[:, :3] *= lengths
    moved = np.abs(ends @ (image.place - label.place).T).max()
    if image.spacing is None or moved <= _CORNER * min(image.spacing):
        return ""
    return f"label and image lie at different places, {moved:.3g} mm apart; resample the label"
