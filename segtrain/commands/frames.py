"""`segtrain predict` of videos, frame by frame."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from segtrain.checkpoint.ready import ReadyModel
from segtrain.commands.summary import Notes
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.image import ImageForm
from segtrain.data.read.photos import PhotoFile
from segtrain.errors import ConfigError, DataError, ExecutionError
from segtrain.evaluation.inference import LabelMap
from segtrain.evaluation.video import frames_of, overlay_video
from segtrain.files import os_errors_as
from segtrain.run import pictures
from segtrain.text import first_of, printable

_FRAME = r"\d{6,}\.(png|tif)"  # the file of the label map of one


def _of_frame(ready: ReadyModel, frame: np.ndarray, place: str) -> LabelMap:
    return ready.predictor.label_maps([torch.from_numpy(frame)], place=place)[0]


def _write_label(output: Path, name: str, label: np.ndarray, classes: ClassFile) -> None:
    """Writes the raw ids of a frame: a PNG, or where classes overlap a TIFF of their bands."""
    path = output / pictures.LABELS / name
    stored = pictures.stored_label(classes, label)
    if classes.overlapping:
        pictures.write_bands(path.with_name(f"{path.name}.tif"), stored)
    else:
        pictures.write_png(path.with_name(f"{path.name}.png"), stored)


def make_room(
    labels: Path, videos: Sequence[str], names: Sequence[str], *, overwrite: bool
) -> None:
    """Removes the label maps of an earlier video's frames, of which there may have been more.

    ConfigError: they are to be kept; or an image is named as a frame would be.
    """
    for video in videos:
        if shared := [name for name in names if name.startswith(f"{video}/")]:
            what = f"{printable(video)} is a video, and {first_of(shared, 1)} an image"
            raise ConfigError(f"--frames: {what}; predict them into two directories")
        old = [one for one in (labels / video).glob("*") if re.fullmatch(_FRAME, one.name)]
        if old and not overwrite:
            repair = "choose another directory or pass --overwrite"
            raise ConfigError(f"--output {first_of(old, 1)}: exists already; {repair}")
        with os_errors_as(ExecutionError, labels, "cannot be cleared"):
            for one in old:
                one.unlink()


def check_frames(place: str, form: ImageForm) -> None:
    """DataError if the model does not take the frames of videos."""
    if (form.channels, form.value_range, form.dtype) != (3, None, np.uint8):
        raise DataError(
            f"{place}: frames are RGB of 8 bits, and the model was trained on "
            f"{form.channels} channels of {form.dtype}"
        )


def predict_videos(
    ready: ReadyModel,
    videos: Sequence[PhotoFile],
    output: Path,
    tint: pictures.Tint,
    *,
    with_frames: bool = False,
) -> list[Notes]:
    """Writes a video of the overlays of each; returns notes on each.

    with_frames: also the label map of each frame, labels/NAME/000000.png and on.
    """
    is_finite = True

    def draw(place: int, frame: np.ndarray) -> np.ndarray:
        nonlocal is_finite
        found = _of_frame(ready, frame, printable(source.path))
        is_finite = is_finite and bool(found.is_finite)
        label = found.label.cpu().numpy()
        if with_frames:
            _write_label(output, f"{source.name}/{place:06d}", label, ready.loaded.classes)
        return tint.over(frame, label)

    notes = []
    for source in videos:
        is_finite = True
        path = output / pictures.VIDEOS / f"{source.name}.mp4"
        with os_errors_as(ExecutionError, path, "cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if with_frames:
                num_frames, size = frames_of(source.path)
                where = f"{printable(output)}/{pictures.LABELS}/{printable(source.name)}"
                about = f"{num_frames or 'all'} frames of {size[0]}x{size[1]} px"
                print(f"{where}: label maps of {about}", flush=True)
            warning = overlay_video(source.path, path, draw)
        except DataError as error:
            notes.append(Notes(str(error)))
        else:
            notes.append(Notes(cut_short=warning, is_finite=is_finite))
    return notes
