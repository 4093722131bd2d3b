"""The training samples of the contenders of bench_against.py: image and label files to a crop.

A crop of `size` from an image of 2048x1024, scaled by 0.5 to 2 and mirrored half of the time, as
a tensor. What is divided by the standard deviation in the step or on the way to it is left out for
all. With colours, each of brightness, contrast, saturation and hue changes with probability 0.5.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from against_mmseg import load_mmseg
from against_models import ALBUMENTATIONS, MMSEG, SEGTRAIN, SEMSEG, TORCHVISION
from commands import segtrain
from PIL import Image

from segtrain.config import AugmentConfig, DataConfig, load_config
from segtrain.data import open_dataset
from segtrain.data.sample.stream import TrainStream
from segtrain.data.sample.transforms import TrainTransform
from segtrain.types import IGNORE_INDEX

Size = tuple[int, int]
Pair = tuple[np.ndarray, np.ndarray]
Run = Callable[[int], object]

IMAGE_SIZE, NUM_IMAGES, NUM_CLASSES = (1024, 2048), 8, 19
SCALES = (0.5, 2.0)
MAX_SHARE = 0.75  # of one class in a crop: `cat_max_ratio` of mmsegmentation's configs
COLORS = {"brightness": 0.125, "contrast": 0.5, "saturation": 0.5, "hue": 0.1}
# As torchvision and albumentations take them.
_RANGES = {name: (1 - x, 1 + x) for name, x in COLORS.items()} | {"hue": (-0.1, 0.1)}
_FILL = (124, 116, 104)
_NOISE = 1.0  # standard deviation; makes a PNG of 2048x1024 about 2.3 MB large, as Cityscapes' are


def write_scenes(root: Path) -> float:
    """Smooth colours with fine noise, a street's worth of regions, and a pack of them.

    Returns:
        The mean size of an image file in MB.
    """
    rng, size = np.random.default_rng(0), IMAGE_SIZE
    names = ", ".join(f"class{i}" for i in range(NUM_CLASSES))
    (root / "classes.yaml").write_text(f"classes: [{names}]\nignore_ids: [255]\n")
    sizes = []
    for i in range(NUM_IMAGES + 1):
        split = "train" if i < NUM_IMAGES else "val"
        smooth = cv2.resize(rng.random((16, 32, 3), np.float32), size[::-1], None, 0, 0, 2)
        noise = rng.normal(0, _NOISE, (*size, 1)) + rng.normal(0, _NOISE / 4, (*size, 3))
        image = (40 + 170 * smooth + noise).clip(0, 255).astype(np.uint8)
        regions = cv2.resize(rng.random((8, 16), np.float32), size[::-1], None, 0, 0, 2)
        label = (regions.clip(0, 0.999) * NUM_CLASSES).astype(np.uint8)
        for kind, pixels in (("images", image), ("labels", label)):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(root / kind / split / f"{i}.png"), pixels)
        sizes.append((root / "images" / split / f"{i}.png").stat().st_size / 1e6)
    config = root / "config.yaml"
    config.write_text(
        f"data: {{layout: folders, root: {root}, classes: {root / 'classes.yaml'}}}\n"
        "train: {batch_size: 2, steps: 10}\n"
    )
    segtrain("data", "pack", config, "--output", root / "pack", quiet=True)
    return float(np.mean(sizes))


def samples(
    contender: str, *, root: str, crop: Size, colors: bool, source: str, share: float = 1.0
) -> Run:
    """So many training samples of a contender.

    source: files, decoded (arrays in memory), or pack.
    share: the largest that one class may take of a crop; 1: any. Only of segtrain and
        mmsegmentation.
    """
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    if contender == SEGTRAIN:
        return _segtrain(Path(root), crop, colors, source, share)
    make = {
        MMSEG: _mmseg,
        SEMSEG: _semseg,
        TORCHVISION: _torchvision,
        ALBUMENTATIONS: _albumentations,
    }
    options = {"share": share} if contender == MMSEG else {}
    read, transform = make[contender](crop, colors, **options)
    images = sorted((Path(root) / "images/train").iterdir())
    pairs = [(path, Path(root) / "labels/train" / path.name) for path in images]
    if source == "files":
        return lambda count: [transform(read(*pairs[i % len(pairs)])) for i in range(count)]
    decoded = [read(*pair) for pair in pairs]
    return lambda count: [transform(decoded[i % len(decoded)]) for i in range(count)]


def _segtrain(root: Path, crop: Size, colors: bool, source: str, share: float) -> Run:
    data = load_config(root / "config.yaml").data
    if source == "pack":
        data = DataConfig(**data.model_dump(exclude_unset=True), pack=str(root / "pack"))
    dataset = open_dataset(data, "train")
    jitter = tuple(COLORS.values())
    changes = {"color_prob": 0.5, "color_jitter": jitter} if colors else {}
    augment = AugmentConfig(crop_size=crop, scale_range=SCALES, max_class_share=share, **changes)
    transform = TrainTransform(augment, form=dataset.form._replace(mean=_FILL))
    if source != "decoded":
        stream = TrainStream(dataset, transform, stream_seed=0, batch_size=1)
        places = iter(range(10**9))
        return lambda count: [stream[next(places), 0] for _ in range(count)]
    pairs = [dataset[i] for i in range(len(dataset))]
    rng = np.random.default_rng(0)
    return lambda count: [transform(*pairs[i % len(pairs)], rng) for i in range(count)]


def _mmseg(crop: Size, colors: bool, share: float) -> tuple[Callable, Callable]:
    """The pipeline of its configs for Cityscapes."""
    load_mmseg()
    from mmcv.transforms import Compose

    whole = {"scale": IMAGE_SIZE[::-1], "ratio_range": SCALES, "keep_ratio": True}
    steps = [
        {"type": "RandomResize", **whole},
        {"type": "RandomCrop", "crop_size": crop, "cat_max_ratio": share},
        {"type": "RandomFlip", "prob": 0.5},
        *([{"type": "PhotoMetricDistortion"}] if colors else []),
        {"type": "PackSegInputs"},
    ]
    load = Compose([{"type": "LoadImageFromFile"}, {"type": "LoadAnnotations"}])
    change = Compose(steps)

    def read(image: Path, label: Path) -> dict[str, Any]:
        paths = {"img_path": str(image), "seg_map_path": str(label)}
        return load({**paths, "label_map": None, "reduce_zero_label": False, "seg_fields": []})

    return read, lambda results: change({**results, "seg_fields": list(results["seg_fields"])})


def _semseg(crop: Size, colors: bool) -> tuple[Callable, Callable]:
    """RandScale, RandomHorizontalFlip, Crop and ToTensor of hszhao/semseg; images are float32.

    Without its rotation and blur, which the others do not have either.
    """
    assert not colors, "it has no changes of colour"
    top_left = random.randint

    def read(image: Path, label: Path) -> Pair:
        pixels = cv2.cvtColor(cv2.imread(str(image), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        return np.float32(pixels), cv2.imread(str(label), cv2.IMREAD_GRAYSCALE)

    def transform(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = pair
        scale = random.uniform(*SCALES)
        image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_LINEAR)
        label = cv2.resize(label, None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST)
        if random.random() < 0.5:
            image, label = cv2.flip(image, 1), cv2.flip(label, 1)
        down, right = (max(0, c - n) for c, n in zip(crop, label.shape, strict=True))
        if down or right:
            edges = (down // 2, down - down // 2, right // 2, right - right // 2)
            image = cv2.copyMakeBorder(image, *edges, cv2.BORDER_CONSTANT, value=_FILL)
            label = cv2.copyMakeBorder(label, *edges, cv2.BORDER_CONSTANT, value=(IGNORE_INDEX,))
        y, x = (top_left(0, n - c) for c, n in zip(crop, label.shape, strict=True))
        window = np.s_[y : y + crop[0], x : x + crop[1]]
        image = torch.from_numpy(image[window].transpose(2, 0, 1)).contiguous()
        return image, torch.from_numpy(label[window]).long()

    return read, transform


def _torchvision(crop: Size, colors: bool) -> tuple[Callable, Callable]:
    """The preset of torchvision's segmentation reference, by its transforms v2 on tensors."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    low, high = (round(IMAGE_SIZE[0] * scale) for scale in SCALES)
    fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORE_INDEX}
    change = v2.Compose(
        [
            v2.RandomResize(min_size=low, max_size=high + 1, antialias=True),
            v2.RandomHorizontalFlip(0.5),
            v2.RandomCrop(crop, pad_if_needed=True, fill=fill),
            *([v2.RandomPhotometricDistort(**_RANGES)] if colors else []),
        ]
    )

    def read(image: Path, label: Path) -> tuple[Any, Any]:
        pixels = v2.functional.pil_to_tensor(Image.open(image).convert("RGB"))
        return tv_tensors.Image(pixels), tv_tensors.Mask(
            v2.functional.pil_to_tensor(Image.open(label))
        )

    return read, lambda pair: change(*pair)


def _albumentations(crop: Size, colors: bool) -> tuple[Callable, Callable]:
    import albumentations as A
    from albumentations.pytorch import ToTensorV2

    change = A.Compose(
        [
            A.RandomScale((SCALES[0] - 1, SCALES[1] - 1), p=1),
            A.PadIfNeeded(*crop, fill=_FILL, fill_mask=IGNORE_INDEX),
            A.RandomCrop(*crop),
            A.HorizontalFlip(p=0.5),
            # All four at once, half of the time: as much work as each of them half of the time.
            *([A.ColorJitter(**_RANGES, p=0.5)] if colors else []),
            ToTensorV2(),
        ],
        seed=0,
    )

    def read(image: Path, label: Path) -> Pair:
        pixels = cv2.cvtColor(cv2.imread(str(image)), cv2.COLOR_BGR2RGB)
        return pixels, cv2.imread(str(label), cv2.IMREAD_UNCHANGED)

    return read, lambda pair: change(image=pair[0], mask=pair[1])
