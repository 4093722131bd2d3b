"""A task of a plugin, heights in metres, which no line of segtrain knows."""

import json
import shutil

import cv2
import numpy as np
import pytest
import tifffile
from experiments import forgetting, losses, small, write_config
from processes import Command

from segtrain import Predictor
from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.data.check.scan import scan_split
from segtrain.distributed.machine import process_pool
from segtrain.errors import ConfigError, DataError

HEIGHTS = '''
import numpy as np
import torch

from segtrain.data.read import raw_label
from segtrain.data.read.label_formats import LabelCounts, LabelFormat
from segtrain.distributed import collectives as dist
from segtrain.plugins import label_format, loss, task
from segtrain.task.contract import Decoding, ImageCounts, Outcome, Task
from segtrain.task.prediction import LabelMap
from segtrain.training.losses.base import column_of_sums


@label_format("metres")
class Metres(LabelFormat):
    """One channel of float32; NaN where nothing is known."""

    task, has_classes = "heights", False

    def problem(self, info, num_classes):
        is_one = info.channels == num_classes == 1 and info.dtype == np.float32
        return "" if is_one else "expected one channel of float32, heights in metres"

    def read(self, path, classes, window=None, *, content=None):
        return raw_label.read_numbers(path, 1, window, content=content)[..., 0]

    def count(self, path, classes, window=None):
        label = self.read(path, classes, window)
        return LabelCounts(label.shape, np.array([np.isfinite(label).sum()]))

    def ignored(self, size, classes):
        return np.full(size, np.nan, np.float32)


@loss("l1")
class L1:
    num_sums = 2

    def __init__(self, options):
        pass

    def sums(self, logits, labels):
        known = ~labels.isnan()
        errors = (logits[:, 0] - labels.nan_to_num()).abs() * known
        return column_of_sums(errors, known)

    def loss_from_sums(self, totals):
        total, number = totals[:, 0]
        return total / number.clamp_min(1)


class AsItIs(Decoding):
    dtype = np.dtype(np.float32)

    def label_map(self, tiles, wanted, rule, *, is_logits):
        label = torch.cat([tile[0].float() for _, tile in tiles])
        return LabelMap(label, label.isfinite().all())

    def describe(self):
        return "heights in metres"


class Errors(ImageCounts):
    def __init__(self, device):
        self.num_infinite = torch.zeros((), dtype=torch.int64, device=device)
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, index, found, label):
        known = ~label.isnan()
        errors = (found.label - label.nan_to_num()).abs() * known
        self._sums += torch.stack([errors.double().sum(), known.double().sum()])
        self.num_infinite += ~found.is_finite

    def sum_over_ranks(self, num_by_windows):
        dist.all_reduce_sum(self._sums)
        error, number = self._sums.tolist()
        return Found(error / number if number else float("nan"), num_by_windows)


class Found(Outcome):
    def __init__(self, error, num_by_windows):
        self.error, self.num_by_windows = error, num_by_windows

    def scalars(self, names):
        return {"metric/heights/closeness": -self.error}

    def words(self):
        return f"mean error {self.error:.3f} m"


@task("heights")
class Heights(Task):
    best_scores = ("closeness",)

    def for_loss(self, stored):
        return stored

    def loss_weight(self, labels, class_weights):
        return (~labels.isnan()).sum(dtype=torch.float64)

    def decoding(self, thresholds):
        return AsItIs()

    def counts(self, num_images, num_classes, device, curves):
        return Errors(device)

    def stored(self, classes, label):
        return label

    def shown(self, label):
        return np.where(np.isnan(label), 255, (label / 4).clip(0, 3)).astype(np.uint8)

    def key(self, classes):
        greys = [(60 * i + 40,) * 3 for i in range(4)]
        return [f"{4 * i} to {4 * i + 4} m" for i in range(4)], greys
'''


SPREAD = """@metric("spread")
class Spread:
    def __init__(self, names, options):
        pass

    def counts(self, label, pred):
        return [float(pred.max() - pred.min())]

    def scores(self, totals):
        return {"x": totals[0]}
"""


@pytest.fixture(autouse=True)
def forgotten():
    with forgetting():
        yield


@pytest.fixture
def heights(lab):
    """A config of ramps: a pixel is as high as it is bright; and the folder of the data."""
    rng, root = np.random.default_rng(0), lab.folder / "data"
    for split, number in (("train", 8), ("val", 3)):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for i in range(number):
            metres = cv2.resize(rng.uniform(0, 16, (4, 5)).astype(np.float32), (60, 44))
            image = np.repeat((metres * 15)[..., None], 3, axis=2) + rng.normal(0, 2, (44, 60, 3))
            cv2.imwrite(str(root / f"images/{split}/{i}.png"), image.clip(0, 255).astype(np.uint8))
            metres[:4, :6] = np.nan
            metres[-1, -1] = -9999  # as GDAL marks what is missing
            tags = [(42113, "s", 0, "-9999", True)]
            tifffile.imwrite(root / f"labels/{split}/{i}.tif", metres, extratags=tags)
    (root / "classes.yaml").write_text("classes: [height]\n")
    (lab.folder / "heights.py").write_text(HEIGHTS)
    options = small(
        root,
        augment={"max_class_share": 1.0},
        loss={"kind": "l1"},
        train={"steps": 30, "batch_size": 4, "precision": "float32"},
        eval={"every_steps": 15, "best": "heights/closeness"},
    )
    options["data"]["label_format"] = "metres"
    more = {"task": "heights", "plugins": ["./heights.py"]}
    return write_config(lab.folder / "c.yaml", options | more), root


def test_a_task_of_a_plugin_trains_evaluates_and_predicts(heights, lab):
    config, root = heights
    run = lab.folder / "run"
    said = lab.done("train", config, "--nproc", 1, "--output", run).out
    assert "mean error" in said
    plugin = ("--plugin", lab.folder / "heights.py")
    file, folder = lab.folder / "scores.json", lab.folder / "predicted"
    words = ("--json", file, "--save-predictions", folder, *plugin)
    assert "mean error" in lab.done("eval", run, *words).out
    truth = [tifffile.imread(path) for path in sorted((root / "labels/val").glob("*.tif"))]
    truth = [np.where(y == -9999, np.nan, y) for y in truth]
    preds = [tifffile.imread(path) for path in sorted(folder.glob("*.tif"))]
    errors = [np.abs(p - y)[~np.isnan(y)] for p, y in zip(preds, truth, strict=True)]
    error = np.concatenate(errors).astype(np.float64).mean()
    assert json.loads(file.read_text())["closeness"] == pytest.approx(-error, rel=1e-5)
    constant = np.nanmean([np.abs(y - np.nanmedian(truth)) for y in truth])
    assert error < constant  # the best that knows no image
    lab.done("predict", run, root / "images/val", "--output", lab.folder / "out", *plugin)
    for path, pred in zip(sorted((root / "images/val").glob("*.png")), preds, strict=True):
        found = tifffile.imread(lab.folder / f"out/labels/{path.stem}.tif")
        np.testing.assert_allclose(found, pred, rtol=1e-5)
        with tifffile.TiffFile(lab.folder / f"out/labels/{path.stem}.tif") as file:
            assert file.pages[0].tags["GDAL_NODATA"].value == "nan"
    image = cv2.imread(str(path))[..., ::-1]
    predictor = Predictor(run)
    np.testing.assert_allclose(predictor(image), pred, rtol=1e-5)
    with pytest.raises(ConfigError, match="probabilities: needs scores of classes"):
        predictor.probabilities(image)
    assert "closeness" in lab.done("runs", lab.folder).out


def test_ranks_do_not_change_what_it_learns(heights, lab):
    config, _ = heights
    few = ("--set", "train.steps=3", "--set", "eval.every_steps=3", "--set", "log.every_steps=1")
    lab.done("train", config, "--nproc", 1, "--output", lab.folder / "one", *few)
    command = Command(
        lab.folder, "train", config, "--nproc", 2, "--output", lab.folder / "two", *few
    )
    assert command.wait() == 0, command.errors
    for tag in ("train/loss", "metric/heights/closeness"):
        one, two = (losses(lab.folder / name, tag) for name in ("one", "two"))
        assert one == pytest.approx(two, rel=1e-4)


def test_processes_of_a_check_read_its_labels(heights, lab):
    config, _ = heights
    data = load_config(config).data
    dataset = open_dataset(data, "train")
    with process_pool(2) as pool:
        scan = scan_split(dataset, pool)
    assert scan.places["unreadable"] == {}
    assert scan.pixels.tolist() == [8 * (44 * 60 - 25)]
    assert scan.ignored_pixels == 8 * 25
    assert "class_weights" not in lab.done("data", "stats", config).out


def test_a_metric_may_choose_the_best_and_the_run_is_read_without_it(heights, lab):
    config, data = heights
    text = "from segtrain.plugins import metric\n\n\n" + SPREAD
    (lab.folder / "spread.py").write_text(text)
    files = "heights.py", "spread.py"
    few = ("train.steps=1", "eval.every_steps=1", f"plugins={[str(lab.folder / x) for x in files]}")
    few += ("eval.metrics=[{name: spread}]", "eval.best=spread/x")
    words = [word for one in few for word in ("--set", one)]
    run, plugin = lab.folder / "run", ("--plugin", lab.folder / "heights.py")
    with forgetting():
        lab.done("train", config, "--nproc", 1, "--output", run, *words)
    assert losses(run, "eval/score") == losses(run, "metric/spread/x")
    with forgetting():
        said = lab.refused("train", config, "--output", "x", *words, "--set", "eval.without=[a]")
    assert "eval.without: task heights has no IoU; leave it out" in said
    with forgetting():
        lab.done("predict", run, data / "images/val", "--output", lab.folder / "out", *plugin)


@pytest.mark.parametrize(
    ("before", "after", "best", "said"),
    [
        ("", "", "mae", "heights/mae: the highest must be the best; expected one of heights/cl"),
        (
            'best_scores = ("closeness",)',
            "",
            "closeness",
            "the task names none: best_scores = ('closeness',) in",
        ),
        # As of labels (H, W, 1) and predictions (H, W): their difference would be (H, H, W).
        ("tile[0].float() for", "tile.float() for", "closeness", "predicts (1, 44, 60) where"),
    ],
)
def test_what_would_choose_or_count_wrong_is_refused(heights, lab, before, after, best, said):
    """At the start, and at the first evaluation."""
    config, _ = heights
    file = lab.folder / "heights.py"
    file.write_text(file.read_text().replace(before, after) if before else file.read_text())
    few = "--set", "train.steps=1", "--set", f"eval.best=heights/{best}"
    outcome = lab.command("train", config, *few, "--nproc", 1, "--output", lab.folder / "run")
    assert outcome.code == 2
    assert said in outcome.err


def test_what_moves_numbers_is_refused_for_vectors(heights, lab):
    config, _ = heights
    text = (lab.folder / "heights.py").read_text()
    file = lab.folder / "heights.py"
    file.write_text(
        text.replace(
            'has_classes = "heights", False', 'has_classes, keeps = "heights", False, False'
        )
    )
    said = lab.refused("train", config, "--output", lab.folder / "run")
    assert "augment.flip_prob: 0.5 changes numbers of metres labels; set 0" in said
    assert "augment.scale_range: [0.6, 1.5] changes numbers of metres labels; set [1, 1]" in said


def test_a_task_that_lacks_a_method_is_refused_by_its_name(heights, lab):
    config, _ = heights
    file = lab.folder / "heights.py"
    file.write_text(file.read_text().replace("def shown(", "def displayed("))
    said = lab.refused("train", config, "--nproc", 1, "--output", lab.folder / "run")
    assert "task heights: lacks shown" in said


def test_labels_of_another_type_are_refused_by_name(heights, lab):
    config, _ = heights
    text = (lab.folder / "heights.py").read_text()
    wide = text.replace("content=content)[..., 0]", "content=content)[..., 0].astype(np.float64)")
    (lab.folder / "heights.py").write_text(wide)
    dataset = open_dataset(load_config(config).data, "train")
    message = r"0.tif: metres gives float64 \(44, 60\), where float32 \(H, W\) is asked for"
    with pytest.raises(DataError, match=message):
        dataset[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("loss.kind=cross_entropy", "loss: cross_entropy is for classes; task heights needs"),
        ("eval.best=miou", "eval.best: task heights has no IoU; name a score of it"),
        ("data.label_format=ids", "data.label_format: task heights needs a plugin's"),
        ("task=semantic", "data.label_format: metres is of task heights; set both"),
        ("augment.max_class_share=0.5", "augment.max_class_share: 0.5 cannot go with task heights"),
    ],
)
def test_what_is_about_classes_is_refused(heights, lab, change, said):
    config, _ = heights
    assert said in lab.refused("train", config, "--output", lab.folder / "run", "--set", change)


def test_scores_of_classes_are_refused(heights, lab):
    config, data = heights
    few = ("--set", "train.steps=1", "--set", "eval.every_steps=1")
    run, plugin = lab.folder / "run", ("--plugin", lab.folder / "heights.py")
    with forgetting():
        lab.done("train", config, "--nproc", 1, "--output", run, *few)
        said = lab.refused("eval", run, "--per-image", lab.folder / "x.csv", *plugin)
    assert "--per-image: needs scores of classes, and task heights has none" in said
    for words in (
        ("report", run),
        ("suspects", run),
        ("compare", run, shutil.copytree(run, lab.folder / "again")),
        ("predict", run, data, "--output", lab.folder / "out", "--probabilities", "npz"),
        ("predict", run, data, "--output", lab.folder / "out", "--unknown-below", "0.5"),
        ("export", run, "--output", lab.folder / "x.onnx", "--format", "onnx", "--argmax"),
    ):
        with forgetting():
            assert "needs scores of classes, and task heights" in lab.refused(*words, *plugin)
    with forgetting():
        said = lab.refused("data", "pack", config, "--output", lab.folder / "pack")
    assert "labels of metres cannot be packed" in said
    assert "complete" in lab.done("runs", lab.folder).out
    said = lab.refused("predict", run, data, "--output", lab.folder / "out", code=4)
    assert "the task 'heights' of a plugin that is not imported here" in said
