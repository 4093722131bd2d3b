"""What an evaluation tells beside the scores of classes, for `eval` and for label maps."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from segtrain.config import Config
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.layouts import instance_files
from segtrain.data.read.sources import groups_of
from segtrain.metrics import Scores, or_none, percent
from segtrain.score.group_table import ScoresByGroup
from segtrain.score.records import Records
from segtrain.score.surfaces import SurfaceScores
from segtrain.score.volume_scores import VolumeScores, VolumeTable
from segtrain.task.score_table import InstanceCounts
from segtrain.text import printable


class Answer(NamedTuple):
    """What was asked beside the scores: as lines of text, and for JSON by its key."""

    key: str
    lines: Sequence[str]
    found: dict[str, Any]


def groups_by(
    pattern: re.Pattern[str] | None, dataset: SegDataset, config: Config
) -> list[str] | None:
    """The group of each image, by its path; None: not asked for."""
    if pattern is None:
        return None
    root = os.path.expanduser(config.data.root)
    return groups_of(pattern, [os.path.relpath(pair.image, root) for pair in dataset.pairs])


def instances_of(dataset: SegDataset, config: Config) -> tuple[InstanceCounts | None, list[str]]:
    """What counts instances, or None and why: no line if the data set has no instances at all."""
    paths = instance_files(config.data, dataset.pairs)
    if not paths or not any(c.instance_px for c in dataset.classes.classes):
        return None, []
    missing = [path for path in paths if not path.is_file()]
    if not missing:
        return InstanceCounts(dataset.classes, paths), []
    # A mean over the other images would look like the score of the whole split.
    count = f"{len(missing)} of {len(paths)} labels have no instance map"
    return None, [f"{count}, such as {printable(missing[0])}: no instance-weighted scores"]


def volumes_of(
    dataset: SegDataset, config: Config, groups: Sequence[str] | None
) -> VolumeScores | None:
    """What scores whole volumes of the data set; None: without groups nobody asks."""
    root, images = Path(os.path.expanduser(config.data.root)), [x.image for x in dataset.pairs]
    return VolumeScores(dataset.classes.names, root, images, groups) if groups else None


def without_classes(scores: Scores, left_out: Sequence[str], names: Sequence[str]) -> Answer:
    """The mean of the other classes, as `eval.without` asks for it."""
    score = scores.mean_iou_without(left_out, names)
    line = f"mIoU without {', '.join(map(printable, left_out))} {percent(score)}"
    return Answer("without", [line], {"classes": left_out, "mIoU": or_none(score)})


def answers_of(
    records: Records | None,
    groups: Sequence[str] | None,
    measured: Mapping[str, SurfaceScores | VolumeTable | None],
    further: Mapping[str, Mapping[str, float]],
) -> list[Answer]:
    """The scores of groups, of what was measured image by image, and of `eval.metrics`.

    groups: the group of each image of `records`; None: nobody asks. further: scores by metric.
    """
    by_group = groups and ScoresByGroup.of(records.images, groups, records.classes)
    found = [
        Answer(key, scores.lines(), scores.to_dict())
        for key, scores in ({"by_group": by_group} | measured).items()
        if scores
    ]
    return found + ([_of_plugins(further)] if further else [])


def _of_plugins(further: Mapping[str, Mapping[str, float]]) -> Answer:
    """The scores of `eval.metrics`, by the names of the metrics."""
    lines = [f"{name}: {key} {x:g}" for name, own in further.items() for key, x in own.items()]
    json = {name: {k: or_none(x) for k, x in own.items()} for name, own in further.items()}
    return Answer("metrics", lines, json)
