"""Folders of images and labels in conventions that people bring, each with its hidden truth."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

from segtrain.config import Config, load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import load_class_file

NAMES = ("background", "car", "road", "tree")
COLORS = np.array([(0, 0, 0), (200, 30, 30), (90, 90, 100), (20, 160, 60)], np.uint8)
_PAINT = np.array([(120, 150, 180), (190, 60, 60), (90, 90, 95), (40, 140, 60)], float)

Truth = dict[str, np.ndarray]
"""The classes (H, W) uint8 of each image, by its path."""


def scene(seed: int, num_classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """A noisy image (64, 80, 3) uint8 and its classes (64, 80) uint8; each class is on it."""
    rng = np.random.default_rng(seed)
    label = np.zeros((64, 80), np.uint8)
    for k in range(1, num_classes):
        center = (int(rng.integers(80)), int(rng.integers(12, 64)))
        cv2.circle(label, center, int(rng.integers(8, 20)), k, -1)
        label[:6, 6 * k : 6 * k + 6] = k
    image = _PAINT[label] + rng.normal(0, 12, (64, 80, 3)) + rng.normal(0, 10, 3)
    return image.clip(0, 255).astype(np.uint8), label


def save(path: Path, array: np.ndarray, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".tif":
        tifffile.imwrite(path, array)
    elif array.dtype == np.uint16:
        cv2.imwrite(str(path), array)
    else:
        Image.fromarray(array).save(path, **options)


def images_in(
    folder: Path,
    name: str = "images/t{i}.png",
    number: int = 6,
    *,
    num_classes: int = 4,
    seed: int = 0,
) -> Iterator[tuple[int, str, np.ndarray]]:
    """Saves scenes from `seed` on; yields the number, the path and the classes of each.

    name: with the fields of `_fields`.
    """
    for i in range(number):
        pixels, classes = scene(seed + i, num_classes)
        path = name.format(**_fields(i))
        save(folder / path, pixels)
        yield i, path, classes


def write(
    folder: Path,
    make: Callable[[np.ndarray, int], np.ndarray] = lambda classes, _: classes,
    *,
    image: str = "images/t{i}.png",
    label: str = "masks/t{i}.png",
    **options: int,
) -> Truth:
    """Saves images and labels; make: what the label of image i holds of its classes."""
    truth = {}
    for i, path, classes in images_in(folder, image, **options):
        save(folder / label.format(**_fields(i)), make(classes, i))
        truth[path] = classes
    return truth


def labels_of(output: Path) -> tuple[Truth, Config]:
    """The label of each image, by its path below the data's root, and the config."""
    config = load_config(output / "config.yaml" if output.is_dir() else output)
    found = {}
    for split in (config.data.train_split, config.data.eval_split):
        dataset = open_dataset(config.data, split)
        for i, pair in enumerate(dataset.pairs):
            name = str(pair.image.relative_to(config.data.root))
            assert name not in found  # in one split only
            found[name] = dataset[i][1]
    return found, config


def quick_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and no sheet, which takes a fifth of the time; test_init looks at it."""
    monkeypatch.setattr("segtrain.desk.commands.init._HOST", ("127.0.0.1", 9))
    blank = np.zeros((1, 1, 3), np.uint8)
    monkeypatch.setattr("segtrain.desk.survey.experiment_files.contact_sheet", lambda *_: blank)


def assert_same_division(found: Truth, truth: Truth) -> None:
    """Equal labels but for the order of the classes."""
    assert found.keys() == truth.keys()
    pairs = {
        pair
        for name, classes in truth.items()
        for pair in zip(classes.reshape(-1).tolist(), found[name].reshape(-1).tolist(), strict=True)
    }
    num_classes = len({a for a, _ in pairs})
    assert len(pairs) == len({b for _, b in pairs}) == num_classes > 1


def _folder(
    image: str,
    label: str,
    make: Callable[[np.ndarray], np.ndarray] = lambda classes: classes,
    *,
    num_classes: int = 4,
    number: int = 8,
    **files: str,
) -> Callable[[Path], Truth]:
    """A folder: `image` and `label` are names for `_fields`; `files` by name, `__` a dot.

    make: the content of a label file.
    """

    def build(folder: Path) -> Truth:
        options = {"image": image, "label": label, "number": number, "num_classes": num_classes}
        truth = write(folder, lambda classes, _: make(classes), **options)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return truth

    return build


def _fields(i: int) -> dict[str, object]:
    split, short = ("training", "train") if i < 9 else ("validation", "val")
    drive = "0016E5" if i < 5 else "0001TP"
    return {"i": i, "scene": i // 2, "split": split, "short": short, "drive": drive}


_TABLE = "name,r,g,b\n" + "".join(
    f"{name},{','.join(map(str, color))}\n"
    for name, color in zip(NAMES, COLORS.tolist(), strict=True)
)
_MAP = "# label:color_rgb:parts:actions\n" + "".join(
    f"{name}:{','.join(map(str, color))}::\n"
    for name, color in zip(NAMES, COLORS.tolist(), strict=True)
)


def _mask(classes: np.ndarray) -> np.ndarray:
    return classes * 255


def _colored(classes: np.ndarray) -> np.ndarray:
    return COLORS[classes]


def _shaded(classes: np.ndarray) -> np.ndarray:
    colors = COLORS[classes]
    colors[0, 6:8, 0] += 2  # of the car
    return colors


_LISTED = "\n".join(NAMES)
_NUMBERED = json.dumps({"labels": {name: i for i, name in enumerate(NAMES)}})
_HEX = json.dumps(
    [
        {"name": n, "color": "#{:02x}{:02x}{:02x}".format(*c)}
        for n, c in zip(NAMES, COLORS.tolist(), strict=True)
    ]
)
_FASTAI = "0016E5_00001.png\n0001TP_00007.png\n"
_ADE = "images/{split}/ADE_{short}_{i:05}.jpg", "annotations/{split}/ADE_{short}_{i:05}.png"
_DRIVES = "images/{drive}_{i:05}.png", "labels/{drive}_{i:05}_P.png"
_BESIDE, _GIFS = ("x{i}.jpg", "x{i}_mask.png"), ("train/c{i}.JPG", "train_masks/c{i}_mask.gif")
_VOC = "JPEGImages/{i}.jpg", "SegmentationClass/{i}.png"
_NNUNET = "imagesTr/c_{i:03}_0000.png", "labelsTr/c_{i:03}.png"
_YEARS = "images/{short}2017/{i}.jpg", "annotations/{short}2017/{i}.png"
_CROPS = "{short}crop/{i}_1_2.jpg", "{short}crop/{i}_1_2.png"
_STEMS = "{short}_{i}.bmp", "{short}_{i}_anno.bmp"
_TILES = "top/top_mosaic_09cm_area{i}.tif", "gts/top_mosaic_09cm_area{i}.tif"
_CARVANA = "segmentation/train/c{i}.jpg", "segmentation/train_masks/c{i}.png"
_SCENES = "scene_{scene}/rgb/{i:04}.png", "scene_{scene}/semantic/{i:04}.png"
CASES: dict[str, Callable[[Path], Truth]] = {
    "ids_with_names": _folder("images/{i}.jpg", "labels/{i}.png", classes__txt=_LISTED),
    "mask_beside_the_image": _folder(*_BESIDE, _mask, num_classes=2, classes__txt="crack"),
    "masks_as_gif": _folder(*_GIFS, _mask, num_classes=2),
    "colors_by_a_table": _folder(
        "imgs/{i}.png", "masks/{i}_L.png", _colored, class_dict__csv=_TABLE
    ),
    "colors_by_a_labelmap": _folder(*_VOC, _colored, labelmap__txt=_MAP),
    "channel_numbers": _folder(*_NNUNET, dataset__json=_NUMBERED),
    "splits_in_the_names": _folder(*_ADE, number=12),
    "beginnings_of_drives": _folder(*_DRIVES, number=12, codes__txt=_LISTED, valid__txt=_FASTAI),
    "splits_with_years": _folder(*_YEARS, number=12),
    "splits_and_crops": _folder(*_CROPS, number=12),
    "splits_in_the_stems": _folder(*_STEMS, number=12),
    "a_folder_named_as_its_images_begin": _folder(*_TILES, _colored),
    "masks_as_ppm": _folder(
        "images/{i}.ppm", "masks/{i}.ah.ppm", lambda x: np.dstack([_mask(x)] * 3), num_classes=2
    ),
    "masks_as_jpeg": _folder("images/{i}.jpg", "masks/{i}.jpg", _mask, num_classes=2),
    "a_word_for_labels_above_all_files": _folder(*_CARVANA),
    "scenes_in_sixteen_bits": _folder(*_SCENES, lambda x: x.astype(np.uint16) * 300 + 7),
    "a_word_for_images_in_both_names": _folder("images/img_{i:03}.png", "masks/img_{i:03}.png"),
    "one_hot": _folder("pics/{i}.webp", "gt/{i}.npy", lambda x: np.eye(4, dtype=np.uint8)[x]),
    "grey_in_three_channels": _folder(
        "a/{i}.tif", "annotations/{i}.bmp", lambda x: np.repeat(x[..., None], 3, axis=2)
    ),
    "a_shade_in_a_few_pixels": _folder(
        "images/{i}.jpg", "labels/{i}.png", _shaded, labels__json=_HEX
    ),
}


def _files_for_classes(form: str) -> Callable[[Path], Truth]:
    def build(folder: Path) -> Truth:
        truth = {}
        for i, path, classes in images_in(folder, "photos/p{i}.jpg"):
            for k, name in enumerate(NAMES[1:], start=1):
                save(folder / form.format(i=i, name=name), (classes == k).astype(np.uint8) * 255)
            truth[path] = classes
        return truth

    return build


CASES["a_folder_for_each_class"] = _files_for_classes("masks/{name}/p{i}.png")
CASES["an_end_for_each_class"] = _files_for_classes("masks/p{i}_{name}.png")


def _cities(folder: Path) -> Truth:
    """Cityscapes' names, in cities of 7, 2 and 1 images, which are numbered anew in each."""
    truth, ids = {}, np.array([7, 11, 26, 23], np.uint8)
    cities = ("train/aachen", 7), ("train/ulm", 1), ("val/bochum", 2), ("val/lindau", 3)
    for city, number in cities:
        for i in range(number):
            pixels, classes = scene(len(truth))
            name = f"{city}/{PurePosixPath(city).name}_{i:06}"
            save(folder / f"leftImg8bit/{name}_leftImg8bit.png", pixels)
            save(folder / f"gtFine/{name}_gtFine_labelIds.png", ids[classes])
            save(folder / f"gtFine/{name}_gtFine_instanceIds.png", ids[classes] * np.uint16(1000))
            save(folder / f"gtFine/{name}_gtFine_color.png", _colored(classes))
            truth[f"leftImg8bit/{name}_leftImg8bit.png"] = classes
    return truth


CASES["cities_of_few_images"] = _cities


def _named_otherwise(folder: Path) -> Truth:
    """MoNuSeg: the images of the test set are beside their masks, those to train on are not."""
    test, train = "MoNuSegTestData/TCGA-{i}", "MoNuSeg 2018 Training Data/"
    names = {"image": f"{test}.tif", "label": f"{test}_bin_mask.png"}
    write(folder, lambda classes, _: _mask(classes), number=3, num_classes=2, seed=8, **names)
    names = train + "Tissue Images/TCGA-A{i}.tif", train + "Binary Masks/TCGA-A{i}.png"
    return _folder(*names, _mask, num_classes=2)(folder)


CASES["a_test_set_named_otherwise"] = _named_otherwise


def _known_colors(folder: Path) -> Truth:
    """KITTI: ids of Cityscapes, and their colours; ids 0 and 1 have no class, and are black."""
    truth, classes = {}, load_class_file("cityscapes").classes
    ids = np.array([one.ids[0] for one in classes], np.uint8)
    colors = np.array([*(one.color for one in classes), (0, 0, 0)], np.uint8)
    for i in range(8):
        pixels, drawn = scene(i, 4)
        labels = np.repeat(np.arange(16, dtype=np.uint8), 5)[None] % 15 + drawn
        without = np.zeros_like(labels, dtype=bool)
        without[:4] = True
        stored = np.where(without, np.arange(80, dtype=np.uint8) % 2, ids[labels])
        save(folder / f"image_2/{i:06}_10.png", pixels)
        save(folder / f"semantic/{i:06}_10.png", stored)
        save(folder / f"semantic_rgb/{i:06}_10.png", colors[np.where(without, 19, labels)])
        truth[f"image_2/{i:06}_10.png"] = np.where(without, 255, labels)
    return truth


CASES["ids_of_cityscapes_and_their_colors"] = _known_colors


def _objects(folder: Path) -> Truth:
    truth = {}
    for i in range(8):
        pixels, classes = scene(i, 2)
        name = f"{i * 7919 + 1:08x}"
        save(folder / f"{name}/images/{name}.png", pixels)
        count, objects = cv2.connectedComponents(classes)
        for k in range(1, count):
            mask = (objects == k).astype(np.uint8) * 255
            save(folder / f"{name}/masks/{k * 31:04x}aa.png", mask)
        truth[f"{name}/images/{name}.png"] = classes
    return truth


def _bands(folder: Path) -> Truth:
    truth = {}
    for i in range(8):
        pixels, classes = scene(i)
        for k, band in enumerate(("B02", "B03", "B04", "B08")):
            save(folder / f"s2/t{i}_{band}.tif", pixels[..., k % 3].astype(np.uint16) * 12)
        save(folder / f"mask/t{i}.png", classes)
        truth[f"s2/t{i}_B02.tif"] = classes
    return truth


def _coco(folder: Path) -> Truth:
    from pycocotools.mask import encode

    truth, images, annotations = {}, [], []
    for i, path, classes in images_in(folder, "images/{i}.jpg"):
        images.append({"id": i, "file_name": f"{i}.jpg", "height": 64, "width": 80})
        for k in (1, 2, 3):
            mask = np.asfortranarray(classes == k, np.uint8)
            runs = encode(mask)
            runs["counts"] = runs["counts"].decode()
            one = {"id": 10 * i + k, "image_id": i, "category_id": k, "segmentation": runs}
            annotations.append(one | {"iscrowd": 0, "area": int(mask.sum()), "bbox": [0, 0, 1, 1]})
        truth[path] = classes
    categories = [{"id": k, "name": NAMES[k]} for k in (1, 2, 3)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(content))
    return truth


CASES["annotations_of_coco"] = _coco
CASES["a_file_for_each_object"] = _objects
CASES["bands_in_files"] = _bands
