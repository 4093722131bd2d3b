import json
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import tifffile
import torch
from experiments import last, refusal, small, train, write_config, write_data

from segtrain.config import AugmentConfig, DataConfig
from segtrain.data import open_dataset
from segtrain.data.read.find import Window
from segtrain.data.sample import centroids as measuring
from segtrain.data.sample.centroids import Centroids, label_centroids, measure_centroids
from segtrain.data.sample.geometry import resample_label
from segtrain.data.sample.stream import ClassUniform, Pick, TrainStream, image_at
from segtrain.data.sample.transforms import draw_placement
from segtrain.errors import DataError
from segtrain.types import IGNORE_INDEX

CPU = torch.device("cpu")


def nvidia_centroids(label, tile_px):
    """class_centroids_image of NVIDIA's datasets/uniform.py: whole tiles only, (class, y, x)."""
    from scipy import ndimage

    found = []
    for y in range(label.shape[0] // tile_px):
        for x in range(label.shape[1] // tile_px):
            tile = label[y * tile_px :, x * tile_px :][:tile_px, :tile_px]
            for class_id in range(IGNORE_INDEX):
                if class_id in tile:
                    cy, cx = ndimage.center_of_mass((tile == class_id).astype(int))
                    found.append((class_id, int(cy) + y * tile_px, int(cx) + x * tile_px))
    return found


def triples(numbers):
    return list(map(tuple, np.reshape(numbers, (-1, 3)).tolist()))


def blobs(rng, size):
    label = np.full(size, IGNORE_INDEX, np.uint8)
    for class_id in (0, 2, 5):
        y, x = rng.integers(size[0] - 8), rng.integers(size[1] - 8)
        label[y : y + rng.integers(1, 9), x : x + rng.integers(1, 9)] = class_id
    return label


def test_centroids_in_whole_tiles_are_nvidias_where_these_lie_on_their_class():
    rng, compared = np.random.default_rng(0), 0
    for _ in range(20):
        label = blobs(rng, (32, 48))
        theirs, ours = nvidia_centroids(label, 16), triples(label_centroids(label, 16))
        assert len(ours) == len(theirs)
        on_class = [i for i, (k, y, x) in enumerate(theirs) if label[y, x] == k]
        compared += len(on_class)
        assert [ours[i] for i in on_class] == [theirs[i] for i in on_class]
    assert compared > 60


def test_every_class_of_every_tile_has_a_centroid_on_it_also_at_the_border():
    rng = np.random.default_rng(1)
    for _ in range(10):
        label = rng.choice(np.array([0, 1, 7, 255], np.uint8), (23, 37), p=[0.6, 0.05, 0.05, 0.3])
        found = triples(label_centroids(label, 16))
        assert all(label[y, x] == k for k, y, x in found)
        tiles = Counter((k, y // 16, x // 16) for k, y, x in found)
        assert set(tiles.values()) == {1}
        ys, xs = np.nonzero(label != 255)
        wanted = {(int(label[y, x]), y // 16, x // 16) for y, x in zip(ys, xs, strict=True)}
        assert set(tiles) == wanted


@pytest.mark.parametrize(("near", "far"), [((50, 65), (50, 34)), ((65, 50), (34, 50))])
def test_the_nearest_pixel_is_found_at_the_end_of_the_first_window(near, far):
    """The search begins with 16 pixels to each side; one is at 15, another at 16."""
    mask = np.zeros((101, 101), bool)
    mask[near] = mask[far] = True
    assert measuring._nearest(mask, 50, 50) == near


@pytest.mark.parametrize("radius", [3, 17, 140])
def test_the_centroid_of_a_ring_is_the_nearest_pixel_of_it(radius):
    label = np.zeros((300, 310), np.uint8)
    cv2.circle(label, (150, 148), radius, 1)
    (_, y, x) = triples(label_centroids(label, 512))[1]
    ys, xs = np.nonzero(label)
    nearest = ((ys - 148) ** 2 + (xs - 150) ** 2).argmin()
    assert (y, x) == (ys[nearest], xs[nearest])


NUM_IMAGES = 7
TABLE = np.array(
    [(0, i, 1, i) for i in range(NUM_IMAGES)] + [(2, 3, 5, 6), (2, 4, 7, 8), (3, 6, 2, 2)], np.int32
)


def stream(fraction=0.3, batch_size=5):
    uniform = ClassUniform(Centroids(TABLE), fraction=fraction)
    dataset = SimpleNamespace(pairs=range(NUM_IMAGES), name=str)
    return TrainStream(dataset, None, stream_seed=11, batch_size=batch_size, class_uniform=uniform)


def picks(of, steps):
    return [of.pick(step, position) for step in range(steps) for position in range(of.batch_size)]


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 1.0])
def test_the_fraction_holds_in_every_epoch_and_the_other_samples_stay(fraction):
    of = stream(fraction)
    found = picks(of, 7 * 20)
    plain = [image_at(11, number, NUM_IMAGES) for number in range(len(found))]
    assert all(a.index == b for a, b in zip(found, plain, strict=True) if a.point is None)
    for epoch in range(1, len(found) // NUM_IMAGES + 1):
        uniform = sum(pick.point is not None for pick in found[: epoch * NUM_IMAGES])
        assert uniform == int(fraction * epoch * NUM_IMAGES + 1e-9)


def test_classes_take_turns_and_each_goes_through_all_its_centroids():
    rows = {Pick(i, (y, x)): k for k, i, y, x in TABLE.tolist()}
    found = [pick for pick in picks(stream(0.6), 7 * 30) if pick.point is not None]
    assert len(found) == 630
    of_class = Counter(rows[pick] for pick in found)
    assert of_class == {0: 210, 2: 210, 3: 210}
    times = Counter(found)
    assert times.keys() == rows.keys()
    assert {times[pick] for pick, k in rows.items() if k == 0} == {30}
    assert {times[pick] for pick, k in rows.items() if k == 2} == {105}


def test_a_step_names_what_it_shows():
    of = stream(0.9)
    found = picks(of, 10)
    assert any(pick.point for pick in found)
    for step in range(10):
        shown = found[5 * step : 5 * step + 5]
        assert of.names_of_step(step) == [str(pick.index) for pick in shown]


@pytest.mark.parametrize(
    "options",
    [
        {"crop_size": (40, 56)},
        {"crop_size": (40, 56), "scale_range": (0.5, 3.0), "max_class_share": 0.75},
        {"crop_size": (40, 56), "scale_range": (0.3, 2.0), "rotate_deg": 180.0},
        {"crop_size": (300, 30), "scale_range": (0.5, 1.5), "rotate_deg": 20.0},
        {"crop_size": (20, 50), "quarter_turn_prob": 0.9},
    ],
)
def test_the_crop_shows_its_pixel_wherever_it_lies(options):
    augment, rng = AugmentConfig(**options), np.random.default_rng(0)
    angles = 0
    for i in range(150):
        label = np.zeros((90, 120), np.uint8)
        pixel = int(rng.integers(90)), int(rng.integers(120))
        if i < 8:  # the corners
            pixel = (0, 89)[i % 2], (0, 119)[i // 2 % 2]
        cv2.circle(label, pixel[::-1], 4, 1, -1)  # so that shrinking leaves some of it
        placement = draw_placement(augment, label, rng, point=pixel)
        angles += placement.angle_deg != 0
        assert (resample_label(label, placement) == 1).any(), (placement, pixel)
    if augment.rotate_deg:
        assert angles > 40


def test_the_pixel_lies_anywhere_in_the_crop():
    augment = AugmentConfig(crop_size=(20, 30), scale_range=(1.0, 1.0), flip_prob=0.0)
    label, rng = np.zeros((200, 300), np.uint8), np.random.default_rng(0)
    starts = [draw_placement(augment, label, rng, point=(100, 150)) for _ in range(500)]
    assert {p.rows.start for p in starts} == set(range(81, 101))
    assert {p.columns.start for p in starts} == set(range(121, 151))


def test_without_a_pixel_the_crops_are_those_of_before():
    """The numbers drawn are a promise to runs that go on."""
    rng = np.random.default_rng(5)
    augment = AugmentConfig(crop_size=(20, 30), rotate_deg=10.0)
    placement = draw_placement(augment, np.zeros((70, 90), np.uint8), rng)
    assert (placement.rows.start, placement.columns.start) == (37, 20)
    assert rng.integers(10**6) == 979523


@pytest.fixture
def own_data(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    write_data(root, num_images=5)
    return root


def table(root, path, tile_px=32, keep=True):
    data = DataConfig(layout="folders", root=str(root), classes=str(root / "classes.yaml"))
    dataset = open_dataset(data, "train")
    return measure_centroids(dataset, tile_px, path, device=CPU, keep=lambda _: keep).table


def test_what_is_known_is_not_measured_again_unless_the_label_has_changed(
    own_data, tmp_path, monkeypatch
):
    """One that shows no class is known, too."""
    label = own_data / "labels" / "train" / "4.png"
    cv2.imwrite(str(label), np.full((56, 72), 255, np.uint8))
    path, measured, whole = tmp_path / "c.json", [], measuring.label_centroids
    monkeypatch.setattr(
        measuring, "label_centroids", lambda *args: measured.append(args) or whole(*args)
    )
    first = table(own_data, path)
    assert len(measured) == 5
    np.testing.assert_array_equal(table(own_data, path), first)
    assert len(measured) == 5

    label = own_data / "labels" / "train" / "3.png"
    pixels = cv2.imread(str(label), cv2.IMREAD_UNCHANGED)
    cv2.imwrite(str(label), pixels[:, ::-1])
    changed = table(own_data, path)
    assert len(measured) == 6
    assert (changed[changed[:, 1] != 3] == first[first[:, 1] != 3]).all()
    np.testing.assert_array_equal(changed, table(own_data, tmp_path / "other.json"))
    table(own_data, path, tile_px=16)
    assert len(measured) == 6 + 5 + 5


def test_windows_of_one_class_are_known_by_their_shapes(tmp_path, monkeypatch):
    """Their bytes are equal: 80 of one class are 10x8 and 8x10."""
    (tmp_path / "images/train").mkdir(parents=True)
    (tmp_path / "labels/train").mkdir(parents=True)
    tifffile.imwrite(tmp_path / "images/train/a.tif", np.zeros((18, 18, 3), np.uint8))
    tifffile.imwrite(tmp_path / "labels/train/a.tif", np.zeros((18, 18), np.uint8))
    (tmp_path / "classes.yaml").write_text("classes: [sea, land]\n")
    data = DataConfig(
        layout="folders", root=str(tmp_path), classes=str(tmp_path / "classes.yaml"), channels=3
    )
    dataset = open_dataset(data, "train")
    pair = dataset.pairs[0]
    windows = Window(0, 0, 10, 8), Window(0, 8, 8, 10)
    dataset = replace(dataset, pairs=[pair._replace(window=window) for window in windows])
    how = {"device": CPU, "keep": lambda _: True}
    first, again = (measure_centroids(dataset, 32, tmp_path / "c.json", **how) for _ in range(2))
    assert first.table.tolist() == [[0, 0, 4, 3], [0, 1, 3, 4]]
    np.testing.assert_array_equal(again.table, first.table)


def test_a_file_that_is_damaged_or_of_other_classes_is_not_believed(own_data, tmp_path):
    path = tmp_path / "c.json"
    wanted, text = table(own_data, path), path.read_text()
    content = json.loads(text)
    next(iter(content["labels"].values()))[1] += 1
    for damaged in (json.dumps(content), text[:-9], "[[1]]"):
        path.write_text(damaged)
        np.testing.assert_array_equal(table(own_data, path), wanted)
    text = "classes: [ground, plant, {name: wet, ids: [2, 3]}]\nignore_ids: [255]\n"
    (own_data / "classes.yaml").write_text(text)
    wanted = table(own_data, tmp_path / "other.json")
    assert wanted[:, 0].max() == 2
    np.testing.assert_array_equal(table(own_data, path), wanted)


def test_labels_without_any_class_are_refused_and_verify_writes_no_file(own_data, tmp_path):
    table(own_data, tmp_path / "c.json", keep=False)
    for label in (own_data / "labels" / "train").iterdir():
        cv2.imwrite(str(label), np.full((56, 72), 255, np.uint8))
    with pytest.raises(DataError, match="no label shows any class"):
        table(own_data, tmp_path / "c.json")
    assert list(tmp_path.iterdir()) == [own_data]


def test_a_run_goes_on_and_is_verified_with_its_centroids_and_not_with_others(
    run_ranks, tmp_path, own_data
):
    """Samples of both kinds; no image shows snow."""
    (own_data / "classes.yaml").write_text(
        "classes: [ground, plant, water, sand, snow]\nignore_ids: [255]\n"
    )
    sections = {"data": {"class_uniform": 0.5}, "augment": {"crop_size": [25, 33]}}
    sections["train"] = {"steps": 2, "shares": 2, "batch_size": 4}
    config = write_config(tmp_path / "c.yaml", small(own_data, **sections))
    run, other = tmp_path / "run", tmp_path / "other"
    assert run_ranks(1, train, config, run, until=1) == [0]
    measured = last(run).centroids
    assert len(measured) == 64
    shutil.copytree(run, other)
    (run / "centroids.json").unlink()
    assert run_ranks(1, train, config, run, True) == [0]
    assert (last(run).step, last(run).centroids) == (2, measured)
    log = (run / "train.log").read_text()
    assert "50% class-uniform: 4 classes with " in log
    assert "no training label shows snow: such a class is left out" in log

    (run / "centroids.json").unlink()
    assert run_ranks(1, verify, run) == [0]
    assert not (run / "centroids.json").exists()

    before = (other / "centroids.json").read_bytes()
    (answer,) = run_ranks(1, refusal, measured_otherwise, config, other)
    assert (other / "centroids.json").read_bytes() == before
    assert answer[:2] == ("ConfigError", 2)
    assert "the centroids of the classes (data.class_uniform) are not those of the" in answer[2]


def verify(directory):
    from segtrain.desk.commands.verify import run_verify

    return run_verify(SimpleNamespace(run=directory, steps=(1, None), set=[], device="cpu"))


def measured_otherwise(config, directory):
    """Goes on with a version of segtrain that measures in another way."""
    measuring._METHOD = 2
    measuring.label_centroids = lambda label, tile_px: label_centroids(label, tile_px)[:3]
    return train(config, directory, True)
