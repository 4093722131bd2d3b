"""`segtrain score`: label maps of any program, beside `eval`, numpy and scikit-learn."""

import csv
import json
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from experiments import small, train, unread, write_config, write_data
from folders import save
from sklearn.metrics import confusion_matrix, jaccard_score
from test_evaluate import NAMES, cityscapes, command, config_of, know_the_colors

from segtrain.config import config_to_yaml
from segtrain.data.read.find import Pair, Window
from segtrain.desk.results.on_list import _place, _places, data_on
from segtrain.desk.results.runs import read_run
from segtrain.errors import ConfigError
from segtrain.score.records import load_records, scores_csv

__all__ = ["cityscapes", "command", "know_the_colors"]  # fixtures
SPLITS = {"train": "train", "eval": "val"}
RAW = [7, 3, 20, 1]  # the ids of the classes; 0 and 255 are ignored


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A data set of six images of unequal sides, whose ids are no positions, and its config."""
    root = tmp_path_factory.mktemp("score")
    write_data(root, num_val=6)
    for path in root.rglob("labels/*/*.png"):
        label = cv2.imread(str(path), -1)
        cv2.imwrite(str(path), np.uint8([*RAW, *[255] * 252])[label])
    rows = "".join(f"- {{name: {name}, ids: [{i}]}}\n" for name, i in zip("abcd", RAW, strict=True))
    (root / "classes.yaml").write_text(f"classes:\n{rows}ignore_ids: [0, 255]\n")
    options = {"train": {"steps": 12}, "optim": {"kind": "adamw", "lr": 0.003, "ema_decay": None}}
    write_config(root / "own.yaml", small(root, **options, eval={"flip": True}))
    return root


@pytest.fixture(scope="module")
def run(world):
    assert train(world / "own.yaml", world / "run") == 0
    return world / "run"


@pytest.fixture
def theirs(world, tmp_path):
    """Label maps of another program, train ids by name of the image, and the folder of them."""
    rng, maps = np.random.default_rng(2), {}
    for path in sorted((world / "labels/val").iterdir()):
        label = to_train(cv2.imread(str(path), -1))
        wrong = rng.random(label.shape) < 0.3
        maps[path.stem] = np.where(wrong | (label == 255), rng.integers(0, 4, label.shape), label)
        save(tmp_path / f"theirs/val/{path.stem}.png", np.uint8(maps[path.stem]))
    return maps, tmp_path / "theirs"


def to_train(raw):
    table = np.full(256, 255)
    table[RAW] = range(4)
    return table[raw]


def labels(world):
    return {
        path.stem: to_train(cv2.imread(str(path), -1))
        for path in sorted((world / "labels/val").iterdir())
    }


OF_MODELS = {"checkpoint", "step", "inference", "norm", "calibration_error"}


def assert_same(ours, evals):
    """All that `eval` says, but for what it says of a model and of probabilities."""
    for scores in ours, evals:
        assert scores["num_images"] > 2
        assert len({row["IoU"] for row in scores["classes"]}) > 2
    assert evals.keys() - ours.keys() == OF_MODELS - {"calibration_error"}
    assert ours["calibration_error"] is None
    assert {k: ours[k] for k in evals.keys() - OF_MODELS} == {
        k: evals[k] for k in evals.keys() - OF_MODELS
    }


def test_label_maps_of_predict_have_every_bit_of_eval(world, run, tmp_path, lab):
    words = "--surface", 2, "--group", "val/([0-2])|[3-5]"
    lab.done("predict", run, world / "images/val", "--output", tmp_path / "p")
    files = [("--json", tmp_path / f"{x}.json", "--per-image", tmp_path / f"{x}.csv") for x in "es"]
    lab.done("eval", run, *words, *files[0])
    out = tmp_path / "scored"
    said = lab.done("score", tmp_path / "p", "--data", run, *words, *files[1], "--output", out)
    assert_same(*(json.loads((tmp_path / f"{x}.json").read_text()) for x in "se"))
    assert (tmp_path / "s.csv").read_bytes() == (tmp_path / "e.csv").read_bytes()
    assert "calibration error, average precision, curves: need" in said.out
    kept, own = load_records(out), load_records(run)
    assert kept.names == own.names
    assert np.array_equal(kept.images, own.images)
    assert np.array_equal(kept.matrix, own.matrix)
    assert not kept.calibration.any()
    assert (out / "results.csv").read_text() == scores_csv(own.scores, own.classes)
    said = lab.done("compare", run, out).out
    assert "verdict     there is no difference: the scores are equal" in said


def test_instances_and_categories_are_those_of_eval(cityscapes, command, tmp_path, lab):
    (tmp_path / "c.yaml").write_text(config_to_yaml(config_of(cityscapes)))
    evals = command(save_predictions=tmp_path / "p")
    words = "--ending", "_pred_labelIds", "--json", tmp_path / "s.json", "--output", tmp_path / "o"
    lab.done("score", tmp_path / "p", "--data", tmp_path / "c.yaml", *words)
    ours = json.loads((tmp_path / "s.json").read_text())
    assert ours["miIoU"] > 0
    assert_same(ours, evals)
    # Positions, read as ids, are ids that are ignored.
    for path in sorted((cityscapes / "gtFine").rglob("*_labelIds.png")):
        name = f"{path.name.removesuffix('_gtFine_labelIds.png')}_leftImg8bit.png"
        save(tmp_path / "t" / name, np.zeros_like(cv2.imread(str(path), -1)))
    assert len(list((tmp_path / "t").iterdir())) == len(NAMES)
    said = lab.refused("score", tmp_path / "t", "--data", tmp_path / "c.yaml", code=3)
    assert re.search(r"aachen_000000.*\d+ pixels without a class: every labelled pixel", said)


def test_the_scores_of_another_program_are_those_of_scikit_learn(world, theirs, tmp_path, lab):
    maps, folder = theirs
    out, file = tmp_path / "o", tmp_path / "s.json"
    words = "--data", world / "own.yaml", "--output", out, "--json", file
    lab.done("score", folder, "--label-format", "train_ids", *words)
    found, truth = json.loads(file.read_text()), labels(world)
    known = [truth[name] != 255 for name in truth]
    label, pred = (
        np.concatenate([x[name][k] for name, k in zip(truth, known, strict=True)])
        for x in (truth, maps)
    )
    assert found["confusion_matrix"] == confusion_matrix(label, pred).tolist()
    iou = jaccard_score(label, pred, average=None)
    assert [row["IoU"] for row in found["classes"]] == pytest.approx(iou.tolist(), abs=1e-15)
    assert found["mIoU"] == pytest.approx(iou.mean())
    page = (out / "report.html").read_text()
    assert f"<b>{100 * iou.mean():.1f}</b>mIoU" in page
    assert page.count("data:image/webp") == 4 * len(maps)
    for word in ("calibration", "of training", "on resnet18", "Curves", "Options"):
        assert word not in page
    # The same in the ids of the class file, in flat names, and again over the first; what the label
    # ignores may be ignored.
    for name, pixels in maps.items():
        raw = np.where(truth[name] == 255, 255, np.array(RAW)[pixels])
        save(tmp_path / f"raw/{name}.tif", raw.astype(np.uint8))
    lab.done("score", tmp_path / "raw", *words)
    assert json.loads(file.read_text()) == found | {"predictions": str(tmp_path / "raw")}


def test_ids_that_may_be_positions_too_are_a_question(world, tmp_path, lab):
    """b and d have the ids 3 and 1: these are positions of others."""
    for name, label in labels(world).items():
        save(tmp_path / f"t/{name}.png", np.where(label == 1, 3, 1).astype(np.uint8))
    words = "score", tmp_path / "t", "--data", world / "own.yaml", "--output", tmp_path / "o"
    assert "say --label-format ids, or train_ids" in lab.refused(*words)
    scores = []
    for form in ("ids", "train_ids"):
        lab.done(*words, "--label-format", form, "--json", tmp_path / "s.json")
        scores.append(json.loads((tmp_path / "s.json").read_text())["mIoU"])
    assert scores[0] > scores[1]


def damaged(folder, how):
    one = folder / "val/1.png"
    pixels = cv2.imread(str(one), -1)
    if how == "missing":
        one.unlink()
    elif how == "foreign":
        save(folder / "val/9.png", pixels)
    elif how == "twice":
        save(folder / "1.png", pixels)
    elif how == "formats":
        save(folder / "val/1.tif", pixels)
    else:
        changed = {
            "turned": pixels.T,
            "small": pixels[:-1],
            "beyond": np.where(np.arange(72) == 40, 4, pixels),
            "none": np.where(np.arange(72) == 40, 255, pixels),
        }
        save(one, np.uint8(changed[how]))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "image 1: expected one label map, found none in .*theirs"),
        ("foreign", "val/9.png: is of no image of split val"),
        ("twice", r"image 1: expected one label map, found .*/1.png, .*/1.png"),
        ("formats", "val: 1.png, 1.tif have one name"),
        ("turned", r"val/1.png: label map 72x56, label .*labels/val/1.png 56x72: shapes"),
        ("small", r"val/1.png: label map 55x72, label"),
        ("beyond", r"val/1.png: .*\b4\b.*pixels"),
        ("none", r"val/1.png: \d\d pixels without a class"),
    ],
)
def test_label_maps_that_do_not_fit_are_named(world, theirs, lab, how, said):
    _, folder = theirs
    damaged(folder, how)
    words = "--data", world / "own.yaml", "--label-format", "train_ids"
    assert re.search(said, lab.refused("score", folder, *words, code=3))


def test_an_ending_that_all_files_share_is_named(world, theirs, tmp_path, lab):
    for name, pixels in theirs[0].items():
        save(tmp_path / f"t/{name}-pred 1.png", np.uint8(pixels))
    words = "score", tmp_path / "t", "--data", world / "own.yaml", "--label-format", "train_ids"
    said = lab.refused(*words, code=3)
    assert said.splitlines() == [said.strip()]
    assert said.strip().endswith("behind those of images: give --ending='-pred 1'")
    lab.done(*words, "--ending=-pred 1", "--output", tmp_path / "o")


def test_files_of_other_images_are_left_out_on_request_and_counted(world, theirs, tmp_path, lab):
    folder, scores = theirs[1], []
    words = "score", folder, "--data", world / "own.yaml", "--label-format", "train_ids"
    words += "--output", tmp_path / "o", "--json", tmp_path / "s.json"
    for more in (), ("--ignore-others",):
        said = lab.done(*words, *more).out
        assert ("left out" in said.partition("label maps")[2]) == bool(more)
        scores.append(json.loads((tmp_path / "s.json").read_text()))
        for name in "78":
            save(folder / f"val/{name}.png", np.zeros((56, 72), np.uint8))
    assert "6 images of split val; 2 files of no image are left out" in said
    assert scores[0] == scores[1]
    assert "files of no image: --ignore-others leaves them out" in lab.refused(*words, code=3)
    (folder / "val/1.png").unlink()  # an image without a label map stays a problem
    assert "image 1: expected one" in lab.refused(*words, "--ignore-others", code=3)


def test_positions_in_place_of_ids_are_recognized(world, theirs, tmp_path, lab):
    """Class ids are 1 to 4: 0 is ignored, or unknown."""
    words = "score", theirs[1], "--output", tmp_path / "o"
    positions = "if its values are positions in the class file: --label-format train_ids"
    for ignored, said in ("[0, 255]", "without a class"), ("[255]", "outside class file"):
        rows = "".join(f"- {{name: {name}, ids: [{i}]}}\n" for i, name in enumerate("abcd", 1))
        (tmp_path / "c.yaml").write_text(f"classes:\n{rows}ignore_ids: {ignored}\n")
        data = shutil.copytree(world, tmp_path / f"d{len(ignored)}")
        for path in (data / "labels/val").iterdir():
            label = to_train(cv2.imread(str(path), -1))
            cv2.imwrite(str(path), np.where(label == 255, 255, label + 1).astype(np.uint8))
        given = f"data.root={data}", f"data.classes={tmp_path / 'c.yaml'}"
        options = "--data", world / "own.yaml", "--set", given[0], "--set", given[1]
        found = lab.refused(*words, *options, code=3)
        assert said in found
        assert positions in found
        lab.done(*words, *options, "--label-format", "train_ids")
        # A program with a value of its own for what has no class.
        for path in (theirs[1] / "val").iterdir():
            pixels = np.where(np.arange(72) < 9, 0, theirs[0][path.stem] + 1)
            save(tmp_path / f"u{len(ignored)}/{path.name}", np.uint8(pixels))
        found = lab.refused("score", tmp_path / f"u{len(ignored)}", *options, code=3)
        assert said in found
        assert positions not in found
        assert ("write there the class that it shall count as" in found) == (said[0] == "w")


def test_values_that_count_from_one_are_told_where_all_are_positions_too(
    world, theirs, tmp_path, lab
):
    """The class that stands last in the file is nowhere, so no value is too high."""
    words = "score", "--data", world / "own.yaml", "--label-format", "train_ids", "--output"
    assert "count from 1" not in lab.done(*words, tmp_path / "o", theirs[1]).out
    right = before = total = 0
    for name, pixels in theirs[0].items():
        higher, label = pixels.clip(max=2) + 1, labels(world)[name]
        save(theirs[1] / f"val/{name}.png", np.uint8(higher))
        counted = label != 255
        right += (higher == label)[counted].sum()
        before += (higher - 1 == label)[counted].sum()
        total += counted.sum()
    said = lab.done(*words, tmp_path / "h", theirs[1]).out
    shares = f"{100 * before / total:.1f} % of the pixels would be right, not"
    assert f"{shares} {100 * right / total:.1f} %" in said
    assert "warning: the label maps seem to count from 1: " in said


def test_jpegs_and_colors_without_the_option_are_named(world, theirs, tmp_path, lab):
    words = "score", tmp_path / "t", "--data", world / "own.yaml"
    for name, pixels in theirs[0].items():
        save(tmp_path / f"t/{name}.jpg", np.uint8(pixels))
    assert "0.jpg: JPEG blurs the values" in lab.refused(*words, code=3)
    for name, pixels in theirs[0].items():
        save(tmp_path / f"t/{name}.png", np.uint8(np.stack([pixels, pixels, 0 * pixels], -1)))
    said = lab.refused(*words, code=3)
    assert "say --label-format colors" in said
    assert "data.label_format" not in said


def test_a_name_that_fits_two_images_is_refused(world, theirs, tmp_path, lab):
    for site in "xy":
        shutil.copytree(world / "images/val", tmp_path / f"d/images/val/{site}")
        shutil.copytree(world / "labels/val", tmp_path / f"d/labels/val/{site}")
    words = "--data", world / "own.yaml", "--set", f"data.root={tmp_path / 'd'}"
    said = lab.refused("score", theirs[1] / "val", *words, code=3)
    assert "0.png: may be of x/0, y/0 of split val" in said


def test_labels_are_no_predictions(world, lab):
    said = lab.refused("score", world / "labels/val", "--data", world / "own.yaml", code=3)
    assert "labels/val/0.png: is the label itself, no prediction" in said


def test_where_scores_may_be_written(world, run, theirs, lab):
    for out, said in (
        (run, "holds other files"),
        (theirs[1] / "o", "lies among the label maps"),
        (world / "labels/val/o", "where images or labels of the data set are read"),
    ):
        words = "--data", run, "--label-format", "train_ids", "--output", out
        assert said in lab.refused("score", theirs[1], *words)


def test_scores_of_other_label_maps_are_not_replaced(world, theirs, tmp_path, lab, monkeypatch):
    """Both would be runs/maps_scored, and a comparison read the second."""
    monkeypatch.chdir(tmp_path)
    words = "--data", world / "own.yaml", "--label-format", "train_ids"
    for name in "ab":
        shutil.copytree(theirs[1], tmp_path / name / "maps")
    lab.done("score", "a/maps", *words)
    lab.done("score", "a/maps", *words)
    said = lab.refused("score", "b/maps", *words)
    assert "runs/maps_scored: holds the scores of a/maps; name another --output" in said


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        (Window(0, 0, 32, 32), Window(8, 8, 32, 32), True),
        (Window(0, 0, 32, 32), None, True),
        (None, None, True),
        (Window(0, 0, 32, 32), Window(0, 32, 32, 32), False),
    ],
)
def test_windows_that_overlap_are_of_one_place(one, other, is_shared):
    places = _places([Pair(Path("a.tif"), Path("b.tif"), "a", window=one)])
    place = _place(Pair(Path("./a.tif"), Path("b.tif"), "b", window=other))
    assert any(map(place.overlaps, places[place.mosaic])) == is_shared
    assert _place(Pair(Path("c.tif"), Path("b.tif"), "c")).mosaic not in places


def test_a_list_here_and_one_of_the_data_are_not_confused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    data = unread(data={"layout": "list", "root": str(tmp_path / "data"), "classes": "voc"}).data
    Path("val.txt").write_text("a.png b.png\n")
    assert data_on(data, "val.txt").eval_split == str(tmp_path / "here/val.txt")
    (tmp_path / "data/val.txt").write_text("c.png d.png\n")
    with pytest.raises(ConfigError, match=r"val\.txt: may be the file here, or .*data/val\.txt"):
        data_on(data, "val.txt")
    assert data_on(data, str(tmp_path / "data/val.txt")).layout == "list"


def test_label_maps_are_compared_with_a_run(world, run, theirs, tmp_path, lab):
    maps, folder = theirs
    out, file = tmp_path / "o", tmp_path / "c.json"
    words = "score", folder, "--data", run, "--label-format", "train_ids"
    lab.done(*words, "--output", out)
    said = lab.done("compare", run, out, "--json", file).out
    found = json.loads(file.read_text())
    truth = labels(world)
    label, pred = (np.concatenate([x[n][truth[n] != 255] for n in truth]) for x in (truth, maps))
    iou = jaccard_score(label, pred, average="macro")
    own = load_records(run).scores.mean_iou
    value, low, high = found["models"]
    assert value == pytest.approx(iou - own)
    assert low < value < high
    assert f"note        label maps of {folder}: their recipe is not known" in said
    assert "config " not in said
    assert "verdict     this model B is better on images like these" in said
    # Several trainings of the other program, of which one is named twice.
    for name in ("o2", "o3"):
        shutil.rmtree(tmp_path / "theirs2", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "theirs2")
        if name == "o2":
            save(tmp_path / "theirs2/val/2.png", np.zeros((56, 72), np.uint8))
        lab.done("score", tmp_path / "theirs2", *words[2:], "--output", tmp_path / name)
    said = lab.done("compare", run, "--with", out, tmp_path / "o2").out
    assert "recipes     " in said
    said = lab.refused("compare", run, "--with", out, tmp_path / "o3")
    assert "some scores of one side of label maps are equal" in said
    assert "are of runs, others of label maps" in lab.refused(
        "compare", run, out, "--with", tmp_path / "o2"
    )
    # A page of both, and not over the page that score has written.
    lab.done("report", run, out, "--output", tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert page.count("calibration error") == 1
    assert f"<b>{100 * iou:.1f}</b>mIoU" in page
    assert "segtrain score has written the page" in lab.refused("report", out)
    assert "expected the directory of a run" in lab.refused("compare", run, out, "--steps")


@pytest.fixture
def lists(world, run, tmp_path):
    """An older run, of another split, and lists of images."""
    older = shutil.copytree(run, tmp_path / "older")
    kept = load_records(older)
    names = tuple(f"old/{name}" for name in kept.names)
    type(kept)(kept.about, names, kept.classes, kept.images, kept.matrix, kept.calibration).save(
        older
    )
    text = (older / "config.yaml").read_text()
    (older / "config.yaml").write_text(text.replace("\nseed: 0\n", "\nseed: 3\n"))
    for name, images in {"new": ["val/4", "val/1"], "leak": ["val/4", "train/2"]}.items():
        lines = [f"images/{x}.png labels/{x}.png\n" for x in images]
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    return older, tmp_path / "new.txt", tmp_path / "leak.txt"


def test_runs_of_different_images_are_compared_on_one_list(run, lists, tmp_path, lab):
    older, new, leak = lists
    said = lab.refused("compare", older, run)
    assert "evaluated on different images" in said
    assert "--on LIST" in said
    file = tmp_path / "c.json"
    said = lab.done("compare", older, run, "--on", new, "--json", file)
    assert f"evaluating {older}, step 12, on 2 images of {new}" in said.err
    assert "2 images, paired" in said.out
    kept = load_records(run)
    rows = [kept.names.index(name) for name in ("4", "1")]
    right, labelled, predicted = np.moveaxis(kept.images[rows].sum(0), 1, 0)
    miou = np.mean(right / (labelled + predicted - right))
    assert json.loads(file.read_text())["scores"] == [[pytest.approx(miou)]] * 2
    assert "flatters" not in said.err  # one evaluation chooses none
    said = lab.refused("compare", older, run, "--on", leak)
    assert "was trained on 1 of 2 images (images/train/2): leave them out" in said
    assert "evaluating" not in said


def test_a_run_that_has_chosen_by_images_of_the_list_is_named(world, run, lists, tmp_path, lab):
    own, words = tmp_path / "own.yaml", ["train: {steps: 2}", "eval: {every_steps: 1, flip: true}"]
    text = (world / "own.yaml").read_text()
    for line in words:
        text = re.sub(rf"^{line.split()[0]}\n(  .*\n)*", "", text, flags=re.M) + f"{line}\n"
    own.write_text(text.replace("steps: 2}", "steps: 2, batch_size: 2}"))
    assert train(own, tmp_path / "often") == 0
    said = lab.done("compare", run, tmp_path / "often", "--on", lists[1]).err
    (line,) = (line for line in said.splitlines() if "flatters" in line)
    assert f"{tmp_path / 'often'} chose its best checkpoint by 2 of 2 images" in line


def test_label_maps_are_scored_on_a_list_and_not_evaluated(run, lists, theirs, tmp_path, lab):
    _, new, _ = lists
    few = tmp_path / "few"
    for name in "41":
        save(few / f"{name}.png", np.uint8(theirs[0][name]))
    words = "--data", run, "--label-format", "train_ids", "--output", tmp_path / "o"
    lab.done("score", few, *words, "--split", new)
    assert [Path(name).name for name in load_records(tmp_path / "o").names] == ["4", "1"]
    said = lab.refused("compare", run, tmp_path / "o", "--on", new)
    assert "label maps are scored on other images by segtrain score ... --split" in said
    assert read_run(run).predictions == ""
    rows = list(csv.reader((tmp_path / "o/results.csv").read_text().splitlines()))
    assert [row[0] for row in rows] == ["class", *"abcd", "mean"]


def test_on_a_list_all_runs_have_the_labels_of_one(world, tmp_path, lab):
    """As of `init`, and of `init --like` on a grown folder: each has drawn labels of its own."""
    runs, scores, first = {}, {}, []
    for name, images, lr in (("p1", "0123", 0.003), ("p2", "012345", 0.01)):
        for i in images:
            label = cv2.imread(str(world / f"labels/val/{i}.png"), -1)
            # Drawn anew meanwhile: others than the older run knew.
            drawn = np.where((np.arange(72) < 40) & (name == "p1"), RAW[2], label)
            save(tmp_path / f"{name}/labels/val/{i}.png", np.uint8(drawn))
        for i in range(8):
            label = cv2.imread(str(world / f"labels/train/{i}.png"), -1)
            save(tmp_path / f"{name}/labels/train/{i}.png", label)
        for split, numbers in ("train", "01234567"), ("val", images):
            lines = [f"images/{split}/{i}.png {split}/{i}.png\n" for i in numbers]
            (tmp_path / f"{name}/{split}.txt").write_text("".join(lines))
        data = {f"{key}_split": str(tmp_path / f"{name}/{x}.txt") for key, x in SPLITS.items()}
        data |= {"layout": "list", "labels_dir": str(tmp_path / f"{name}/labels")}
        optim = {"kind": "adamw", "lr": lr, "ema_decay": None}
        options = small(world, train={"steps": 9}, optim=optim)
        options["data"] |= data
        runs[name] = tmp_path / f"runs/{name}"
        assert train(write_config(tmp_path / f"{name}/c.yaml", options), runs[name]) == 0
    other = tmp_path / "some.txt"
    shutil.copy(tmp_path / "p1/val.txt", other)
    # The list of a run, one that lies beside it, and one of neither: the labels of the last run.
    beside = shutil.copy(other, tmp_path / "p1/some.txt")
    for on, owner in (tmp_path / "p2/val.txt", "p2"), (beside, "p1"), (other, "p2"):
        for name, run in runs.items():
            given = f"data.eval_split={on}", f"data.labels_dir={tmp_path / owner / 'labels'}"
            words = [word for x in given for word in ("--set", x)]
            lab.done("eval", run, *words, "--json", tmp_path / "e.json")
            scores[name] = json.loads((tmp_path / "e.json").read_text())["mIoU"]
        said = lab.done("compare", *runs.values(), "--on", on, "--json", tmp_path / "c.json")
        where = f"those of {runs[owner]}, below {tmp_path / owner / 'labels'}\n"
        assert f"labels that count for all: {where}" in said.err
        found = json.loads((tmp_path / "c.json").read_text())["scores"]
        assert found == [[pytest.approx(scores[name])] for name in runs]
        first.append(scores["p1"])
    assert len(set(first)) == 3  # the last two are of the same images
    said = lab.done("compare", runs["p2"], runs["p1"], "--on", tmp_path / "p2/val.txt").err
    assert f"those of {runs['p2']}" in said  # whatever the order


@pytest.fixture
def later(world, tmp_path):
    """A week later: photos under other names in another folder, classes exchanged, and a new one.

    The config of its data, and the order of the classes there, by position.
    """
    order, root = [1, 0, 2, 3], tmp_path / "later"
    for split in "train", "val":
        for path in (world / f"images/{split}").iterdir():
            (root / f"images/{split}").mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / f"images/{split}/new_{path.name}")
            label = to_train(cv2.imread(str(world / f"labels/{split}/{path.name}"), -1))
            table = np.uint8([*np.argsort(order), *[255] * 252])
            save(root / f"labels/{split}/new_{path.name}", table[label])
    rows = "".join(f"- {{name: {name}, ids: [{i}]}}\n" for i, name in enumerate("bacde"))
    (root / "classes.yaml").write_text(f"classes:\n{rows}ignore_ids: [255]\n")
    lists = {"new": ["val/new_4", "val/new_1"], "leak": ["val/new_4", "train/new_2"]}
    for name, images in lists.items():
        lines = [f"images/{x}.png labels/{x}.png\n" for x in images]
        (root / f"{name}.txt").write_text("".join(lines))
    return root


def test_on_a_list_classes_go_by_name_and_equal_files_are_known(run, later, tmp_path, lab):
    options = small(later, train={"steps": 2}, optim={"ema_decay": None})
    newer = tmp_path / "newer"
    assert train(write_config(later / "own.yaml", options), newer) == 0
    file = tmp_path / "c.json"
    said = lab.done("compare", run, newer, "--on", later / "new.txt", "--json", file).err
    assert f"{run}: classes are compared by name; it has no e and never predicts it" in said
    assert f"does not have; all are read below {later}" in said
    kept = load_records(run)
    rows = [kept.names.index(name) for name in ("4", "1")]
    right, labelled, predicted = np.moveaxis(kept.images[rows].sum(0), 1, 0)
    found = json.loads(file.read_text())
    assert found["scores"][0] == [pytest.approx(np.mean(right / (labelled + predicted - right)))]
    # Of its training are files with the same bytes, whatever they are called here.
    said = lab.refused("compare", run, newer, "--on", later / "leak.txt")
    assert f"{run} was trained on 1 of 2 images (images/train/new_2): leave them out" in said
    # The labels of the older run do not know the new class.
    lines = [f"images/val/{i}.png labels/val/{i}.png\n" for i in (1, 4)]
    (tmp_path / "old.txt").write_text("".join(lines))
    said = lab.refused("compare", newer, run, "--on", tmp_path / "old.txt", code=3)
    assert "its labels lack e: choose a list whose data have them" in said
