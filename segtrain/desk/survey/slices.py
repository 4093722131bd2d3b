"""Volumes to a data set of images: a file for each slice, and lists of whole patients.

A slice of a .nii.gz takes seconds to reach, so they are written once, as TIFFs and PNGs that all of
training reads. Which volume is the label of which, names and values say, as of images.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from segtrain.data.read import volumes
from segtrain.data.read.concurrent import for_each_pair
from segtrain.data.read.sources import groups_of, stems_of, without_times
from segtrain.data.read.volumes import AXES, Stack, VolumeFile, find_volumes
from segtrain.desk.survey.contents import LabelFacts, spread
from segtrain.desk.survey.file_names import MADE_WORDS, ROLE_WORDS, parse_names, split_of, words_of
from segtrain.desk.survey.one_picture import best_span
from segtrain.desk.survey.splits import DEFAULT_VAL, chosen_groups
from segtrain.desk.survey.survey import matched
from segtrain.errors import ConfigError, DataError, ExecutionError, refuse_unused
from segtrain.files import os_errors_as, write_atomic
from segtrain.run.pictures import write_png
from segtrain.text import counted, first_of, printable

IMAGES, LABELS, LISTS, NAMES = "images", "labels", ("train.txt", "val.txt"), "dataset.json"
_DRAFT = ".unfinished"
_MOST_IDS, _FLAT, _MOST_CLASSES, _SAMPLE = 256, 0.7, 1 << 16, 3
# How far from whole numbers ids may be: by the last digits of a scale, or by half a step of bytes
# with a scale, if no two of them would become one.
_LAST_DIGITS, _HALF_STEP = 1e-3, 0.1
# Of one volume: slices are left out on both sides of those to evaluate on.
_GAP = 1 / 40


# Of the units that NIfTI, ImageJ and OME say.
_PER_CM = {"mm": 10.0, "cm": 1.0, "µm": 1e4, "um": 1e4, "micron": 1e4, "microns": 1e4, "nm": 1e7}


class _Case(NamedTuple):
    """A volume to cut.

    label: None: there are no labels. name: of the folder of its slices. group: what stays on one
    side of the split. split: train, val or test, where a folder says so.
    """

    image: VolumeFile
    label: VolumeFile | None
    name: str
    group: str
    split: str | None


class _Written(NamedTuple):
    """The slices of a case, how many pixels of each show each value, (N, K), and what to say."""

    case: _Case
    ids: tuple[str, ...]
    counts: np.ndarray
    spacing: tuple[float, float, float] | None
    unit: str
    note: str


def find_all(sources: Sequence[Path]) -> tuple[list[VolumeFile], list[str]]:
    """The volumes among `sources`, and what to say; empty: they are annotations, or nothing."""
    volume_files: list[VolumeFile] = []
    notes: list[str] = []
    for source in sources:
        start = f"{source.name}/" if len(sources) > 1 and source.is_dir() else ""
        there, said = find_volumes(source, stacks=True)
        volume_files += [volume._replace(name=start + volume.name) for volume in there]
        notes += said
    return volume_files, notes


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
    cases, lines = _cases(found, group)
    number, dtype = _axis(cases, axis), _common_dtype(cases)
    _claim(output, overwrite=overwrite)
    # Until all slices are written: half an import would train as a small data set.
    draft = output / _DRAFT
    write = partial(_write_case, folder=draft, axis=number, dtype=dtype)
    with os_errors_as(ExecutionError, output, "cannot be written"):
        written = list(for_each_pair(write, cases, None, "slices"))
        if cases[0].label is not None:
            train, val, reason = _split(written)
            for name, part in zip(LISTS, (train, val), strict=True):
                text = "".join(f"{IMAGES}/{x}.tif\t{LABELS}/{x}.png\n" for x in part)
                write_atomic(draft / name, text)
            lines.append(f"{len(train)} slices to train, {len(val)} to evaluate: {reason}")
        names = [x for source in sources for x in (source / NAMES, source.parent / NAMES)]
        if there := next((x for x in names if x.is_file()), None):  # nnU-Net's, of the classes
            shutil.copyfile(there, draft / NAMES)
        for path in draft.iterdir():
            path.rename(output / path.name)
        draft.rmdir()
    lines += [f"warning: {note}" for note in {volume.note for volume in written} if note]
    along = "z or t" if all(x.image.is_tiff for x in cases) else AXES[number]
    what = counted(len(cases), "volume", "volumes")
    total = sum(len(volume.ids) for volume in written)
    lines.append(f"{total} slices along {along} of {what}: {printable(output)}")
    return lines


def _claim(output: Path, *, overwrite: bool) -> None:
    """Makes the folder `output`, or empties the one of an earlier import."""
    place = f"--output {printable(output)}"
    with os_errors_as(ConfigError, place, "cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
        there = {path.name: path for path in output.iterdir()}
        if others := there.keys() - {IMAGES, LABELS, NAMES, _DRAFT, *LISTS}:
            raise ConfigError(f"{place}: holds {first_of(sorted(others), 3)}; name a new folder")
        # What an interrupted import has left may go.
        if there and _DRAFT not in there and not overwrite:
            raise ConfigError(f"{place}: holds slices already; --overwrite replaces them")
        for path in there.values():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _cases(
    found: Sequence[VolumeFile], group: re.Pattern[str] | None
) -> tuple[list[_Case], list[str]]:
    """Which volumes are labels, and whose."""
    # With a suffix, as names of pictures have one.
    by_path = {f"{x.name}{'.tif' if x.is_tiff else '.nii'}": x for x in found}
    if len(by_path) < len(found):
        raise DataError("several volumes have one name; import them one by one")
    # imagesTr/p01.nii and labelsTr/p01.nii are told apart and paired as pictures are.
    names = parse_names(list(by_path))
    of_pattern: dict[str, list[str]] = defaultdict(list)
    for name in names:
        of_pattern[name.pattern].append(name.path)
    facts = {
        pattern: [_facts(by_path[path]) for path in spread(paths, _SAMPLE)]
        for pattern, paths in of_pattern.items()
    }
    roles, images, _, matches = matched(names, facts)
    shared = {image: bands for image, bands in matches.bands.items() if image in matches.labels}
    if shared or any(len(labels) > 1 for labels in matches.labels.values()):
        several = next(iter(shared.items()), None) or next(
            (image, labels) for image, labels in matches.labels.items() if len(labels) > 1
        )
        what = "several volumes for one image or label; keep one of each"
        raise DataError(f"{several[0]}: {what}: {first_of(several[1], 3)}")
    if "label" in roles.values() and not matches.labels:
        raise DataError(f"no label fits a volume by its name: {first_of(sorted(by_path), 4)}")
    alone = [image.path for image in images if image.path not in matches.labels]
    made = [path for x, paths in of_pattern.items() if roles[x] == "made" for path in paths]
    # No preview by its name, so it was meant as a label.
    unlike = [path for path in made if MADE_WORDS.isdisjoint(words_of(path))]
    if unlike and not matches.labels:
        raise DataError(_why_no_ids(by_path[unlike[0]]))
    lines = [] if matches.labels else ["warning: no labels: images alone are written"]
    lines += [
        f"warning: {counted(len(files), one, many)}: {first_of(files, 3)}"
        for files, one, many in (
            (alone, "volume has no label, and is left out", "volumes have none, and are left out"),
            (matches.alone, "label has no volume", "labels have no volume"),
            (matches.unclear, "label fits several volumes", "labels fit several volumes"),
            (unlike, "label holds no ids, and is left out", "labels hold no ids, and are left out"),
        )
        if files and matches.labels
    ]
    others = sorted({*made} - {*unlike})
    named = "volume is left out by its name", "volumes are left out by their names"
    lines += [f"warning: {counted(len(others), *named)}: {first_of(others, 3)}"] if others else []
    used = [image for image in images if image.path in matches.labels] or images
    files = [by_path[image.path] for image in used]
    labels = [by_path[x[0]] if (x := matches.labels.get(i.path)) else None for i in used]
    short = [_without_roles(file.name) for file in files]
    shown = short if len({*short}) == len(short) else [file.name for file in files]
    splits = [image.split for image in used]
    groups = groups_of(group, [x.name for x in files]) if group else _groups(files)
    # What a folder is called may be a hospital.
    _check_sides(groups if group else [file.patient for file in files], splits)
    return list(map(_Case, files, labels, shown, groups, splits)), lines


def _check_sides(patients: Sequence[str], splits: Sequence[str | None]) -> None:
    """Refuses folders of splits that divide a patient; empty: not known."""
    evaluated = "val" if "val" in splits else "test"
    train, val = (
        {x for x, split in zip(patients, splits, strict=True) if x and split == wanted}
        for wanted in ("train", evaluated)
    )
    if both := sorted(train & val):
        what = counted(len(both), "patient is", "patients are")
        raise ConfigError(
            f"{what} in the folders of train and of {evaluated}: {first_of(both)}; put the volumes "
            "of each on one side, or give --group a pattern that tells them apart"
        )


def _without_roles(name: str) -> str:
    """The name without folders that say a role or a split, as `imagesTr`."""
    *folders, stem = name.split("/")
    kept = [x for x in folders if not all(w in ROLE_WORDS or split_of(w) for w in words_of(x))]
    return "/".join([*kept, stem])


def _facts(file: VolumeFile) -> LabelFacts:
    """Whether the middle slice of a volume looks like ids."""
    stack = _read(file, None)
    # At the ends of a volume there is often nothing.
    middle = stack.pixels[len(stack.pixels) // 2]
    is_flat = (middle[:, 1:] == middle[:, :-1]).mean() > _FLAT and middle.shape[2] == 1
    is_ids = is_flat and not _other_number(middle) and len(np.unique(middle)) <= _MOST_IDS
    return LabelFacts("ids" if is_ids else "picture", middle.shape[:2], {})


def _other_number(pixels: np.ndarray) -> str:
    """A number that is no id from 0 to 65535, if there is one; empty: all can be rounded to ids."""
    numbers = np.unique(pixels)
    ids = np.round(numbers)
    # Half a step is fine only if no two numbers become one id.
    near = _HALF_STEP if len(np.unique(ids)) == len(ids) else _LAST_DIGITS
    strange = numbers[~((np.abs(numbers - ids) <= near) & (ids >= 0) & (ids < _MOST_CLASSES))]
    return f"{strange[0]:g}" if len(strange) else ""


def _why_no_ids(file: VolumeFile) -> str:
    """Why a volume that is called a label cannot be one."""
    place, number = printable(file.path), _other_number(_read(file, None).pixels)
    if not number:
        return f"{place}: called a label, and looks like a picture; rename or move what is none"
    repair = "store ids, and 255 where nothing is labelled"
    return f"{place}: expected ids from 0 to 65535, found {number}; {repair}"


def _read(file: VolumeFile, axis: int | None) -> Stack:
    if file.is_tiff:
        return volumes.read_tiff_stack(file)
    image = volumes.load_volume(file)
    return volumes.read_stack(file, image, volumes.coarsest_axis(image) if axis is None else axis)


def _axis(cases: Sequence[_Case], axis: str | None) -> int:
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


def _common_dtype(cases: Sequence[_Case]) -> np.dtype:
    """uint8 or uint16 if all volumes hold such numbers without a scale; else float32."""
    found = {volumes.slice_dtype(case.image) for case in cases}
    return found.pop() if len(found) == 1 else np.dtype(np.float32)


def _groups(files: Sequence[VolumeFile]) -> list[str]:
    """What stays on one side of the split: a patient, as DICOM, a folder or a name says."""
    names = [without_times(file.name) for file in files]
    # The first folder with a number, as of a patient, if all volumes lie in such folders, and not
    # in one alone.
    folders = [
        next((x for x in PurePosixPath(name).parts[:-1] if any(map(str.isdecimal, x))), "")
        for name in names
    ]
    by_folder = len({*folders}) > 1 and "" not in folders
    stems = stems_of(folders if by_folder else names)
    return [file.patient or stem for file, stem in zip(files, stems, strict=True)]


def _write_case(case: _Case, folder: Path, axis: int, dtype: np.dtype) -> _Written:
    """Writes the images and labels of a volume."""
    import tifffile

    image = _read(case.image, axis)
    options = {"compression": "deflate", "photometric": "minisblack"}
    options |= {"planarconfig": "contig"} if image.pixels.shape[3] > 1 else {}
    if image.spacing is not None and image.unit in _PER_CM:  # pixels a centimetre
        per_cm = _PER_CM[image.unit]
        # Of x and y: the first spacing is that between slices.
        options["resolution"] = tuple(per_cm / x for x in image.spacing[:0:-1])
        options["resolutionunit"] = "CENTIMETER"
    (folder / IMAGES / case.name).mkdir(parents=True)
    for name, pixels in zip(image.ids, image.pixels.astype(dtype, copy=False), strict=True):
        path = folder / IMAGES / case.name / f"{name}.tif"
        pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
        tifffile.imwrite(path, pixels, metadata=None, **options)
    counts = np.zeros((len(image.ids), 0))
    if case.label is not None:
        counts = _write_labels(case, _checked_label(case, image, axis), folder)
    return _Written(case, image.ids, counts, image.spacing, image.unit, image.note)


def _checked_label(case: _Case, image: Stack, axis: int) -> Stack:
    """DataError: no ids, or not of these voxels."""
    label, place = _read(case.label, axis), printable(case.label.path)
    if problem := volumes.other_grid(image, label):
        raise DataError(f"{place}: {problem}: {printable(case.image.path)}")
    pixels = label.pixels
    if pixels.shape[3] != 1:
        raise DataError(f"{place}: {pixels.shape[3]} channels; expected ids in one")
    if _other_number(pixels):
        raise DataError(_why_no_ids(case.label))
    return label._replace(pixels=np.round(pixels))


def _write_labels(case: _Case, label: Stack, folder: Path) -> np.ndarray:
    """Returns how many pixels of each slice show each value, (N, K)."""
    highest = int(label.pixels.max())
    ids = label.pixels[..., 0].astype(np.uint8 if highest <= 255 else np.uint16)
    (folder / LABELS / case.name).mkdir(parents=True)
    for name, pixels in zip(label.ids, ids, strict=True):
        write_png(folder / LABELS / case.name / f"{name}.png", pixels)
    return np.stack([np.bincount(x.ravel(), minlength=highest + 1) for x in ids])


def _split(written: Sequence[_Written]) -> tuple[list[str], list[str], str]:
    """Slices to train and to evaluate on, and why; all of a patient are on one side."""
    names = [[f"{volume.case.name}/{x}" for x in volume.ids] for volume in written]
    said = [volume.case.split for volume in written]
    groups = [volume.case.group for volume in written]
    evaluated = "val" if "val" in said else "test"
    # The folders' own splits, else whole patients, else a part of the only volume.
    if "train" in said and evaluated in said:
        sides, reason = said, f"the folders' train and {evaluated}"
        others = [
            volume.case.name for volume in written if volume.case.split not in ("train", evaluated)
        ]
        if others:
            what = counted(len(others), "volume is", "volumes are")
            reason += f"; {what} in no list: {first_of(others, 3)}"
    elif len({*groups}) > 1:
        chosen = chosen_groups(
            [x for x, volume in zip(groups, names, strict=True) for _ in volume], DEFAULT_VAL
        )
        sides = [evaluated if x in chosen else "train" for x in groups]
        what = counted(len(chosen), "patient or volume", "patients or volumes")
        reason = f"whole {what} of {len({*groups})}, chosen by a hash of the names (--group)"
    elif len(written) > 1:
        raise DataError("all volumes are of one patient, so there is nothing to evaluate on")
    else:
        return _split_one(written[0], names[0])
    train, val = (
        [x for side, volume in zip(sides, names, strict=True) if side == wanted for x in volume]
        for wanted in ("train", evaluated)
    )
    return train, val, reason


def _split_one(one: _Written, names: Sequence[str]) -> tuple[list[str], list[str], str]:
    """A span of slices of the only volume, with a gap on both sides."""
    width, gap = max(1, round(DEFAULT_VAL * len(names))), max(1, round(_GAP * len(names)))
    if len(names) < width + gap + 1:
        raise DataError(f"{one.case.name}: too few slices to train and evaluate: {len(names)}")
    _, first = best_span(one.counts, width, gap)
    last = first + width
    train = [*names[: max(0, first - gap)], *names[last + gap :]]
    apart = f"{gap + 1} slices"
    if one.spacing is not None:
        apart += f" ({(gap + 1) * one.spacing[0]:.4g} {one.unit})"
    span = f"slices {one.ids[first]} to {one.ids[last - 1]}"
    return train, list(names[first:last]), f"{span}, {apart} from the nearest to train on"
