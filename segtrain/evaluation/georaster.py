"""Predicts a raster of any size in the memory of a block, and writes it with its georeference."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segtrain.data.read.find import Window
from segtrain.data.read.image import ImageForm, ignore_missing, read_image
from segtrain.data.read.raster import is_tiff
from segtrain.data.read.tiff import opened_tiff
from segtrain.errors import DataError
from segtrain.evaluation.predictor import Predictor
from segtrain.evaluation.settings import Size
from segtrain.files import open_regular, os_errors_as, temporary
from segtrain.text import printable
from segtrain.types import IGNORE_INDEX

# The side of a block whose prediction is kept, and what is seen around it: less context would show
# as seams. Both together are an image of Cityscapes and fit where training did.
BLOCK_PX, MARGIN_PX = 1024, 256
# A plain TIFF ends at 4 GiB; deflate may make a file a little larger.
_BIG_BYTES = 3 << 30
_NO_DATA = 42113  # GDAL_NODATA
# ModelPixelScale, ModelTiepoint, ModelTransformation, and the three of GeoKeys (OGC 19-008r4).
_GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)

GeoTags = list[tuple[int, int, int, object, bool]]
"""What tifffile calls extratags."""


def geo_tags(path: Path) -> GeoTags:
    """The tags by which a TIFF says where on Earth it lies; empty if it does not, or is none."""
    if not is_tiff(path):
        return []
    with os_errors_as(DataError, path), open_regular(path) as file, opened_tiff(file, path) as tiff:
        tags = tiff.keyframe.tags
        found = [tags[code] for code in _GEO_TAGS if code in tags]
        values = [tag.value for tag in found]
        for i, tag in enumerate(found):
            if isinstance(tag.value, str):  # as its bytes: it may be in any encoding
                file.seek(tag.valueoffset)
                values[i] = file.read(tag.valuebytecount)
        both = zip(found, values, strict=True)
        return [(tag.code, int(tag.dtype), tag.count, value, True) for tag, value in both]


def write_label(path: Path, label: np.ndarray, ids: np.ndarray, tags: GeoTags) -> None:
    """Writes train ids or IGNORE_INDEX (H, W) as a compressed TIFF with these tags, atomically.

    ids: (256,) what to write for each; that of IGNORE_INDEX is marked as no data.
    """
    _write(path, ids[label], ids, tags)


def write_probabilities(
    path: Path, probabilities: np.ndarray, names: Sequence[str], tags: GeoTags
) -> None:
    """Writes (K, H, W) float32 atomically: as NPZ with the names, or as TIFF with these tags.

    NPZ: `probabilities`, float16, and `classes`. TIFF: a band a class, float32; NaN is no data.
    """
    import tifffile

    with temporary(path, path.suffix) as draft:
        if path.suffix == ".npz":
            values = {"probabilities": probabilities.astype(np.float16), "classes": list(names)}
            np.savez_compressed(draft, **values)
        else:
            options = {"photometric": "minisblack", "planarconfig": "separate", "metadata": None}
            options["extratags"] = [*tags, (_NO_DATA, "s", 0, "nan", True)]
            tifffile.imwrite(draft, probabilities, compression="deflate", **options)
        os.replace(draft, path)


def predict_raster(
    predictor: Predictor,
    path: Path,
    size: Size,
    output: Path,
    *,
    form: ImageForm,
    ids: np.ndarray,
    on_block: Callable[[np.ndarray], object],
) -> bool:
    """Writes the ids of the TIFF at `path`, (height, width) `size`, as a tiled TIFF.

    ids: as of `write_label`. form: of the file. on_block: called after each block with what the
        network saw, as `read_image` gives it.

    Returns whether all scores were finite numbers; elsewhere the prediction means nothing.

    Raises:
        DataError: a part of the file cannot be read.
    """
    is_finite = True

    def blocks() -> Iterator[np.ndarray]:
        nonlocal is_finite
        for top in range(0, size[0], BLOCK_PX):
            for left in range(0, size[1], BLOCK_PX):
                seen, core = _around((top, left), size)
                stored = read_image([path], form, seen)
                nowhere = np.zeros(stored.shape[:2], np.uint8)
                image, missing = ignore_missing(stored, nowhere, form)
                (found,) = predictor.label_maps([torch.from_numpy(image)], place=printable(path))
                is_finite = is_finite and bool(found.is_finite)
                label = found.label.cpu().numpy()
                block = np.zeros((BLOCK_PX, BLOCK_PX), ids.dtype)
                part = ids[np.maximum(label, missing)[core]]
                block[: part.shape[0], : part.shape[1]] = part
                on_block(stored)
                yield block

    options = {"shape": size, "dtype": ids.dtype, "tile": (BLOCK_PX, BLOCK_PX), "maxworkers": 1}
    is_big = math.prod(size) * ids.itemsize > _BIG_BYTES
    _write(output, blocks(), ids, geo_tags(path), bigtiff=is_big, **options)
    return is_finite


def _write(
    path: Path,
    pixels: np.ndarray | Iterator[np.ndarray],
    ids: np.ndarray,
    tags: GeoTags,
    **options: Any,
) -> None:
    import tifffile

    no_data = (_NO_DATA, "s", 0, str(ids[IGNORE_INDEX]), True)
    with temporary(path) as draft:
        tifffile.imwrite(
            draft,
            pixels,
            compression="deflate",
            photometric="minisblack",
            extratags=[*tags, no_data],
            metadata=None,
            **options,
        )
        os.replace(draft, path)


def num_blocks(size: Size) -> int:
    """How many blocks a raster of this size has."""
    return math.prod(math.ceil(side / BLOCK_PX) for side in size)


def _around(start: tuple[int, int], size: Size) -> tuple[Window, tuple[slice, slice]]:
    """What the network sees of the block at `start`, and where in it the block lies."""
    spans, core = [], []
    for first, length in zip(start, size, strict=True):
        last = min(first + BLOCK_PX, length)
        begin, end = max(0, first - MARGIN_PX), min(last + MARGIN_PX, length)
        spans.append((begin, end - begin))
        core.append(slice(first - begin, last - begin))
    (top, height), (left, width) = spans
    return Window(top, left, height, width), (core[0], core[1])
