"""Reads an image of a pack completely, and compares it and its files with the manifest."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segtrain.data.brightness import brightness
from segtrain.data.check.scan import BadFile, SplitScan
from segtrain.data.listing import Pair
from segtrain.data.pack.manifest import PackedImage, header_of, read_pack
from segtrain.data.pack.reader import PackedDataset, Shards, split_rows
from segtrain.data.pack.source import has_content
from segtrain.errors import DataError
from segtrain.text import printable


class PackedPair(NamedTuple):
    """An image of a pack. shards: that hold it. compared: whether its files are hashed, too."""

    image: PackedImage
    pair: Pair
    shards: Shards
    compared: bool


def packed_pairs(dataset: PackedDataset, *, compare: bool) -> list[PackedPair]:
    """All images of `dataset`. compare: also hash the files that it was made from."""
    # A record of its own for each, because all of them travel to other processes.
    shards, compared = dataset.shards, compare and dataset.source_is_there
    return [
        PackedPair(
            replace(image, shard=0),
            pair,
            Shards(shards.directory, [shards.shards[image.shard]]),
            compared,
        )
        for image, pair in zip(dataset.images, dataset.pairs, strict=True)
    ]


def scan_packed(item: PackedPair, num_classes: int, count_rgb: bool) -> SplitScan:
    """What one image and its label hold."""
    scan = SplitScan("", 1, num_classes)
    packed, pair, shards, compared = item
    try:
        shards.check(packed, num_classes)
    except DataError as error:
        scan.bad_files.append(BadFile.of(shards.path(packed), error))
        return scan
    finally:
        if compared:
            _compare(scan, item)
    image, label = split_rows(shards.rows(packed))
    scan.digests[bytes.fromhex(packed.image.sha256)] = [pair.name]
    scan.sizes[label.shape] = 1
    if packed.orientation != 1:
        scan.turned = [pair.name]
    scan.brightness = [brightness(image, packed.depth, pair.name)]
    if count_rgb:
        scan.rgb[:] = [np.bincount(image[..., c].ravel(), minlength=256) for c in range(3)]
    scan.pixels += np.bincount(label.ravel(), minlength=256)[:num_classes]
    num_valid = int(scan.pixels.sum())
    scan.images[:] = scan.pixels > 0
    scan.pixels_beside[:] = scan.images * num_valid
    scan.ignored_pixels = label.size - num_valid
    if not num_valid:
        scan.all_ignored = [pair.name]
    return scan


def header_problems(directory: Path) -> list[str]:
    """The shards of a pack whose first bytes, which other programs read, are not what they were.

    Raises:
        DataError: there is no whole pack.
    """
    pack = read_pack(directory)
    problems = []
    for i, shard in enumerate(pack.shards):
        expected = header_of(pack, i)
        with (directory / shard.name).open("rb") as file:
            if file.read(len(expected)) != expected:
                problems.append(f"{printable(directory / shard.name)}: damaged header")
    return problems


def _compare(scan: SplitScan, item: PackedPair) -> None:
    """Notes files that do not have the bytes that were packed."""
    for path, file in ((item.pair.image, item.image.image), (item.pair.label, item.image.label)):
        try:
            if has_content(path, file):
                continue
        except DataError as error:
            scan.bad_files.append(BadFile.of(path, error))
            continue
        reason = "changed since it was packed; delete the pack and make it again"
        scan.bad_files.append(BadFile(printable(path), reason))
