"""Streams against a server on this machine that sends JPEG frames, and frames of videos."""

import os
import re
import signal
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import cv2
import numpy as np
import pytest
import tifffile
from test_predict import CLASSES, RAW_IDS, photo, read, run, save, write_video

from segtrain import cli
from segtrain.commands import frames
from segtrain.data.read.classes import ClassFile
from segtrain.errors import ConfigError, DataError, ExecutionError
from segtrain.evaluation import live
from segtrain.evaluation.live import opened, paced
from segtrain.text import without_password

__all__ = ["run"]  # the fixture
PALETTE = [(200, 20, 30), (20, 200, 30), (30, 20, 200)]


def jpeg(color):
    picture = np.full((48, 64, 3), color[::-1], np.uint8)
    return cv2.imencode(".jpg", picture)[1].tobytes()


class Sender(BaseHTTPRequestHandler):
    """Sends `server.colors` one by one, `server.pause_s` apart, then hangs up."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            for color in self.server.colors:
                data = jpeg(color)
                head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                self.wfile.write(head.encode() + data + b"\r\n")
                self.wfile.flush()
                time.sleep(self.server.pause_s)

    def log_message(self, *args):
        pass


@pytest.fixture
def send():
    """Serves frames of these colours and returns the address."""
    servers = []

    def start(colors, pause_s=0.02):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Sender)
        server.colors, server.pause_s = colors, pause_s
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/live.mjpg"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def greys(number):
    """Frame i has the grey 2 i, so that a frame tells when it was sent."""
    return [(2 * i, 2 * i, 2 * i) for i in range(number)]


def test_a_slow_taker_gets_the_newest_frame_and_not_the_next(send):
    with opened(send(greys(100), pause_s=0.02)) as stream:
        taken = []
        for _ in range(4):
            frame = stream.newest()
            taken.append((int(frame.mean().round()) // 2, stream.count))
            time.sleep(0.3)
    numbers = [number for number, _ in taken]
    # In each pause 15 frames arrive. A queue of them would lag behind by 45 in the end.
    assert all(count - number < 15 for number, count in taken), taken
    assert all(b - a >= 5 for a, b in pairwise(numbers)), taken


def test_the_rate_and_the_seconds_are_bounds(send):
    with opened(send(greys(127), pause_s=0.02)) as stream:
        start = time.monotonic()
        times = [time.monotonic() for _ in paced(stream, rate=5, seconds=1)]
        assert 0.8 <= time.monotonic() - start < 2
    assert 3 <= len(times) <= 6
    assert min(np.diff(times)) > 0.15


def test_a_stream_becomes_label_maps_and_overlays_named_by_time(run, tmp_path, send, capsys):
    address = send([PALETTE[1]] * 400, pause_s=0.01)
    assert run(address, inputs=[address], seconds=0.5, rate=20, opacity=1.0) == 0
    labels = sorted((tmp_path / "out/labels").iterdir())
    assert 2 <= len(labels) <= 11
    for path in labels:
        assert np.array_equal(read(path), np.full((48, 64), RAW_IDS[1]))
        overlay = read(tmp_path / "out/overlays" / path.name)
        assert np.array_equal(overlay[0, 0], CLASSES.palette[1])
        assert re.fullmatch(r"20\d{6}_\d{6}_\d{6}", path.stem)
    assert f"{len(labels)} of " in capsys.readouterr().out


def test_a_stream_that_ends_is_an_error_and_its_frames_stay(run, tmp_path, send, capsys):
    address = send([PALETTE[2]] * 5)
    with pytest.raises(ExecutionError, match=r"live\.mjpg: the stream is gone after 5 frames"):
        run(address, inputs=[address])
    labels = list((tmp_path / "out/labels").iterdir())
    assert labels
    assert all((read(path) == RAW_IDS[2]).all() for path in labels)
    assert "frames: " in capsys.readouterr().out


def test_a_silent_stream_is_gone_too(send, monkeypatch):
    with opened(send([PALETTE[0]] * 20, pause_s=1.0)) as stream:
        stream.newest()
        monkeypatch.setattr(live, "_SILENT_S", 0.3)
        with pytest.raises(ExecutionError, match="the stream is gone after"):
            list(paced(stream, rate=None, seconds=10))


def test_ctrl_c_ends_a_stream_with_whole_files(run, tmp_path, send):
    address = send([PALETTE[0]] * 2000, pause_s=0.01)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    # Python's own, as in a process of the command; a training in this process leaves another.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(address, inputs=[address], seconds=20)
    finally:
        signal.signal(signal.SIGINT, before)
    assert all((read(path) == RAW_IDS[0]).all() for path in (tmp_path / "out/labels").iterdir())


def test_what_a_stream_cannot_honour_is_refused(run, tmp_path, send):
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9/x: no camera or stream"):
        run("", inputs=["http://me:secret@127.0.0.1:9/x"])
    with pytest.raises(ConfigError, match="comes alone"):
        run("", inputs=["camera:0", str(tmp_path)])
    for option in ({"probabilities": "npz"}, {"frames": True}):
        with pytest.raises(ConfigError, match="without --probabilities, --frames"):
            run("", inputs=["camera:0"], **option)
    save(tmp_path / "a.png", photo(5, 6))
    with pytest.raises(ConfigError, match="--rate, --seconds: are for a camera or stream"):
        run(tmp_path / "a.png", rate=2.0)
    with pytest.raises(ConfigError, match="--frames: there is no video"):
        run(tmp_path / "a.png", frames=True)
    assert without_password("rtsp://me:x@10.0.0.5/1") == "rtsp://10.0.0.5/1"


def test_the_command_line_takes_streams_and_no_other_addresses(capsys):
    parse = cli._parser().parse_args
    for address in ("rtsp://10.0.0.5/live", "camera:0", "http://10.0.0.5/x.mjpg"):
        args = parse(["predict", "run", address, "--output", "o", "--rate", "0.5"])
        assert (args.inputs, args.rate) == ([address], 0.5)
    for wrong in (["s3://b/x"], ["camera:0", "--rate", "0"], ["camera:0", "--seconds", "nan"]):
        with pytest.raises(SystemExit):
            parse(["predict", "run", *wrong, "--output", "o"])
        assert "expected a" in capsys.readouterr().err


def labels_of(path):
    """The class of each pixel of each frame, as the model of the tests has it."""
    video, found = cv2.VideoCapture(str(path)), []
    while (read := video.read())[0]:
        found.append(read[1][..., ::-1].argmax(2))
    video.release()
    return found


def test_frames_of_a_video_become_label_maps(run, tmp_path, capsys):
    video = write_video(tmp_path / "in/street/drive.mp4", PALETTE)
    assert run(tmp_path / "in", frames=True) == 0
    folder = tmp_path / "out/labels/street/drive"
    assert "labels/street/drive: label maps of 3 frames of 48x64 px" in capsys.readouterr().out
    found = [read(folder / f"{i:06d}.png") for i in range(3)]
    assert len(list(folder.iterdir())) == 3
    for label, expected in zip(found, labels_of(video), strict=True):
        assert np.array_equal(label, RAW_IDS[expected])
    assert {int(label[24, 32]) for label in found} == set(RAW_IDS)
    assert (tmp_path / "out/videos/street/drive.mp4").exists()

    # A shorter one in its place leaves no frame of the longer one behind.
    write_video(video, PALETTE[:1])
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "out/videos/street/drive.mp4").unlink()
    with pytest.raises(ConfigError, match=r"drive/00000\d\.png and 2 more: exists already"):
        run(tmp_path / "in", frames=True)
    assert run(tmp_path / "in", frames=True, overwrite=True) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["000000.png", "notes.txt"]


def test_frames_never_get_the_place_of_an_image(run, tmp_path):
    write_video(tmp_path / "in/drive.mp4", PALETTE)
    save(tmp_path / "in/drive/000001.png", photo(5, 6))
    with pytest.raises(ConfigError, match="drive is a video, and drive/000001 an image"):
        run(tmp_path / "in", frames=True)
    assert run(tmp_path / "in") == 0


def test_label_maps_of_frames_have_a_band_for_each_class_that_overlaps(tmp_path):
    classes = ClassFile("two", CLASSES.classes[:2], (), (0, 0, 0), overlapping=True)
    label = np.random.default_rng(0).integers(0, 2, (5, 6, 2), dtype=np.uint8)
    frames._write_label(tmp_path, "drive/000000", label, classes)
    bands = tifffile.imread(tmp_path / "labels/drive/000000.tif")
    assert np.array_equal(bands, (label * np.array([7, 23], np.uint8)).transpose(2, 0, 1))
