"""`segtrain predict` of videos, frame by frame."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from segtrain.data.read.find import VIDEO_SUFFIXES
from segtrain.data.read.photos import PhotoFile
from segtrain.errors import ConfigError, DataError, ExecutionError
from segtrain.files import os_errors_as
from segtrain.predict.kind import Job
from segtrain.predict.summary import Notes
from segtrain.predict.video import frames_of, overlay_video
from segtrain.run import pictures
from segtrain.text import first_of, printable

_FRAME = r"\d{6,}\.(png|tif)"  # the file of the label map of one


class Videos:
    """Videos, of which a video of the overlays is made."""

    several, such, instead = "videos", "a video", {}
    honours = "--frames", "--opacity", "--clear"

    def is_own(self, source: PhotoFile) -> bool:
        """Whether its suffix is that of a video."""
        return source.path.suffix.lower() in VIDEO_SUFFIXES

    def check(self, job: Job, sources: Sequence[PhotoFile]) -> None:
        """DataError: the model does not take frames; ConfigError: their label maps have no room."""
        form = job.ready.form
        if form.channels != 3 or form.value_range not in (None, (0, 255)):
            low, high = form.limits
            raise DataError(
                f"{printable(sources[0].path)}: frames are RGB of 8 bits, and the model was trained"
                f" on {form.channels} channels of values of [{low:g}, {high:g}]: "
                "predict images of such values, one for each frame"
            )
        for source in sources if job.frames else ():
            if shared := [name for name in job.names if name.startswith(f"{source.name}/")]:
                what = f"{printable(source.name)} is a video, and {first_of(shared, 1)} an image"
                raise ConfigError(f"--frames: {what}; predict them into two directories")
            # `predict` deletes the frames of an earlier video: with --overwrite alone.
            if (old := _old_frames(job, source)) and not job.overwrite:
                repair = "choose another directory or pass --overwrite"
                raise ConfigError(f"--output {first_of(old, 1)}: exists already; {repair}")

    def predict(self, job: Job, sources: Sequence[PhotoFile]) -> list[Notes]:
        """Writes a video for each, and with --frames labels/NAME/000000.png and on."""
        for source in sources if job.frames else ():  # there may have been more
            with os_errors_as(ExecutionError, job.output / pictures.LABELS, "cannot be cleared"):
                for old in _old_frames(job, source):
                    old.unlink()
        return [
            _predict_video(job, source, job.output / pictures.VIDEOS / f"{source.name}.mp4")
            for source in sources
        ]

    def written(self, job: Job) -> str:
        """The folder of videos."""
        return pictures.VIDEOS


def _predict_video(job: Job, source: PhotoFile, path: Path) -> Notes:
    is_finite, file = True, printable(source.path)

    def draw(number: int, frame: np.ndarray) -> np.ndarray:
        nonlocal is_finite
        (label_map,) = job.ready.predictor.label_maps([torch.from_numpy(frame)], place=file)
        is_finite = is_finite and bool(label_map.is_finite)
        label = label_map.label.cpu().numpy()
        if job.frames:
            stored = job.task.stored(job.classes, label)
            name = f"{source.name}/{number:06d}"
            pictures.write_stored(job.output / pictures.LABELS / name, stored)
        return job.tint.over(frame, job.task.shown(label))

    with os_errors_as(ExecutionError, path, "cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if job.frames:
            num_frames, size = frames_of(source.path)
            where = f"{printable(job.output)}/{pictures.LABELS}/{printable(source.name)}"
            about = f"{num_frames or 'all'} frames of {size[0]}x{size[1]} px"
            print(f"{where}: label maps of {about}", flush=True)
        warning = overlay_video(source.path, path, draw)
    except DataError as error:
        return Notes(str(error))
    return Notes(cut_short=warning, is_finite=is_finite)


def _old_frames(job: Job, source: PhotoFile) -> list[Path]:
    """The label maps of the frames of an earlier video of this name."""
    files = (job.output / pictures.LABELS / source.name).glob("*")
    return [file for file in files if re.fullmatch(_FRAME, file.name)]


KIND = Videos()
