"""Which volumes are images and labels, and whose: by names and values, as of pictures."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from segtrain.data.read import volumes
from segtrain.data.read.sources import groups_of, stems_of, without_times
from segtrain.data.read.volumes import Stack, VolumeFile, find_volumes
from segtrain.desk.survey.affixes import parse_names
from segtrain.desk.survey.contents import LabelFacts, spread
from segtrain.desk.survey.file_names import MADE_WORDS, ROLE_WORDS, split_of, words_of
from segtrain.desk.survey.paired_names import matched
from segtrain.desk.survey.pairs import Matches
from segtrain.desk.survey.roles import roles_of
from segtrain.desk.volumes.organ_masks import class_order, is_mask, missing_lines, organs_of
from segtrain.errors import ConfigError, DataError
from segtrain.text import counted, first_of, printable

_CHANNEL = "_0000"
_MOST_IDS, _FLAT, _MOST_CLASSES, _SAMPLE = 256, 0.7, 1 << 16, 3
# How far from whole numbers ids may be: by the last digits of a scale, or by half a step of bytes
# with a scale, if no two of them would become one.
_LAST_DIGITS, _HALF_STEP = 1e-3, 0.1


class VolumeCase(NamedTuple):
    """A volume to cut.

    label: None: there are no labels. name: of the folder of its slices. group: what stays on one
    side of the split. split: train, val or test, where a folder says so. organs: the classes that
    paths of labels tell, in the order of their ids, from 1. masks: that make the label together, by
    organ, of which `label` is one; empty: it holds ids.
    """

    image: VolumeFile
    label: VolumeFile | None
    name: str
    group: str
    split: str | None
    organs: tuple[str, ...] = ()
    masks: Mapping[str, VolumeFile] = MappingProxyType({})


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


def find_cases(
    found: Sequence[VolumeFile], group: re.Pattern[str] | None
) -> tuple[list[VolumeCase], list[str]]:
    """The volumes to cut, with their labels, and warnings; without any labels, all volumes.

    group: what in the path of a volume tells its patient.

    Raises:
        DataError: several volumes for one label, or labels that fit none or hold no ids.
        ConfigError: `group` is not in a path, or folders divide a patient.
    """
    # With a suffix, as names of pictures have one.
    by_path = {
        f"{name}{'.tif' if x.is_tiff else '.nii'}": x
        for name, x in zip(_without_channel([x.name for x in found]), found, strict=True)
    }
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
    roles = roles_of(names, facts)
    images, _, matches = matched(names, roles)
    organs = organs_of(matches.labels, {x.path: x for x in (*names, *images)})
    _check_one_each(matches, are_masks=bool(organs))
    if "label" in roles.values() and not matches.labels:
        raise DataError(f"no label fits a volume by its name: {first_of(sorted(by_path), 4)}")
    made = [path for x, paths in of_pattern.items() if roles[x] == "made" for path in paths]
    # No preview by its name, so it was meant as a label.
    unlike = [path for path in made if MADE_WORDS.isdisjoint(words_of(path))]
    if unlike and not matches.labels:
        raise DataError(why_no_ids(by_path[unlike[0]]))
    lines = _left_out_lines(matches, [image.path for image in images], made, unlike)
    used = [image for image in images if image.path in matches.labels] or images
    files = [by_path[image.path] for image in used]
    labels = [by_path[x[0]] if (x := matches.labels.get(i.path)) else None for i in used]
    short = [_without_roles(file.name) for file in files]
    shown = short if len({*short}) == len(short) else [file.name for file in files]
    splits = [image.split for image in used]
    groups = groups_of(group, [x.name for x in files]) if group else _groups(files)
    # What a folder is called may be a hospital.
    _check_sides(groups if group else [file.patient for file in files], splits)
    order = class_order(organs)
    cases = [
        VolumeCase(*about, order)
        for about in zip(files, labels, shown, groups, splits, strict=True)
    ]
    if not _are_masks(matches, order, by_path):
        return cases, lines
    masks = [{organs[x]: by_path[x] for x in matches.labels[image.path]} for image in used]
    lines += missing_lines(order, dict(zip(shown, masks, strict=True)))
    return [case._replace(masks=x) for case, x in zip(cases, masks, strict=True)], lines


def _without_channel(names: Sequence[str]) -> list[str]:
    """`names` without nnU-Net's `_0000`, where all of a folder have it: its images of one channel.

    Elsewhere are names without it, as of labels, which may themselves end so.

    >>> _without_channel(["imagesTr/s01_0000", "labelsTr/s01"])
    ['imagesTr/s01', 'labelsTr/s01']
    >>> _without_channel(["imagesTr/s_0000_0000", "labelsTr/s_0000"])
    ['imagesTr/s_0000', 'labelsTr/s_0000']
    """
    of_folder: dict[str, list[str]] = defaultdict(list)
    for name in names:
        of_folder[name.rpartition("/")[0]].append(name)
    stems = {name.rpartition("/")[2] for name in names}
    have_it = {
        folder
        for folder, own in of_folder.items()
        if all(name.endswith(_CHANNEL) for name in own)
        and any(name.rpartition("/")[2].removesuffix(_CHANNEL) in stems for name in own)
    }
    return [n.removesuffix(_CHANNEL) if n.rpartition("/")[0] in have_it else n for n in names]


def _are_masks(matches: Matches, organs: Sequence[str], by_path: Mapping[str, VolumeFile]) -> bool:
    """Whether each label file is the mask of one organ, also where a volume has one of several."""
    own = [*matches.labels.values()]
    several = any(len(files) > 1 for files in own)
    return several or (
        len(organs) > 1 and all(is_mask(read_case(by_path[files[0]], None)) for files in own)
    )


def _check_one_each(matches: Matches, *, are_masks: bool) -> None:
    """DataError: several volumes belong to one label, or several labels but masks to a volume."""
    labels = {} if are_masks else matches.labels
    several = {
        **{path: bands for path, bands in matches.bands.items() if path in matches.labels},
        **{path: own for path, own in labels.items() if len(own) > 1},
    }
    if several:
        path, files = next(iter(several.items()))
        what = "several volumes for one image or label; keep one of each"
        raise DataError(f"{path}: {what}: {first_of(files, 3)}")


def _left_out_lines(
    matches: Matches, images: Sequence[str], made: Sequence[str], unlike: Sequence[str]
) -> list[str]:
    """Warnings about volumes that are not cut.

    made: neither images nor labels. unlike: those of them that are called labels.
    """
    alone = [path for path in images if path not in matches.labels]
    kinds = [
        (alone, "volume has no label, and is left out", "volumes have none, and are left out"),
        (matches.alone, "label has no volume", "labels have no volume"),
        (matches.unclear, "label fits several volumes", "labels fit several volumes"),
        (unlike, "label holds no ids, and is left out", "labels hold no ids, and are left out"),
    ]
    lines = [] if matches.labels else ["warning: no labels: images alone are written"]
    kinds = kinds if matches.labels else []
    others = sorted({*made} - {*unlike})
    named = "volume is left out by its name", "volumes are left out by their names"
    return lines + [
        f"warning: {counted(len(files), one, many)}: {first_of(files, 3)}"
        for files, one, many in (*kinds, (others, *named))
        if files
    ]


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
    stack = read_case(file, None)
    # At the ends of a volume there is often nothing.
    middle = stack.pixels[len(stack.pixels) // 2]
    is_flat = (middle[:, 1:] == middle[:, :-1]).mean() > _FLAT and middle.shape[2] == 1
    is_ids = is_flat and not other_number(middle) and len(np.unique(middle)) <= _MOST_IDS
    return LabelFacts("ids" if is_ids else "picture", middle.shape[:2], {})


def other_number(pixels: np.ndarray) -> str:
    """A number that is no id from 0 to 65535, if there is one; empty: all can be rounded to ids."""
    numbers = np.unique(pixels)
    ids = np.round(numbers)
    # Half a step is fine only if no two numbers become one id.
    near = _HALF_STEP if len(np.unique(ids)) == len(ids) else _LAST_DIGITS
    strange = numbers[~((np.abs(numbers - ids) <= near) & (ids >= 0) & (ids < _MOST_CLASSES))]
    return f"{strange[0]:g}" if len(strange) else ""


def why_no_ids(file: VolumeFile) -> str:
    """Why a volume that is called a label cannot be one."""
    place, number = printable(file.path), other_number(read_case(file, None).pixels)
    if not number:
        return f"{place}: called a label, and looks like a picture; rename or move what is none"
    repair = "store ids, and 255 where nothing is labelled"
    return f"{place}: expected ids from 0 to 65535, found {number}; {repair}"


def read_case(file: VolumeFile, axis: int | None) -> Stack:
    """The slices of a volume; axis: 0 for x, None for the coarsest one."""
    if file.is_tiff:
        return volumes.read_tiff_stack(file)
    image = volumes.load_volume(file)
    return volumes.read_stack(file, image, volumes.coarsest_axis(image) if axis is None else axis)


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
