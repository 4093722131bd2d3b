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
from experiments import last, segtrain
from folders import labels_of, write

from segtrain.api import Predictor
from segtrain.checkpoint import load_model
from segtrain.checkpoint.format import save
from segtrain.checkpoint.trained import load_initial
from segtrain.config import LossConfig, load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import load_class_file, parse_class_file
from segtrain.data.read.label_formats import label_format_of
from segtrain.desk.results.runs import summarize
from segtrain.errors import CheckpointError, ConfigError, DataError
from segtrain.inference.class_scores import InferenceSettings, predict_labels
from segtrain.inference.settings import BatchLimits
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
from segtrain.predict import georaster
from segtrain.run.pictures import mask_names
from segtrain.score.records import load_records
from segtrain.task.targets import targets_of
from segtrain.task.tasks import task_of
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


def discs(root: Path, number: int) -> dict[str, np.ndarray]:
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


# Losses


def seg_loss(**config):
    return SegLoss(LossConfig.model_validate(config), CPU, targets=targets_of("multilabel"))


def flat(logits, labels):
    """(K, n) logits and labels, and which of them are valid."""
    labels = labels.movedim(-1, 1)
    flattened = (x.movedim(1, 0).flatten(1) for x in (logits, labels))
    return *flattened, labels.movedim(1, 0).flatten(1) != IGNORE_INDEX


def expected_cross_entropy(logits, labels):
    x, y, valid = flat(logits, labels)
    weights = torch.tensor([[1.0], [2.0], [0.5]]).double() * valid
    positive = torch.tensor([[3.0], [1.0], [2.0]]).double()
    y = y.double().where(valid, 0)
    loss = F.binary_cross_entropy_with_logits
    return loss(x, y, weights, pos_weight=positive, reduction="sum") / weights.sum()


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
        size = hits + missed * (g - p * g).sum() + found * (p - p * g).sum()
        losses.append(1 - hits / ((p.square().sum() + g.sum()) / 2 if square else size))
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


def test_the_calibration_error_is_of_how_often_a_class_is_there_in_fifteen_bins():
    """0.21 and 0.26 are in one bin of them, where 47 of 200 are right; of 16 bins in two."""
    curves, label = CurveCounts(3), torch.zeros(1, 200, 3, dtype=torch.uint8)
    label[0, :60, 0] = 1  # 3 of 10 where 0.8 is said; and none where 0.1 is
    label[0, :47, 2] = 1
    said = torch.tensor([[0.8, 0.8], [0.1, 0.1], [0.21, 0.26]]).repeat_interleave(100, dim=1)
    curves.update(said[:, None], label)
    assert calibration_error(curves.counts) == pytest.approx((0.5 + 0.1 + 0) / 3, abs=1e-3)


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
    values["task"] = "multilabel"
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
    logits = Ensemble(members, task_of("multilabel").mean).double()(images).out
    expected = sum(one.double()(images).out.sigmoid() for one in members) / 2
    assert (logits.sigmoid() - expected).abs().max() < 1e-12


# Labels


def classes(text="classes: [red, blue]"):
    return parse_class_file(text, Path("classes.yaml"), overlapping=True)


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
    how = {"photometric": "minisblack", "planarconfig": "separate", "metadata": None}
    tifffile.imwrite(tmp_path / "a.tif", bands, **how)
    with pytest.raises(DataError, match=re.escape(said)):
        label_format_of("bands").read(tmp_path / "a.tif", classes(text))
    listed = classes(f"classes: [{{name: red}}, {{name: blue, ids: [1, {value}]}}]")
    read = label_format_of("bands").read(tmp_path / "a.tif", listed)
    assert (read == (bands != 0).transpose(1, 2, 0)).all()
    ignoring = classes(f"classes: [red, blue]\nignore_ids: [{value}]")
    read = label_format_of("bands").read(tmp_path / "a.tif", ignoring)
    assert (read[2, :2] == [1, IGNORE_INDEX]).all()


def test_a_value_of_more_than_16_bits_is_no_other_value(tmp_path):
    """65537 would be 1 in 16 bits."""
    bands = np.zeros((4, 6, 2), np.uint32)
    bands[1, 1] = 1
    np.save(tmp_path / "a.npy", bands)
    assert (label_format_of("bands").read(tmp_path / "a.npy", classes()) == bands).all()
    bands[2, :3, 1] = 65537
    np.save(tmp_path / "a.npy", bands)
    with pytest.raises(DataError, match=r"in the band of blue: 65537 \(3 pixels\)"):
        label_format_of("bands").read(tmp_path / "a.npy", classes())


@pytest.mark.parametrize("text", ["[0]}]", "[7]}]\nignore_ids: [7]"])
def test_a_class_file_that_contradicts_itself_is_refused(text):
    with pytest.raises(ConfigError, match=r"[07] is also an id in the band of red"):
        classes("classes: [{name: red, ids: " + text)


# Training


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A folder with data/, in which each class has a folder of masks, and the masks by image."""
    root = tmp_path_factory.mktemp("learnt")
    truth = discs(root / "data", 24)
    truth["03"][0] = 0  # no file of this class
    image = cv2.imread(str(root / "data/images/03.png"))
    image[..., 2] = 60
    cv2.imwrite(str(root / "data/images/03.png"), image)
    for k, name in enumerate(NAMES):
        (root / "data/masks" / name).mkdir(parents=True)
        for stem, masks in truth.items():
            if masks[k].any():
                cv2.imwrite(str(root / f"data/masks/{name}/{stem}.png"), 255 * masks[k])
    return root, truth


@pytest.fixture(scope="module")
def learnt(drawn):
    """The folder of `drawn` with made/, an experiment of `init`, and run/, its training."""
    root, _ = drawn
    assert segtrain("init", root / "data", "--task", "multilabel", "--output", root / "made") == 0
    # Half a network, and AdamW, learn them in 7 s of a processor.
    words = short(
        *("augment.color_prob=0.0", "augment.scale_range=[0.8,1.25]", "train.steps=40"),
        *("train.batch_size=4", "optim.kind=adamw", "optim.lr=0.002", "optim.weight_decay=0.0005"),
        *("optim.ema_decay=0.8", "model.head_channels=16"),
    )
    assert segtrain("train", root / "made", "--output", root / "run", "--nproc", 1, *words) == 0
    return root


def short(*options: str) -> list[str]:
    """Words of a command that trains an experiment of `init` for a moment."""
    small = ("model.num_stages=2", "model.output_stride=8", "train.precision=float32")
    small += ("data.num_workers=0", "schedule.warmup_steps=0", "log.charts=false")
    return [word for option in (*small, *options) for word in ("--set", option)]


def test_init_draws_each_class_into_a_band_of_its_own(drawn, learnt):
    seen, config = labels_of(learnt / "made")
    order = [load_class_file(config.data.classes).names.index(name) for name in NAMES]
    found = {Path(name).stem: label[..., order].transpose(2, 0, 1) for name, label in seen.items()}
    np.testing.assert_equal(found, drawn[1])
    assert "do not show it: red (1)" in (learnt / "made/classes.yaml").read_text()


def test_both_discs_are_learnt_where_they_overlap_too(drawn, learnt, lab, tmp_path):
    """What predict writes, against the masks; eval counts the same."""
    output, truth = tmp_path / "pred", drawn[1]
    lab.done("predict", learnt / "run", learnt / "data/images", "--output", output)
    loaded = load_model(learnt / "run")
    data = loaded.config.data
    names = [Path(name).name for name in open_dataset(data, data.eval_split).names]
    counts, both = np.zeros((2, 2)), np.zeros(2)
    order = [loaded.classes.names.index(name) for name in NAMES]
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
        "eval", learnt / "run", "--json", tmp_path / "e.json", "--save-predictions", tmp_path / "p"
    )
    found = json.loads((tmp_path / "e.json").read_text())
    by_name = {row["name"]: row["IoU"] for row in found["classes"]}
    assert [by_name[name] for name in NAMES] == pytest.approx(iou.tolist(), abs=1e-12)
    assert "flatters its scores" in scores.out
    saved = tifffile.imread(next((tmp_path / "p").rglob(f"{names[0]}.tif")))
    assert (saved == tifffile.imread(output / f"labels/{names[0]}.tif")).all()


def test_the_score_of_the_training_is_that_of_eval_and_of_the_kept_images(learnt, lab, tmp_path):
    lab.done("eval", learnt / "run", "--json", tmp_path / "e.json")
    found = json.loads((tmp_path / "e.json").read_text())["mIoU"]
    checkpoint = last(learnt / "run")
    assert found == pytest.approx(checkpoint.best["score"], abs=1e-12)
    assert load_model(learnt / "run").config.eval.thresholds == tuple(checkpoint.thresholds)
    lab.done("report", learnt / "run")
    assert "IoU" in (learnt / "run/report.html").read_text()
    fixed = lab.done("eval", learnt / "run", "--set", "eval.thresholds=[0.5]").out
    assert "flatters" not in fixed
    said = lab.refused("eval", learnt / "run", "--set", "eval.thresholds=[0.1,0.2,0.3]")
    assert "3 numbers for 2 classes" in said


def test_label_maps_of_predict_have_the_scores_of_eval(learnt, lab, tmp_path):
    lab.done("predict", learnt / "run", learnt / "data/images", "--output", tmp_path / "p")
    lab.done("eval", learnt / "run", "--json", tmp_path / "e.json")
    evals = json.loads((tmp_path / "e.json").read_text())
    for name in {path.stem for path in (tmp_path / "p/labels").iterdir()} - {
        Path(name).name for name in load_records(learnt / "run").names
    }:
        (tmp_path / f"p/labels/{name}.tif").unlink()
    words = "--output", tmp_path / "o", "--json", tmp_path / "s.json"
    lab.done("score", tmp_path / "p", "--data", learnt / "run", *words)
    ours = json.loads((tmp_path / "s.json").read_text())
    assert ours["counts"] == evals["counts"]
    assert ours["mIoU"] == evals["mIoU"] > 0
    assert ours["mAP"] is ours["calibration_error"] is None
    said = lab.done("compare", learnt / "run", tmp_path / "o").out
    assert "there is no difference: the scores are equal" in said
    said = lab.refused(
        "score", tmp_path / "p", "--data", learnt / "run", "--label-format", "ids", code=3
    )
    assert "channels, expected one of class ids" in said


def test_the_library_gives_a_band_a_class(learnt):
    predictor = Predictor(learnt / "run")
    image = cv2.imread(str(learnt / "data/images/00.png"))[..., ::-1]
    label = predictor(image)
    assert label.shape == (48, 64, 2)
    p = predictor.probabilities(image)
    thresholds = np.array(load_model(learnt / "run").config.eval.thresholds).reshape(-1, 1, 1)
    assert (label == (p >= thresholds).transpose(1, 2, 0)).all()


def test_a_raster_in_parts_has_the_bands_of_the_same_image_at_once(
    learnt, lab, tmp_path, monkeypatch
):
    image = cv2.imread(str(learnt / "data/images/00.png"))[..., ::-1]
    tifffile.imwrite(tmp_path / "a.tif", np.ascontiguousarray(image), photometric="rgb")
    words = "predict", learnt / "run", tmp_path / "a.tif", "--output"
    lab.done(*words, tmp_path / "whole")
    monkeypatch.setattr("segtrain.predict.raster_inputs.MAX_PHOTO_PIXELS", 1000)
    monkeypatch.setattr("segtrain.data.read.raster._MIN_BYTES", 0)
    monkeypatch.setattr(georaster, "BLOCK_PX", 64)
    lab.done(*words, tmp_path / "parts")
    whole, parts = (tifffile.imread(tmp_path / f"{x}/labels/a.tif") for x in ("whole", "parts"))
    parts = parts.transpose(2, 0, 1)
    assert parts.shape == whole.shape == (2, 48, 64)
    assert (parts == whole).all()


@pytest.mark.slow("export", "one_vs_rest", "score", "inference")
def test_the_exported_graph_gives_the_logits_and_the_file_says_how_to_use_them(
    learnt, lab, tmp_path
):
    onnx = pytest.importorskip("onnx")
    import onnxruntime

    file = tmp_path / "m.onnx"
    lab.done("export", learnt / "run", "--format", "onnx", "--normalize", "--output", file)
    about = {prop.key: prop.value for prop in onnx.load(file).metadata_props}
    assert about["task"] == "multilabel"
    thresholds = json.loads(about["inference"])["thresholds"]
    image = cv2.imread(str(learnt / "data/images/00.png"))[..., ::-1]
    session = onnxruntime.InferenceSession(file)
    images = np.ascontiguousarray(image.transpose(2, 0, 1)[None])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images})
    label = 1 / (1 + np.exp(-logits[0])) >= np.array(thresholds).reshape(-1, 1, 1)
    same = label.transpose(1, 2, 0) == Predictor(learnt / "run")(image)
    assert same.mean() > 0.999  # at a threshold, roundings decide


def test_the_weights_alone_keep_the_thresholds_and_a_graph_has_no_argmax(learnt, lab, tmp_path):
    file = tmp_path / "m.safetensors"
    words = "export", learnt / "run", "--output"
    lab.done(*words, file, "--format", "safetensors")
    kept, thresholds = (load_model(x).config.eval.thresholds for x in (file, learnt / "run"))
    assert kept == thresholds
    said = lab.refused(*words, tmp_path / "n.onnx", "--format", "onnx", "--argmax")
    assert "--argmax: a pixel may have several classes" in said
    assert "not several" in lab.refused("suspects", learnt / "run")


def test_data_stats_prints_weights_that_balance(learnt, lab, tmp_path):
    lab.done("data", "stats", learnt / "made", "--json", tmp_path / "s.json")
    found = json.loads((tmp_path / "s.json").read_text())
    data = load_config(learnt / "made/config.yaml").data
    dataset = open_dataset(data, data.train_split)
    labels = np.stack([dataset[i][1] for i in range(len(dataset))])
    expected = (labels == 0).sum((0, 1, 2)) / (labels == 1).sum((0, 1, 2))
    assert found["positive_weights"] == pytest.approx(expected.tolist(), rel=1e-3)
    lab.done("data", "check", learnt / "made")


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ("[red, blue, green]", "expected a band of 8 bits for each of 3 classes"),
        ("[{name: red, ids: [7]}, {name: blue, ids: [7]}]", "values in the band of red: 1"),
    ],
)
def test_labels_that_do_not_fit_the_class_file_are_refused(learnt, lab, tmp_path, classes, said):
    (tmp_path / "c.yaml").write_text(f"classes: {classes}\n")
    words = "data", "check", learnt / "made", "--set", f"data.classes={tmp_path / 'c.yaml'}"
    outcome = lab.command(*words)
    assert outcome.code == 3
    assert said in outcome.out + outcome.err


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
    words = short("train.steps=1", "model.head_channels=8", "train.batch_size=2", "optim.kind=sgd")
    run = tmp_path / "run"
    lab.done("train", tmp_path / "made", "--output", run, "--nproc", 1, *words)
    loaded = load_model(run)
    assert loaded.classes.names == ("foreground",)
    assert loaded.model.head.classifier.conv.out_channels == 1


def test_one_label_for_all_classes_is_no_multilabel_folder(tmp_path, lab):
    write(tmp_path / "data")
    words = "init", tmp_path / "data", "--task", "multilabel", "--output", tmp_path / "m"
    assert "one label holds all classes" in lab.refused(*words)


def test_tables_count_each_class_where_it_lies_on_others_too(learnt, lab, tmp_path):
    table, output = tmp_path / "t.csv", tmp_path / "pred"
    words = "predict", learnt / "run", learnt / "data/images", "--output"
    said = lab.done(*words, output, "--table", table).out
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 24
    shares = dict(re.findall(r"(\w+) ([\d.]+) %", said[said.index("classes: ") :]))
    for name, share in shares.items():  # the images are of one size
        means = [float(row["share"]) for row in rows if row["class"] == name]
        assert float(share) == pytest.approx(100 * sum(means) / 24, abs=0.06)
    assert len(shares) == 2
    for row in rows:
        mask = cv2.imread(str(output / f"masks/{row['class']}/{row['image']}.png"), -1)
        assert int(row["pixels"]) == (mask == 255).sum()
        assert int(row["objects"]) == cv2.connectedComponents(mask, connectivity=8)[0] - 1
    said = lab.refused(*words, tmp_path / "o", "--threshold", "red=0.3")
    assert "use --set eval.thresholds" in said
    said = lab.refused(*words, tmp_path / "o", "--set", "eval.thresholds=[0.1,0.2,0.3]")
    assert "eval.thresholds: 3 numbers for 2 classes" in said


def test_curves_and_borders_are_those_of_each_class(learnt, lab, tmp_path):
    found = tmp_path / "e.json"
    said = lab.done(
        "eval", learnt / "run", "--surface", 2, "--class", "red", "--recall", 0.9, "--json", found
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
    lab.done("eval", learnt / "run", "--set", f"eval.thresholds=[{given}]", "--json", scores)
    row = json.loads(scores.read_text())["classes"][names.index("red")]
    assert (row["precision"], row["recall"]) == (point["precision"], point["recall"])


def test_no_class_is_black_unless_its_file_says_so():
    """Pictures leave black clear."""
    assert (0, 0, 0) not in classes().palette
    given = classes("classes: [{name: red, color: [0, 0, 0]}, {name: blue}]")
    assert given.palette[0] == (0, 0, 0)


def test_a_split_without_any_object_has_no_score_and_no_best(learnt, lab, tmp_path):
    made = shutil.copytree(learnt / "made", tmp_path / "made")
    text = (made / "config.yaml").read_text().replace(str(learnt / "made"), str(made))
    (made / "config.yaml").write_text(text)
    config = load_config(made / "config.yaml")
    for pair in open_dataset(config.data, config.data.eval_split).pairs:
        assert made in pair.label.parents
        cv2.imwritemulti(str(pair.label), [np.zeros((48, 64), np.uint8)] * 2)
    words = short(
        *("model.head_channels=16", "train.batch_size=2", "train.steps=2", "eval.every_steps=1")
    )
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
    here, checkpoint = learnt / "run/checkpoints/last.pt", last(learnt / "run")
    own = np.array(checkpoint.thresholds)
    other, given, unknown = (tmp_path / name for name in ("other.pt", "given.pt", "unknown.pt"))
    save(other, checkpoint._replace(thresholds=[*(own + 0.125)]))
    save(given, with_thresholds(checkpoint, [0.25]))  # one for all classes, by its config
    save(unknown, checkpoint._replace(thresholds=None))  # before its first evaluation
    for member, thresholds in ((other, own + 0.125), (given, 0.25), (unknown, 0.5)):
        for pair in ((here, member), (member, here)):
            found = load_model(*pair).config.eval.thresholds
            assert found == pytest.approx((own + thresholds) / 2, abs=1e-12), member
    fits = [load_model(one).fits_thresholds for one in (here, given, unknown)]
    assert fits == [True, False, False]
    assert load_model(given, here).fits_thresholds
    save(given, with_thresholds(checkpoint, [0.1, 0.2, 0.3]))
    with pytest.raises(CheckpointError, match=r"eval.thresholds: 3 numbers for 2 classes"):
        load_model(here, given)


def test_weights_of_the_other_task_are_loaded_with_a_warning(learnt):
    made = load_model(learnt / "run")
    semantic = made.config.model_copy(update={"task": "semantic"})
    lines = load_initial(made.model, learnt / "run", made.classes.names, semantic).lines
    assert any("init: task is multilabel there, semantic here" in line for line in lines)


def test_each_class_has_a_folder_of_masks_of_its_own():
    """Also where names differ in what no file name has, or in case alone; and none leads out."""
    names = ["a/b", "a_b", "A\\b", ".."]
    found = mask_names(classes(json.dumps({"classes": names})))
    assert found == ["a_b_2", "a_b", "A_b_3", "_"]  # who can have it keeps its own
