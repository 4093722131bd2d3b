"""A video whose frames are predicted: their overlays, as a video."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import cv2
import numpy as np

from segtrain.errors import DataError, ExecutionError
from segtrain.files import os_errors_as, temporary
from segtrain.run.console import ProgressBar
from segtrain.text import counted, printable

_DEFAULT_FPS = 25.0
_MOST_DAMAGED = 1000  # frames in a row; a header may tell of any number that is not there


def overlay_video(path: Path, output: Path, draw: Callable[[int, np.ndarray], np.ndarray]) -> str:
    """Writes a video of what `draw` makes of each frame, at the same rate and size, without sound.

    In the place of a damaged frame stands the overlay before it, so that all keep their times.

    output: an .mp4 file. draw: of the frame's place, from 0, and from and to (H, W, 3) uint8 RGB,
        called in order.

    Returns a warning, or nothing: frames are damaged, or the file ends before its header says.

    Raises:
        DataError: it is no video that OpenCV can read.
        ExecutionError: the video cannot be written.
    """
    with _opened(path) as video:
        number = max(0, int(video.get(cv2.CAP_PROP_FRAME_COUNT)))
        # Some files do not say their rate.
        rate = video.get(cv2.CAP_PROP_FPS) or _DEFAULT_FPS
        num_done = damaged = 0
        with (
            os_errors_as(ExecutionError, output, "cannot be written"),
            temporary(output, ".mp4") as draft,
            ProgressBar(number, 0, "video", enabled=True, unit="frame", last_line=False) as bar,
        ):
            bar.describe(printable(path.name))
            writer: cv2.VideoWriter | None = None
            drawn: np.ndarray | None = None
            for place, frame in _frames(video, number):
                before, drawn = drawn, cv2.cvtColor(draw(place, frame), cv2.COLOR_RGB2BGR)
                if writer is None:
                    code, size = cv2.VideoWriter.fourcc(*"mp4v"), drawn.shape[1::-1]
                    writer = cv2.VideoWriter(str(draft), code, rate, size)
                    if not writer.isOpened():
                        raise ExecutionError(f"{printable(output)}: cannot be written")
                # The frames in between are damaged: the overlay before them is shown, or else the
                # first one.
                for _ in range(place - num_done):
                    writer.write(drawn if before is None else before)
                writer.write(drawn)
                damaged += place - num_done
                bar.update(place + 1 - num_done)
                num_done = place + 1
            if writer is None:
                raise DataError(f"{printable(path)}: a video without frames")
            # A file of OpenCV is complete only now.
            writer.release()
            # OpenCV says nothing of a full disk.
            written = cv2.VideoCapture(str(draft))
            num_written = max(0, int(written.get(cv2.CAP_PROP_FRAME_COUNT)))
            written.release()
            if num_written != num_done:
                what = f"{num_written} of {num_done} frames arrived; is the disk full?"
                raise ExecutionError(f"{printable(output)}: cannot be written: {what}")
            os.replace(draft, output)
    if num_done < number or damaged:
        whole = counted(max(num_done, number), "frame", "frames")
        said = f"{printable(path)}: {num_done - damaged} of {whole} can be read"
        if damaged:
            said += f"; {damaged} are damaged and show the overlay before"
        if num_done < number:  # the container skips what it cannot tell from noise, without a word
            said += "; if the file is not cut off but damaged, frames after that come too early"
        return said
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


def _frames(video: cv2.VideoCapture, number: int) -> Iterator[tuple[int, np.ndarray]]:
    """The frames that can be read, with their places among all `number` that the header tells.

    OpenCV answers alike for a damaged frame, after which others come, and for the end.
    """
    last = -1
    for place in count():
        is_there, frame = video.read()
        if is_there:
            last = place
            yield place, cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
        elif place >= number or place - last > _MOST_DAMAGED:
            return
