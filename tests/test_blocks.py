"""Windows of one large picture: lists of them, and `segtrain init` for a folder with one."""

import re

import numpy as np
import pytest
import tifffile
from experiments import COLORS
from PIL import Image

from segtrain import cli
from segtrain.config import DataConfig, load_config
from segtrain.data import open_dataset
from segtrain.data.check.checks import check_data
from segtrain.data.read.lists import list_pairs, list_text
from segtrain.desk.survey.one_picture import best_span
from segtrain.errors import DataError

SIZE = 480, 1600
# A pixel of half a metre in UTM zone 33 N (EPSG 32633).
GEO = [
    (33550, "d", 3, (0.5, 0.5, 0.0), True),
    (33922, "d", 6, (0.0, 0.0, 0.0, 500000.0, 5000000.0, 0.0), True),
    (34735, "H", 12, (1, 1, 0, 2, 1024, 0, 1, 1, 3072, 0, 1, 32633), True),
]


def scene(root, *, sand=True):
    """Squares of three classes, and a strip of a fourth."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, (SIZE[0] // 40, SIZE[1] // 40)).repeat(40, 0).repeat(40, 1)
    label = label.astype(np.uint8)
    if sand:
        label[100:200] = 3
    noise = rng.normal(0, 10, (*SIZE, 3))
    image = (COLORS[label].astype(np.int16) + noise).clip(0, 255).astype(np.uint8)
    root.mkdir()
    options = {"tile": (256, 256), "compression": "deflate", "extratags": GEO}
    tifffile.imwrite(root / "town.tif", image, photometric="rgb", **options)
    tifffile.imwrite(root / "town_label.tif", label, **options)
    return image, label


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    """A folder with one picture, and what it shows."""
    root = tmp_path_factory.mktemp("town")
    drawn = scene(root / "data")
    (root / "c.yaml").write_text("classes: [ground, plant, water, sand]\n")
    return root, *drawn


def with_lists(root, **lists):
    """The data set of these lists, by their names."""
    for name, lines in lists.items():
        (root / f"data/{name}.txt").write_text(lines)
    names = [f"{name}.txt" for name in lists]
    options = {"root": str(root / "data"), "classes": str(root / "c.yaml")}
    return DataConfig(layout="list", train_split=names[0], eval_split=names[-1], **options)


def test_a_list_names_windows(town):
    root, image, label = town
    lines = (
        "town.tif#xywh=10,20,300,200 town_label.tif\ntown.tif#xywh=500,0,64,64\ttown_label.tif\n"
    )
    dataset = open_dataset(with_lists(root, windows=lines), "windows.txt")
    assert dataset.names == ["town_y20_x10", "town_y0_x500"]
    assert not dataset.warnings  # one label, but not of several images
    np.testing.assert_array_equal(dataset[0][0], image[20:220, 10:310])
    np.testing.assert_array_equal(dataset[0][1], label[20:220, 10:310])
    np.testing.assert_array_equal(dataset[1][1], label[:64, 500:564])
    root /= "data"
    (root / "again.txt").write_text(list_text(dataset.pairs, root, root))
    assert list_pairs(root / "again.txt", root, root).pairs == dataset.pairs


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("town.tif#xywh=1500,0,101,10 town_label.tif", "the image has 1600 columns and 480 rows"),
        ("town.tif#xywh=0,0,0,10 town_label.tif", "no window of it"),
        ("town.png#xywh=0,0,9,9 town_label.tif", "windows are read of TIFFs only"),
        ("town.tif#xywh=0,0,9,9 other.tif", "must be a TIFF of that size"),
        ("town.tif#xywh=0,0,9\ttown_label.tif", "expected a file"),
    ],
)
def test_windows_that_are_none_are_refused(town, line, problem):
    root, *_ = town
    Image.new("RGB", SIZE[::-1]).save(root / "data/town.png")
    tifffile.imwrite(root / "data/other.tif", np.zeros((9, 9), np.uint8))
    with pytest.raises(DataError, match=problem):
        open_dataset(with_lists(root, wrong=line + "\n"), "wrong.txt")


def test_windows_of_both_sides_that_overlap_are_a_warning(town):
    line = "town.tif#xywh={},0,100,480 town_label.tif\n"
    data = with_lists(town[0], train=line.format(0), val=line.format(90))
    found = check_data(data, jobs=1).findings
    assert any("what tiles to train on show, too" in one.text for one in found)


def init(root, *words):
    assert cli.main(["init", str(root / "data"), "--output", str(root / "mine"), *words]) == 0
    data = load_config(root / "mine/config.yaml").data
    return [open_dataset(data, split) for split in (data.train_split, data.eval_split)]


def apart(train, val):
    """The distance in pixels between the nearest of two sets of windows, along an axis."""
    gaps = [
        max(b.top - a.top - a.height, a.top - b.top - b.height,
            b.left - a.left - a.width, a.left - b.left - b.width)
        for a in train for b in val
    ]  # fmt: skip
    return min(gaps)


def test_init_divides_one_picture_by_a_strip_with_gaps(tmp_path, capsys):
    image, label = scene(tmp_path / "data")
    train, val = init(tmp_path)
    said = capsys.readouterr().out
    gap, metres = re.search(r"(\d+) px \(([\d.]+) m\) from the nearest window", said).groups()
    windows = [[pair.window for pair in side.pairs] for side in (train, val)]
    assert apart(*windows) == int(gap) >= 30
    assert float(metres) == int(gap) * 0.5
    # What is read is that part of both files; nothing twice, and all but the gaps.
    used = np.zeros(SIZE, int)
    for side in (train, val):
        for i, pair in enumerate(side.pairs):
            top, left, height, width = pair.window
            part = slice(top, top + height), slice(left, left + width)
            used[part] += 1
            np.testing.assert_array_equal(side[i][0], image[part])
            np.testing.assert_array_equal(side[i][1], label[part])
    assert used.max() == 1
    areas = [sum(w.height * w.width for w in side) / label.size for side in windows]
    assert areas[1] == pytest.approx(0.2, abs=0.01)
    assert sum(areas) > 0.94
    assert cli.main(["data", "check", str(tmp_path / "mine")]) == 0
    assert "fine; no warnings" in capsys.readouterr().out


def test_no_side_of_the_strip_that_is_evaluated_is_thinner_than_a_crop():
    """40 cells, of which 8 are evaluated and one on each side is left out."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        (lost, *_), first = best_span(rng.integers(1, 50, (40, 3)), 8, 1, no_strips=True)
        assert lost == 0
        assert [cells for cells in (first - 1, 40 - first - 8 - 1) if 0 < cells < 4] == []


@pytest.mark.parametrize("places", [(800,), (100, 1400)])
def test_a_class_in_one_place_is_trained_on_and_in_two_on_both_sides(tmp_path, places):
    _, label = scene(tmp_path / "data", sand=False)
    for left in places:
        label[100:200, left : left + 50] = 3
    tifffile.imwrite(tmp_path / "data/town_label.tif", label, tile=(256, 256), extratags=GEO)
    for side in init(tmp_path)[: len(places)]:
        assert any((side[i][1] == 3).any() for i in range(len(side)))


def test_a_class_that_no_window_to_evaluate_on_shows_is_told(tmp_path, capsys):
    _, label = scene(tmp_path / "data", sand=False)
    label[100:105, 810:830] = 3
    tifffile.imwrite(tmp_path / "data/town_label.tif", label, tile=(256, 256), extratags=GEO)
    train, _ = init(tmp_path)
    assert any((train[i][1] == 3).any() for i in range(len(train)))
    assert "warning: no window to evaluate on shows class_3\n" in capsys.readouterr().out


def test_labels_that_are_no_tiff_are_drawn_as_one(tmp_path):
    _, label = scene(tmp_path / "data")
    (tmp_path / "data/town_label.tif").unlink()
    Image.fromarray(label).save(tmp_path / "data/town_label.png")
    train, _ = init(tmp_path)
    for i, pair in enumerate(train.pairs):
        top, left, height, width = pair.window
        np.testing.assert_array_equal(train[i][1], label[top : top + height, left : left + width])


def test_windows_without_a_label_are_left_out(tmp_path):
    _, label = scene(tmp_path / "data")
    label[:, :800] = 255
    tifffile.imwrite(tmp_path / "data/town_label.tif", label, tile=(256, 256), extratags=GEO)
    train, val = init(tmp_path, "--ignore", "255")
    for side in (train, val):
        assert all((side[i][1] != 255).any() for i in range(len(side)))
    assert sum(pair.window.width * pair.window.height for pair in train.pairs) < label.size * 0.6


def test_one_picture_of_another_format_is_refused_with_what_to_do(tmp_path, capsys):
    image, _ = scene(tmp_path / "data")
    (tmp_path / "data/town.tif").unlink()
    Image.fromarray(image).save(tmp_path / "data/town.png")
    assert cli.main(["init", str(tmp_path / "data"), "--output", str(tmp_path / "mine")]) != 0
    assert "store it as TIFF (gdal_translate" in capsys.readouterr().err


@pytest.mark.slow
def test_a_raster_of_a_hundred_megapixels_trains_and_is_evaluated(tmp_path):
    """Its pixels repeat, so that the files are small."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, (60, 60)).repeat(20, 0).repeat(20, 1).astype(np.uint8)
    image = (COLORS[label] + rng.integers(0, 30, (1200, 1200, 3))).astype(np.uint8)
    label, image = np.tile(label, (8, 9))[:, :10_400], np.tile(image, (8, 9, 1))[:, :10_400]
    assert label.size > 89_478_485
    (tmp_path / "data").mkdir()
    options = {"tile": (512, 512), "compression": "deflate", "extratags": GEO}
    tifffile.imwrite(tmp_path / "data/city.tif", image, photometric="rgb", **options)
    tifffile.imwrite(tmp_path / "data/city_label.tif", label, **options)
    init(tmp_path)
    settings = "train.steps=2 train.batch_size=2 model.head_channels=16 augment.crop_size=[64,64]"
    settings += " eval.every_steps=2 data.num_workers=0 schedule.warmup_steps=0"
    settings += " model.num_stages=2 model.output_stride=8 model.pretrained=null"
    words = [word for one in settings.split() for word in ("--set", one)]
    run = tmp_path / "run"
    mine = str(tmp_path / "mine")
    assert cli.main(["train", mine, "--nproc", "1", *words, "--output", str(run)]) == 0
    assert '"eval/mIoU"' in (run / "metrics.jsonl").read_text()
