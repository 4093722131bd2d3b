"""Volumes to a data set of images: a file for each slice, and lists of whole patients.

A slice of a .nii.gz takes seconds to reach, so they are written once, as TIFFs and PNGs that all of
training reads. Which volume is the label of which, names and values say, as of images.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from segtrain.data.read import volumes
from segtrain.data.read.concurrent import for_each_pair
from segtrain.data.read.cut_volumes import CUT_VOLUMES, CUT_VOLUMES_FILE, CutVolume
from segtrain.data.read.volumes import AXES, MM, Stack, VolumeFile
from segtrain.desk.volumes.cases import VolumeCase, find_cases, other_number, read_case, why_no_ids
from segtrain.desk.volumes.organ_masks import BACKGROUND, joined, shared_lines
from segtrain.desk.volumes.slice_sides import Written, divide_slices
from segtrain.errors import ConfigError, DataError, ExecutionError, refuse_unused
from segtrain.files import os_errors_as, write_atomic
from segtrain.run.pictures import write_png
from segtrain.text import counted, first_of, printable

IMAGES, LABELS, LISTS, NAMES = "images", "labels", ("train.txt", "val.txt"), "dataset.json"
_DRAFT = ".unfinished"


def import_volumes(
    sources: Sequence[Path],
    found: Sequence[VolumeFile],
    output: Path,
    *,
    axis: str | None = None,
    group: re.Pattern[str] | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Writes the slices of all volumes with a label into `output`; returns what to say.

    Without any labels: of all volumes. axis: x, y or z of the patient; None: the coarsest one.
    group: what in the path of a volume tells its patient.

    Raises:
        ConfigError: `output` holds something, volumes are coarsest along different axes, `group`
            is not in a path, or folders divide a patient.
        DataError: a volume is damaged, or does not lie on the voxels of its label.
    """
    cases, lines = find_cases(found, group)
    number, dtype = _axis(cases, axis), _common_dtype(cases)
    _claim(output, overwrite=overwrite)
    # Until all slices are written: half an import would train as a small data set.
    draft = output / _DRAFT
    write = partial(_write_case, folder=draft, axis=number, dtype=dtype)
    with os_errors_as(ExecutionError, output, "cannot be written"):
        written = list(for_each_pair(write, cases, None, "slices"))
        if cases[0].label is not None:
            train, val, reason = divide_slices(written)
            for name, part in zip(LISTS, (train, val), strict=True):
                text = "".join(f"{IMAGES}/{x}.tif\t{LABELS}/{x}.png\n" for x in part)
                write_atomic(draft / name, text)
            lines.append(f"{len(train)} slices to train, {len(val)} to evaluate: {reason}")
        # Eval measures distances by it, and folds put predicted slices together again.
        cut = {volume.case.name: volume.place for volume in written}
        write_atomic(draft / CUT_VOLUMES_FILE, CUT_VOLUMES.dump_json(cut))
        _write_names(draft / NAMES, sources, written)
        for path in draft.iterdir():
            path.rename(output / path.name)
        draft.rmdir()
    lines += shared_lines(sum((volume.shared for volume in written), Counter()))
    for note in sorted({volume.note for volume in written if volume.note}):
        files = first_of((x.case.image.path for x in written if x.note == note), 3)
        lines.append(f"warning: {files}: {note}")
    along = "z or t" if all(x.image.is_tiff for x in cases) else AXES[number]
    what = counted(len(cases), "volume", "volumes")
    total = sum(len(volume.ids) for volume in written)
    lines.append(f"{total} slices along {along} of {what}: {printable(output)}")
    return lines


def _write_names(path: Path, sources: Sequence[Path], written: Sequence[Written]) -> None:
    """Writes which class an id is, as nnU-Net's dataset.json does, where anything tells it."""
    names = [x for source in sources for x in (source / NAMES, source.parent / NAMES)]
    case, there = written[0].case, next((x for x in names if x.is_file()), None)
    is_binary = all(volume.counts.shape[1] <= 2 for volume in written)
    if case.masks or (len(case.organs) == 1 and is_binary and there is None):
        ids = {name: i for i, name in enumerate((BACKGROUND, *case.organs))}
        write_atomic(path, json.dumps({"labels": ids}, indent=1))
    elif there is not None:
        shutil.copyfile(there, path)


def _claim(output: Path, *, overwrite: bool) -> None:
    """Makes the folder `output`, or empties the one of an earlier import."""
    place = f"--output {printable(output)}"
    with os_errors_as(ConfigError, place, "cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
        there = {path.name: path for path in output.iterdir()}
        if others := there.keys() - {IMAGES, LABELS, NAMES, _DRAFT, CUT_VOLUMES_FILE, *LISTS}:
            raise ConfigError(f"{place}: holds {first_of(sorted(others), 3)}; name a new folder")
        # What an interrupted import has left may go.
        if there and _DRAFT not in there and not overwrite:
            raise ConfigError(f"{place}: holds slices already; --overwrite replaces them")
        for path in there.values():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _axis(cases: Sequence[VolumeCase], axis: str | None) -> int:
    """The axis along which all volumes are cut."""
    files = [case.image for case in cases if not case.image.is_tiff]
    if not files:
        refuse_unused({"axis": axis}, "axis", "TIFF stacks, which say no place in a patient")
    if axis is not None:
        return AXES.index(axis)
    axes = {AXES[volumes.coarsest_axis(volumes.load_volume(file))] for file in files}
    if len(axes) > 1:
        raise ConfigError(
            f"volumes are coarsest along {first_of(sorted(axes))}; slices of all have to show "
            "the same: --axis z cuts all across the body, x and y from the side and the front"
        )
    return AXES.index(axes.pop()) if axes else 2


def _common_dtype(cases: Sequence[VolumeCase]) -> np.dtype:
    """uint8 or uint16 if all volumes hold such numbers without a scale; else float32."""
    found = {volumes.slice_dtype(case.image) for case in cases}
    return found.pop() if len(found) == 1 else np.dtype(np.float32)


def _write_case(case: VolumeCase, folder: Path, axis: int, dtype: np.dtype) -> Written:
    """Writes the images and labels of a volume."""
    import tifffile

    image = read_case(case.image, axis)
    options = {"compression": "deflate", "photometric": "minisblack"}
    options |= {"planarconfig": "contig"} if image.pixels.shape[3] > 1 else {}
    if image.spacing is not None and image.unit in MM:  # pixels a centimetre
        # Of x and y: the first spacing is that between slices.
        options["resolution"] = tuple(10 / MM[image.unit] / x for x in image.spacing[:0:-1])
        options["resolutionunit"] = "CENTIMETER"
        # `predict` takes the sizes of pixels from microscopes alone, whose files have such a text.
        options |= {"description": "ImageJ=1.11a\nunit=cm\n"} if case.image.is_tiff else {}
    (folder / IMAGES / case.name).mkdir(parents=True)
    for name, pixels in zip(image.ids, image.pixels.astype(dtype, copy=False), strict=True):
        path = folder / IMAGES / case.name / f"{name}.tif"
        pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
        tifffile.imwrite(path, pixels, metadata=None, **options)
    counts, shared = np.zeros((len(image.ids), 0)), Counter()
    if case.label is not None:
        read = partial(_checked_label, case, image, axis)
        how = case.organs, case.masks, image, read
        label, shared = joined(*how) if case.masks else (read(case.label), shared)
        counts = _write_labels(case, label, folder)
    named, along = [f"{IMAGES}/{case.name}/{x}" for x in image.ids], image.stored and AXES[axis]
    size = image.pixels.shape[1:3]
    about = {"axis": along, "spacing_mm": image.spacing_mm, "stored": image.stored}
    place = CutVolume(slices=named, size=size, **about)
    return Written(case, image.ids, counts, image.spacing, image.unit, image.note, place, shared)


def _checked_label(case: VolumeCase, image: Stack, axis: int, file: VolumeFile) -> Stack:
    """A label of a case; DataError: no ids, or not of the voxels of its image."""
    label, place = read_case(file, axis), printable(file.path)
    if problem := volumes.other_grid(image, label):
        raise DataError(f"{place}: {problem}: {printable(case.image.path)}")
    pixels = label.pixels
    if pixels.shape[3] != 1:
        raise DataError(f"{place}: {pixels.shape[3]} channels; expected ids in one")
    if other_number(pixels):
        raise DataError(why_no_ids(file))
    return label._replace(pixels=np.round(pixels))


def _write_labels(case: VolumeCase, label: Stack, folder: Path) -> np.ndarray:
    """Returns how many pixels of each slice show each value, (N, K)."""
    highest = int(label.pixels.max())
    ids = label.pixels[..., 0].astype(np.uint8 if highest <= 255 else np.uint16)
    (folder / LABELS / case.name).mkdir(parents=True)
    for name, pixels in zip(label.ids, ids, strict=True):
        write_png(folder / LABELS / case.name / f"{name}.png", pixels)
    return np.stack([np.bincount(x.ravel(), minlength=highest + 1) for x in ids])
