"""What is written never lands where the data set is read."""

from pathlib import Path

import pytest

from segtrain.config import DataConfig
from segtrain.data.read.protect import check_pictures, check_run_directory
from segtrain.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def data(layout="folders", root="d", **options):
    return DataConfig(layout=layout, root=root, classes="voc", **options)


def is_refused(check, *args, **kwargs):
    try:
        check(*args, **kwargs)
    except ConfigError as error:
        return "where images or labels of the data set are read; choose" in str(error)
    return False


@pytest.mark.parametrize(
    ("layout", "folders"),
    [
        ("cityscapes", ["leftImg8bit", "gtFine", "gtCoarse"]),
        ("voc", ["JPEGImages", "SegmentationClass", "SegmentationClassAug"]),
        ("ade20k", ["images", "annotations"]),
        ("folders", ["images", "labels"]),
        ("camvid", ["train", "valannot"]),
    ],
)
def test_a_run_is_refused_below_the_folders_that_are_searched(layout, folders):
    for folder in folders:
        for below in ("", "runs/my", "train/runs"):
            assert is_refused(check_run_directory, Path("d", folder, below), data(layout))
            assert is_refused(check_run_directory, Path(folder, below), data(layout, root="."))


@pytest.mark.parametrize("layout", ["cityscapes", "voc", "ade20k", "folders", "camvid", "list"])
def test_runs_beside_those_folders_are_welcome(layout):
    """data.root is often the current folder."""
    for output in ("runs/my", "d/runs/my", "d", "images2/runs", "."):
        check_run_directory(Path(output), data(layout, root="."))
        check_run_directory(Path(output), data(layout))


def test_neither_points_nor_links_lead_around_it():
    Path("d/images").mkdir(parents=True)
    Path("way").symlink_to("d/images")
    assert is_refused(check_run_directory, Path("way/runs"), data())
    assert is_refused(check_run_directory, Path("d/runs/../images/x"), data(root="d/../d"))


def test_predictions_for_training_images_do_not_replace_their_labels():
    """The folder `labels` of the predictions would be that of the data set."""
    assert is_refused(check_pictures, "--output", Path("d"), ["labels/train/0"], data())
    assert is_refused(check_pictures, "--output", Path("d/labels"), ["colors/0"], data())
    check_pictures("--output", Path("d/predictions"), ["labels/train/0"], data())
    check_pictures("--output", Path("d"), ["labels/0"], data(labels_dir="masks"))


def test_where_the_splits_lie_at_the_top_only_they_are_closed_the_evaluated_one_too():
    options = {"images_dir": ".", "labels_dir": "masks"}
    assert is_refused(check_run_directory, Path("d/train/x"), data(**options))
    assert is_refused(check_run_directory, Path("d/masks/x"), data(**options))
    check_run_directory(Path("d/runs/my"), data(**options))
    check_pictures("--overlays", Path("d/test"), ["0"], data(**options))
    assert is_refused(
        check_pictures, "--overlays", Path("d/test"), ["0"], data(**options), splits=["test"]
    )


def test_files_that_a_list_names_are_not_replaced():
    options = {"train_split": "train.txt", "eval_split": "missing.txt"}
    Path("d/a").mkdir(parents=True)
    Path("d/b").mkdir()
    for name in ("a/0.jpg", "b/0.png", "1.jpg", "1.png"):
        Path("d", name).touch()
    Path("d/train.txt").write_text("a/0.jpg b/0.png\n1.jpg 1.png\n")
    listed = data("list", **options)
    for output, name in (("d", "a/0"), ("d", "1"), ("d/b", "0"), ("d/x", "../b/0")):
        assert is_refused(check_pictures, "--save-predictions", Path(output), [name], listed)
    check_pictures("--save-predictions", Path("d/predictions"), ["a/0"], listed)
    check_run_directory(Path("d/a/runs"), listed)
