"""Options of the data: where it lies, and how training images are changed."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from segtrain.config.plugin_names import PluginName, PluginOptions
from segtrain.config.section import (
    Fraction,
    NonNegative,
    Pixels,
    PositiveFloat,
    Scale,
    Section,
    Size,
    option,
)

OwnFormat = Literal["ids", "colors", "train_ids", "bands"]


class DataConfig(Section):
    """Where images and labels lie and how they are read."""

    addresses = ("pack",)

    layout: Literal["cityscapes", "camvid", "voc", "ade20k", "folders", "list"] = option(
        ..., "directory layout of the data set"
    )
    root: str = option(..., "data set directory", min_length=1)
    classes: str = option(
        ...,
        "class file: a name from data/classes (cityscapes, camvid, ...) or a YAML path",
        min_length=1,
    )
    train_split: str = option(
        "train",
        "split to train on, several as train+train_extra; a file for layout 'list'. Cityscapes: "
        "gtCoarse/train is train with coarse labels",
    )
    eval_split: str = option("val", "split to evaluate on; a file for layout 'list'")
    train_exclude: tuple[str, ...] = option(
        (),
        "images left out of train_split, by name: the path below the split, without ending; * "
        "stands for any characters, also /, and ? for one",
    )
    images_dir: str = option("images", "layout 'folders': images/<split>/**")
    labels_dir: str | None = option(
        None,
        "layout 'folders': labels/<split>/**.png, null: labels; layout 'list': the folder, "
        "absolute or below root, that label columns start from, null: root",
        min_length=1,
    )
    label_format: Annotated[OwnFormat, PluginName("label_format")] = option(
        "ids",
        "labels hold raw class ids (grey or palette files), the class colours (RGB), or positions "
        "in the class file, from 0, and 255 to ignore (Cityscapes: labelTrainIds); bands, of task "
        "multilabel: a band for each class, in the order of the class file, 1 where it is and 0 "
        "where not; or a plugin's",
    )
    channels: Annotated[int, Field(ge=1, le=16)] = option(
        3,
        "channels of an image: 3 is RGB, which grey and palette files become; other numbers must "
        "be those of the files, or of the image columns of a list together",
    )
    value_range: tuple[float, float] | None = option(
        None,
        "[low, high]: the stored values that become 0 and 255, of all images alike, such as "
        "[0, 4095] for 12 bits; null: those of the type, 0..255 or 0..65535; other types and "
        "floats need it; 'segtrain data stats' prints what the files hold",
    )
    clip: bool = option(
        False,
        "stored values beyond value_range become its ends, as nnU-Net does for CT, whose range is "
        "that of the labelled tissue; false: they go on beyond 0 and 255",
    )
    neighbours: Annotated[int, Field(ge=0, le=7)] = option(
        0,
        "images are slices of volumes, z0007 after z0006: so many before and after each are "
        "further channels, which data.channels counts; 1: 3 channels of grey slices",
    )
    slice_axis: Literal["x", "y", "z"] | None = option(
        None,
        "'segtrain predict' cuts volumes across this axis of the patient, as the training's were "
        "cut; null: the one with the largest spacing, else z",
    )
    pack: str | None = option(
        None,
        "directory of a pack of both splits, made by 'segtrain data pack', or its address, such as "
        "s3://bucket/pack, to read instead of the files; null: read the files",
        min_length=1,
    )
    short_side_px: Pixels | None = option(
        None, "image size that scale_range refers to, by its short side; null: as stored"
    )
    mean: tuple[float, ...] = option(
        (123.675, 116.28, 103.53),
        "mean subtracted, one number a channel, in units of 0..255, also of 16-bit or float data; "
        "the default is ImageNet's RGB",
    )
    std: tuple[PositiveFloat, ...] = option(
        (58.395, 57.12, 57.375),
        "standard deviation divided by, one number a channel, in units of 0..255",
    )
    num_workers: NonNegative | None = option(
        None,
        "loader processes a rank; null: the cores divided by the ranks, at most 8",
    )
    class_uniform: Fraction = option(
        0.0,
        "fraction of the samples of an epoch that show a class drawn uniformly, in a crop around "
        "one of its centroids; NVIDIA's semantic-segmentation uses 0.5",
    )

    def _mistakes(self) -> Iterator[str]:
        if self.value_range is not None and self.value_range[0] >= self.value_range[1]:
            yield f"value_range: expected [low, high], found {list(self.value_range)}"
        if self.neighbours and self.pack is not None:
            yield "neighbours: a pack has none; pack: null reads the files"
        for key, values in (("mean", self.mean), ("std", self.std)):
            # The defaults may have another length: `data stats` loads such a config, and finds
            # them. Training refuses it later (`wrong_units`).
            if key in self.model_fields_set and len(values) != self.channels:
                yield f"{key}: {len(values)} numbers, data.channels is {self.channels}"


class ExtraTransform(Section):
    """One further transform, by class name, that changes pixels but not geometry."""

    name: Annotated[str, PluginName("transform", "library")] = option(
        ..., "class name in albumentations, or a plugin's", pattern=r"^[A-Z][A-Za-z0-9]*$"
    )
    args: Annotated[dict[str, Any], PluginOptions("transform", "name", plain=True)] = Field(
        default_factory=dict, description="its keyword arguments", validate_default=True
    )


class AugmentConfig(Section):
    """Random changes of the training images: geometry first, then the pixels of the crop."""

    crop_size: Size = option((512, 512), "height and width of a training crop")
    scale_range: tuple[Scale, Scale] = option(
        (0.5, 2.0), "uniform random scale of the image; [1, 1]: none"
    )
    rotate_deg: Annotated[float, Field(ge=0, le=180)] = option(
        0.0, "rotation of half of the images, uniform in [-x, x] degrees; semseg uses 10"
    )
    flip_prob: Fraction = option(0.5, "probability of a horizontal flip")
    quarter_turn_prob: Fraction = option(
        0.0,
        "probability of a turn by 90, 180 or 270 degrees, each as often, for images without an up, "
        "as of satellites or cells; the crop is turned, so it keeps its crop_size",
    )
    max_class_share: Annotated[float, Field(gt=0, le=1)] = option(
        1.0,
        "draw the crop anew, up to 10 times, while one class covers more; mmsegmentation has 0.75",
    )
    class_mix_prob: Fraction = option(
        0.0,
        "probability that half of the classes of another random crop are pasted on the crop "
        "(ClassMix)",
    )
    blur_prob: Fraction = option(0.0, "probability of a 5x5 Gaussian blur")
    color_prob: Fraction = option(
        0.0,
        "probability of each change of colour: brightness, contrast, saturation, hue; of 8-bit RGB "
        "only; mmsegmentation uses 0.5",
    )
    color_jitter: tuple[Fraction, Fraction, Fraction, Annotated[float, Field(ge=0, le=0.5)]] = (
        option(
            (0.125, 0.5, 0.5, 0.1),
            "largest changes of colour, [brightness, contrast, saturation, hue]: what is added, as "
            "a share of 255; contrast and saturation factors from [1 - x, 1 + x]; rotation of the "
            "hue, as a share of the circle; the default is mmsegmentation's",
        )
    )
    extra: tuple[ExtraTransform, ...] = option(
        (), "further albumentations transforms of 8-bit images, applied to the crop last"
    )

    def _mistakes(self) -> Iterator[str]:
        yield from self._no_effect("color_prob", any(self.color_jitter), "color_jitter of zeros")
        low, high = self.scale_range
        if low > high:
            yield f"scale_range: the first number, {low}, is larger than {high}"
