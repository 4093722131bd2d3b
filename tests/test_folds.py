"""`segtrain folds`: the division, interruptions, the joined score, and what is refused."""

import functools
import json
import re
from collections import Counter

import cv2
import numpy as np
import pytest
import torch
from experiments import bits, last, small, write_config, write_data

from segtrain.desk.commands.folds import fold_of_each
from segtrain.desk.results.compare import score_interval
from segtrain.errors import ConfigError
from segtrain.metrics import ConfusionMatrix
from segtrain.run.division import read_division
from segtrain.score.records import Records
from segtrain.types import IGNORE_INDEX

SEQUENCES = ("a1", "b 2", "#c3", "d4", "e5")  # with four frames each


pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A config; images/train has 5 * 4 frames, images/val two more of the first sequence."""
    root = tmp_path_factory.mktemp("folds")
    write_data(root, num_images=20, num_val=2, size=(40, 56))
    for kind in ("images", "labels"):
        for i in range(20):
            name = f"{SEQUENCES[i % 5]}_{i // 5:03d}.png"
            (root / kind / "train" / f"{i}.png").rename(root / kind / "train" / name)
        for i in range(2):
            (root / kind / "val" / f"{i}.png").rename(root / kind / "val" / f"a1_{10 + i:03d}.png")
    sections = {"train": {"steps": 2, "batch_size": 2}, "augment": {"crop_size": [25, 33]}}
    sections |= {"optim": {"ema_decay": None}, "eval": {"every_steps": 1}}
    return write_config(root / "own.yaml", small(root, **sections))


@pytest.fixture
def folds(lab):
    """Runs the command on the CPU."""
    return functools.partial(lab.command, "folds", "--device", "cpu")


def test_folds_that_are_killed_and_resumed_end_with_the_same_bits(own, stop, tmp_path, lab, folds):
    whole, cut, maps = tmp_path / "whole", tmp_path / "cut", tmp_path / "maps"
    said = folds(own, "-k", 2, "--output", whole, "--save-predictions", maps)
    assert said.code == 0
    assert "eval.every_steps: null for folds" in said.err
    assert "warning: --by image" not in said.err
    assert "continue sequences" not in said.err

    ran = stop["ran"]
    assert [words[0] for words in ran] == ["train"] * 2 + ["eval"] * 2
    # Within the first fold, then between the two.
    stop |= {len(ran) + 1: 1, len(ran) + 3: 0}
    said = folds(own, "-k", 2, "--output", cut)
    assert said.code == 143
    assert f"to go on: segtrain folds {cut} --resume" in said.err
    assert folds(own, "--output", cut, "--resume", "-k", 2).code == 130
    del stop[len(ran)]
    assert [fold.finished for fold in read_division(cut).folds] == [True, False]
    before = len(ran)
    error = lab.refused("eval", cut, code=4)
    assert "not trained to the end: fold_1; go on with segtrain folds" in error
    assert folds(cut, "--resume").code == 0
    assert len(ran) == before + 1
    for i in range(2):
        assert bits(last(whole / f"fold_{i}")) == bits(last(cut / f"fold_{i}"))
    assert (whole / "folds.json").read_text() == (cut / "folds.json").read_text()
    said = folds(cut, "--resume", "--set", "log.charts=true")  # nothing is trained again
    assert (said.code, len(ran)) == (0, before + 1)
    check_page(cut, said.out)
    before = (cut / "report.html").read_text()
    (cut / "report.html").unlink()
    lab.done("report", cut)
    assert (cut / "report.html").read_text() == before
    check_comparison(whole, cut, lab)
    trained = len(ran)
    check_changes(cut, own.parent / "labels/train/d4_000.png", lab)
    assert len(ran) == trained

    found = json.loads((whole / "folds.json").read_text())
    check_division(found, whole)
    check_score(found, maps, own.parent)
    check_ensemble(whole, lab)


def check_division(found, directory):
    """Each image is in one fold, each sequence whole; a run trains on exactly the others."""
    names = [name for fold in found["folds"] for name in fold["images"]]
    assert sorted(names) == sorted(
        f"images/train/{sequence}_{i:03d}" for sequence in SEQUENCES for i in range(4)
    )
    for fold in found["folds"]:
        assert len(set(fold["images"].values())) == len(fold["images"]) / 4
        lists = [
            set(re.findall(r"images/train/[^\t]+(?=\.png\t)", (directory / name).read_text()))
            for name in (f"{fold['run']}_eval.txt", f"{fold['run']}_train.txt")
        ]
        assert lists == [set(fold["images"]), set(names) - set(fold["images"])]


def check_score(found, maps, root):
    """The joined score is that of all predicted label maps at once."""
    matrix = ConfusionMatrix(4)
    for fold in found["folds"]:
        for name in fold["images"]:
            pred = cv2.imread(str(maps / f"{name}.png"), cv2.IMREAD_UNCHANGED)
            file = root / f"{name.replace('images', 'labels')}.png"
            label = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
            assert set(np.unique(label)) <= {0, 1, 2, 3, IGNORE_INDEX}
            matrix.update(torch.from_numpy(pred), torch.from_numpy(label))
    scores = matrix.scores()
    assert found["scores"]["mIoU"] == pytest.approx(scores.mean_iou, abs=1e-12)
    assert found["scores"]["num_pixels"] == scores.num_pixels
    low, high = found["scores"]["interval"]
    assert low < scores.mean_iou < high
    assert list(found["scores"]["folds"]) == ["fold_0", "fold_1"]


def check_page(directory, said):
    """The page says what the terminal says, and shows images of every fold."""
    page = (directory / "report.html").read_text()
    *_, score = re.findall(r"mIoU +([0-9.]+) of all 20 images, each by the model", said)
    assert f"<p>mIoU       {score} of all 20 images" in page
    for fold in read_division(directory).folds:
        assert f"<td>{fold.run}</td>" in page
        assert any(f'alt="prediction of {name}"' in page for name in fold.images)
    assert (directory / "results.csv").read_text().startswith("class,IoU,")


def check_comparison(whole, cut, lab):
    """Folds are compared by their joined scores, with folds made alike only."""
    file = lab.folder / "c.json"
    said = lab.done("compare", whole, cut, "--json", file).out
    assert "+0.00 (+0.00 to +0.00) points" in said
    score = read_division(whole).scores["mIoU"]
    scores = json.loads(file.read_text())["scores"]
    assert scores == [[pytest.approx(score)], [pytest.approx(score)]]
    for command in (["compare"], ["report", "--output", lab.folder / "x.html"]):
        assert f"{whole}" in lab.refused(*command, whole, cut / "fold_0")


def check_changes(directory, label, lab):
    """Folds of another config or of other labels are not joined, though nothing is left to do."""
    experiment, old_lr, new_lr = directory / "experiment.yaml", b"  lr: 0.02\n", b"  lr: 0.5\n"
    for path, change, said in (
        (experiment, lambda old: old.replace(old_lr, new_lr), "optim.lr: 0.02 there"),
        (label, lambda old: old + b" ", "names, sizes or order of the files differ"),
        (label, lambda old: old[:-1] + b" ", "labels hold something else; the first is"),
    ):
        before = path.read_bytes()
        path.write_bytes(change(before))
        error = lab.refused("folds", directory, "--resume", "--device", "cpu")
        assert f"{directory}: was started otherwise" in error
        assert f"fold_0: {'' if path == experiment else 'split '}" in error
        assert said in error
        path.write_bytes(before)


def check_ensemble(directory, lab):
    """The directory is the ensemble, evaluated on the split that no fold has seen."""
    said = lab.done("eval", directory)
    assert f"mean probability of 2 models: {directory / 'fold_0'} step 2" in said.out
    assert "2 images of split val" in said.out
    assert "trained a member" not in said.err
    said = lab.done("eval", directory, "--split", "train")
    assert "20 of 20 images of split train trained a member" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-k", 6, "--by", "sequence"], "-k 6: 5 groups of images for 6 folds"),
        (["-k", 21, "--by", "image"], "-k 21: 20 groups of images for 21 folds"),
        (["-k", 6, "--group", r"([a-z]\d|[a-z] 2)_"], "-k 6: 5 groups of images for 6 folds"),
        (["--group", "[a-d] ?._"], "4 images have no group: images/train/e5_000.png"),
        (["--group", "x", "--by", "image"], "--by: no effect with --group"),
        (["--set", "data.pack=packs/x"], "data.pack: holds the splits, not folds of them"),
        (["--save-predictions", "images/train/out"], "--save-predictions images/train/out: would"),
    ],
)
def test_what_cannot_be_divided_is_refused(own, tmp_path, monkeypatch, folds, words, said):
    monkeypatch.chdir(own.parent)
    for _ in range(2):  # the second try is not refused for what the first has left
        code, _, error = folds(own, "--output", tmp_path / "out", *words)
        assert code == 2
        assert said in error
        assert not (tmp_path / "out" / "folds.json").exists()


def test_other_options_are_refused_when_folds_go_on(own, stop, tmp_path, folds, lab):
    stop[1] = 0
    begun = folds(own, "-k", 2, "--by", "image", "--all", "--output", tmp_path)
    assert begun.code == 130
    division = read_division(tmp_path)
    assert [len(fold.images) for fold in division.folds] == [11, 11]
    assert "warning: --by image: the names show sequences" in begun.err
    words = ("-k", 3, "--by", "sequence", "--set", "optim.lr=0.5", "--resume")
    said = lab.refused("folds", tmp_path, *words)
    for line in ("-k: 2 there, 3 now", "--by: image there, sequence now", "optim.lr: 0.02 there"):
        assert line in said
    said = lab.refused("folds", own, "-k", 2, "--output", tmp_path)
    assert "is not empty; go on by --resume" in said


def test_a_fold_without_labels_is_refused_before_any_trains(stop, tmp_path, folds):
    write_data(tmp_path, num_images=4, num_val=1)
    cv2.imwrite(str(tmp_path / "labels/train/3.png"), np.full((56, 72), 255, np.uint8))
    config = write_config(tmp_path / "c.yaml", small(tmp_path))
    for _ in range(2):
        code, _, said = folds(config, "-k", 4, "--output", tmp_path / "out")
        assert code == 3
        assert re.search(r"fold_\d: .*\n?.*all other pixels are ignored", said)
    assert stop["ran"] == []


def test_groups_stay_whole_and_folds_are_even():
    sizes = {f"s{i}": n for i, n in enumerate((40, 3, 17, 17, 9, 1, 30, 8, 8, 2))}
    groups = [name for name, size in sizes.items() for _ in range(size)]
    found = fold_of_each(groups, 3)
    assert len(set(zip(groups, found, strict=True))) == len(sizes)
    assert sorted(Counter(found).values()) == [44, 44, 47]
    # The order of the images and what else is there do not matter.
    assert dict(zip(groups[::-1], fold_of_each(groups[::-1], 3), strict=True)) == dict(
        zip(groups, found, strict=True)
    )
    singles = fold_of_each([str(i) for i in range(11)], 4)
    assert sorted(Counter(singles).values()) == [2, 3, 3, 3]
    assert singles != sorted(singles)
    with pytest.raises(ConfigError, match="2 groups of images for 3 folds"):
        fold_of_each(["a", "b", "a"], 3)


def test_the_interval_holds_the_score_of_the_population():
    """Of 95 % intervals over 12 sequences of 5 alike images, about 95 % do."""
    rng, held, trials = np.random.default_rng(0), 0, 200
    truth = 0.5 / 1.5  # half of each class is right: IoU = a / (2 - a)
    for _ in range(trials):
        right = np.repeat(rng.uniform(0.2, 0.8, (12, 2)), 5, axis=0)
        counts = right, np.ones((60, 2)), right + 1 - right[:, ::-1]
        images = (1000 * np.stack(counts, axis=2)).round().astype(np.int64)
        names = tuple(f"s{i // 5}_{i}" for i in range(60))
        zeros = np.zeros((2, 2), np.int64), np.zeros((2, 960), np.int64)
        records = Records({}, names, ("a", "b"), images, *zeros)
        found = score_interval(records, [name.partition("_")[0] for name in names])
        held += found.low <= truth <= found.high
    assert 0.91 <= held / trials <= 0.99


def test_no_fold_trains_on_pixels_that_it_is_scored_on(stop, tmp_path, folds):
    """Tiles of 40x56 that overlap by half, six rows of four; by their names, in pixels."""
    write_data(tmp_path, num_images=24, num_val=1, size=(40, 56))
    field, boxes = np.random.default_rng(0).integers(0, 256, (140, 140, 3), np.uint8), {}
    for i in range(24):
        y, x = 20 * (i // 4), 28 * (i % 4)
        boxes[f"images/train/field_y{y}_x{x}"] = here = np.s_[y : y + 40, x : x + 56]
        for kind in ("images", "labels"):
            file = tmp_path / kind / "train" / f"{i}.png"
            file.rename(file.with_name(f"field_y{y}_x{x}.png"))
        cv2.imwrite(str(tmp_path / f"images/train/field_y{y}_x{x}.png"), field[here])
    config = write_config(tmp_path / "own.yaml", small(tmp_path, train={"steps": 2}))
    stop[1] = 0
    said = folds(config, "-k", 3, "--output", tmp_path / "out")
    assert said.code == 130
    words = r"8 images, 1 group; (\d) tiles that overlap them left out of training"
    left = re.findall(words, said.err)
    assert sorted(left) == ["4", "4", "8"]  # of two strips at the ends, and one between them
    scored = []
    for number in range(3):
        seen = []
        for part in ("train", "eval"):
            seen.append(np.zeros((140, 140), int))
            for line in (tmp_path / "out" / f"fold_{number}_{part}.txt").read_text().splitlines():
                if not line.startswith("#"):
                    seen[-1][boxes[re.split(r"\.png", line)[0]]] += 1
        assert seen[0].any()
        assert not (seen[0] & seen[1]).any()
        scored.append(seen[1])
    assert sum(scored).max() == 4  # each tile is scored in one fold
    assert sum(scored).sum() == 24 * 40 * 56


def test_groups_by_a_pattern_stay_in_one_fold(own, stop, tmp_path, folds, lab):
    """Frames 000 to 003 of five sequences: here what has the same frame number stays together."""
    stop[1] = 0
    begun = folds(own, "-k", 2, "--group", r"_(\d+)\.png$", "--output", tmp_path)
    assert begun.code == 130
    assert "fold_0: 10 images, 2 groups" in begun.err
    numbers = [{name[-3:] for name in fold.images} for fold in read_division(tmp_path).folds]
    assert sorted(map(len, numbers)) == [2, 2]
    assert not numbers[0] & numbers[1]
    said = lab.refused("folds", tmp_path, "--group", "x", "--resume")
    assert r"--group: _(\d+)\.png$ there, x now" in said
