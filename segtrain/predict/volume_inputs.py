"""`segtrain predict` of volumes: slice by slice, into a volume that lies where the source does."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from segtrain.checkpoint.ready import ReadyModel
from segtrain.config.data import DataConfig
from segtrain.data.check.values import image_values, joined_values
from segtrain.data.read.cut_volumes import read_cut_volumes
from segtrain.data.read.decode import Info
from segtrain.data.read.find import IMAGE_SUFFIXES, data_root, first_lines, visible_files
from segtrain.data.read.image import ImageForm, ignore_missing
from segtrain.data.read.neighbours import with_neighbours
from segtrain.data.read.photos import PhotoFile, form_of_info
from segtrain.data.read.volumes import (
    AXES,
    Stack,
    VolumeFile,
    coarsest_axis,
    find_volumes,
    load_volume,
    nifti_library,
    no_spacing,
    read_stack,
    unsure_sides,
    write_volume,
)
from segtrain.errors import ConfigError, DataError
from segtrain.files import temporary
from segtrain.predict.kind import Job, noted
from segtrain.predict.object_table import VOLUME_TITLES, write_table
from segtrain.predict.summary import Notes, class_pixels
from segtrain.predict.volume_table import ABOUT, volume_rows
from segtrain.run import pictures
from segtrain.run.console import ProgressBar
from segtrain.text import printable

ENDING = ".nii.gz"
_OTHER_SPACING = 1.5  # times
_INSTEAD = {"--probabilities": "--probabilities nii writes those of volumes"}
_INSTEAD |= {"--objects": "--table FILE counts components, and tells millilitres"}


class Volumes:
    """CT, MRI, microscopy in three dimensions: slice by slice."""

    several, such = "volumes", "a volume"
    instead = MappingProxyType(_INSTEAD)
    honours = "--set data.slice_axis", "data.neighbours", "--table", "--probabilities nii"

    def take(
        self, inputs: Sequence[str | Path], output: Path
    ) -> tuple[list[VolumeFile], list[str | Path], list[str]]:
        """The volumes among inputs, the other inputs, and lines about files of neither.

        DataError, before a model is loaded: a file is missing, or headers tell that nothing of
            what was given can be predicted.
        """
        found = _split_inputs(inputs, output)
        if found[0]:
            nifti_library()  # of DICOM, too, NIfTI is written
        problems = []
        for volume in found[0]:
            try:
                load_volume(volume, headers_only=True)
            except DataError as error:
                problems.append(str(error))
        # As one photo of many, one damaged volume is named after the others are done.
        is_all = len(problems) == len(found[0]) and not found[1]
        if problems and (is_all or not all(volume.path.exists() for volume in found[0])):
            raise DataError(first_lines("input", problems))
        return found

    def is_own(self, source: PhotoFile) -> bool:
        """No file: those that hold volumes are taken from the inputs."""
        return False

    def check(self, job: Job, sources: Sequence[VolumeFile]) -> None:
        """ConfigError: the model has no one class a pixel."""
        if job.task.ids(job.classes) is None:
            raise ConfigError("volumes are labelled with one class a pixel")

    def predict(self, job: Job, sources: Sequence[VolumeFile]) -> list[Notes]:
        """Writes a volume of ids for each, where its source lies, and the table of all."""
        notes, rows = [], []
        for source in sources:
            path = job.output / pictures.LABELS / f"{source.name}{ENDING}"
            with noted(notes, path):
                note, own, lines = _predict_volume(job, source, path)
                notes.append(note)
            if not notes[-1].problem:
                rows += own
                print("\n".join(lines))
        if job.tables.table:
            write_table(job.tables.table, [VOLUME_TITLES, *rows])
            print(ABOUT)
        return notes

    def written(self, job: Job) -> str:
        """The folder of label volumes."""
        return pictures.LABELS


def _split_inputs(
    inputs: Sequence[str | Path], output: Path
) -> tuple[list[VolumeFile], list[str | Path], list[str]]:
    """The volumes among the inputs, but for those in `output`, and the inputs that hold none.

    Also what to say of files of no volume.

    DataError: two volumes have one name, and so would their predictions; or a folder holds images
        beside volumes.
    """
    volumes: list[VolumeFile] = []
    others: list[str | Path] = []
    notes: list[str] = []
    place = output.resolve()
    for given in inputs:
        inside, said = find_volumes(Path(given))
        # A folder may hold the output of an earlier call, whose volumes are no input.
        inside = [x for x in inside if not x.path.resolve().is_relative_to(place)]
        if inside and any(x.lower().endswith(IMAGE_SUFFIXES) for x in _files_below(given, output)):
            what = "holds volumes and images; name one kind of them by its files or folder"
            raise DataError(f"{printable(given)}: {what}")
        volumes += inside
        notes += said
        others += [] if inside else [given]
    volumes = _with_folders(volumes)
    paths: dict[str, Path] = {}
    for volume in volumes:
        if (other := paths.setdefault(volume.name, volume.path)) != volume.path:
            both = f"{printable(other)} and {printable(volume.path)}"
            what = f"both predictions would be {volume.name}{ENDING}"
            raise DataError(f"{both}: {what}; name the folder above both")
    return volumes, others, notes


def _with_folders(volumes: Sequence[VolumeFile]) -> list[VolumeFile]:
    """`volumes`, with their folders in front where names are equal, as of p01/ct and p02/ct."""
    paths: dict[str, set[Path]] = defaultdict(set)
    for volume in volumes:
        paths[volume.name].add(volume.path)
    return [
        x._replace(name=f"{x.path.resolve().parent.name}/{x.name}") if len(paths[x.name]) > 1 else x
        for x in volumes
    ]


def _files_below(given: str | Path, output: Path) -> list[str]:
    folder = Path(given)
    files = visible_files(folder) if folder.is_dir() else []
    return [x for x in files if not (folder / x).resolve().is_relative_to(output.resolve())]


def _predict_volume(
    job: Job, file: VolumeFile, output: Path
) -> tuple[Notes, list[list[Any]], list[str]]:
    """Writes the ids of a volume as NIfTI, and its probabilities, if they are asked for.

    Returns notes, rows of the table, and lines to print.

    DataError: it cannot be read, or its values are of another kind than the training's.
    """
    data, classes, place = job.ready.config.data, job.classes, printable(file.path)
    image = load_volume(file)
    axis = coarsest_axis(image) if data.slice_axis is None else AXES.index(data.slice_axis)
    stack = read_stack(file, image, axis)
    doubts = image.extra["doubt"], unsure_sides(image), _other_values(stack, job.ready)
    doubts = *doubts, _other_spacing(stack, data)
    if job.ready.form.value_range is not None and stack.pixels.dtype == np.uint8:
        # One that needs no more bits than bytes, among others: data import keeps numbers as well.
        stack = stack._replace(pixels=stack.pixels.astype(np.float32))
    # The whole volume is in memory, its labels too; only the slices go to the device in turn.
    labels = np.zeros(stack.pixels.shape[:3], np.uint8)
    folder = job.output / pictures.PROBABILITIES / file.name
    paths = [folder / f"{name}{ENDING}" for name in pictures.mask_names(classes)]
    with ExitStack() as files:
        kept = None
        if job.probabilities:  # in a file: all of them may be larger than the memory
            folder.mkdir(parents=True, exist_ok=True)
            kept = files.enter_context(files.enter_context(temporary(folder / "all")).open("wb"))
        notes, num_missing = _predict_slices(job.ready, stack, file, labels, kept)
        rows, valid = labels.reshape(-1, labels.shape[2]), labels.size - num_missing
        notes = notes._replace(class_pixels=class_pixels(rows, valid, len(classes.names)))
        write_volume(output, pictures.raw_ids(classes)[labels], image, axis)
        if kept is not None:
            kept.flush()
            shape = len(labels), len(paths), *labels.shape[1:]
            known = np.memmap(kept.name, np.float32, "r", shape=shape)
        for k, path in enumerate(paths):
            if kept is not None:
                write_volume(path, known[:, k], image, axis)
            else:
                path.unlink(missing_ok=True)  # of an earlier prediction
    number, height, width = labels.shape
    step = f", {stack.spacing[0]:.3g} {stack.unit} apart" if stack.unit else ""
    which = f" ({file.name}: {file.about})" if file.about else ""
    lines = [f"{place}: {number} slices of {height}x{width} along {AXES[axis]}{step}{which}"]
    lines += [f"warning: {place}: {note}" for note in doubts if note]
    if not job.tables.table:
        return notes, [], lines
    if why := no_spacing(image):
        lines.append(f"warning: {place}: no millilitres: {why}")
    return notes, volume_rows(file.name, labels, num_missing, classes.names, image), lines


def _other_values(stack: Stack, ready: ReadyModel) -> str:
    """Why values are of another unit than the training's, as after a window; empty: nothing tells.

    Photos of such a type are refused; a volume may be one that needs no more bits than bytes.
    """
    low, high = ready.config.data.value_range or (0.0, 255.0)
    least, most = (float(x.reduce(stack.pixels, axis=None)) for x in (np.fmin, np.fmax))
    seen, to = f"values from {least:g} to {most:g}", "convert them as those of the training were"
    if stack.pixels.dtype == np.uint8 and (low < 0 or high > 255):
        return f"{seen}, and the model was trained on values of [{low:g}, {high:g}]: {to}"
    # Where values are clipped, their range may be of a bright organ alone, and the mean is not.
    means = ready.loaded.channels.mean if ready.loaded.channels else ()
    mean = min((low + x * (high - low) / 255 for x in means), default=low)
    if not mean < 0 <= least:
        return ""
    return f"{seen}, none below 0, and those of the training are {mean:.4g} on average: {to}"


def _other_spacing(stack: Stack, data: DataConfig) -> str:
    """Why voxels are of another size than in each volume of the training; empty: nothing tells."""
    with suppress(DataError):
        volumes = read_cut_volumes(data_root(data)).values()
        known = np.array([x.spacing_mm for x in volumes if x.spacing_mm])
        if stack.spacing_mm and len(known):
            times = np.exp(np.abs(np.log(np.array(stack.spacing_mm) / known))).max(1)
            if times.min() > _OTHER_SPACING:
                here, there = (
                    "x".join(f"{step:.3g}" for step in steps)
                    for steps in (stack.spacing_mm, known[times.argmin()])
                )
                what = f"voxels of {here} mm (slices, rows, columns), the nearest of the training"
                return f"{what} of {there} mm: resample it"
    return ""


def _predict_slices(
    ready: ReadyModel, stack: Stack, file: VolumeFile, labels: np.ndarray, kept: IO[bytes] | None
) -> tuple[Notes, int]:
    """Fills `labels` (N, H, W) with train ids, and `kept` with probabilities (N, K, H, W) float32.

    Returns notes, and how many voxels have no value.
    """
    predictor, place = ready.predictor, printable(file.path)
    channels = 2 * ready.config.data.neighbours + 1
    info = Info(labels.shape[1:], channels, stack.pixels.dtype)
    form = form_of_info(info, ready.form, file.path)
    values, is_finite, num_missing = [], True, 0
    wanted = "none" if kept is None else "all"
    bar = ProgressBar(len(labels), 0, "volume", enabled=True, unit="slice", last_line=False)
    bar.describe(printable(file.name))
    with bar:
        for start in range(0, len(labels), predictor.limits.num_images):
            numbers = range(start, min(start + predictor.limits.num_images, len(labels)))
            seen = list(_seen(stack, numbers, ready.config.data.neighbours, form))
            values += [image_values(stored, form, place) for stored, _, _ in seen]
            images = [pixels for _, pixels, _ in seen]
            maps = predictor.label_maps(images, place=place, probabilities=wanted)
            for i, each, (_, _, missing) in zip(numbers, maps, seen, strict=True):
                is_finite = is_finite and bool(each.is_finite)
                # `missing` is IGNORE_INDEX, the largest, where there is no value, else 0.
                labels[i] = np.maximum(each.label.cpu().numpy(), missing)
                num_missing += int(np.count_nonzero(missing))
                if kept is not None:
                    shown = each.probability.float().cpu().numpy()
                    kept.write(np.where(missing, np.float32(np.nan), shown).tobytes())
                bar.update()
    return Notes(values=joined_values(values), is_finite=is_finite), num_missing


def _seen(
    stack: Stack, numbers: Sequence[int], neighbours: int, form: ImageForm
) -> Iterator[tuple[np.ndarray, Tensor, np.ndarray]]:
    """Of each slice the values (H, W, C), what the network sees, and `missing` as of Photos."""
    for i in numbers:
        stored = with_neighbours(stack.pixels, i, neighbours)
        if stored.dtype.kind == "f":
            stored = np.where(np.isfinite(stored), stored, np.float32(np.nan))
        if stored.shape[2] < form.channels:  # grey becomes RGB
            stored = np.repeat(stored, form.channels, axis=2)
        pixels, missing = ignore_missing(stored, np.zeros(stored.shape[:2], np.uint8), form)
        yield stored, torch.from_numpy(np.ascontiguousarray(pixels)), missing


KIND = Volumes()
