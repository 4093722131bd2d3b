"""Labels that are drawn: of annotation files, and of pictures that training cannot read."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from segtrain.data.read.classes import load_class_file
from segtrain.data.read.concurrent import for_each_pair, num_processes
from segtrain.desk.annotations import read_annotations
from segtrain.desk.annotations.label_maps import PAIRS, claim, label_files, write_labels
from segtrain.desk.survey.class_ids import train_ids
from segtrain.desk.survey.class_masks import presence
from segtrain.desk.survey.class_table import Class, Classes
from segtrain.desk.survey.contents import Color
from segtrain.desk.survey.decisions import Decisions
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import Answers
from segtrain.desk.survey.survey import Survey
from segtrain.distributed.machine import process_pool
from segtrain.errors import ConfigError, refuse_unused
from segtrain.run.pictures import write_bands, write_indexed_png
from segtrain.text import first_of
from segtrain.types import IGNORE_INDEX


def draw_annotations(
    survey: Survey, output: Path, answers: Answers, jobs: int | None
) -> tuple[LabelSet, Classes]:
    """Draws the labels of the annotation files into `output`; the set, and its classes.

    Raises:
        DataError: annotations that are wrong, or do not fit the images.
        ConfigError: two formats, or an option that annotation files leave no choice for.
    """
    kinds = [answers.labels] if answers.labels else list(survey.annotations)
    if len(kinds) > 1:
        raise ConfigError(
            f"{survey.root}: annotations of {first_of(kinds)}; --labels {kinds[0]} chooses one"
        )
    if kinds[0] not in survey.annotations:
        there = first_of(survey.annotations)
        raise ConfigError(f"--labels {kinds[0]}: no such labels; found annotations of {there}")
    refuse_unused(vars(answers), "exif ignore instances resize threshold", "annotation files")
    if answers.empty_folders:
        raise ConfigError(f"--missing {answers.missing}: folders are for labels that are pictures")
    files = survey.annotations[kinds[0]]
    how = {"attribute": answers.attribute, "names": answers.names}
    how["others_are_empty"] = answers.missing is not None
    annotations = read_annotations(files, survey.root, **how)
    claim(output, survey.root, overwrite=True)
    overlap = annotations.overlap if answers.task is None else "keep"
    keeps = overlap == "keep"
    pixels, _ = write_labels(annotations, output, overlap=overlap, jobs=jobs)
    # The lists of this folder, train.txt and val.txt, take its place.
    (output / PAIRS).unlink()
    classes = [
        Class(name, (i,), None, int(pixels[i]))
        for i, name in enumerate(annotations.classes)
        if i or (pixels[0] and not keeps)
    ]
    sources = first_of((file.relative_to(survey.root) for file in files), 2)
    pattern = f"{sources} ({kinds[0]})"
    files = label_files(annotations, keeps=keeps)
    labels = {image.name: (file,) for image, file in zip(annotations.images, files, strict=True)}
    made = LabelSet(pattern, "annotations", labels, {}, overlapping=keeps)
    how = "each class by itself" if keeps else f"overlaps by {overlap}"
    total = sum(math.prod(image.size) for image in annotations.images) if keeps else 0
    reasons, notes = (f"drawn from {pattern}, {how}",), tuple(annotations.notes)
    return made, Classes(tuple(classes), (IGNORE_INDEX,), reasons, notes, all_pixels=total)


def draw_labels(plan: Decisions, class_file: Path, folder: Path, jobs: int | None) -> None:
    """Draws the label of each image into `folder`: train ids, or a band a class.

    255 is where there is no class. class_file: of the experiment, with the colours.
    """
    palette = load_class_file(str(class_file)).palette
    work = partial(_draw, plan.survey.root, plan.labels, plan.classes, palette)
    items = [(image, folder / plan.label_files[image.path]) for image in plan.images]
    with process_pool(num_processes(len(items), jobs)) as pool:
        for _ in for_each_pair(work, items, pool, "drawing labels"):
            pass


def _draw(
    root: Path,
    labels: LabelSet,
    classes: Classes,
    palette: Sequence[Color],
    item: tuple[Image, Path],
) -> None:
    """Draws the label of one image; item: the image, and the file."""
    image, path = item
    if labels.overlapping:
        number = len(labels.classes)
        class_files = labels.class_files(root, image.path)
        bands = presence(class_files, image.size, number, labels.void, labels.threshold)
        # The bands of the classes that are kept, in their order; files may show more.
        write_bands(path, bands[..., [class_info.values[0] - 1 for class_info in classes.classes]])
        return
    drawn = train_ids(root, labels, classes, image)
    if image.window:
        from segtrain.predict.georaster import write_label  # imports torch, and is rare

        path.parent.mkdir(parents=True, exist_ok=True)
        write_label(path, drawn, IGNORE_INDEX, root / image.path)
        return
    write_indexed_png(path, drawn, [*palette, *[(0, 0, 0)] * (256 - len(palette))])
