"""Draws the strip of the READMEs: image, label, prediction and errors of some images of a run.

python tools/strip.py runs/demo --images 0 5 --output configs/demo.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from segtrain.checkpoint import LoadedModel, load_model
from segtrain.data import open_dataset
from segtrain.errors import UserError
from segtrain.evaluation.inference import predict_label
from segtrain.evaluation.settings import InferenceSettings
from segtrain.run.pictures import colorize, error_map, legend, text_mask

COLUMNS = ("image", "label", "prediction", "errors (red; grey: not labelled)")
GAP_PX, TITLE_PX, FONT_PX = 6, 24, 15
# A third of the bytes of a full-colour file, and no difference to the eye at this size.
NUM_COLORS = 128


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="run directory or checkpoint")
    parser.add_argument("--images", type=int, nargs="+", default=[0, 1], metavar="I")
    parser.add_argument("--width", type=int, default=256, metavar="PX", help="of one column")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the PNG")
    args = parser.parse_args()
    try:
        strip = draw_strip(load_model(args.run), args.images, args.width)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    picture = Image.fromarray(strip).quantize(NUM_COLORS, dither=Image.Dither.NONE)
    picture.save(args.output, optimize=True)
    print(f"{args.output}: {args.output.stat().st_size / 1000:.0f} kB")
    return 0


def draw_strip(loaded: LoadedModel, indices: Sequence[int], width: int) -> np.ndarray:
    """One row for each image of the evaluation split, with column titles above and the legend of
    the classes that occur below, (height, 4 * width + gaps, 3) uint8."""
    dataset = open_dataset(loaded.config.data, loaded.config.data.eval_split)
    palette, rows, seen = loaded.classes.palette, [], set()
    for index in indices:
        image, label = dataset[index]
        pred = _predict(loaded, image, label.shape)
        parts = (image, colorize(label, palette), colorize(pred, palette), error_map(label, pred))
        rows.append(_side_by_side([_resized(part, width) for part in parts]))
        seen |= set(np.unique(label)) | set(np.unique(pred))
    names = [(i, name) for i, name in enumerate(loaded.classes.names) if i in seen]
    total = rows[0].shape[1]
    gap = np.full((GAP_PX, total, 3), 255, dtype=np.uint8)
    below = legend([name for _, name in names], [palette[i] for i, _ in names], total)
    body = [part for row in rows for part in (row, gap)]
    return np.vstack([_titles(width, total), *body, below])


def _predict(loaded: LoadedModel, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    pixels = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
    settings = InferenceSettings.from_config(loaded.config)
    return predict_label(loaded.model, pixels, settings, size).numpy()


def _resized(picture: np.ndarray, width: int) -> np.ndarray:
    height = round(picture.shape[0] * width / picture.shape[1])
    if picture.shape[1] == width:
        return picture
    return np.array(Image.fromarray(picture).resize((width, height), Image.Resampling.BOX))


def _side_by_side(parts: Sequence[np.ndarray]) -> np.ndarray:
    gap = np.full((parts[0].shape[0], GAP_PX, 3), 255, dtype=np.uint8)
    return np.hstack([x for part in parts for x in (part, gap)][:-1])


def _titles(width: int, total: int) -> np.ndarray:
    line = np.full((TITLE_PX, total), 255, dtype=np.uint8)
    for i, text in enumerate(COLUMNS):
        ink = text_mask(text, FONT_PX)[:TITLE_PX, :width]
        left = i * (width + GAP_PX)
        line[: ink.shape[0], left : left + ink.shape[1]] -= ink
    return np.repeat(line[..., None], 3, axis=2)


if __name__ == "__main__":
    sys.exit(main())
