"""A video whose frames are predicted: their overlays, as a video."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np

from segtrain.errors import DataError, ExecutionError
from segtrain.files import os_errors_as, temporary
from segtrain.run.console import ProgressBar
from segtrain.text import counted, printable

_DEFAULT_FPS = 25.0


def overlay_video(path: Path, output: Path, draw: Callable[[np.ndarray], np.ndarray]) -> str:
    """Writes a video of what `draw` makes of each frame, at the same rate and size, without sound.

    output: an .mp4 file. draw: from and to (H, W, 3) uint8 RGB, called in order.

    Returns a warning, or nothing: the file ends before its header says.

    Raises:
        DataError: it is no video that OpenCV can read.
        ExecutionError: the video cannot be written.
    """
    with _opened(path) as video:
        number = max(0, int(video.get(cv2.CAP_PROP_FRAME_COUNT)))
        rate = video.get(cv2.CAP_PROP_FPS) or _DEFAULT_FPS
        count = 0
        with (
            os_errors_as(ExecutionError, output, "cannot be written"),
            temporary(output, ".mp4") as draft,
            ProgressBar(number, 0, "video", enabled=True, unit="frame", last_line=False) as bar,
        ):
            bar.describe(printable(path.name))
            writer: cv2.VideoWriter | None = None
            for frame in _frames(video):
                drawn = cv2.cvtColor(draw(frame), cv2.COLOR_RGB2BGR)
                if writer is None:
                    code, size = cv2.VideoWriter.fourcc(*"mp4v"), drawn.shape[1::-1]
                    writer = cv2.VideoWriter(str(draft), code, rate, size)
                    if not writer.isOpened():
                        raise ExecutionError(f"{printable(output)}: cannot be written")
                writer.write(drawn)
                count += 1
                bar.update()
            if writer is None:
                raise DataError(f"{printable(path)}: a video without frames")
            writer.release()
            # OpenCV says nothing of a full disk.
            written = cv2.VideoCapture(str(draft))
            num_written = max(0, int(written.get(cv2.CAP_PROP_FRAME_COUNT)))
            written.release()
            if num_written != count:
                what = f"{num_written} of {count} frames arrived; is the disk full?"
                raise ExecutionError(f"{printable(output)}: cannot be written: {what}")
            os.replace(draft, output)
    if count < number:
        there = counted(count, "frame", "frames")
        return f"{printable(path)}: {there} of {number} can be read"
    return ""


def frames_of(path: Path) -> tuple[int, tuple[int, int]]:
    """How many frames its header says it has (0: nothing), and their (height, width).

    DataError: it is no video that OpenCV can read.
    """
    with _opened(path) as video:
        count, height, width = (
            int(video.get(key))
            for key in (
                cv2.CAP_PROP_FRAME_COUNT,
                cv2.CAP_PROP_FRAME_HEIGHT,
                cv2.CAP_PROP_FRAME_WIDTH,
            )
        )
    return max(0, count), (height, width)


@contextmanager
def _opened(path: Path) -> Iterator[cv2.VideoCapture]:
    video = cv2.VideoCapture(str(path))
    try:
        if not video.isOpened():
            raise DataError(f"{printable(path)}: damaged, or no video that OpenCV can read")
        yield video
    finally:
        video.release()


def _frames(video: cv2.VideoCapture) -> Iterator[np.ndarray]:
    while True:
        is_there, frame = video.read()
        if not is_there:
            return
        yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
