"""What images hold, as CSV: a line for each image and class, and a line for each object."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segtrain.data.read.photos import PhotoFile
from segtrain.errors import ConfigError, ExecutionError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.predict.objects import ImageObjects, find_objects
from segtrain.predict.pixel_size import UM, PixelGrid, contradicts, grid_of, square
from segtrain.text import first_of, printable

_TABLE = "image", "class", "pixels", "share", "objects", "no_value_px", "unknown_px"
VOLUME_TITLES = "image", "class", "voxels", "ml", "components", "share"
VOLUME_TITLES += "no_value_voxels", "unknown_voxels"
_OBJECTS = "image", "class", "object", "pixels", "x_px", "y_px", "left_px", "top_px"
_OBJECTS += "width_px", "height_px"
# An area is a product: 0.1 * 0.1 is a little more than 0.01.
_ROUNDING = 1 - 1e-9


class TableOptions(NamedTuple):
    """What the user asks for.

    table, objects: files to write. pixel_size: number and unit. min_area: of the largest object of
    a class that is to count as there: pixels, where the unit is empty, or square units.
    """

    table: Path | None = None
    objects: Path | None = None
    pixel_size: tuple[float, str] | None = None
    min_area: tuple[float, str] | None = None

    @property
    def files(self) -> dict[str, Path]:
        """By their options."""
        both = {"--table": self.table, "--objects": self.objects}
        return {option: path for option, path in both.items() if path is not None}

    def check(self) -> None:
        """Makes the folders of the files.

        ConfigError: a file cannot be written, or an option serves none.
        """
        if self.min_area and not self.table:
            raise ConfigError("--min-area: serves only --table FILE")
        if self.pixel_size and not self.files:
            raise ConfigError("--pixel-size: serves only --table FILE and --objects FILE")
        if len({path.absolute() for path in self.files.values()}) < len(self.files):
            raise ConfigError(f"--objects {printable(self.objects)}: is the file of --table")
        begins = {"--table": (_TABLE, VOLUME_TITLES), "--objects": (_OBJECTS,)}
        for option, path in self.files.items():
            with os_errors_as(ConfigError, f"{option} {printable(path)}", "cannot be written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                check_output(path, *(",".join(titles[:3]) for titles in begins[option]))

    def grids(self, sources: Sequence[PhotoFile]) -> tuple[dict[PhotoFile, PixelGrid], list[str]]:
        """Where the pixels of each file lie, if that is known, and warnings.

        ConfigError: a file has a map and the user names a size, or is to be measured and has none.
        """
        if not self.files:
            return {}, []
        known = {source: grid_of(source.path) for source in sources}
        grids = {source: grid for source, (grid, _) in known.items() if grid}
        on_map = [source for source, grid in grids.items() if grid.unit != UM]
        reasons = [why for _, why in known.values() if why and not self.pixel_size]
        other = []
        if self.pixel_size:
            if on_map:
                own = first_of((source.path for source in on_map), 3)
                raise ConfigError(
                    f"--pixel-size: these files have a pixel size of their own: {own}"
                )
            other = [
                f"{printable(source.path)} ({grid.width:.4g} x {grid.height:.4g} {UM})"
                for source, grid in grids.items()
                if contradicts(grid, self.pixel_size)
            ]
            grids = dict.fromkeys(sources, square(*self.pixel_size))
        elif on_map and len(on_map) < len(grids):  # a table has one unit
            small = [source for source in grids if source not in on_map]
            reasons += [f"{printable(x.path)}: pixels in {UM}, others in m" for x in small]
            grids = {source: grids[source] for source in on_map}
        unit = self.min_area[1] if self.min_area else ""
        if unit and (without := [x.path for x in sources if _unit2(grids.get(x)) != unit]):
            raise ConfigError(f"--min-area: no pixel size in {unit[:-1]}: {first_of(without, 3)}")
        kinds = ("measured in pixels alone", reasons), ("--pixel-size is not what files say", other)
        return grids, [
            f"warning: {what}: {first_of(found, 3, separator='; ')}"
            for what, found in kinds
            if found
        ]


@dataclass(frozen=True)
class ObjectTables:
    """What is found in images, and where; it is written at the end."""

    options: TableOptions
    classes: Sequence[str]
    grids: Mapping[PhotoFile, PixelGrid]
    found: dict[PhotoFile, ImageObjects]

    def add(self, source: PhotoFile, label: np.ndarray, missing: np.ndarray) -> None:
        """Counts an image, if a table is asked for; `label`, `missing`: as of `find_objects`."""
        if self.options.files:
            self.found[source] = find_objects(label, missing, len(self.classes))

    def write(self, sources: Sequence[PhotoFile]) -> None:
        """Writes the files, with the images in this order."""
        there = [source for source in sources if source in self.found]
        makers = {"--table": self.table, "--objects": self.objects}
        for option, path in self.options.files.items():
            write_table(path, makers[option](there))

    def table(self, sources: Sequence[PhotoFile]) -> list[list[Any]]:
        """A row for each image and class, below the titles."""
        unit, least = self._unit, self.options.min_area
        titles = [*_TABLE, *([f"area_{unit}2"] if unit else []), *(["decision"] if least else [])]
        rows: list[list[Any]] = [titles]
        for source in sources:
            found, grid = self.found[source], self.grids.get(source)
            valid = found.size[0] * found.size[1] - found.no_value
            for k, (name, pixels) in enumerate(
                zip(self.classes, found.pixels.tolist(), strict=True)
            ):
                areas = found.objects[k].pixels
                share = pixels / valid if valid else ""
                unknown = found.num_ignored - found.no_value
                row = [source.name, name, pixels, share, len(areas), found.no_value, unknown]
                if unit:
                    row.append(pixels * grid.area if grid else "")
                if least:
                    # Without a unit `min_area` counts pixels, whatever size a file says they have.
                    pixel = grid.area if least[1] and grid else 1
                    is_there = bool((areas * pixel >= least[0] * _ROUNDING).any())
                    row.append("yes" if is_there else "no")
                rows.append(row)
        return rows

    def objects(self, sources: Sequence[PhotoFile]) -> list[list[Any]]:
        """A row for each object, below the titles."""
        unit = self._unit
        # Without a map coordinates begin at the corner of the image.
        is_map = unit != UM and not self.options.pixel_size
        xy = ["map_x", "map_y"] if is_map else [f"x_{unit}", f"y_{unit}"]
        rows: list[list[Any]] = [
            [
                *_OBJECTS,
                *([f"area_{unit}2", *xy, f"width_{unit}", f"height_{unit}"] if unit else []),
            ]
        ]
        for source in sources:
            grid = self.grids.get(source)
            for name, objects in zip(self.classes, self.found[source].objects, strict=True):
                every = zip(*(column.tolist() for column in objects), strict=True)
                for i, (pixels, box, (x, y)) in enumerate(every, 1):
                    row = [source.name, name, i, pixels, x, y, *box]
                    if unit and grid:
                        # Centres count from the middle of the first pixel, the map from its corner.
                        row += [pixels * grid.area, *grid.at(x + 0.5, y + 0.5)]
                        row += [box[2] * grid.width, box[3] * grid.height]
                    # A file without a pixel size leaves the columns of lengths and areas empty.
                    rows.append(row + [""] * (len(rows[0]) - len(row)))
        return rows

    @property
    def _unit(self) -> str:
        """Of lengths, the same in all files; empty if no file has a size."""
        return next((grid.unit for grid in self.grids.values()), "")


def _unit2(grid: PixelGrid | None) -> str:
    return f"{grid.unit}2" if grid else ""


def write_table(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Writes a CSV, its titles first; ExecutionError if it cannot."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    for name, *values in rows[1:]:
        # Map coordinates have seven digits before the point.
        cells = (f"{value:.12g}" if isinstance(value, float) else value for value in values)
        writer.writerow([printable(name), *cells])
    with os_errors_as(ExecutionError, path, "cannot be written"):
        write_output(path, text.getvalue())
