"""The data layout of Cityscapes: fine and coarse labels, as ids, train ids or colours."""

from pathlib import Path

from segtrain.config import DataConfig
from segtrain.data.folders import split_folder
from segtrain.data.listing import Listing
from segtrain.data.match import match_folders, only_images

_CONTENT = {"ids": "labelIds", "train_ids": "labelTrainIds", "colors": "color"}


def scan(root: Path, data: DataConfig, split: str) -> Listing:
    """The pairs of a split.

    Coarse labels are taken where there are no fine ones (train_extra), and in a split whose name
    asks for them: `gtCoarse/train`.
    """
    named, split = _label_folder_and_split(split)
    images = split_folder(root, "leftImg8bit", split)
    coarse = not (root / "gtFine" / split).is_dir() and (root / "gtCoarse" / split).is_dir()
    kind = named or ("gtCoarse" if coarse else "gtFine")
    content = _CONTENT[data.label_format]
    listing = match_folders(
        images,
        split_folder(root, kind, split),
        image_end="_leftImg8bit",
        label_end=f"_{kind}_{content}",
    )
    for i, problem in enumerate(listing.problems):
        if data.label_format == "ids" and problem.endswith("_labelTrainIds.png)"):
            listing.problems[i] += "; set data.label_format: train_ids to read those"
    if kind == "gtCoarse" and split == "val":
        note = "split 'val' is read from gtCoarse: the benchmark scores the labels of gtFine"
        return listing._replace(notes=[note])
    return listing


def scan_images(root: Path, data: DataConfig, split: str) -> Listing:
    """The images of a split, without labels."""
    return only_images(split_folder(root, "leftImg8bit", split), image_end="_leftImg8bit")


def _label_folder_and_split(text: str) -> tuple[str, str]:
    """`gtCoarse/train` in its two parts; the first is empty if `text` names no folder."""
    folder, slash, split = text.partition("/")
    return (folder, split) if slash and folder in ("gtFine", "gtCoarse") else ("", text)


def instance_file(label: Path) -> Path:
    """The instance map that belongs to a label file."""
    stem = label.stem.rpartition("_")[0]
    return label.with_name(f"{stem}_instanceIds.png")
