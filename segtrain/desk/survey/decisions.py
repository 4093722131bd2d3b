"""All that was decided about a folder, and which label file each of its images has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from segtrain.data.read import image_formats
from segtrain.data.read.find import LABEL_SUFFIXES
from segtrain.data.read.label_formats import label_format_of
from segtrain.data.read.raster import is_tiff
from segtrain.desk.annotations.label_maps import LABELS
from segtrain.desk.survey.class_table import Classes
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.recipe import Machine, Option
from segtrain.desk.survey.splits import Splits
from segtrain.desk.survey.survey import Survey
from segtrain.text import distinct


@dataclass(frozen=True)
class Decisions:
    """All that was decided about a folder."""

    survey: Survey
    labels: LabelSet
    classes: Classes
    splits: Splits
    machine: Machine
    options: Sequence[Option]

    @property
    def images(self) -> list[Image]:
        """The images of both splits, each once, although windows share a file."""
        return list({x.path: x for x in (*self.splits.train, *self.splits.val)}.values())

    @cached_property
    def label_format(self) -> str | None:
        """`data.label_format`; None: labels are drawn, as training cannot read them so."""
        labels = self.labels
        # (): an image without a file shows background alone, so its label is drawn.
        if labels.classes or labels.kind not in ("ids", "colors") or () in labels.labels.values():
            return None
        # They lie on the picture as viewers turn it, or have another size, or are transparent:
        # training reads pixels as stored, and opaque ones alone. Or lists take no such suffix, as
        # .ppm, which need not keep ids.
        files = [files[0] for files in labels.labels.values()]
        is_listed = all(file.lower().endswith(LABEL_SUFFIXES) for file in files)
        if labels.upright or labels.resized or labels.has_alpha or not is_listed:
            return None
        if labels.kind == "colors" and len(self.classes.ignored) > 1:
            return None  # a class file can ignore one colour
        file = self.survey.root / files[0]
        # Of a PNG training cannot read a window alone.
        if self.splits.train[0].window and not is_tiff(file):
            return None
        problem = label_format_of(labels.kind).problem(image_formats.read_info(file), 0)
        return None if problem else labels.kind

    @cached_property
    def label_files(self) -> Mapping[str, str]:
        """The label of each image, by its path; below LABELS if it is drawn, else in the folder."""
        labels, images = self.labels.labels, self.images
        if self.label_format is not None:
            return {image.path: labels[image.path][0] for image in images}
        if self.labels.kind == "annotations":
            return {x.path: labels[x.path][0].removeprefix(f"{LABELS}/") for x in images}
        # TIFFs have windows, and bands.
        suffix = "tif" if self.labels.overlapping or images[0].window else "png"
        # On some disks 1.png would take the place of the label of a.JPG that is called A.
        names = distinct([image.name for image in images], str.casefold)
        return {x.path: f"{name}.{suffix}" for x, name in zip(images, names, strict=True)}
