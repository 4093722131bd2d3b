"""The files of predictions below one directory: label maps, colour maps and overlays."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from segtrain.data.classes import ClassFile
from segtrain.errors import ConfigError
from segtrain.files import NotRegularError, check_replaceable
from segtrain.run.pictures import colorize, legend, overlay, write_png
from segtrain.text import printable

KINDS = LABELS, COLORS, OVERLAYS = "labels", "colors", "overlays"
_LEGEND = "legend.png"


def file_names(names: Sequence[str]) -> list[str]:
    """The paths, relative to the directory, of the predictions for images of these names."""
    return [f"{kind}/{name}.png" for name in names for kind in KINDS]


def check_output(output: Path, names: Sequence[str], *, overwrite: bool) -> None:
    """ConfigError if a directory cannot take the predictions, or already holds some of them."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {printable(output)}: is a file; expected a directory")
    for path in (output / name for name in (_LEGEND, *file_names(names))):
        try:
            check_replaceable(path)
        except NotRegularError as error:
            raise ConfigError(f"--output {printable(path)}: {error.strerror}") from None
        except OSError:
            continue  # the folder cannot be read; writing will say so
    there = [name for name in names if os.path.lexists(output / LABELS / f"{name}.png")]
    if there and not overwrite:
        first = printable(output / LABELS / f"{there[0]}.png")
        repair = "choose another directory or pass --overwrite"
        more = f", and {len(there) - 1} more" if there[1:] else ""
        raise ConfigError(f"--output {first}: exists already{more}; {repair}")


def write_legend(output: Path, classes: ClassFile) -> None:
    """Writes the colour and name of each class."""
    write_png(output / _LEGEND, legend(classes.names, classes.palette))


def write_prediction(
    output: Path, name: str, image: np.ndarray, pred: np.ndarray, classes: ClassFile
) -> None:
    """Writes the three pictures of `pred`, (H, W) uint8 train ids; ExecutionError if it cannot.

    Label maps hold the raw ids of the class file: grey, with 16 bits if an id exceeds 255.
    """
    ids = np.array(classes.write_ids)
    ids = ids.astype(np.uint8 if ids.max() <= 255 else np.uint16)  # a class file allows no more
    colors = colorize(pred, classes.palette)
    blended = overlay(image, pred, classes.palette)
    for kind, picture in zip(KINDS, (ids[pred], colors, blended), strict=True):
        write_png(output / kind / f"{name}.png", picture)
