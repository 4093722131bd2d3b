"""A split as a sequence of images with labels."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from test_data_check import write_pair

from segtrain.config import DataConfig
from segtrain.data import open_dataset
from segtrain.errors import DataError


def write_split(root, split, sizes):
    """Random images and labels of the given (height, width) in the CamVid layout."""
    rng = np.random.default_rng(0)
    for i, size in enumerate(sizes):
        write_pair(root, split, i, rng.choice([0, 1, 10, 11], size))


def config(root):
    return DataConfig(layout="camvid", root=str(root), classes="camvid")


def test_dataset_survives_the_way_to_a_loader_process_in_200_bytes_a_pair(tmp_path):
    write_split(tmp_path, "train", [(2, 3)] * 40)
    dataset = open_dataset(config(tmp_path), "train")
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 3000 + 200 * 40
    copy = pickle.loads(pickled)
    assert copy.pairs == dataset.pairs
    np.testing.assert_array_equal(copy[1][1], dataset[1][1])


@pytest.mark.fault(51, 67)
def test_a_label_of_another_size_or_that_vanishes_is_refused(tmp_path):
    write_split(tmp_path, "train", [(5, 8)])
    Image.fromarray(np.zeros((5, 9), np.uint8)).save(tmp_path / "labels/train/0.png")
    expected = (
        r"labels/train/0\.png: label 5x9, image .*images/train/0\.png 5x8: "
        r"sizes \(height x width\) must be equal; EXIF orientation is ignored"
    )
    dataset = open_dataset(config(tmp_path), "train")
    with pytest.raises(DataError, match=expected):
        dataset[0]
    (tmp_path / "labels/train/0.png").unlink()
    with pytest.raises(DataError, match=r"labels/train/0\.png: cannot be read: no such file"):
        dataset[0]


def test_a_damaged_training_image_can_be_left_out_by_the_option_that_is_named(tmp_path):
    write_split(tmp_path, "train", [(5, 8), (7, 4)])
    write_split(tmp_path, "val", [(5, 8)])
    for path in (tmp_path / "images/train/1.png", tmp_path / "images/val/0.png"):
        path.write_bytes(path.read_bytes()[:-20])
    dataset = open_dataset(data := config(tmp_path), "train")
    with pytest.raises(DataError, match=r"train/1\.png: .*data\.train_exclude: \[1\]$"):
        dataset[1]
    with pytest.raises(DataError, match=r"val/0\.png: damaged image: [^;]*$"):
        open_dataset(data, "val")[0]
    (kept,) = open_dataset(data.model_copy(update={"train_exclude": ("1",)}), "train")
    assert kept[0].shape == (5, 8, 3)
    (tmp_path / "images").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"no such file or directory; there is no folder .*images$"):
        dataset[1]


def test_reading_data_needs_no_torch_and_class_files_need_no_opencv():
    code = (
        "import sys, segtrain.data.read.classes; assert not {'cv2', 'torch'} & set(sys.modules);"
        "from segtrain.data import open_dataset; import segtrain.data.check.checks;"
        "import segtrain.data.check.stats, segtrain.data.pack.writer;"
        "assert 'torch' not in sys.modules and 'albumentations' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
