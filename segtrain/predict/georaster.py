"""Predicts a raster of any size in the memory of a block, and writes it with its georeference."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segtrain.data.read.find import Window
from segtrain.data.read.georeference import copy_place, is_on_map
from segtrain.data.read.image import ImageForm, ignore_missing, ignored_where, read_image
from segtrain.data.read.image_formats import read_info
from segtrain.errors import ConfigError
from segtrain.files import temporary
from segtrain.inference.predictor import Predictor
from segtrain.inference.settings import Size
from segtrain.text import printable

# The side of a block whose prediction is kept, and what is seen around it: less context would show
# as seams. Both together are an image of Cityscapes and fit where training did.
BLOCK_PX, MARGIN_PX = 1024, 256
# A plain TIFF ends at 4 GiB; deflate may make a file a little larger.
_BIG_BYTES = 3 << 30
_NO_DATA = 42113  # GDAL_NODATA


def write_label(path: Path, label: np.ndarray, no_data: float, image: Path) -> None:
    """Writes a label (H, W) or (H, W, K) as a compressed TIFF that lies where `image` does.

    label: as label files hold it; its value `no_data` is marked as such.
    """
    if label.ndim == 2:
        _write(path, label, no_data, image)
    else:  # a band a class
        apart = {"planarconfig": "separate"} if label.shape[2] > 1 else {}
        _write(path, np.moveaxis(label, 2, 0), no_data, image, **apart)


def write_probabilities(
    path: Path, probabilities: np.ndarray, names: Sequence[str], image: Path
) -> None:
    """Writes (K, H, W) float32 atomically: as NPZ with the names, or as TIFF as `write_label`.

    NPZ: `probabilities`, float16, and `classes`. TIFF: a band a class, float32; NaN is no data.
    """
    if path.suffix == ".npz":
        values = {"probabilities": probabilities.astype(np.float16), "classes": list(names)}
        with temporary(path, path.suffix) as draft:
            np.savez_compressed(draft, **values)
            os.replace(draft, path)
    else:
        _write(path, probabilities, "nan", image, planarconfig="separate")


def predict_raster(
    predictor: Predictor,
    path: Path,
    size: Size,
    output: Path,
    *,
    form: ImageForm,
    stored: Callable[[np.ndarray], np.ndarray],
    no_data: float,
    on_block: Callable[[np.ndarray, tuple[slice, slice]], object],
) -> bool:
    """Writes the label of the TIFF at `path`, (height, width) `size`, as a tiled TIFF.

    stored: what label files hold of a label map. no_data: as of `write_label`. form: of the file.
    on_block: called after each block with what the network saw, as `read_image` gives it, and
        where in it the block lies.

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
                (predicted,) = predictor.label_maps(
                    [torch.from_numpy(image)], place=printable(path)
                )
                is_finite = is_finite and bool(predicted.is_finite)
                part = stored(ignored_where(missing, predicted.label.cpu().numpy())[core])
                # `like` is made below, before the first block is asked for.
                if part.dtype != like.dtype:
                    raise ConfigError(f"task: gives {part.dtype}, and its dtype is {like.dtype}")
                # All tiles of a TIFF have one size, so blocks at the edges are filled up.
                block = np.zeros((BLOCK_PX, BLOCK_PX, *part.shape[2:]), part.dtype)
                block[: part.shape[0], : part.shape[1]] = part
                on_block(pixels, core)
                yield block

    # The shape and type of what is written, of no pixel at all.
    decoding = predictor.settings.usual.decoding
    bands = decoding.bands(predictor.num_classes)
    like = stored(np.zeros((0, 0, *bands), decoding.dtype))
    options = {"shape": (*size, *bands), "dtype": like.dtype, "tile": (BLOCK_PX, BLOCK_PX)}
    options |= {"planarconfig": "contig"} if bands else {}
    is_big = math.prod((*size, *bands)) * like.itemsize > _BIG_BYTES
    _write(output, blocks(), no_data, path, bigtiff=is_big, maxworkers=1, **options)
    return is_finite


def _write(
    path: Path,
    pixels: np.ndarray | Iterator[np.ndarray],
    no_data: float | str,
    image: Path,
    **options: Any,
) -> None:
    import tifffile

    with temporary(path) as draft:
        tifffile.imwrite(
            draft,
            pixels,
            compression="zlib",
            photometric="minisblack",
            extratags=[(_NO_DATA, "s", 0, str(no_data), True)],
            metadata=None,
            **options,
        )
        if is_on_map(image, read_info(image)):
            copy_place(image, draft)
        # GDAL keeps there what the tags of a TIFF cannot say, and believes it before them.
        aux, draft_aux = (file.with_name(f"{file.name}.aux.xml") for file in (path, draft))
        # Removed before the map is replaced: the new map must never stand beside them.
        for kept in (".aux.xml", ".ovr", ".msk"):  # of an earlier map: overviews and a mask, too
            path.with_name(f"{path.name}{kept}").unlink(missing_ok=True)
        os.replace(draft, path)
        if draft_aux.exists():
            os.replace(draft_aux, aux)


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
