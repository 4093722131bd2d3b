"""`segtrain predict` of what moves: videos frame by frame, and the newest frames of a stream."""

import argparse
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import numpy as np
import torch

from segtrain.checkpoint.ready import ReadyModel
from segtrain.commands.summary import NOT_FINITE, Notes, print_about
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.image import ImageForm
from segtrain.data.read.photos import PhotoFile
from segtrain.data.read.protect import check_pictures
from segtrain.errors import ConfigError, DataError, ExecutionError
from segtrain.evaluation.inference import LabelMap
from segtrain.evaluation.live import opened, paced
from segtrain.evaluation.video import frames_of, overlay_video
from segtrain.files import os_errors_as
from segtrain.run import pictures
from segtrain.text import first_of, printable, without_password

_FRAME = r"\d{6,}\.(png|tif)"  # the file of the label map of one


def check_stream(args: argparse.Namespace) -> None:
    """ConfigError: options that a camera or stream does not have; `args` are those of predict."""
    if len(args.inputs) > 1 or args.probabilities or args.frames or args.table or args.objects:
        options = "--probabilities, --frames, --table and --objects"
        raise ConfigError(f"a camera or stream: comes alone, without {options}")


def predict_stream(
    ready: ReadyModel,
    address: str,
    output: Path,
    tint: pictures.Tint,
    *,
    rate: float | None,
    seconds: float | None,
) -> None:
    """Predicts the newest frames of a stream, and names them by the time (UTC).

    rate: most frames a second; None: all that there is time for. seconds: None: until Ctrl-C.
    """
    classes = ready.loaded.classes
    check_frames(without_password(address), ready.form)
    kinds = ["masks", *pictures.KINDS] if classes.overlapping else [*pictures.KINDS]
    check_pictures("--output", output, [f"{kind}/x.png" for kind in kinds], ready.config.data)
    print_about(ready)
    pictures.write_legend(output, classes)
    num_done, is_finite = 0, True
    with opened(address) as stream:
        try:
            for frame in paced(stream, rate=rate, seconds=seconds):
                name = f"{datetime.now(UTC):%Y%m%d_%H%M%S_%f}"
                found = _of_frame(ready, frame, without_password(address))
                label = found.label.cpu().numpy()
                pictures.write_prediction(output, name, frame, label, classes, tint)
                if classes.overlapping:
                    _write_label(output, name, label, classes)
                num_done, is_finite = num_done + 1, is_finite and bool(found.is_finite)
        finally:  # also where it is interrupted, or the stream is gone
            where = f"{printable(output)}/{{{','.join(kinds)}}}"
            print(f"{num_done} of {stream.count} frames: {where}")
            if not is_finite:
                print(NOT_FINITE.format("some frames"))


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
    """DataError if the model does not take the frames of videos and streams."""
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

    def draw(frame: np.ndarray) -> np.ndarray:
        nonlocal is_finite
        found = _of_frame(ready, frame, printable(source.path))
        is_finite = is_finite and bool(found.is_finite)
        label = found.label.cpu().numpy()
        if with_frames:
            _write_label(output, f"{source.name}/{next(number):06d}", label, ready.loaded.classes)
        return tint.over(frame, label)

    notes = []
    for source in videos:
        is_finite, number = True, count()
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
