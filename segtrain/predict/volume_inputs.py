"""`segtrain predict` of volumes: slice by slice, into a volume that lies where the source does."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from segtrain.checkpoint.ready import ReadyModel
from segtrain.data.check.values import ImageValues, image_values, joined_values
from segtrain.data.read.decode import Info
from segtrain.data.read.find import IMAGE_SUFFIXES, visible_files
from segtrain.data.read.image import ignore_missing
from segtrain.data.read.neighbours import with_neighbours
from segtrain.data.read.photos import PhotoFile, form_of_info
from segtrain.data.read.volumes import (
    AXES,
    VolumeFile,
    coarsest_axis,
    find_volumes,
    load_volume,
    read_stack,
    write_label_volume,
)
from segtrain.errors import ConfigError, DataError
from segtrain.files import temporary
from segtrain.predict.kind import Job, noted
from segtrain.predict.summary import Notes
from segtrain.run import pictures
from segtrain.run.console import ProgressBar
from segtrain.text import printable

ENDING = ".nii.gz"


class Volumes:
    """CT, MRI, microscopy in three dimensions: slice by slice."""

    several, such, instead = "volumes", "a volume", {}
    honours = "--set data.slice_axis", "data.neighbours"

    def take(
        self, inputs: Sequence[str | Path], output: Path
    ) -> tuple[list[VolumeFile], list[str | Path], list[str]]:
        """The volumes among inputs, the other inputs, and lines about files of neither."""
        return _split_inputs(inputs, output)

    def is_own(self, source: PhotoFile) -> bool:
        """No file: those that hold volumes are taken from the inputs."""
        return False

    def check(self, job: Job, sources: Sequence[VolumeFile]) -> None:
        """ConfigError: the model has no one class a pixel."""
        if job.task.ids(job.classes) is None:
            raise ConfigError("volumes are labelled with one class a pixel")

    def predict(self, job: Job, sources: Sequence[VolumeFile]) -> list[Notes]:
        """Writes a volume of ids for each, where its source lies."""
        notes = []
        for source in sources:
            path = job.output / pictures.LABELS / f"{source.name}{ENDING}"
            with noted(notes, path):
                values, is_finite, along = _predict_volume(job.ready, source, path)
                notes.append(Notes(values=values, is_finite=is_finite))
            if not notes[-1].problem:
                print(along)
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
    paths: dict[str, Path] = {}
    for volume in volumes:
        if (other := paths.setdefault(volume.name, volume.path)) != volume.path:
            both = f"{printable(other)} and {printable(volume.path)}"
            what = f"both predictions would be {volume.name}{ENDING}"
            raise DataError(f"{both}: {what}; name the folder above both")
    return volumes, others, notes


def _files_below(given: str | Path, output: Path) -> list[str]:
    folder = Path(given)
    files = visible_files(folder) if folder.is_dir() else []
    return [x for x in files if not (folder / x).resolve().is_relative_to(output.resolve())]


def _predict_volume(
    ready: ReadyModel, file: VolumeFile, output: Path
) -> tuple[ImageValues, bool, str]:
    """Writes the ids of a volume as NIfTI.

    Returns what the network saw, whether all scores were finite numbers, and along which axis.

    DataError: it cannot be read, or its values are of another kind than the training's.
    """
    data, predictor, place = ready.config.data, ready.predictor, printable(file.path)
    image = load_volume(file)
    axis = coarsest_axis(image) if data.slice_axis is None else AXES.index(data.slice_axis)
    stack = read_stack(file, image, axis)
    if ready.form.value_range is not None and stack.pixels.dtype == np.uint8:
        # One that needs no more bits than bytes, among others: data import keeps numbers as well.
        stack = stack._replace(pixels=stack.pixels.astype(np.float32))
    number, size = len(stack.pixels), stack.pixels.shape[1:3]
    channels = 2 * data.neighbours + 1
    form = form_of_info(Info(size, channels, stack.pixels.dtype), ready.form, file.path)
    ids = pictures.raw_ids(ready.loaded.classes)
    # The whole volume is in memory, its labels too; only the slices go to the device in turn.
    labels = np.zeros((number, *size), ids.dtype)
    values, is_finite = [], True
    at_once = predictor.limits.num_images
    bar = ProgressBar(number, 0, "volume", enabled=True, unit="slice", last_line=False)
    bar.describe(printable(file.name))
    with bar:
        for start in range(0, number, at_once):
            seen = []
            for i in range(start, min(start + at_once, number)):
                stored = with_neighbours(stack.pixels, i, data.neighbours)
                if stored.dtype.kind == "f":
                    stored = np.where(np.isfinite(stored), stored, np.float32(np.nan))
                if stored.shape[2] < form.channels:  # grey becomes RGB
                    stored = np.repeat(stored, form.channels, axis=2)
                values.append(image_values(stored, form, place))
                seen.append(ignore_missing(stored, np.zeros(size, np.uint8), form))
            images = [torch.from_numpy(np.ascontiguousarray(pixels)) for pixels, _ in seen]
            maps = predictor.label_maps(images, place=place)
            for i, (each, (_, missing)) in enumerate(zip(maps, seen, strict=True), start=start):
                is_finite = is_finite and bool(each.is_finite)
                # `missing` is IGNORE_INDEX, the largest, where there is no value, else 0.
                labels[i] = ids[np.maximum(each.label.cpu().numpy(), missing)]
                bar.update()
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary(output, ENDING) as draft:
        write_label_volume(draft, labels, image, axis)
        draft.replace(output)  # a file that is there is whole
    step = "" if stack.spacing is None else f", {stack.spacing[0]:.3g} {stack.unit} apart"
    along = f"{place}: {number} slices of {size[0]}x{size[1]} along {AXES[axis]}{step}"
    return joined_values(values), is_finite, along


KIND = Volumes()
