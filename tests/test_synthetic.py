"""The synthetic street scenes, as pictures and as files."""

import argparse
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from experiments import contents

from segtrain.data.read.classes import load_class_file
from segtrain.desk.synthetic.data_set import main, write_dataset
from segtrain.desk.synthetic.scene import draw_scene
from segtrain.errors import DataError

SIZE = (48, 96)
JUDGED = {
    *("road", "sidewalk", "building", "pole", "traffic sign", "vegetation", "terrain"),
    *("sky", "person", "car", "bus"),
}


def write(root: Path, num_train: int = 5, **changes: object) -> int:
    settings = {"size": SIZE, "seed": 3, "jobs": 1, **changes}
    return write_dataset(root, {"train": num_train, "val": 2}, **settings)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("synthetic") / "drawn"
    write(root)
    return root


def test_a_small_set_holds_every_class_of_the_demo_and_something_to_ignore():
    classes, all_of_them = load_class_file("street_scenes"), load_class_file("cityscapes")
    scenes = [draw_scene(np.random.default_rng((7, index)), SIZE) for index in range(25)]
    labels = np.stack([scene.label for scene in scenes])
    shares = {classes.train_id_of[int(i)]: float((labels == i).mean()) for i in np.unique(labels)}
    assert shares.pop(255) > 0
    assert {classes.names[t] for t in shares} == {*classes.names} == JUDGED
    assert all(
        classes.names[classes.train_id_of[i]] == all_of_them.names[all_of_them.train_id_of[i]]
        for i in np.unique(labels[labels != 4])
    )
    assert min(shares.values()) > 0.01, shares
    sky, road = np.nonzero(labels == 23)[1], np.nonzero(labels == 7)[1]
    assert sky.max() < 0.6 * SIZE[0]
    assert road.min() > 0.3 * SIZE[0]

    several = 0
    for _, label, instances in scenes:
        single = instances >= 1000
        assert instances.dtype == np.uint16
        assert np.array_equal(np.where(single, instances // 1000, instances), label)
        assert np.array_equal(single, np.isin(label, (24, 26, 28)))
        several += len(np.unique(instances[label == 26])) > 1
    assert several > 1


def test_files_have_the_names_and_places_of_cityscapes(written):
    """And hold the scene in RGB."""
    names = set(contents(written)) - {"synthetic.json"}
    images = {n for n in names if n.startswith("leftImg8bit/")}
    assert len(images) == 7
    assert "leftImg8bit/train/ashdown/ashdown_000000_000019_leftImg8bit.png" in images
    assert "leftImg8bit/val/dunmore/dunmore_000001_000019_leftImg8bit.png" in images
    stems = {n.split("/", 1)[1].removesuffix("_leftImg8bit.png") for n in images}
    kinds = ("labelIds", "instanceIds")
    assert names == images | {
        f"gtFine/{stem}_gtFine_{kind}.png" for stem in stems for kind in kinds
    }
    assert len({contents(written)[name] for name in images}) == 7  # train and val share no picture
    place = "{}/val/dunmore/dunmore_000001_000019_{}.png"
    scene = draw_scene(np.random.default_rng((3, 2, 1)), SIZE)
    places = [("leftImg8bit",) * 2, *(("gtFine", f"gtFine_{kind}") for kind in kinds)]
    for part, expected in zip(places, scene, strict=True):
        stored = cv2.imread(str(written / place.format(*part)), cv2.IMREAD_UNCHANGED)
        assert stored.dtype == expected.dtype
        assert np.array_equal(stored[..., ::-1] if stored.ndim == 3 else stored, expected)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow("desk"))])
def test_bytes_depend_neither_on_processes_nor_on_the_number_of_scenes(
    written, tmp_path, capsys, jobs
):
    root = tmp_path / "more"
    options = {"num_train": 9, "num_val": 2, "size": [48, 96], "seed": 3, "jobs": jobs}
    assert main(argparse.Namespace(root=root, **options)) == 0
    assert "9 train and 2 val scenes of 48x96, 11 drawn, 0 there" in capsys.readouterr().out
    less, more = contents(written), contents(root)
    assert all(more[name] == less[name] for name in less if name != "synthetic.json")


def test_only_what_is_missing_is_drawn_again(tmp_path):
    root = tmp_path / "a"
    write(root)
    whole = contents(root)
    record = json.loads(whole["synthetic.json"])
    assert (record["seed"], record["size"], record["num_train"]) == (3, [48, 96], 5)
    assert write(root) == 0
    (root / "gtFine/train/ashdown/ashdown_000003_000019_gtFine_labelIds.png").unlink()
    assert write(root) == 1
    assert contents(root) == whole
    with pytest.raises(DataError, match=r"'seed': 4.*name another folder"):
        write(root, seed=4)


@pytest.mark.parametrize(
    ("name", "root"), [("notes.txt", ""), ("file", "file"), ("synthetic.json", "")]
)
def test_other_content_is_refused_and_left_alone(tmp_path, name, root):
    (tmp_path / name).write_text("[1,")
    with pytest.raises(DataError, match="expected an empty folder"):
        write(tmp_path / root)
    assert contents(tmp_path) == {name: b"[1,"}
