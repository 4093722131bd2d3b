"""The first message about a folder that segtrain cannot train on as it is."""

import pytest

from segtrain.data.read.recognize import recognize


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("train/a.jpg train/_annotations.coco.json", "a COCO export of Roboflow (train/_ann"),
        ("val2017/a.jpg annotations/instances_val2017.json", "annotations of COCO (annotations/i"),
        ("a.jpg b.JPG a.json", "2 .jpg files, annotations of LabelMe (a.json)"),
        ("images/a.png labels/a.txt data.yaml", "1 .png file, annotations of YOLO (data.yaml)"),
        ("train/a.png train/via_region_data.json", "annotations of VIA (train/via_region_data"),
        ("ds/img/a.jpg ds/ann/a.jpg.json", "annotations of Supervisely (ds/ann/a.jpg.json)"),
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
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    said = recognize(tmp_path)
    assert said.startswith(f"{tmp_path} holds ")
    assert expected in said
    assert said.endswith(f"; segtrain init {tmp_path} makes a config of it")
