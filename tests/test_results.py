"""Scores, calibration, records of images, and the pages made of them."""

import csv
import html
import io
import json
import re
import shutil
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from experiments import experiment, train, write_config, write_data
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_fscore_support

from segtrain import cli
from segtrain.errors import ConfigError, DataError
from segtrain.metrics import Calibration, ConfusionMatrix, calibration_error, reliability
from segtrain.results import charts
from segtrain.results.records import Records, load_records, scores_csv, sequence_of
from segtrain.results.runs import departures, differing, read_run
from segtrain.run.directory import EVALUATION
from segtrain.types import IGNORE_INDEX


def segtrain(*words):
    """The exit code of a command, in this process."""
    return cli.main([str(word) for word in words])


NAMES = ["road", "<b>sky", "car", "never"]


def drawn(num=4000, classes=4, seed=0):
    """Labels, some ignored, predictions and their probabilities; the last class occurs never."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes - 1, num).astype(np.uint8)
    probability = rng.uniform(0.3, 1, num)
    pred = np.where(rng.random(num) < probability**2, label, (label + 1) % (classes - 1))
    label[rng.random(num) < 0.1] = IGNORE_INDEX
    return label, pred.astype(np.uint8), probability


def test_dice_precision_and_recall_are_those_of_scikit_learn():
    label, pred, _ = drawn()
    matrix = ConfusionMatrix(4)
    matrix.update(torch.from_numpy(pred), torch.from_numpy(label))
    scores, valid = matrix.scores(), label != IGNORE_INDEX
    precision, recall, f1, _ = precision_recall_fscore_support(
        label[valid], pred[valid], labels=range(4), zero_division=np.nan
    )
    for ours, theirs in (
        (scores.precision, precision),
        (scores.recall, recall),
        (scores.dice, f1),
    ):
        assert ours == pytest.approx(theirs, rel=1e-12, nan_ok=True)
    assert scores.mean_dice == pytest.approx(np.nanmean(f1), rel=1e-12)
    rows = list(csv.DictReader(io.StringIO(scores_csv(scores, NAMES))))
    assert float(rows[0]["Dice"]) == pytest.approx(f1[0], abs=1e-6)
    assert rows[3]["IoU"] == ""


def test_the_reliability_curve_is_that_of_scikit_learn():
    label, pred, probability = drawn()
    calibration = Calibration()
    for part in np.array_split(np.arange(len(label)), 3):
        calibration.update(*(torch.from_numpy(x[part]) for x in (probability, pred, label)))
    valid = label != IGNORE_INDEX
    right, known = (pred == label)[valid], probability[valid]
    accuracy, confidence = calibration_curve(right, known, n_bins=15)
    found = reliability(calibration.counts)
    assert [b.accuracy for b in found] == pytest.approx(accuracy, abs=5e-3)
    assert [b.confidence for b in found] == pytest.approx(confidence, abs=5e-4)
    share = np.histogram(known, 15, (0, 1))[0]
    expected = (share[share > 0] / len(known) * np.abs(accuracy - confidence)).sum()
    assert calibration_error(calibration.counts) == pytest.approx(expected, abs=5e-4)
    assert np.isnan(calibration_error(Calibration().counts))


def records(scores, names, classes=2):
    """Images of 100 labelled pixels of class 0, of which `scores` are right."""
    images = np.zeros((len(names), classes, 3), np.int64)
    for i, right in enumerate(scores):
        images[i, 0] = [right, 100, right]
        images[i, 1] = [0, 0, 100 - right]
    total = images.sum(0)
    matrix = np.array([[total[0, 0], total[1, 2]], [0, 0]])
    about = {"split": "val", "step": 3, "inference": "whole image"}
    counts = np.zeros((2, 960), np.int64)
    return Records(about, tuple(names), ("a", "b"), images, matrix, counts)


def test_neighbours_of_a_sequence_count_once_among_the_worst():
    names = [f"walk_{i:03}" for i in range(60)] + ["alone_1", "other"]
    found = records([*range(10, 70), 30, 5], names)
    assert [found.names[i] for i in found.worst(4)] == ["other", "walk_000", "walk_003", "walk_006"]
    assert [found.names[i] for i in found.worst(2, best=True)] == ["walk_059", "walk_056"]
    assert found.worst(3, by_class=1) == []  # labelled nowhere
    assert sequence_of("a/seq0001_frame12_left") == "a/seq0001_frame"
    rows = list(csv.reader(io.StringIO(found.table())))
    assert rows[1] == ["other", "0.050000", "0.050000", "100", "0.050000", "0.000000"]
    assert len(rows) == 63


def test_records_are_read_as_they_were_written(tmp_path):
    made = records([1, 50], ["ä 1", "b"])
    made.save(tmp_path)
    found = load_records(tmp_path)
    assert (found.about, found.names, found.classes) == (made.about, made.names, made.classes)
    assert np.array_equal(found.images, made.images)
    assert found.scores == made.scores
    assert load_records(tmp_path / "elsewhere") is None
    whole = (tmp_path / EVALUATION).read_bytes()
    other = replace(made, names=("one",))
    other.save(tmp_path)
    sizes = (tmp_path / EVALUATION).read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], sizes):
        (tmp_path / EVALUATION).write_bytes(damaged)
        with pytest.raises(DataError, match=r"evaluation\.npz: .*damaged"):
            load_records(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run whose class names would be HTML."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "data").mkdir()
    write_data(folder / "data", num_val=3)
    (folder / "data/classes.yaml").write_text(
        "classes: ['<script>x</script>', plant, water, sand]\nignore_ids: [255]\n"
    )
    options = experiment(
        folder / "data", train={"steps": 2}, eval={"every_steps": 1}, log={"charts": True}
    )
    config = write_config(folder / "c.yaml", options)
    assert train(config, folder / "run") == 0
    return folder / "run"


def test_training_leaves_a_page_whose_numbers_are_those_of_eval(run):
    page = (run / "report.html").read_text()
    assert segtrain("eval", run, "--json", run / "s.json", "--per-image", run / "i.csv") == 0
    scores = json.loads((run / "s.json").read_text())
    shown = re.findall(r"<b>([\d.]+)</b>", page)
    means = [scores[key] for key in ("mIoU", "mDice", "aAcc")]
    assert shown[:3] == [f"{100 * x:.1f}" for x in means]
    assert shown[3] == f"{scores['calibration_error']:.3f}"
    for row in scores["classes"]:
        cells = [row[key] for key in ("Dice", "precision", "recall", "share")]
        text = "</td><td>".join("-" if x is None else f"{100 * x:.1f}" for x in cells)
        assert f"<td>{text}</td>" in page.replace("</td>\n<td>", "</td><td>")
    assert "<script>x" not in page
    assert html.escape("<script>x</script>") in page
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)  # needs no network
    assert page.count("data:image/webp") == 4 * 3
    kept = load_records(run)
    assert kept.scores.mean_iou == scores["mIoU"]
    assert (run / "i.csv").read_text() == kept.table()
    assert (run / "results.csv").read_text() == scores_csv(kept.scores, kept.classes)


def test_a_report_of_several_runs_says_what_differs(run, tmp_path, capsys):
    second = tmp_path / "second"
    shutil.copytree(run, second)
    text = (second / "config.yaml").read_text()
    (second / "config.yaml").write_text(text.replace("\nseed: 0\n", "\nseed: 7\n"))
    assert segtrain("report", run, second) == 2
    assert "--output" in capsys.readouterr().err
    assert segtrain("report", run, second, "--output", tmp_path / "both.html") == 0
    page = (tmp_path / "both.html").read_text()
    assert page.count("<h2>run</h2>") == page.count("<h2>second</h2>") == 1
    assert "<tr><td>seed</td><td>0</td><td>7</td></tr>" in page
    config = read_run(run).config
    other = config.model_copy(update={"seed": 7})
    assert differing([config, other]) == {"seed": [0, 7]}
    assert departures(config)["train.steps"] == 2
    assert "train.virtual_ranks" not in departures(config)
    with pytest.raises(ConfigError, match="expected the directory of a run"):
        read_run(tmp_path)


def test_without_records_the_run_is_evaluated_again(run, capsys):
    kept = (run / EVALUATION).read_bytes()
    (run / EVALUATION).unlink()
    before = (run / "report.html").read_text()
    code = segtrain("report", run)
    (run / EVALUATION).write_bytes(kept)
    assert code == 0
    assert "evaluating" in capsys.readouterr().err
    facts = re.compile(r"<b>([\d.]+)</b>")
    assert facts.findall((run / "report.html").read_text())[:4] == facts.findall(before)[:4]


def test_overlays_of_the_worst_images(run, tmp_path):
    worst = load_records(run).worst(2)
    assert segtrain("eval", run, "--overlays", tmp_path / "o", "--worst", 2) == 0
    names = load_records(run).names
    written = {str(p.relative_to(tmp_path / "o")) for p in (tmp_path / "o").rglob("*.png")}
    assert written == {f"{names[i]}.png" for i in worst}


def test_the_confusion_matrix_is_darkest_where_a_row_has_its_pixels():
    counts = np.array([[90, 10, 0], [0, 0, 0], [0, 500, 500]])
    cells = np.unique(charts.confusion_picture(counts, ["a", "$b$", "c"]).reshape(-1, 3), axis=0)
    for part in (0.9, 0.1, 0.5, 0.0):
        color = (255 * np.array(matplotlib.colormaps["Blues"](part)[:3])).round()
        assert np.abs(cells - color).max(1).min() <= 1
