"""One image of a pack, read completely."""

import hashlib

import numpy as np

from segtrain.data.check.scan import SplitScan
from segtrain.data.check.values import image_values
from segtrain.data.pack.index import PackedImage
from segtrain.data.pack.open_pack import has_content
from segtrain.data.pack.reader import Shards, split_rows
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.find import Pair
from segtrain.data.read.image import ImageForm
from segtrain.errors import DataError


def scan_packed(
    item: tuple[PackedImage, Pair],
    classes: ClassFile,
    form: ImageForm,
    sample_size: int,
    shards: Shards,
    compare: bool,
) -> SplitScan:
    """What one image of a pack and its label hold; compare: also hash the files of both."""
    packed, pair = item
    scan = SplitScan("", 1, classes.num_classes)
    if compare:
        for path, file in zip((*pair.images, pair.label), packed.files, strict=True):
            try:
                if not has_content(path, file):
                    raise DataError(
                        "changed since it was packed; delete the pack and make it again"
                    )
            except DataError as error:
                scan.add_unreadable(path, error)
    try:
        shards.check(packed)
    except DataError as error:
        scan.add_unreadable(shards.path(packed), error)
        return scan
    image, label = split_rows(shards.rows(packed), packed.width, form)
    # Of the files, not of the packed rows, so that it does not depend on the decoder.
    digest = hashlib.sha256("".join(file.sha256 for file in packed.images).encode()).digest()
    # What the files are was checked when they were packed.
    values = image_values(image, form, pair.name)
    scan.add_image(image, values, digest, packed.orientation, sample_size)
    # The slice leaves out IGNORE_INDEX, 255: there are at most 255 classes, from 0.
    pixels = np.bincount(label.ravel(), minlength=256)[: classes.num_classes]
    scan.add_label(pair.name, pixels, label.size)
    return scan
