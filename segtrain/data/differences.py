"""How a data set differs from the one that a model was trained on, as lines for a message."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from segtrain.data.classes import ClassFile
from segtrain.data.dataset import SegDataset
from segtrain.data.fingerprint import SplitFingerprint, hash_files
from segtrain.text import printable


def file_difference(
    before: SplitFingerprint, now: SplitFingerprint, dataset: SegDataset, root: str
) -> str:
    """How the names, sizes or order of the files differ from `before`; empty if they do not.

    now: the fingerprint of `dataset` at `root`.
    """
    if before.num_pairs == now.num_pairs and before.files == now.files:
        return ""
    if before.pairs_per_hash != now.pairs_per_hash:
        now = hash_files(dataset, root, pairs_per_hash=before.pairs_per_hash)
    differing = _differing(before.files, now.files)
    block = differing[0] if differing else 0
    # One hash covers the images and the labels of a block. Both lists end together.
    kinds = zip(*((pair.image, pair.label) for pair in dataset.pairs), strict=True)
    places = [_place(paths, block, now.pairs_per_hash) for paths in kinds]
    is_beyond = block * now.pairs_per_hash >= len(dataset.pairs)
    place = places[0] if is_beyond else " or ".join(places)
    what = "names, sizes or order of the files differ"
    if before.num_pairs != now.num_pairs:
        what = f"{before.num_pairs} images there, {now.num_pairs} now"
    return f"split {dataset.split}: {what}; the first difference is {place}"


def label_difference(before: SplitFingerprint, labels: Sequence[str], dataset: SegDataset) -> str:
    """How the contents of the labels differ from `before`; empty if they do not or are unknown.

    before: of the same files, by names and sizes.
    labels: the hashes now.
    """
    differing = [] if before.labels is None else _differing(before.labels, labels)
    if not differing:
        return ""
    place = _place([pair.label for pair in dataset.pairs], differing[0], before.pairs_per_hash)
    many = f"{len(differing)} " if before.pairs_per_hash == 1 else ""
    return f"split {dataset.split}: {many}labels hold something else; the first is {place}"


def class_differences(
    before: ClassFile, now: ClassFile, label_format: str
) -> tuple[list[str], list[str]]:
    """Differences between two class files: those that change the labels, and the others.

    If labels are read by ids, colours only change pictures. If they are read by colours, ids only
    change the label maps that segtrain writes. If they hold train ids, both are harmless.
    """
    if before.names != now.names:
        pairs = zip((*before.names, "none"), (*now.names, "none"), strict=False)
        i, (old, new) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return [
            f"class file: {before.num_classes} classes there, {now.num_classes} now; class {i} is "
            f"{old} there, {new} now"
        ], []
    both = list(zip(before.classes, now.classes, strict=True))
    ids = {f"ids of {old.name}": (old.ids, new.ids) for old, new in both}
    ids["ignore_ids"] = (before.ignore_ids, now.ignore_ids)
    colors = {f"color of {old.name}": (old.color, new.color) for old, new in both}
    colors |= {
        f"more_colors of {old.name}": (sorted(old.more_colors), sorted(new.more_colors))
        for old, new in both
    }
    colors["color of what is ignored"] = (before.ignore_color, now.ignore_color)
    id_lines = [_line(what, *pair) for what, pair in ids.items() if set(pair[0]) != set(pair[1])]
    color_lines = [_line(what, *pair) for what, pair in colors.items() if pair[0] != pair[1]]
    if label_format == "train_ids":
        return [], id_lines + color_lines
    return (color_lines, id_lines) if label_format == "colors" else (id_lines, color_lines)


def _line(what: str, old: Sequence[object], new: Sequence[object]) -> str:
    return f"class file: {what}: {list(old)} there, {list(new)} now"


def _differing(before: Sequence[str], now: Sequence[str]) -> list[int]:
    """The indices of the blocks that differ or that one side does not have."""
    return [i for i, (old, new) in enumerate(zip_longest(before, now)) if old != new]


def _place(paths: Sequence[Path], block: int, pairs_per_hash: int) -> str:
    """The file or files of a block."""
    files = paths[block * pairs_per_hash : (block + 1) * pairs_per_hash]
    if not files:
        return f"after {printable(paths[-1])}, which is the last one now"
    if len(files) == 1:
        return printable(files[0])
    return f"among the {len(files)} from {printable(files[0])} to {printable(files[-1])}"
