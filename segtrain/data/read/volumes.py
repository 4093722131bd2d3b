"""Volumes as stacks of slices: NIfTI by nibabel, series of DICOM files by pydicom, TIFF stacks.

NIfTI and DICOM are turned so that their axes go to the right, to the front and to the head of the
patient (RAS+), whatever the order of the file. So a slice shows the same in all: along z, the front
is above; along x and y, the head is. Values are those of the file times its scale.
"""

import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from segtrain.data.read.decode import damage_named, number_dtype
from segtrain.errors import ConfigError, DataError
from segtrain.files import os_errors_as, walk
from segtrain.text import printable

AXES = "xyz"
_NIFTI = (".nii", ".nii.gz")
_DICOM = (".dcm", ".ima", "")
_TIFF = (".tif", ".tiff")
# Steps between slices, and the corners of an image and its label, may differ by these fractions of
# a voxel. Axes with spacings this close are equally coarse.
_UNITS = {"micron": "µm", "meter": "m"}
_STEP, _CORNER, _COARSER = 0.05, 0.1, 1.01


class VolumeFile(NamedTuple):
    """A volume that was found.

    name: a relative path without suffix. files: of a series of DICOM; else `path` alone.
    patient: as DICOM says; empty: nobody says.
    """

    path: Path
    name: str
    files: tuple[Path, ...]
    patient: str = ""

    @property
    def is_tiff(self) -> bool:
        """Whether it is a stack of no known place in a patient."""
        return self.path.suffix.lower() in _TIFF


class Stack(NamedTuple):
    """The slices of a volume, in order.

    pixels: (N, H, W, C). ids: of the slices, such as `z0003`. spacing: of slices, rows and columns;
    None: nobody says. unit: of spacing. place: (4, 4) from voxels, turned to RAS+, to millimetres;
    None: a TIFF says none. note: what had to be assumed; empty: nothing.
    """

    pixels: np.ndarray
    ids: tuple[str, ...]
    spacing: tuple[float, float, float] | None
    unit: str = "mm"
    place: np.ndarray | None = None
    note: str = ""


def nifti_library() -> ModuleType:
    """nibabel; ConfigError: it is not installed."""
    try:
        import nibabel
    except ImportError:
        raise ConfigError(_missing("NIfTI", "nibabel")) from None
    return nibabel


def dicom_library() -> ModuleType:
    """pydicom; ConfigError: it is not installed."""
    try:
        import pydicom
    except ImportError:
        raise ConfigError(_missing("DICOM", "pydicom")) from None
    return pydicom


def _missing(kind: str, library: str) -> str:
    return (
        f"{kind} is read by {library}, which is not installed; in the checkout of segtrain: pip "
        "install '.[medical]'"
    )


def _suffix(path: Path) -> str:
    return ".nii.gz" if path.name.lower().endswith(".nii.gz") else path.suffix.lower()


def find_volumes(source: Path, *, stacks: bool = False) -> list[VolumeFile]:
    """The volumes at `source`, a file or a folder searched to any depth; none: an empty list.

    stacks: also TIFFs with several pages.

    DataError: a folder cannot be read.
    """
    found: list[VolumeFile] = []
    series: dict[tuple[Path, str], list[tuple[Path, str]]] = defaultdict(list)
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
                found.append(VolumeFile(path, name, (path,)))
            elif kind in _DICOM and path.is_file() and _is_dicom(path):
                header = _header_of(path)
                if "Rows" in header:  # no report, and no outlines
                    uid = str(header.get("SeriesInstanceUID", ""))
                    series[path.parent, uid].append((path, str(header.get("PatientID", ""))))
    folders = [folder for folder, _ in series]
    for number, ((folder, _), members) in enumerate(sorted(series.items())):
        name = folder.relative_to(source).as_posix() if is_folder else source.stem
        name = folder.name if name == "." else name
        name += f"_{number}" if folders.count(folder) > 1 else ""
        paths = tuple(path for path, _ in members)
        found.append(VolumeFile(folder, name, paths, members[0][1]))
    return found


def _num_pages(path: Path) -> int:
    import tifffile

    with damage_named(path, "TIFF"), tifffile.TiffFile(path) as file:
        return len(file.pages)


def _is_dicom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def _header_of(path: Path) -> Any:
    names = ["SeriesInstanceUID", "PatientID", "Rows"]
    pydicom = dicom_library()
    with damage_named(path, "DICOM file"):
        return pydicom.dcmread(path, stop_before_pixels=True, specific_tags=names)


def load_volume(file: VolumeFile) -> Any:
    """A nibabel image (X, Y, Z) in the order of the file, its voxels not yet read.

    DataError: it is damaged, or no volume of single numbers with even steps.
    """
    if file.path.is_dir() or len(file.files) > 1 or _suffix(file.path) not in _NIFTI:
        return _load_series(file)
    nibabel = nifti_library()
    with damage_named(file.path, "volume"):
        image = nibabel.load(file.path)
        shape, dtype = image.shape, image.get_data_dtype()
    if dtype.kind not in "uif" or len(shape) < 3 or any(n != 1 for n in shape[3:]):
        what = f"expected a volume of single numbers, found {'x'.join(map(str, shape))} {dtype}"
        raise DataError(f"{printable(file.path)}: {what}; store each volume in a file of its own")
    return image if len(shape) == 3 else image.slicer[(..., *[0] * (len(shape) - 3))]


def _load_series(file: VolumeFile) -> Any:
    """A series of DICOM files, in the order of their positions, as nibabel has it."""
    pydicom = dicom_library()
    headers = []
    for path in file.files:
        with damage_named(path, "DICOM file"):
            headers.append(pydicom.dcmread(path))
    place = printable(file.path)
    first = headers[0]
    along = np.array(first.get("ImageOrientationPatient", (1, 0, 0, 0, 1, 0)), float).reshape(2, 3)
    normal = np.cross(*along)
    positions = [np.array(x.get("ImagePositionPatient", (0, 0, 0)), float) for x in headers]
    order = np.argsort([position @ normal for position in positions], kind="stable")
    headers, positions = [headers[i] for i in order], [positions[i] for i in order]
    steps = np.diff(positions, axis=0)  # (N - 1, 3)
    step = steps.mean(0) if len(steps) else normal * float(first.get("SliceThickness") or 1)
    length = float(np.linalg.norm(step))
    if len(steps) and (length == 0 or np.abs(steps - step).max() > _STEP * length):
        what = "its slices do not follow each other at even steps: one is missing or there twice"
        raise DataError(f"{place}: {what}")
    same = ("Rows", "Columns", "PixelSpacing", "ImageOrientationPatient")
    if any(x.get(key) != first.get(key) for x in headers for key in same):
        raise DataError(f"{place}: its slices differ in size, spacing or orientation")
    slices = [_dicom_values(x, place) for x in headers]  # (rows, columns) each
    down_mm, right_mm = map(float, first.get("PixelSpacing", (1, 1)))
    affine = np.eye(4)
    # Rows are counted along the second direction, by the first of the spacings (C.7.6.2.1.1).
    affine[:3] = np.column_stack([along[0] * right_mm, along[1] * down_mm, step, positions[0]])
    affine[:2] *= -1  # DICOM counts to the left and to the back
    return nifti_library().Nifti1Image(np.stack(slices).transpose(2, 1, 0), affine)


def _dicom_values(header: Any, place: str) -> np.ndarray:
    """(rows, columns) float32: what the numbers mean, bright where the tissue is."""
    with damage_named(place, "DICOM file"):
        stored = header.pixel_array
    if stored.ndim != 2 or not str(header.PhotometricInterpretation).startswith("MONOCHROME"):
        raise DataError(f"{place}: expected one grey picture in each DICOM file")
    values = stored.astype(np.float32)
    if header.PhotometricInterpretation == "MONOCHROME1":  # the lowest number is white
        is_signed = int(header.PixelRepresentation)
        values = (-1 if is_signed else 2 ** int(header.BitsStored) - 1) - values
    slope, intercept = header.get("RescaleSlope", 1), header.get("RescaleIntercept", 0)
    return values * np.float32(slope) + np.float32(intercept)


def coarsest_axis(image: Any) -> int:
    """The axis, after the turn to RAS+, with the largest spacing; z where none is coarser."""
    spacing = _spacing(_turned(image))
    axis = int(np.argmax(spacing))
    others = [one for i, one in enumerate(spacing) if i != axis]
    return axis if spacing[axis] > _COARSER * max(others) else 2


def _turned(image: Any) -> Any:
    return nifti_library().as_closest_canonical(image)


def _spacing(image: Any) -> list[float]:
    return [float(x) for x in nifti_library().affines.voxel_sizes(image.affine)]


def slice_dtype(file: VolumeFile) -> np.dtype:
    """The dtype in which the slices of a volume are read, without reading them."""
    if file.is_tiff:
        return read_tiff_stack(file).pixels.dtype
    data = load_volume(file).dataobj
    has_scale = (getattr(data, "slope", 1), getattr(data, "inter", 0)) != (1, 0)
    return np.dtype(np.float32) if has_scale else _kept(data.dtype)


def _kept(dtype: np.dtype) -> np.dtype:
    """uint8 and uint16 in native order; all other numbers become float32."""
    kept = number_dtype(dtype)
    return kept if kept in (np.uint8, np.uint16) else np.dtype(np.float32)


def read_stack(file: VolumeFile, image: Any, axis: int) -> Stack:
    """The slices along an axis (0: x) of what `load_volume` gave."""
    turned = _turned(image)
    with damage_named(file.path, "volume"):
        voxels = np.asanyarray(turned.dataobj)
    voxels = voxels.astype(_kept(voxels.dtype), copy=False)
    spacing = _spacing(turned)
    columns, rows = (spacing[i] for i in range(3) if i != axis)
    pixels = np.moveaxis(voxels, axis, 0).transpose(0, 2, 1)[:, ::-1]
    ids = tuple(f"{AXES[axis]}{i:04d}" for i in range(len(pixels)))
    unit = _UNITS.get(turned.header.get_xyzt_units()[0], "mm")
    return Stack(pixels[..., None], ids, (spacing[axis], rows, columns), unit, turned.affine)


def write_label_volume(path: Path, labels: np.ndarray, image: Any, axis: int) -> None:
    """Writes slices (N, H, W) of ids as NIfTI, in the order and the place of `image`.

    axis: as of `read_stack`.
    """
    nibabel = nifti_library()
    voxels = np.moveaxis(labels[:, ::-1].transpose(0, 2, 1), 0, axis)
    from_ras = nibabel.orientations.axcodes2ornt("RAS")
    to_file = nibabel.io_orientation(image.affine)
    turn = nibabel.orientations.ornt_transform(from_ras, to_file)
    voxels = nibabel.orientations.apply_orientation(voxels, turn)
    header = image.header.copy()
    header.set_data_dtype(labels.dtype)
    header["cal_min"] = header["cal_max"] = 0
    nibabel.save(type(image)(np.ascontiguousarray(voxels), image.affine, header), path)


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
        spacing, unit = _tiff_spacing(tiff)
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


def _tiff_spacing(tiff: Any) -> tuple[tuple[float, float, float] | None, str]:
    """Of slices, rows and columns, as ImageJ or OME says it, and its unit; None: neither does."""
    if tiff.is_ome:
        return _ome_spacing(tiff.ome_metadata)
    found = tiff.imagej_metadata or {}
    resolution = [tiff.pages.first.tags.valueof(f"{axis}Resolution") for axis in "YX"]
    if "spacing" not in found or not all(x and x[0] for x in resolution):
        return None, ""
    rows, columns = (x[1] / x[0] for x in resolution)
    unit = str(found.get("unit", "")).replace("\\u00B5", "µ") or "pixels"
    return (float(found["spacing"]), rows, columns), unit


def _ome_spacing(text: str) -> tuple[tuple[float, float, float] | None, str]:
    """As `_tiff_spacing`, of the OME-XML of a file, whose unit is µm if it says none."""
    pixels = re.search(r"<(?:\w+:)?Pixels\b[^>]*>", text)
    said = dict(re.findall(r'PhysicalSize([XYZ](?:Unit)?)="([^"]*)"', pixels[0] if pixels else ""))
    units = {said.get(f"{axis}Unit", "µm") for axis in "ZYX"}
    if not {*"ZYX"} <= said.keys() or len(units) > 1:
        return None, ""
    try:
        slices, rows, columns = (float(said[axis]) for axis in "ZYX")
    except ValueError:
        return None, ""
    return (slices, rows, columns), units.pop()


def other_grid(image: Stack, label: Stack) -> str:
    """Why a label does not lie on the voxels of its image; empty: it does."""
    if image.pixels.shape[:3] != label.pixels.shape[:3] or image.ids != label.ids:
        shapes = ("x".join(map(str, one.pixels.shape[:3])) for one in (label, image))
        return "label of {} voxels, image of {} (slices x rows x columns)".format(*shapes)
    if image.place is None or label.place is None:
        return ""
    # Voxels lie along x, y, z; slices along one of them, their columns and rows along the others.
    sliced = AXES.index(image.ids[0][0])
    number, rows, columns = image.pixels.shape[:3]
    lengths = np.insert([columns, rows], sliced, number)
    ends = np.array([(*corner, 1) for corner in np.ndindex(2, 2, 2)], float)
    ends[:, :3] *= lengths
    moved = np.abs(ends @ (image.place - label.place).T).max()
    if image.spacing is None or moved <= _CORNER * min(image.spacing):
        return ""
    return f"label and image lie at different places, {moved:.3g} mm apart; resample the label"
