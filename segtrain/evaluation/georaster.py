"""Predicts a raster of any size in the memory of a block, and writes it with its georeference."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segtrain.data.read.find import Window
from segtrain.data.read.image import ImageForm, ignore_missing, ignored_where, read_image
from segtrain.data.read.raster import is_tiff
from segtrain.data.read.tiff import opened_tiff
from segtrain.errors import DataError
from segtrain.evaluation.predictor import Predictor
from segtrain.evaluation.settings import Size
from segtrain.files import open_regular, os_errors_as, temporary
from segtrain.text import printable

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


def write_label(path: Path, label: np.ndarray, no_data: int, tags: GeoTags) -> None:
    """Writes a label (H, W) or (H, W, K) as a compressed TIFF with these tags, atomically.

    label: as label files hold it; its value `no_data` is marked as such.
    """
    if label.ndim == 2:
        _write(path, label, no_data, tags)
    else:  # a band a class
        apart = {"planarconfig": "separate"} if label.shape[2] > 1 else {}
        _write(path, np.moveaxis(label, 2, 0), no_data, tags, **apart)


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
    stored: Callable[[np.ndarray], np.ndarray],
    no_data: int,
    on_block: Callable[[np.ndarray], object],
) -> bool:
    """Writes the label of the TIFF at `path`, (height, width) `size`, as a tiled TIFF.

    stored: what label files hold of a label map. no_data: as of `write_label`. form: of the file.
    on_block: called after each block with what the network saw, as `read_image` gives it.

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
                pixels = read_image([path], form, seen)
                nowhere = np.zeros(pixels.shape[:2], np.uint8)
                image, missing = ignore_missing(pixels, nowhere, form)
                (found,) = predictor.label_maps([torch.from_numpy(image)], place=printable(path))
                is_finite = is_finite and bool(found.is_finite)
                part = stored(ignored_where(missing, found.label.cpu().numpy())[core])
                block = np.zeros((BLOCK_PX, BLOCK_PX, *part.shape[2:]), part.dtype)
                block[: part.shape[0], : part.shape[1]] = part
                on_block(pixels)
                yield block

    # The shape and type of what is written, of no pixel at all.
    overlap = predictor.settings.usual.thresholds is not None
    bands = (predictor.num_classes,) if overlap else ()
    like = stored(np.zeros((0, 0, *bands), np.uint8))
    options = {"shape": (*size, *bands), "dtype": like.dtype, "tile": (BLOCK_PX, BLOCK_PX)}
    options |= {"planarconfig": "contig"} if overlap else {}
    is_big = math.prod((*size, *bands)) * like.itemsize > _BIG_BYTES
    tags = geo_tags(path)
    _write(output, blocks(), no_data, tags, bigtiff=is_big, maxworkers=1, **options)
    return is_finite


def _write(
    path: Path,
    pixels: np.ndarray | Iterator[np.ndarray],
    no_data: int,
    tags: GeoTags,
    **options: Any,
) -> None:
    import tifffile

    marked = (_NO_DATA, "s", 0, str(no_data), True)
    with temporary(path) as draft:
        tifffile.imwrite(
            draft,
            pixels,
            compression="deflate",
            photometric="minisblack",
            extratags=[*tags, marked],
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
