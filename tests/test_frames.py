"""Label maps of the frames of videos."""

import cv2
import numpy as np
import pytest
import tifffile
from test_predict import CLASSES, RAW_IDS, photo, read, run, save, write_video

from segtrain.commands import frames
from segtrain.data.read.classes import ClassFile
from segtrain.errors import ConfigError

__all__ = ["run"]  # the fixture
PALETTE = [(200, 20, 30), (20, 200, 30), (30, 20, 200)]


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


def test_frames_of_an_image_are_refused(run, tmp_path):
    save(tmp_path / "a.png", photo(5, 6))
    with pytest.raises(ConfigError, match="--frames: there is no video"):
        run(tmp_path / "a.png", frames=True)


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
