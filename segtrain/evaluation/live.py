"""A camera or network stream whose newest frames are predicted: older ones are dropped, not kept.

A thread reads all frames, because OpenCV hands them out in their order and buffers those that
nobody has taken: a slow model would see the past, and more of it with every frame.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Thread

import cv2
import numpy as np

from segtrain.errors import DataError, ExecutionError
from segtrain.text import counted, without_password

# A camera that sends nothing for so long is gone.
_SILENT_S = 10


class Stream:
    """The frames of an open stream, as `newest` finds them.

    count: of the frames that have arrived.
    """

    def __init__(self, address: str) -> None:
        self._name = without_password(address)
        wait = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, cv2.CAP_PROP_READ_TIMEOUT_MSEC]
        limits = [value for key in wait for value in (key, 1000 * _SILENT_S)]
        if address.startswith("camera:"):
            self._video = cv2.VideoCapture(int(address.removeprefix("camera:")))
        else:
            self._video = cv2.VideoCapture(address, cv2.CAP_FFMPEG, limits)
        if not self._video.isOpened():
            self._video.release()
            raise DataError(f"{self._name}: no camera or stream that OpenCV can open")
        self.count = 0
        self._frame: np.ndarray | None = None
        self._is_over = self._is_closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def newest(self) -> np.ndarray:
        """The newest frame, (H, W, 3) uint8 RGB, once there is one that was not returned yet.

        Raises:
            ExecutionError: the stream has ended, or nothing arrives any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self._is_over, _SILENT_S)
            frame, self._frame = self._frame, None
        if frame is None:
            seen = counted(self.count, "frame", "frames")
            raise ExecutionError(f"{self._name}: the stream is gone after {seen}")
        return cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)

    def close(self) -> None:
        """Ends the thread, which may wait for a silent camera; then it ends with the process."""
        self._is_closed = True
        self._thread.join(timeout=1)

    def _read(self) -> None:
        is_there = True
        while is_there and not self._is_closed:
            is_there, frame = self._video.read()
            with self._changed:
                if is_there:
                    self._frame, self.count = frame, self.count + 1
                else:
                    self._is_over = True
                self._changed.notify()
        self._video.release()  # here, where nobody reads


@contextmanager
def opened(address: str) -> Iterator[Stream]:
    """The stream, closed at the end; DataError: it cannot be opened."""
    stream = Stream(address)
    try:
        yield stream
    finally:
        stream.close()


def paced(stream: Stream, *, rate: float | None, seconds: float | None) -> Iterator[np.ndarray]:
    """Its newest frames, at most `rate` a second, for `seconds`; None: all that the caller takes.

    Raises:
        ExecutionError: as `Stream.newest`.
    """
    start = time.monotonic()
    due = start
    while seconds is None or due < start + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        yield stream.newest()
        # From now on, not from `due`: after a pause there is no burst.
        due = max(due + 1 / rate, time.monotonic()) if rate else time.monotonic()
