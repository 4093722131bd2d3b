"""The first message about a folder that segtrain cannot train on as it is."""

import pytest

from segtrain import cli
from segtrain.data.read.recognize import recognize


def touch(root, files):
    for file in files.split():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("train/a.jpg train/_annotations.coco.json", "a COCO export of Roboflow (train/_ann"),
        ("val2017/a.jpg annotations/instances_val2017.json", "annotations of COCO (annotations/i"),
        ("a.jpg b.JPG a.json", "2 .jpg files, annotations of LabelMe (a.json)"),
        ("images/a.png labels/a.txt data.yaml", "1 .png file, annotations of YOLO (data.yaml)"),
        ("images/a.png annotations.xml", "annotations of CVAT (annotations.xml)"),
        ("JPEGImages/a.png SegmentationClass/a.png labelmap.txt", "masks of CVAT (labelmap.txt)"),
        ("train/a.jpg train/a_mask.png train/_classes.csv", "masks of Roboflow (train/_classes"),
        ("imagesTr/a_0000.png labelsTr/a.png dataset.json", "a data set of nnU-Net (imagesTr/a"),
        ("JPEGImages/a.jpg Annotations/a.xml", "boxes, which are no outlines (Annotations/a.xml)"),
        ("img_dir/train/a.jpg ann_dir/train/a.png", "a data set of mmsegmentation (ann_dir/"),
        ("a.jpg project-1-at-2026-01-02.json", "an export of Label Studio (project-1"),
    ],
)
def test_a_folder_is_recognized_by_its_names(tmp_path, files, expected):
    touch(tmp_path, files)
    said = recognize(tmp_path)
    assert said.startswith(f"{tmp_path} holds ")
    assert expected in said
    assert said.endswith(f"; segtrain init {tmp_path} makes a config of it")


@pytest.mark.parametrize("command", [["bench"], ["data", "check"]])
def test_a_folder_instead_of_a_config_is_told_the_next_command(
    tmp_path, monkeypatch, capsys, command
):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, "my_data/train/a.jpg my_data/train/_annotations.coco.json empty/notes.txt")
    assert cli.main([*command, "my_data"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("segtrain: my_data: is a directory; expected a config file")
    assert second == (
        "segtrain: my_data holds 1 .jpg file, a COCO export of Roboflow "
        "(train/_annotations.coco.json); segtrain init my_data makes a config of it"
    )
    assert cli.main([*command, "empty"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_training_on_a_folder_without_images_is_refused(tmp_path, monkeypatch, capsys):
    """With images, it is surveyed first."""
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, "notes/notes.txt")
    assert cli.main(["train", "notes"]) == 3
    assert "notes: no images" in capsys.readouterr().err
    assert not (tmp_path / "notes_segtrain").exists()
