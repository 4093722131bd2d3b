"""Rasters too large to be read at once: in parts, into a raster that lies where the source does."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from segtrain.checkpoint.ready import ReadyModel
from segtrain.data.check.values import image_values, joined_values
from segtrain.data.read.decode import MAX_PHOTO_PIXELS
from segtrain.data.read.georeference import is_on_map
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.photos import PhotoFile, form_of_file, other_unit
from segtrain.data.read.raster import raster_size, refuse_short_side
from segtrain.errors import DataError
from segtrain.inference.settings import Size
from segtrain.predict.georaster import num_blocks, predict_raster
from segtrain.predict.kind import Job, check_library, noted
from segtrain.predict.summary import Notes
from segtrain.predict.undeclared import where_zero
from segtrain.run import pictures
from segtrain.run.console import ProgressBar
from segtrain.task.tasks import task_of
from segtrain.text import printable

_POLYGONS = "of its label map, segtrain data polygons LABELMAP tells areas and outlines"


class Rasters:
    """TIFFs of more pixels than memory is taken for. Colours and overlays are left out."""

    several, such, honours = "rasters", "a raster that is read in parts", ()
    instead = dict.fromkeys(("--table", "--objects"), _POLYGONS)

    def is_own(self, source: PhotoFile) -> bool:
        """Whether it is a TIFF with parts to read, and larger than photos may be."""
        return _size_of(source) is not None

    def check(self, job: Job, sources: Sequence[PhotoFile]) -> None:
        """ConfigError: a library is missing that georeferences need."""
        check_library(sources)

    def predict(self, job: Job, sources: Sequence[PhotoFile]) -> list[Notes]:
        """Writes a tiled TIFF for each, with the georeference of its image."""
        notes = []
        for source in sources:
            path = job.output / pictures.LABELS / f"{source.name}.tif"
            with noted(notes, path):
                notes.append(_predict_raster(job.ready, source, _size_of(source), path))
        return notes

    def written(self, job: Job) -> str:
        """The folder of label maps."""
        return pictures.LABELS


def _size_of(source: PhotoFile) -> Size | None:
    return raster_size(source.path, MAX_PHOTO_PIXELS)


def _predict_raster(ready: ReadyModel, source: PhotoFile, size: Size, path: Path) -> Notes:
    settings, values, num_zeros, units = ready.predictor.settings, [], 0, set()
    task = task_of(ready.config.task)
    refuse_short_side(source.path, settings.usual.short_side_px)
    path.parent.mkdir(parents=True, exist_ok=True)
    form = form_of_file(source.path, ready.form)
    bar = ProgressBar(num_blocks(size), 0, "raster", enabled=True, unit="block", last_line=False)
    bar.describe(printable(source.name))

    def add(block: np.ndarray, core: tuple[slice, slice]) -> None:
        nonlocal num_zeros
        num_zeros += int(where_zero(block)[core].sum())
        values.append(image_values(block, form, printable(source.path)))
        if not np.isnan(values[-1].peak):
            units.add(other_unit(block, ready.form))
        bar.update()

    with bar:
        is_finite = predict_raster(
            ready.predictor,
            source.path,
            size,
            path,
            form=form,
            stored=partial(task.stored, ready.loaded.classes),
            no_data=task.no_data(ready.loaded.classes),
            on_block=add,
        )
    # A block may be the sea on a map of heights: the unit is another one if it is so everywhere.
    if units and "" not in units:
        path.unlink()
        raise DataError(f"{printable(source.path)}: {units.pop()}")
    info = read_info(source.path)
    return Notes(
        turned=info.orientation != 1,
        in_parts=settings.usual.mode == "whole",
        values=joined_values(values),
        is_finite=is_finite,
        zeros=num_zeros / math.prod(size) if is_on_map(source.path, info) else 0.0,
    )


KIND = Rasters()
