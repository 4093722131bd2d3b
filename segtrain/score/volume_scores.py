"""Dice and Hausdorff distances of whole volumes, put together of their slices.

HD95: border voxels have a face to another class or out of the volume; 95 % of those of one mask lie
at most so far from the border of the other, centre to centre; the larger one of both directions, as
MONAI's `compute_hausdorff_distance(percentile=95, spacing=...)`. Where only label or prediction
shows a class there is none. A group's is the mean of its volumes; its Dice counts all their voxels.
"""

import math
import zlib
from base64 import b85decode, b85encode
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple

import numpy as np

from segtrain.data.read.cut_volumes import places_of, read_cut_volumes
from segtrain.data.read.image import shows
from segtrain.distributed import collectives as dist
from segtrain.errors import DataError
from segtrain.metrics import mean_of_present, or_none, ratio
from segtrain.score.surfaces import hausdorff_95
from segtrain.task.prediction import Prediction
from segtrain.text import first_of, printable, table_lines
from segtrain.types import IGNORE_INDEX

_SEVERAL = " (several groups)"


def group_of_slices(volume: str, groups: Iterable[str]) -> str:
    """The group of all its slices; if they have several, one of its own, which no other has."""
    first, *others = {*groups}
    return f"{volume}{_SEVERAL}" if others else first


class VolumeRow(NamedTuple):
    """voxels: (K, 3), right, labelled, predicted. hd95_mm: K, or NaN. problem: why all are NaN."""

    volume: str
    group: str
    problem: str
    voxels: list[list[int]]
    hd95_mm: list[float]


class VolumeScores:
    """Keeps the slices of an evaluation; `add` is a callback of `evaluate_dataset`."""

    def __init__(
        self, classes: Sequence[str], root: Path, images: Iterable[Path], groups: Sequence[str]
    ) -> None:
        self._volumes = read_cut_volumes(root)
        self._places, self._groups = places_of(self._volumes, root, images), groups
        # Volume, number of the slice, its group, shape and pixels, as JSON has them.
        self._kept: list[Any] = []
        self.table = VolumeTable(classes, [])

    def add(self, prediction: Prediction) -> None:
        """Keeps label and prediction of a slice, compressed to about a hundredth."""
        if place := self._places[prediction.index]:
            label, size = prediction.label, self._volumes[place[0]].size
            if label.shape[:2] != size:
                what = "a label of {}x{}, cut as {}x{}".format(*label.shape[:2], *size)
                raise DataError(f"volume {printable(place[0])}: {what}; import the volumes again")
            pred = np.where(label == IGNORE_INDEX, label, prediction.pred)
            both = np.stack([label, pred]).astype(np.uint8)
            pixels = b85encode(zlib.compress(both, 1)).decode()
            self._kept.append([*place, self._groups[prediction.index], both.shape, pixels])

    def sum_over_ranks(self) -> None:
        """Measures the volumes, each on one rank (collective; call it once)."""
        parts = dist.all_gather_object(self._kept)
        kept = sorted(each for part in parts for each in part)
        volumes = [(name, list(own)) for name, own in groupby(kept, lambda each: each[0])]
        mine = volumes[dist.rank() :: dist.world_size()]
        parts = dist.all_gather_object([self._measure(*each) for each in mine])
        self.table.rows[:] = sorted(VolumeRow(*row) for part in parts for row in part)

    def _measure(self, name: str, kept: Sequence[Any]) -> VolumeRow:
        spacing, total = self._volumes[name].spacing_mm, len(self._volumes[name].slices)
        problem = "" if spacing else "no spacing in mm at right angles"
        if len(kept) < total:  # it has other borders than all of it
            problem = f"{len(kept)} of {total} slices"
        stored = ((zlib.decompress(b85decode(text)), size) for *_, size, text in kept)
        slices = [np.frombuffer(x, np.uint8).reshape(size) for x, size in stored]
        voxels, distances = [], []
        for k in range(len(self.table.classes)):
            label, pred = (np.stack([shows(x[side], k) for x in slices]) for side in (0, 1))
            voxels.append([int(x.sum()) for x in (label & pred, label, pred)])
            is_measured = not problem and label.any() and pred.any()
            distances.append(hausdorff_95(label, pred, spacing) if is_measured else math.nan)
        group = group_of_slices(name, (group for _, _, group, *_ in kept))
        return VolumeRow(name, group, problem, voxels, distances)


class VolumeTable(NamedTuple):
    """The scores of volumes, for people and for JSON; without rows it is false."""

    classes: Sequence[str]
    rows: list[VolumeRow]

    def __bool__(self) -> bool:
        return bool(self.rows)

    @classmethod
    def of(cls, found: dict[str, Any]) -> "VolumeTable":
        """The table whose `to_dict` was read from JSON; empty: none."""
        rows = []
        for row in found.get("volumes", []):
            far = [math.nan if x is None else x for x in row["HD95_mm"].values()]
            about = row["volume"], row["group"], row["problem"]
            rows.append(VolumeRow(*about, list(row["voxels"].values()), far))
        return cls(list(found["over_volumes"]["Dice"]) if rows else [], rows)

    @classmethod
    def joined(cls, tables: Sequence["VolumeTable"]) -> "VolumeTable":
        """That of several evaluations; a volume that they divide is one, without a distance."""
        rows: dict[str, VolumeRow] = {}
        for row in (row for table in tables for row in table.rows):
            if other := rows.get(row.volume):  # its parts have no distance either
                voxels = np.add(row.voxels, other.voxels).tolist()
                group = group_of_slices(row.volume, (row.group, other.group))
                row = row._replace(group=group, voxels=voxels, problem="divided among folds")
            rows[row.volume] = row
        return cls(next((x.classes for x in tables if x), []), sorted(rows.values()))

    def lines(self) -> list[str]:
        """A table over volumes and over groups, and which volumes have no distance."""
        found, columns = self.to_dict(), [["class", *self.classes]]
        is_grouped = len(found["groups"]) < len(found["volumes"])
        for key in ("volumes", "groups") if is_grouped else ("volumes",):
            for title, scores in found[f"over_{key}"].items():
                factor = 100 if title == "Dice" else 1
                for name, head in (("mean", f"{title} {key}"), ("sd", "sd")):
                    values = [x[name] for x in scores.values()]
                    shown = ("-" if x is None else f"{factor * x:.2f}" for x in values)
                    columns.append([head, *shown])
        sides = np.array([row.voxels for row in self.rows])[..., 1:] > 0  # (volumes, K, 2)
        columns.append(["one-sided", *map(str, (sides[..., 0] != sides[..., 1]).sum(0).tolist())])
        lines = [
            "volumes: Dice in percent, Hausdorff distance (95 %) in mm; one-sided: volumes where "
            "only label or prediction shows the class, without HD95",
            *table_lines(columns),
        ]
        if left := [f"{row.volume} ({row.problem})" for row in self.rows if row.problem]:
            lines.append(f"warning: volumes without HD95: {first_of(left, 5)}")
        if odd := [x.volume for x in self.rows if x.group == f"{x.volume}{_SEVERAL}"]:
            what = "warning: volumes whose slices have several groups, each taken for a group"
            lines.append(f"{what}: {first_of(odd, 5)}; give --group a pattern of whole volumes")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Scores of each volume and group, and over them; NaN becomes None."""
        groups = {name: [x for x in self.rows if x.group == name] for _, name, *_ in self.rows}
        found: dict[str, Any] = {"groups": [], "volumes": []}
        for name, own in sorted(groups.items()):
            found["groups"].append({"group": name, **self._scores(own)})
        for row in self.rows:
            about = {"volume": row.volume, "group": row.group, "problem": row.problem}
            found["volumes"].append(about | self._scores([row]))
        for key in list(found):
            found[f"over_{key}"] = {
                title: {k: _summary([x[title][k] for x in found[key]]) for k in self.classes}
                for title in ("Dice", "HD95_mm")
            }
        return found

    def _scores(self, rows: Sequence[VolumeRow]) -> dict[str, dict[str, Any]]:
        """Of some volumes together, class by class."""
        voxels = np.sum([row.voxels for row in rows], axis=0).tolist()
        dices = [or_none(ratio(2 * right, one + other)) for right, one, other in voxels]
        columns = zip(*(row.hd95_mm for row in rows), strict=True)
        far = [or_none(mean_of_present(x)) for x in columns]
        titled = {"Dice": dices, "HD95_mm": far, "voxels": voxels}
        return {key: dict(zip(self.classes, x, strict=True)) for key, x in titled.items()}


def _summary(values: Sequence[float | None]) -> dict[str, float | None]:
    """The mean and the standard deviation of a sample, of those that are there."""
    there = [x for x in values if x is not None]
    deviation = stdev(there) if len(there) > 1 else None
    return {"mean": or_none(mean_of_present(there)), "sd": deviation}
