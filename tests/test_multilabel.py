"""Task multilabel: classes that overlap. The oracles are torch, torchvision, scikit-learn and the
authors' own lines for the Lovász hinge, in float64."""

import csv
import json
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from experiments import experiment, last, write_config

from segtrain.api import Predictor
from segtrain.checkpoint import load_model
from segtrain.checkpoint.format import save
from segtrain.checkpoint.trained import load_initial
from segtrain.config import LossConfig, load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import parse_class_file
from segtrain.data.read.labels import read_label
from segtrain.errors import CheckpointError
from segtrain.evaluation import georaster
from segtrain.evaluation.inference import InferenceSettings, predict_labels
from segtrain.evaluation.settings import BatchLimits
from segtrain.metrics import calibration_error
from segtrain.models.ensemble import Ensemble
from segtrain.one_vs_rest import (
    BinaryCounts,
    CurveCounts,
    best_thresholds,
    counts_at,
    levels_of,
    scores_of,
)
from segtrain.results.runs import summarize
from segtrain.run.pictures import mask_names
from segtrain.training.losses import SegLoss
from segtrain.types import IGNORE_INDEX, SegLogits

K, H, W, IMAGES = 3, 6, 9, 4
CPU = torch.device("cpu")
NAMES = ("red", "blue")


def noise(seed=0):
    """Logits, and labels (N, H, W, K) as batches hold them: a fifth of each class is ignored.

    The last class is nowhere, and of the last image nothing is known.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((IMAGES, K, H, W), generator=generator, dtype=torch.float64)
    labels = (torch.rand((IMAGES, H, W, K), generator=generator) < 0.3).to(torch.uint8)
    labels[..., -1] = 0
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE_INDEX
    labels[-1] = IGNORE_INDEX
    return logits, labels


def discs(root: Path, number: int, *, missing: int | None = None) -> dict[str, np.ndarray]:
    """Images of a red and a blue disc that may overlap, in root/images; their masks (2, H, W)."""
    rng = np.random.default_rng(5)
    truth = {}
    (root / "images").mkdir(parents=True)
    for i in range(number):
        rows, columns = np.mgrid[:48, :64]
        masks = []
        for _ in NAMES:
            y, x, radius = rng.integers(16, 32), rng.integers(16, 48), rng.integers(9, 15)
            masks.append((rows - y) ** 2 + (columns - x) ** 2 < radius**2)
        truth[f"{i:02}"] = np.stack(masks).astype(np.uint8)
        image = np.full((48, 64, 3), 60.0)
        image[..., 0] += 130 * masks[0]
        image[..., 2] += 130 * masks[1]
        image = (image + rng.normal(0, 8, image.shape)).clip(0, 255).astype(np.uint8)
        cv2.imwrite(str(root / f"images/{i:02}.png"), image[..., ::-1])
    return truth


def mask_folders(root: Path, truth: dict[str, np.ndarray]) -> None:
    """A folder of 0/255 masks for each class; where a class is nowhere there is no file."""
    for k, name in enumerate(NAMES):
        (root / "masks" / name).mkdir(parents=True)
        for image, masks in truth.items():
            if masks[k].any():
                cv2.imwrite(str(root / f"masks/{name}/{image}.png"), 255 * masks[k])


@pytest.fixture(scope="module")
def banded(tmp_path_factory) -> Path:
    """A data set of the layout `folders` whose labels are TIFFs of two bands."""
    root = tmp_path_factory.mktemp("banded")
    truth = discs(root / "all", 14)
    for i, (name, masks) in enumerate(truth.items()):
        split = "train" if i < 10 else "val"
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        (root / f"all/images/{name}.png").rename(root / f"images/{split}/{name}.png")
        save_bands(root / f"labels/{split}/{name}.tif", masks)
    (root / "classes.yaml").write_text("classes: [red, blue]\nignore_ids: [255]\n")
    return root


def save_bands(path: Path, masks: np.ndarray) -> None:
    tifffile.imwrite(path, masks, photometric="minisblack", planarconfig="separate", metadata=None)


def of_task(root: Path, **sections):
    """A small experiment on `banded`."""
    values = experiment(
        root,
        data={"label_format": "bands"},
        augment={"crop_size": [33, 41], "max_class_share": 1.0} | sections.pop("augment", {}),
        model={"head_channels": 8, "aux_channels": 8},
        train={"steps": 3, "batch_size": 5, "precision": "float32"} | sections.pop("train", {}),
        **sections,
    )
    return {"task": "multilabel", **values}


# Losses


def seg_loss(**config):
    return SegLoss(LossConfig.model_validate(config), CPU, multilabel=True)


def flat(logits, labels):
    """(K, n) logits and labels, and which of them are valid."""
    labels = labels.movedim(-1, 1)
    flattened = (x.movedim(1, 0).flatten(1) for x in (logits, labels))
    return *flattened, labels.movedim(1, 0).flatten(1) != IGNORE_INDEX


def expected_cross_entropy(logits, labels):
    x, y, valid = flat(logits, labels)
    weights, positive = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([3.0, 1.0, 2.0])
    rows = [
        F.binary_cross_entropy_with_logits(
            x[k][valid[k]], y[k][valid[k]].double(), pos_weight=positive[k].double()
        )
        * valid[k].sum()
        for k in range(K)
    ]
    return (weights * torch.stack(rows)).sum() / (weights * valid.sum(1)).sum()


def expected_focal(logits, labels):
    from torchvision.ops import sigmoid_focal_loss

    x, y, valid = flat(logits, labels)
    return sigmoid_focal_loss(x[valid], y[valid].double(), alpha=-1, gamma=2, reduction="mean")


def overlap(logits, labels, missed, found, square=False):
    x, y, valid = flat(logits, labels)
    losses = []
    for k in range(K):
        p, g = x[k][valid[k]].sigmoid(), y[k][valid[k]].double()
        if not g.any():
            continue
        hits = (p * g).sum()
        if square:
            losses.append(1 - 2 * hits / (p.square().sum() + g.sum()))
        else:
            losses.append(
                1 - hits / (hits + missed * (g - p * g).sum() + found * (p - p * g).sum())
            )
    return torch.stack(losses).mean()


def lovasz_grad(sorted_truth):
    """As bermanmaxim/LovaszSoftmax, lovasz_losses.py."""
    total = sorted_truth.sum()
    intersection = total - sorted_truth.cumsum(0)
    union = total + (1 - sorted_truth).cumsum(0)
    jaccard = 1.0 - intersection / union
    jaccard[1:] = jaccard[1:] - jaccard[:-1].clone()
    return jaccard


def expected_hinge(logits, labels):
    """`lovasz_hinge(per_image=True)` of each class, the mean over all with valid pixels."""
    losses = []
    for image, label in zip(logits, labels, strict=True):
        for k in range(K):
            x, y = image[k].flatten(), label[..., k].flatten()
            x, y = x[y != IGNORE_INDEX], y[y != IGNORE_INDEX].double()
            if not len(y):
                continue
            errors, order = (1.0 - x * (2.0 * y - 1.0)).sort(descending=True)
            losses.append(errors.relu() @ lovasz_grad(y[order]))
    return torch.stack(losses).mean()


LOSSES = {
    "cross_entropy": (
        {"class_weights": (1.0, 2.0, 0.5), "positive_weights": (3.0, 1.0, 2.0)},
        expected_cross_entropy,
    ),
    "focal": ({}, expected_focal),
    "dice": ({}, lambda *a: overlap(*a, 0.5, 0.5, square=True)),
    "dice_linear": ({}, lambda *a: overlap(*a, 0.5, 0.5)),
    "tversky": ({}, lambda *a: overlap(*a, 0.7, 0.3)),
    "lovasz": ({}, expected_hinge),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_and_its_gradient_are_the_formula_over_all_ranks(kind):
    """Two ranks, of which one has no valid pixel but for one image."""
    options, formula = LOSSES[kind]
    logits, labels = noise()
    criterion = seg_loss(kind=kind, **options)
    reference = logits.clone().requires_grad_()
    expected = formula(reference, labels)
    expected.backward()
    parts = [(logits[:1], labels[:1]), (logits[1:], labels[1:])]
    given = [x.clone().requires_grad_() for x, _ in parts]
    sums = [
        criterion(SegLogits(x), criterion.labels(y)) for x, (_, y) in zip(given, parts, strict=True)
    ]
    totals = sum(x.detach() for x in sums)
    for one in sums:
        criterion.objective(one, totals).backward()
    assert abs(criterion.means(totals)[0] - expected) < 1e-12
    found = torch.cat([x.grad for x in given])
    assert (found - reference.grad).abs().max() < 1e-12
    assert reference.grad.abs().max() > 1e-4


def test_ignored_of_one_class_counts_for_another():
    logits, labels = noise()
    labels[0, 2, 3] = torch.tensor([1, IGNORE_INDEX, 0])
    given = logits.clone().requires_grad_()
    criterion = seg_loss()
    sums = criterion(SegLogits(given), criterion.labels(labels))
    criterion.objective(sums, sums.detach()).backward()
    assert (given.grad[0, :, 2, 3] != 0).tolist() == [True, False, True]


def test_a_microbatch_weighs_by_its_valid_pixels_of_all_classes():
    _, labels = noise()
    criterion = seg_loss()
    assert criterion.label_weight(criterion.labels(labels)) == (labels != IGNORE_INDEX).sum()
    weighted = seg_loss(class_weights=(1.0, 2.0, 0.5))
    by_class = (labels != IGNORE_INDEX).sum((0, 1, 2)).double()
    expected = by_class @ torch.tensor([1.0, 2.0, 0.5]).double()
    assert weighted.label_weight(weighted.labels(labels)) == expected


# Scores


def counted():
    """Probabilities and labels of four images, and their counts."""
    logits, labels = noise(3)
    matrix, curves, levels = BinaryCounts(K), CurveCounts(K), []
    probabilities = logits.sigmoid().float()
    for p, label in zip(probabilities, labels, strict=True):
        matrix.update((p >= 0.5).to(torch.uint8).movedim(0, -1), label)
        levels.append(levels_of(curves.update(p, label)))
    return probabilities, labels, matrix, curves, torch.stack(levels)


def test_scores_are_those_of_scikit_learn():
    from sklearn.metrics import average_precision_score, f1_score, jaccard_score

    probabilities, labels, matrix, curves, _ = counted()
    scores = scores_of(matrix.counts, curves.counts)
    p, y, valid = flat(probabilities, labels)
    bins = (p * 1024).floor() / 1024
    for k in range(K):
        truth, one, binned = (x[k][valid[k]].numpy() for x in (y, p, bins))
        pred = one >= 0.5
        assert scores.iou[k] == pytest.approx(jaccard_score(truth, pred), abs=1e-12)
        assert scores.dice[k] == pytest.approx(f1_score(truth, pred), abs=1e-12)
        assert scores.class_frequency[k] == pytest.approx(truth.mean(), abs=1e-12)
        if truth.any():
            expected = average_precision_score(truth, binned)
            assert scores.ap[k] == pytest.approx(expected, abs=1e-12)
        else:
            assert np.isnan(scores.ap[k])
    right = (p >= 0.5)[valid] == (y == 1)[valid]
    assert scores.pixel_acc == pytest.approx(right.double().mean().item(), abs=1e-12)


def test_thresholds_are_the_best_of_all_and_images_are_counted_at_them():
    from sklearn.metrics import jaccard_score

    probabilities, labels, _, curves, levels = counted()
    thresholds = best_thresholds(levels_of(curves.counts))
    p, y, valid = flat(probabilities, labels)
    for k in range(2):
        truth, one = (x[k][valid[k]].numpy() for x in (y, p))
        ious = [jaccard_score(truth, one >= i / 64) for i in range(1, 64)]
        assert ious[round(64 * thresholds[k]) - 1] == max(ious)
    assert thresholds[2] == 0.5  # a class that no label shows
    by_image = BinaryCounts(K)
    for i, label in enumerate(labels):
        above = probabilities[i] >= torch.tensor(thresholds).view(-1, 1, 1)
        expected = by_image.update(above.to(torch.uint8).movedim(0, -1), label)
        assert torch.equal(counts_at(levels, thresholds)[i], expected)


def test_the_calibration_error_says_how_often_a_class_is_there():
    curves = CurveCounts(2)
    label = torch.zeros(1, 10, 2, dtype=torch.uint8)
    label[0, :3, 0] = 1  # 3 of 10 where 0.8 is said; and none of 10 where 0.1 is
    curves.update(torch.tensor([0.8, 0.1]).view(2, 1, 1).expand(2, 1, 10), label)
    assert calibration_error(curves.counts) == pytest.approx((0.5 + 0.1) / 2, abs=1e-3)


def test_its_bins_are_the_fifteen_of_one_class_among_all():
    """0.21 and 0.26 are in one of 15 bins, where 47 of 200 are right; of 16 bins in two."""
    curves, label = CurveCounts(1), torch.zeros(1, 200, 1, dtype=torch.uint8)
    label[0, :47] = 1
    curves.update(torch.tensor([0.21, 0.26]).repeat_interleave(100).view(1, 1, 200), label)
    assert calibration_error(curves.counts) == pytest.approx(0, abs=1e-3)


# Predictions


class Fixed(torch.nn.Module):
    """Gives the first channels of its images as logits."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, images):
        return SegLogits(self.factor * images[:, :2])


@pytest.mark.parametrize("how", [{}, {"flip": True}, {"mode": "slide", "crop_size": (8, 8)}])
def test_each_class_is_where_its_own_probability_reaches_its_threshold(how):
    image = torch.randint(0, 256, (1, 3, 16, 24), dtype=torch.uint8)
    values = {"mean": (128.0,) * 3, "std": (40.0,) * 3, "thresholds": (0.3, 0.7)}
    settings = InferenceSettings(**values, **how)
    asked = {"probabilities": "all"}
    (found,) = predict_labels(
        Fixed().eval(), [image], settings, [(16, 24)], BatchLimits(1, 2), **asked
    )
    p = ((image[0, :2].double() - 128) / 40).sigmoid()
    assert (found.probability - p).abs().max() < 1e-6
    expected = found.probability >= torch.tensor([0.3, 0.7]).view(2, 1, 1)
    assert torch.equal(found.label, expected.to(torch.uint8).movedim(0, -1))
    assert (found.label.sum(-1) == 2).any()
    assert (found.label.sum(-1) == 0).any()


def test_an_ensemble_has_the_mean_of_the_sigmoids():
    images = torch.randn(1, 3, 4, 5).double()
    members = Fixed(1.0), Fixed(-3.0)
    logits = Ensemble(members, multilabel=True).double()(images).out
    expected = sum(one.double()(images).out.sigmoid() for one in members) / 2
    assert (logits.sigmoid() - expected).abs().max() < 1e-12


# Labels


def classes(text="classes: [red, blue]"):
    return parse_class_file(text, Path("classes.yaml"), "bands")


@pytest.mark.parametrize(
    ("text", "value", "said"),
    [
        ("classes: [red, blue]", 255, "values in the band of blue: 255 (2 pixels)"),
        ("classes: [red, blue]\nignore_ids: [255]", 7, "values in the band of blue: 7"),
    ],
)
def test_a_value_that_the_class_file_does_not_explain_is_refused(tmp_path, text, value, said):
    bands = np.zeros((2, 4, 6), np.uint8)
    bands[0, 1:3] = 1
    bands[1, 2, :2] = value
    save_bands(tmp_path / "a.tif", bands)
    with pytest.raises(Exception, match="ids: ") as caught:
        read_label(tmp_path / "a.tif", classes(text), "bands")
    assert said in str(caught.value)
    listed = classes(f"classes: [{{name: red}}, {{name: blue, ids: [1, {value}]}}]")
    read = read_label(tmp_path / "a.tif", listed, "bands")
    assert (read == (bands != 0).transpose(1, 2, 0)).all()
    ignoring = classes(f"classes: [red, blue]\nignore_ids: [{value}]")
    read = read_label(tmp_path / "a.tif", ignoring, "bands")
    assert (read[2, :2] == [0 if False else 1, IGNORE_INDEX]).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("classes: [{name: red, ids: [0]}]", "0 is also an id in the band of red"),
        ("classes: [{name: red, ids: [7]}]\nignore_ids: [7]", "7 is also an id in the band"),
    ],
)
def test_a_class_file_that_contradicts_itself_is_refused(text, said):
    with pytest.raises(Exception, match="is also") as caught:
        classes(text)
    assert said in str(caught.value)


def test_labels_with_another_number_of_bands_are_refused(banded, tmp_path, lab):
    config = of_task(banded)
    (tmp_path / "three.yaml").write_text("classes: [red, blue, green]\n")
    config["data"]["classes"] = str(tmp_path / "three.yaml")
    path = write_config(tmp_path / "c.yaml", config)
    said = lab.refused("train", path, "--output", tmp_path / "run", code=3)
    assert "expected a band of 8 bits for each of 3 classes" in said


# Training


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """An experiment of `init` on folders of masks, trained; and the masks of each image."""
    from experiments import segtrain

    root = tmp_path_factory.mktemp("learnt")
    truth = discs(root / "data", 24)
    truth["03"][0] = 0  # no file of this class
    image = cv2.imread(str(root / "data/images/03.png"))
    image[..., 2] = 60
    cv2.imwrite(str(root / "data/images/03.png"), image)
    mask_folders(root / "data", truth)
    assert segtrain("init", root / "data", "--task", "multilabel", "--output", root / "made") == 0
    # Half a network, and AdamW, learn them in 7 s of a processor.
    options = ["augment.color_prob=0.0", "augment.scale_range=[0.8,1.25]", "train.steps=40"]
    options += ["model.head_channels=16", "model.num_stages=2", "model.output_stride=8"]
    options += ["train.batch_size=4", "train.precision=float32", "data.num_workers=0"]
    options += ["optim.kind=adamw", "optim.lr=0.002", "optim.weight_decay=0.0005"]
    options += ["optim.ema_decay=0.8", "schedule.warmup_steps=0", "log.charts=false"]
    words = [word for option in options for word in ("--set", option)]
    assert segtrain("train", root / "made", "--output", root / "run", "--nproc", 1, *words) == 0
    return root, truth


def test_init_draws_each_class_into_a_band_of_its_own(learnt):
    root, truth = learnt
    config = load_config(root / "made/config.yaml")
    seen = {}
    for split in (config.data.train_split, config.data.eval_split):
        dataset = open_dataset(config.data, split)
        order = [dataset.classes.names.index(name) for name in NAMES]
        for i, name in enumerate(dataset.names):
            seen[Path(name).name] = dataset[i][1][..., order].transpose(2, 0, 1)
    assert seen.keys() == truth.keys()
    assert all((seen[name] == masks).all() for name, masks in truth.items())
    assert "do not show it: red (1)" in (root / "made/classes.yaml").read_text()


def test_both_discs_are_learnt_where_they_overlap_too(learnt, lab, tmp_path):
    """What predict writes, against the masks; eval counts the same."""
    root, truth = learnt
    output = tmp_path / "pred"
    lab.done("predict", root / "run", root / "data/images", "--output", output)
    config = load_model(root / "run").config
    val = [line.split("\t")[-1] for line in Path(config.data.eval_split).read_text().splitlines()]
    names = [Path(line).stem for line in val if not line.startswith("#")]
    counts, both = np.zeros((2, 2)), np.zeros(2)
    order = [load_model(root / "run").classes.names.index(name) for name in NAMES]
    for name in names:
        label = tifffile.imread(output / f"labels/{name}.tif")[order]
        for k, class_name in enumerate(NAMES):
            mask = cv2.imread(str(output / f"masks/{class_name}/{name}.png"), -1)
            assert ((mask == 255) == label[k]).all()
            counts[k] += (label[k] & truth[name][k]).sum(), (label[k] | truth[name][k]).sum()
        shared = truth[name].all(0)
        both += (label.all(0) & shared).sum(), (label.all(0) | shared).sum()
    iou = counts[:, 0] / counts[:, 1]
    assert iou.min() > 0.75  # one that said both classes everywhere would have 0.13
    assert both[0] / both[1] > 0.5
    scores = lab.done(
        "eval", root / "run", "--json", tmp_path / "e.json", "--save-predictions", tmp_path / "p"
    )
    found = json.loads((tmp_path / "e.json").read_text())
    by_name = {row["name"]: row["IoU"] for row in found["classes"]}
    assert [by_name[name] for name in NAMES] == pytest.approx(iou.tolist(), abs=1e-12)
    assert "flatters its scores" in scores.out
    saved = tifffile.imread(next((tmp_path / "p").rglob(f"{names[0]}.tif")))
    assert (saved == tifffile.imread(output / f"labels/{names[0]}.tif")).all()


def test_the_score_of_the_training_is_that_of_eval_and_of_the_kept_images(learnt, lab, tmp_path):
    root, _ = learnt
    lab.done("eval", root / "run", "--json", tmp_path / "e.json")
    found = json.loads((tmp_path / "e.json").read_text())["mIoU"]
    best = load_best(root / "run")
    assert found == pytest.approx(best["score"], abs=1e-12)
    assert load_model(root / "run").config.eval.thresholds == tuple(last(root / "run").thresholds)
    said = lab.done("report", root / "run").out
    assert "report" in said
    page = (root / "run/report.html").read_text()
    assert "mAP" in page or "IoU" in page
    fixed = lab.done("eval", root / "run", "--set", "eval.thresholds=[0.5]").out
    assert "flatters" not in fixed


def load_best(run):
    return last(run).best


def test_the_library_gives_a_band_a_class(learnt):
    root, _ = learnt
    predictor = Predictor(root / "run")
    image = cv2.imread(str(root / "data/images/00.png"))[..., ::-1]
    label = predictor(image)
    assert label.shape == (48, 64, 2)
    p = predictor.probabilities(image)
    thresholds = np.array(load_model(root / "run").config.eval.thresholds).reshape(-1, 1, 1)
    assert (label == (p >= thresholds).transpose(1, 2, 0)).all()


def test_a_raster_in_parts_has_the_bands_of_the_same_image_at_once(
    learnt, lab, tmp_path, monkeypatch
):
    root, _ = learnt
    image = cv2.imread(str(root / "data/images/00.png"))[..., ::-1]
    tifffile.imwrite(tmp_path / "a.tif", np.ascontiguousarray(image), photometric="rgb")
    words = "predict", root / "run", tmp_path / "a.tif", "--output"
    lab.done(*words, tmp_path / "whole")
    monkeypatch.setattr("segtrain.commands.predict.raster_inputs.MAX_PHOTO_PIXELS", 1000)
    monkeypatch.setattr("segtrain.data.read.raster._MIN_BYTES", 0)
    monkeypatch.setattr(georaster, "BLOCK_PX", 64)
    lab.done(*words, tmp_path / "parts")
    whole, parts = (tifffile.imread(tmp_path / f"{x}/labels/a.tif") for x in ("whole", "parts"))
    parts = parts.transpose(2, 0, 1)
    assert parts.shape == whole.shape == (2, 48, 64)
    assert (parts == whole).all()


@pytest.mark.slow("export", "one_vs_rest", "evaluation")
def test_the_exported_graph_gives_the_logits_and_the_file_says_how_to_use_them(
    learnt, lab, tmp_path
):
    onnx = pytest.importorskip("onnx")
    import onnxruntime

    root, _ = learnt
    file = tmp_path / "m.onnx"
    lab.done("export", root / "run", "--format", "onnx", "--normalize", "--output", file)
    about = {prop.key: prop.value for prop in onnx.load(file).metadata_props}
    assert about["task"] == "multilabel"
    thresholds = json.loads(about["inference"])["thresholds"]
    image = cv2.imread(str(root / "data/images/00.png"))[..., ::-1]
    session = onnxruntime.InferenceSession(file)
    images = np.ascontiguousarray(image.transpose(2, 0, 1)[None])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images})
    label = 1 / (1 + np.exp(-logits[0])) >= np.array(thresholds).reshape(-1, 1, 1)
    same = label.transpose(1, 2, 0) == Predictor(root / "run")(image)
    assert same.mean() > 0.999  # at a threshold, roundings decide


def test_the_weights_alone_keep_the_thresholds_and_a_graph_has_no_argmax(learnt, lab, tmp_path):
    root, _ = learnt
    file = tmp_path / "m.safetensors"
    lab.done("export", root / "run", "--format", "safetensors", "--output", file)
    assert (
        load_model(file).config.eval.thresholds == load_model(root / "run").config.eval.thresholds
    )
    said = lab.refused(
        "export", root / "run", "--format", "onnx", "--argmax", "--output", tmp_path / "n.onnx"
    )
    assert "--argmax: a pixel may have several classes" in said


def test_suspects_says_that_it_is_for_the_other_task(learnt, lab):
    root, _ = learnt
    assert "not several" in lab.refused("suspects", root / "run")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"loss": {"kind": "ohem"}}, "loss: ohem is for classes of which a pixel has one"),
        ({"loss": {"label_smoothing": 0.1}}, "label_smoothing and logit_adjustment cannot go"),
        ({"augment": {"class_mix_prob": 0.5}}, "class_mix_prob: 0.5 cannot go with task"),
        ({"data": {"label_format": "ids"}}, "bands and task multilabel go together"),
        ({"data": {"layout": "voc"}}, "data.layout: voc has one class a pixel"),
        ({"data": {"class_uniform": 0.5}}, "data.class_uniform: 0.5 cannot go with task"),
        ({"loss": {"positive_weights": [1.0]}}, "positive_weights: 1 numbers for the 2 classes"),
        ({"eval": {"thresholds": [0.1, 0.2, 0.3]}}, "eval.thresholds: 3 numbers for the 2"),
    ],
)
def test_what_cannot_go_with_the_task_is_refused(banded, lab, tmp_path, sections, said):
    config = of_task(banded)
    for section, options in sections.items():
        config[section] = config.get(section, {}) | options
    path = write_config(tmp_path / "c.yaml", config)
    assert said in lab.refused("train", path, "--output", tmp_path / "run", "--nproc", 1)


def test_tversky_and_thresholds_are_refused_without_the_task(data, lab):
    said = lab.refused("train", lab.config(data, loss={"kind": "tversky"}))
    assert "tversky and positive_weights are for task multilabel" in said
    said = lab.refused("train", lab.config(data, eval={"thresholds": [0.3]}))
    assert "thresholds: has no effect with task semantic" in said


def test_data_stats_prints_weights_that_balance(banded, lab, tmp_path):
    path = write_config(tmp_path / "c.yaml", of_task(banded))
    lab.done("data", "stats", path, "--json", tmp_path / "s.json")
    found = json.loads((tmp_path / "s.json").read_text())
    dataset = open_dataset(load_config(path).data, "train")
    labels = np.stack([dataset[i][1] for i in range(len(dataset))])
    expected = (labels == 0).sum((0, 1, 2)) / (labels == 1).sum((0, 1, 2))
    assert found["positive_weights"] == pytest.approx(expected.tolist(), rel=1e-3)
    assert lab.done("data", "check", path).code == 0


def test_a_class_that_is_nowhere_and_labels_without_any_are_found(banded, lab, tmp_path):
    config = of_task(banded)
    for kind in ("images", "labels"):
        (tmp_path / kind).symlink_to(banded / kind)
    (tmp_path / "classes.yaml").write_text(
        "classes: [{name: red, ids: [7]}, {name: blue, ids: [7]}]\n"
    )
    config["data"] |= {"root": str(tmp_path), "classes": str(tmp_path / "classes.yaml")}
    path = write_config(tmp_path / "c.yaml", config)
    assert (
        "values in the band of red: 1"
        in lab.command("data", "check", path).err + lab.command("data", "check", path).out
    )


def test_annotations_keep_what_lies_on_each_other(tmp_path, lab):
    """COCO, drawn by hand: a square in a square, and a region to ignore by its name."""
    pytest.importorskip("pycocotools")
    root = tmp_path / "data"
    root.mkdir()
    rng = np.random.default_rng(0)
    squares = {"organ": (4, 4, 36, 36), "lesion": (10, 12, 20, 26), "void": (0, 0, 3, 3)}
    images, annotations = [], []
    for i in range(4):
        cv2.imwrite(str(root / f"{i}.png"), rng.integers(0, 255, (40, 48, 3), np.uint8))
        images.append({"id": i, "file_name": f"{i}.png", "height": 40, "width": 48})
        for category, (x, y, right, bottom) in enumerate(squares.values(), 1):
            outline = [x, y, right, y, right, bottom, x, bottom]
            annotations.append(
                {"id": len(annotations), "image_id": i, "category_id": category, "iscrowd": 0}
                | {"segmentation": [outline], "bbox": [x, y, right - x, bottom - y], "area": 9}
            )
    categories = [{"id": i, "name": name} for i, name in enumerate(squares, 1)]
    text = {"images": images, "annotations": annotations, "categories": categories}
    (root / "instances.json").write_text(json.dumps(text))
    lab.done("init", root, "--task", "multilabel", "--output", tmp_path / "made")
    config = load_config(tmp_path / "made/config.yaml")
    dataset = open_dataset(config.data, config.data.train_split)
    expected = np.zeros((40, 48, 2), np.uint8)
    for k, name in enumerate(("organ", "lesion")):
        x, y, right, bottom = squares[name]
        expected[y:bottom, x:right, k] = 1
    expected[0:3, 0:3] = IGNORE_INDEX
    assert dataset.classes.names == ("organ", "lesion")
    assert (dataset[0][1] == expected).all()
    lab.done("data", "import", root, "--overlap", "keep", "--output", tmp_path / "drawn")
    assert "ids: [1]" in (tmp_path / "drawn/classes.yaml").read_text()


def test_one_class_is_a_sigmoid_of_its_own(tmp_path, lab):
    truth = discs(tmp_path / "data", 12)
    (tmp_path / "data/masks").mkdir()
    for name, masks in truth.items():
        cv2.imwrite(str(tmp_path / f"data/masks/{name}.png"), 255 * masks[0])
    lab.done("init", tmp_path / "data", "--task", "multilabel", "--output", tmp_path / "made")
    options = ["train.steps=1", "model.head_channels=8", "data.num_workers=0"]
    options += ["schedule.warmup_steps=0", "train.batch_size=2", "train.precision=float32"]
    options += ["model.num_stages=2", "model.output_stride=8", "optim.kind=sgd", "log.charts=false"]
    words = [word for option in options for word in ("--set", option)]
    run = tmp_path / "run"
    lab.done("train", tmp_path / "made", "--output", run, "--nproc", 1, *words)
    loaded = load_model(run)
    assert loaded.classes.names == ("foreground",)
    assert loaded.model.head.classifier.conv.out_channels == 1


def test_one_label_for_all_classes_is_no_multilabel_folder(tmp_path, lab):
    discs(tmp_path / "data", 8)
    (tmp_path / "data/masks").mkdir()
    for i in range(8):
        mask = np.zeros((48, 64), np.uint8)
        mask[:20], mask[30:] = 1, 2
        cv2.imwrite(str(tmp_path / f"data/masks/{i:02}.png"), mask)
    said = lab.refused(
        "init", tmp_path / "data", "--task", "multilabel", "--output", tmp_path / "m"
    )
    assert "one label holds all classes" in said


def test_tables_count_each_class_where_it_lies_on_others_too(learnt, lab, tmp_path):
    root, _ = learnt
    table, output = tmp_path / "t.csv", tmp_path / "pred"
    photos = root / "data/images"
    lab.done("predict", root / "run", photos, "--output", output, "--table", table)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 24
    for row in rows:
        mask = cv2.imread(str(output / f"masks/{row['class']}/{row['image']}.png"), -1)
        assert int(row["pixels"]) == (mask == 255).sum()
        assert int(row["objects"]) == cv2.connectedComponents(mask, connectivity=8)[0] - 1
    said = lab.refused(
        "predict", root / "run", photos, "--output", tmp_path / "o", "--threshold", "red=0.3"
    )
    assert "use --set eval.thresholds" in said


def test_curves_and_borders_are_those_of_each_class(learnt, lab, tmp_path):
    root, _ = learnt
    found = tmp_path / "e.json"
    said = lab.done(
        "eval", root / "run", "--surface", 2, "--class", "red", "--recall", 0.9, "--json", found
    ).out
    found = json.loads(found.read_text())
    ap = {row["name"]: row["AP"] for row in found["classes"]}
    assert found["curves"]["AP"] == pytest.approx(ap, abs=1e-12)
    point = found["curves"]["operating_point"]
    assert point["recall"] >= 0.9
    assert f"by {point['threshold']} in eval.thresholds" in said
    names = [row["name"] for row in found["classes"]]
    given = ", ".join(str(point["threshold"] if name == "red" else 0.5) for name in names)
    scores = tmp_path / "s.json"
    lab.done("eval", root / "run", "--set", f"eval.thresholds=[{given}]", "--json", scores)
    row = json.loads(scores.read_text())["classes"][names.index("red")]
    assert (row["precision"], row["recall"]) == (point["precision"], point["recall"])


def test_no_class_is_black_unless_its_file_says_so():
    """Pictures leave black clear."""
    assert (0, 0, 0) not in classes().palette
    given = classes("classes: [{name: red, color: [0, 0, 0]}, {name: blue}]")
    assert given.palette[0] == (0, 0, 0)


def test_a_split_without_any_object_has_no_score_and_no_best(learnt, lab, tmp_path):
    root, _ = learnt
    made = shutil.copytree(root / "made", tmp_path / "made")
    text = (made / "config.yaml").read_text().replace(str(root / "made"), str(made))
    (made / "config.yaml").write_text(text)
    config = load_config(made / "config.yaml")
    for pair in open_dataset(config.data, config.data.eval_split).pairs:
        assert made in pair.label.parents
        cv2.imwritemulti(str(pair.label), [np.zeros((48, 64), np.uint8)] * 2)
    small = "model.num_stages=2", "model.head_channels=16", "train.batch_size=2", "train.steps=2"
    every = "data.num_workers=0", "schedule.warmup_steps=0", "eval.every_steps=1"
    words = [word for option in (*small, *every) for word in ("--set", option)]
    said = lab.done("train", made, "--output", tmp_path / "run", "--nproc", 1, *words).out
    nothing = f"warning: no label of {made}/val.txt shows any class: there is nothing to score"
    assert said.count(nothing) == 1, said
    assert said.count("  no best score\n") == 2
    assert not (tmp_path / "run/checkpoints/best.pt").exists()
    assert last(tmp_path / "run").best is None
    assert summarize(tmp_path / "run").best is None
    assert nothing in lab.done("eval", tmp_path / "run").out
    listed = lab.done("runs", tmp_path).out.splitlines()[1]
    assert re.search(r"run +- +- +2/2 .* complete$", listed), listed


def with_thresholds(checkpoint, values):
    """The checkpoint of a training with them in its config."""
    config = json.loads(checkpoint.config)
    config["eval"]["thresholds"] = values
    return checkpoint._replace(config=json.dumps(config), thresholds=None)


def test_an_ensemble_has_the_mean_thresholds_in_any_order(learnt, tmp_path):
    root, _ = learnt
    other = tmp_path / "other.pt"
    checkpoint = last(root / "run")
    changed = [t + 0.125 for t in checkpoint.thresholds]
    save(other, checkpoint._replace(thresholds=changed))
    expected = [t + 0.0625 for t in checkpoint.thresholds]
    given = tmp_path / "given.pt"  # one for all classes, by its config
    save(given, with_thresholds(checkpoint, [0.25]))
    unknown = tmp_path / "unknown.pt"  # before its first evaluation
    save(unknown, checkpoint._replace(thresholds=None))
    here = root / "run/checkpoints/last.pt"
    for member, wanted in (
        (other, expected),
        (given, [(t + 0.25) / 2 for t in checkpoint.thresholds]),
        (unknown, [(t + 0.5) / 2 for t in checkpoint.thresholds]),
    ):
        for pair in ((here, member), (member, here)):
            found = load_model(*pair).config.eval.thresholds
            assert found == pytest.approx(wanted, abs=1e-12), member
    fits = [load_model(one).fits_thresholds for one in (here, given, unknown)]
    assert fits == [True, False, False]
    assert load_model(given, here).fits_thresholds
    save(given, with_thresholds(checkpoint, [0.1, 0.2, 0.3]))
    with pytest.raises(CheckpointError, match=r"eval.thresholds: 3 numbers for 2 classes"):
        load_model(here, given)


def test_thresholds_of_another_number_are_refused_after_training_too(learnt, lab, tmp_path):
    root, _ = learnt
    wrong = "--set", "eval.thresholds=[0.1,0.2,0.3]"
    assert "3 numbers for 2 classes" in lab.refused("eval", root / "run", *wrong)
    photos, output = root / "data/images", tmp_path / "p"
    said = lab.refused("predict", root / "run", photos, "--output", output, *wrong)
    assert "eval.thresholds: 3 numbers for 2 classes" in said


def test_weights_of_the_other_task_are_loaded_with_a_warning(learnt):
    root, _ = learnt
    made = load_model(root / "run")
    semantic = made.config.model_copy(update={"task": "semantic"})
    lines = load_initial(made.model, root / "run", made.classes.names, semantic).lines
    assert any("init: task is multilabel there, semantic here" in line for line in lines)


def test_each_class_has_a_folder_of_masks_of_its_own():
    """Also where names differ in what no file name has, or in case alone; and none leads out."""
    names = ["a/b", "a_b", "A\\b", ".."]
    found = mask_names(classes(json.dumps({"classes": names})))
    assert found == ["a_b_2", "a_b", "A_b_3", "_"]  # who can have it keeps its own
