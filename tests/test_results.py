"""Scores, calibration, records of images, and the pages made of them."""

import csv
import html
import io
import json
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from experiments import contents, experiment, segtrain, train, write_config, write_data
from scipy.stats import t, ttest_ind
from test_tables import read_like

from segtrain.commands.from_desk import write_page
from segtrain.desk.results import compare as compare_module
from segtrain.desk.results import report
from segtrain.desk.results.compare import compare, comparison_lines, verdict
from segtrain.desk.results.report import evaluated, report_page
from segtrain.desk.results.runs import departures, differing, read_run
from segtrain.errors import ConfigError, DataError
from segtrain.run import charts
from segtrain.run.directory import EVALUATION
from segtrain.score.records import (
    LABELLED,
    RIGHT,
    Records,
    load_records,
    scores_csv,
    sequences_of,
)


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
    frames = [f"frankfurt_000{i // 30}_{i:04}0_leftImg8bit" for i in range(20, 60)]
    assert set(sequences_of(frames)) == {"frankfurt_0000_", "frankfurt_0001_"}
    rows = list(csv.reader(io.StringIO(found.table())))
    pixels = ["5", "100", "5", "0", "0", "95"]
    assert rows[1] == ["other", "0.050000", "0.050000", "100", "0.050000", "0.000000", *pixels]
    assert len(rows) == 63


def test_a_class_that_is_called_as_a_column_has_a_column_of_its_own():
    found = replace(records([1, 50], ["x", "y"]), classes=("IoU", "label"))
    for text in (found.table(), found.confusion_csv()):
        header, *rows = csv.reader(io.StringIO(text))
        assert len({*header}) == len(header) == len(rows[0])
    assert header == ["label", "IoU", "label_2"]


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
    options = experiment(folder / "data", train={"steps": 2}, log={"charts": True})
    config = write_config(folder / "c.yaml", options)
    assert train(config, folder / "run", report=write_page) == 0
    return folder / "run"


@pytest.fixture
def no_charts(monkeypatch):
    """They take most of the time of a page."""
    names = "confusion", "reliability"
    monkeypatch.setattr(report, "draw_figures", lambda *_, **__: dict.fromkeys(names, ""))


@pytest.fixture(scope="module")
def scored(run):
    """What an evaluation of it has written, by option."""
    names = {"--json": "s.json", "--per-image": "i.csv", "--curves": "c.csv"}
    files = {option: run.parent / name for option, name in names.items()}
    assert segtrain("eval", run, *(word for pair in files.items() for word in pair)) == 0
    return files


def test_training_leaves_a_page_whose_numbers_are_those_of_eval(run, scored):
    page, scores = (run / "report.html").read_text(), json.loads(scored["--json"].read_text())
    shown = re.findall(r"<b>([\d.]+)</b>", page)
    means = [scores[key] for key in ("mIoU", "mDice", "aAcc")]
    assert shown[:3] == [f"{100 * x:.1f}" for x in means]
    assert shown[3] == f"{scores['calibration_error']:.3f}"
    for row in scores["classes"]:
        cells = [row[key] for key in ("Dice", "precision", "recall", "share")]
        text = "</td><td>".join("-" if x is None else f"{100 * x:.1f}" for x in cells)
        assert f"<td>{text}</td>" in page.replace("</td>\n<td>", "</td><td>")
    assert "Pictures are of" not in page
    assert "<script>x" not in page
    assert html.escape("<script>x</script>") in page
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)  # needs no network
    assert page.count("data:image/webp") == 4 * 3
    kept = load_records(run)
    assert kept.scores.mean_iou == scores["mIoU"]
    assert scored["--per-image"].read_text() == kept.table()
    assert (run / "results.csv").read_text() == scores_csv(kept.scores, kept.classes)


@pytest.mark.parametrize(
    "words",
    [
        "report RUN: --output",
        "runs RUN: --json",
        "eval RUN: --json --per-image --curves",
        "config schema: --output",
        "data check RUN/config.yaml: --json",
        "data stats RUN/config.yaml --jobs 1: --json",
    ],
)
@pytest.mark.usefixtures("no_charts")
def test_an_option_replaces_what_it_wrote_and_nothing_else(run, scored, tmp_path, lab, words):
    words, options = (part.split() for part in words.replace("RUN", str(run)).split(": "))
    file = tmp_path / "there"
    for there in ((run.parent / "data/labels/val/0.png").read_bytes(), b'{"shapes": []}'):
        file.write_bytes(there)
        for option in options:
            said = lab.refused(*words, option, file)
            assert f"{option} {file}: cannot be written: exists, and is no" in said
    files = {option: tmp_path / option for option in options}
    given = [word for pair in files.items() for word in pair]
    earlier = {"report": {"--output": run / "report.html"}, "eval": scored}.get(words[0])
    if earlier is None:
        lab.done(*words, *given)
    else:  # which takes longer
        for option, written in files.items():
            shutil.copy(earlier[option], written)
    lab.done(*words, *given)


def test_figures_have_the_numbers_of_eval(run, scored, tmp_path, lab, monkeypatch):
    """Of a run that is named by its config; curves have the points of `eval --curves`."""
    draw, drawn = charts.precision_recall, {}
    monkeypatch.setattr(charts, "precision_recall", lambda x: drawn.update(x) or draw(x))
    folder, page = tmp_path / "f", tmp_path / "r.html"
    words = "--curves", "--figures", folder, "--output", page
    lab.done("report", run / "config.yaml", *words)
    (curves,) = folder.glob("precision*.svg")
    names = {"loss", "mIoU", "learning_rate", "confusion", "reliability", curves.stem}
    assert {path.stem for path in folder.glob("*.svg")} == names
    roots = [ElementTree.parse(path).getroot() for path in folder.glob("*.svg")]
    assert all(one.get("width").endswith("pt") for one in roots)
    header, *rows = csv.reader((folder / "confusion.csv").read_text().splitlines())
    assert header[1:] == [row[0] for row in rows] == [*load_records(run).classes]
    scores = json.loads(scored["--json"].read_text())
    assert [[int(x) for x in row[1:]] for row in rows] == scores["confusion_matrix"]
    ap = scores["curves"]["AP"]
    labels = {f"{name}: AP {x:.3f}": name for name, x in ap.items() if x is not None}
    assert drawn.keys() == labels.keys()
    assert len(drawn) >= 2
    rows = list(csv.DictReader(scored["--curves"].read_text().splitlines()))
    for label, curve in drawn.items():
        own = [row for row in rows if row["class"] == labels[label]]
        for values, key in zip(curve, ("recall", "precision"), strict=True):
            expected = [float(row[key] or "nan") for row in own]
            np.testing.assert_allclose(values[1:], expected, atol=1e-6)
        for text in (curves, page):
            assert label in html.unescape(text.read_text())
    assert "precision and recall" not in (run / "report.html").read_text()
    shutil.copytree(run, tmp_path / "b")
    said = lab.refused("report", run, tmp_path / "b", "--curves", "--output", tmp_path / "x.html")
    assert "--curves: serves only the report of one run" in said


@pytest.fixture
def second(run, tmp_path):
    """The same run, said to be of another seed."""
    folder = shutil.copytree(run, tmp_path / "second")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("\nseed: 0\n", "\nseed: 7\n"))
    return folder


def test_a_report_of_several_runs_says_what_differs(run, second, tmp_path, lab):
    assert "--output" in lab.refused("report", run, second)
    lab.done("report", run, second, "--output", tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert page.count("<h2>run</h2>") == page.count("<h2>second</h2>") == 1
    assert "<tr><td>seed</td><td>0</td><td>7</td></tr>" in page
    config = read_run(run).config
    other = config.model_copy(update={"seed": 7})
    assert differing([config, other]) == {"seed": [0, 7]}
    assert departures(config)["train.steps"] == 2
    assert "train.virtual_ranks" not in departures(config)
    assert not {"seed", "task", "plugins"} & departures(config).keys()
    assert departures(config.model_copy(update={"seed": 7}))["seed"] == 7
    with pytest.raises(ConfigError, match="expected the directory of a run"):
        read_run(tmp_path)


@pytest.mark.usefixtures("no_charts")
def test_without_records_the_run_is_evaluated_again(run, second, lab):
    (second / EVALUATION).unlink()
    assert "evaluating" in lab.done("report", second).err
    pages = [(one / "report.html").read_text() for one in (run, second)]
    before, after = (re.findall(r"<b>([\d.]+)</b>", page)[:4] for page in pages)
    assert after == before
    assert len(after) == 4


@pytest.mark.usefixtures("no_charts")
def test_pictures_by_class_are_of_the_worst_classes_and_none_is_shown_twice(run, monkeypatch):
    images = np.zeros((3, 4, 3), np.int64)
    images[:, :3, LABELLED] = 100
    images[:, :3, RIGHT] = [50, 0, 70]
    matrix = np.diag([50, 0, 70, 0])
    matrix[:3, 3] = [50, 100, 30]
    cpu = torch.device("cpu")
    found = evaluated(run, cpu)
    kept = replace(found.records, classes=tuple("abcd"), images=images, matrix=matrix)
    monkeypatch.setattr(report, "_CLASSES", 2)
    page = report_page([found._replace(records=kept)], cpu)
    monkeypatch.setattr(report, "_CLASSES", 3)
    all_of_them = report_page([found._replace(records=kept)], cpu)
    rows = re.findall(r"</span>([a-d])</td>(.*?)</tr>", page, re.DOTALL)
    shown = [re.findall(r"#image-\d", row) for _, row in rows]
    assert [len(images) for images in shown] == [len(set(images)) for images in shown]
    assert [len(images) for images in shown] == [2, 2, 0, 0]
    only = "Pictures are of the {} labelled classes with the lowest IoU."
    assert only.format(2) in page
    assert only.format(3) not in all_of_them


@pytest.mark.usefixtures("no_charts")
def test_a_report_reads_data_that_have_moved_and_never_shows_others(run, tmp_path, lab):
    moved = tmp_path / "moved"
    shutil.copytree(run.parent / "data", moved)

    def pictures(option):
        page = tmp_path / "page.html"
        code, _, error = lab.command("report", run, "--output", page, "--set", option)
        shown = page.read_text().count("data:image/webp") if code == 0 else None
        return code, shown, error

    assert pictures(f"data.root={moved}") == (0, 4 * 3, "")
    for file in moved.glob("*/val/0.png"):
        file.unlink()
    for option, found, said in (
        (f"data.root={moved}", (0, 0), "no pictures: .*split val has other images than"),
        (f"data.root={tmp_path}/x", (0, 0), r"no folder .*/x; if .* moved: --set data\.root="),
        ("data.train_split=val", (2, None), r"only data\.root can be set"),
    ):
        *result, error = pictures(option)
        assert tuple(result) == found
        assert re.search(said, error)


def test_overlays_of_the_worst_images(run, tmp_path, lab):
    kept = load_records(run)
    said = lab.done("eval", run, "--overlays", tmp_path / "o", "--worst", 2).out
    assert "overlays of the 2 worst images (neighbours of a sequ" in said
    assert contents(tmp_path / "o").keys() == {f"{kept.names[i]}.png" for i in kept.worst(2)}


def test_the_confusion_matrix_is_darkest_where_a_row_has_its_pixels():
    import matplotlib

    counts = np.array([[90, 10, 0], [0, 0, 0], [0, 500, 500]])
    cells = np.unique(charts.confusion_picture(counts, ["a", "$b$", "c"]).reshape(-1, 3), axis=0)
    for part in (0.9, 0.1, 0.5, 0.0):
        color = (255 * np.array(matplotlib.colormaps["Blues"](part)[:3])).round()
        assert np.abs(cells - color).max(1).min() <= 1


def pair(rng, images=40, gain=0.0, sequences=None):
    """Two sides whose images are drawn alike, but for a `gain` of B's accuracy."""
    size = rng.integers(2000, 8000, (images, 4))
    hard = rng.normal(1, 0.6, (images, 1))
    names = [f"s{i * (sequences or 1) // images}_{i:03}" for i in range(images)]
    if sequences is None:
        names = [chr(97 + i % 26) + chr(97 + i // 26) for i in range(images)]
    sides = []
    for more in (0, gain):
        noise = rng.normal(0, 0.5, (images, 4))
        if sequences:
            noise += rng.normal(0, 0.5, (sequences, 1))[np.arange(images) * sequences // images]
        right = rng.binomial(size, 1 / (1 + np.exp(-hard - noise - more)))
        found = right + np.roll(size - right, 1, axis=1)
        counts = np.stack([right, size, found], axis=-1)
        zeros = np.zeros((4, 4), int), np.zeros((2, 960), int)
        sides.append(Records({"split": "val"}, tuple(names), tuple("abcd"), counts, *zeros))
    return sides


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(compare_module, "_RESAMPLES", 500)


def alarms(times, **options):
    found = [
        compare([a], [b])
        for a, b in (pair(np.random.default_rng(i), **options) for i in range(times))
    ]
    return sum(one.models.excludes_zero for one in found) / times


@pytest.mark.parametrize("options", [{}, {"sequences": 8}])
def test_equal_models_are_told_apart_as_often_as_the_interval_says(options):
    """One time in twenty; 80 trials of that are 1 to 9 with a probability of 0.97."""
    assert 1 / 80 <= alarms(80, **options) <= 9 / 80
    assert alarms(20, gain=1.0, **options) > 0.7


def test_a_difference_its_images_and_its_classes():
    a, _ = pair(np.random.default_rng(0))
    counts = a.images.copy()
    counts[3, 2] = [0, counts[3, 2, LABELLED], 0]  # B misses a class in an image
    b = replace(a, images=counts)
    found = compare([a], [b])
    assert found.unit == "40 images, paired"
    assert found.models.value == pytest.approx(found.scores[1][0] - found.scores[0][0])
    assert found.models.value < 0
    assert max(found.images, key=lambda name: abs(found.images[name])) == a.names[3]
    assert [name for name, one in found.classes.items() if one.value] == ["c"]
    assert found.recipes is None
    lines = "\n".join(comparison_lines(found, *[[read_like(name)] for name in "ab"]))
    assert a.names[3] in lines
    assert "class       c: -" in lines


def test_verdicts():
    """More than one seed a side speaks of the recipe; one does not."""
    rng = np.random.default_rng(1)
    first, better = pair(rng, gain=1.0)
    assert "one seed a side cannot tell" in verdict(compare([first], [better]), {"optim.lr"})
    assert "only in their seed" in verdict(compare([first], [better]), {"seed"})
    assert "the configs are equal" in verdict(compare([first], [better]), {})
    found = compare([first, first], [better, better])
    assert found.seed_std == 0
    assert verdict(found, {"optim.lr"}).startswith("B is better, beyond")
    # Seeds that move the score by more than the recipe does.
    found = compare([first, better], [better, first])
    assert found.recipes.low < -0.01 < 0.01 < found.recipes.high
    assert verdict(found, {"optim.lr"}).startswith("images and seeds together")
    a, b = pair(rng)
    assert verdict(compare([a], [b]), {"optim.lr"}).startswith("the choice of images explains")
    assert verdict(compare([a], [a]), {"optim.lr"}).startswith("there is no difference")


def test_seeds_of_each_side_have_a_variance_of_their_own():
    """Images are alike, so only seeds move a score: SciPy's t test of Welch has the interval."""
    names = [f"{i}.png" for i in range(6)]
    a, b = (
        [records([right] * 6, names) for right in side] for side in ((61, 60, 62, 61), (50, 70))
    )
    found = compare(a, b)
    welch = ttest_ind(found.scores[1], found.scores[0], equal_var=False).confidence_interval(0.95)
    assert (found.recipes.low, found.recipes.high) == pytest.approx(tuple(welch), rel=1e-9)
    # With one run a side says nothing of its own, and the other one's is taken.
    alone = compare(a, b[:1])
    spread = np.std(alone.scores[0], ddof=1) * np.sqrt(1 / 4 + 1)
    assert alone.recipes.high - alone.recipes.value == pytest.approx(t.ppf(0.975, 3) * spread)
    assert "as far as those of the other" in alone.notes[-1]
    assert not found.notes or "as far" not in found.notes[-1]


def test_what_cannot_be_compared_is_refused():
    a, b = pair(np.random.default_rng(0), sequences=1)
    with pytest.raises(ConfigError, match="no interval can be had over fewer than 5"):
        compare([a], [b], by="sequence")
    assert "too narrow" in compare([a], [b]).notes[0]
    counts = b.images.copy()
    counts[7, 1, LABELLED] += 1
    for other, match in (
        (replace(b, names=b.names[::-1]), "different images"),
        (replace(b, classes=tuple("abcx")), "different classes"),
        (replace(b, images=counts), rf"on different labels: {a.names[7]}$"),
    ):
        with pytest.raises(ConfigError, match=match):
            compare([a], [other])


def test_compare_prints_and_writes(run, second, tmp_path, lab):
    """The model is the same, and differs in nothing."""
    for _ in range(2):  # the second replaces the first
        said = lab.done("compare", run, second, "--json", tmp_path / "c.json").out
    assert "B - A       +0.00 (+0.00 to +0.00) points" in said
    assert "config      seed: 0 in A, 7 in B" in said
    assert json.loads((tmp_path / "c.json").read_text())["models"][0] == 0
    shutil.copytree(run, tmp_path / "third")
    said = lab.refused("compare", run, tmp_path / "third", "--with", second)
    assert "several of one side have seed 0" in said
