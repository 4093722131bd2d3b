"""Other data than a run was trained on do not go unnoticed, wherever the same data lie."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import cv2
import pytest
import torch
from experiments import (
    after_each_step,
    contents,
    last,
    refusal,
    small,
    stopped_after,
    train,
    write_config,
    write_data,
)
from processes import logged_steps

from segtrain import cli
from segtrain.checkpoint.format import config_field, load, parse_data, save
from segtrain.checkpoint.trained import load_initial
from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.data.read import dataset as dataset_module
from segtrain.data.read.classes import ClassFile, SegClass, class_differences, class_file_from_json
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.find import Pair
from segtrain.data.read.fingerprint import (
    LabelHashing,
    file_difference,
    fingerprint_from_json,
    fingerprint_to_json,
    hash_files,
    label_difference,
)
from segtrain.data.read.label_formats import told_by
from segtrain.errors import CheckpointError, DataError
from segtrain.files import manifest
from segtrain.models import build_model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """As everywhere, with labels that are not compressed: all have one size in bytes."""
    root = tmp_path_factory.mktemp("data") / "set"
    root.mkdir()
    write_data(root)
    for path in root.glob("labels/*/*.png"):
        label = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        cv2.imwrite(str(path), label, [cv2.IMWRITE_PNG_COMPRESSION, 0])
    return root


def changed(data: Path, root: Path, *changes: Callable[[Path], None]) -> Path:
    """A copy of `data` at `root` with `changes` made."""
    shutil.copytree(data, root)
    for change in changes:
        change(root)
    return root


def add_image(root):
    for kind in ("images", "labels"):
        shutil.copy(root / kind / "train/3.png", root / kind / "train/30.png")


def grow_image(root, kind="images"):
    with (root / kind / "train/5.png").open("ab") as file:
        file.write(b"\0")


def exchange_labels(root, split="train"):
    files = [root / f"labels/{split}/{i}.png" for i in (1, 2)]
    first, second = (file.read_bytes() for file in files)
    assert len(first) == len(second)
    for file, content in zip(files, (second, first), strict=True):
        file.write_bytes(content)


def exchange_labels_to_evaluate(root):
    exchange_labels(root, "val")


def exchange_ids(root):
    lines = ["{name: ground, ids: [0]}", "{name: plant, ids: [2]}", "{name: water, ids: [1]}"]
    text = "".join(f"  - {line}\n" for line in [*lines, "{name: sand, ids: [3]}"])
    (root / "classes.yaml").write_text(f"classes:\n{text}ignore_ids: [255]\n")


def seen(root, split="train"):
    config = load_config(write_config(root.parent / f"{root.name}.yaml", small(root)))
    dataset = open_dataset(config.data, split)
    found = hash_files(dataset, config.data.root)
    with closing(LabelHashing([(dataset, found.pairs_per_hash)])) as hashing:
        (labels,) = hashing.result()
    return dataset, found, labels


def test_the_same_data_elsewhere_have_one_fingerprint(data, tmp_path, monkeypatch):
    _, here, labels = seen(data)
    _, there, labels_there = seen(changed(data, tmp_path / "b"))
    assert (here, labels) == (there, labels_there)
    assert len(set(here.files)) == len(set(labels)) == 8
    monkeypatch.chdir(tmp_path)
    for root in ("./b/", f"{tmp_path}/b/"):
        data_config = load_config(tmp_path / "b.yaml", [f"data.root={root}"]).data
        assert hash_files(open_dataset(data_config, "train"), root) == here
    _, other_split, _ = seen(data, "val")
    assert other_split != here


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add_image, "8 images there, 9 now"),
        (grow_image, "the first difference is {}/images/train/5.png"),
        (partial(grow_image, kind="labels"), "the first difference is {}/images/train/5.png"),
    ],
)
def test_other_files_are_named(data, tmp_path, change, said):
    _, before, _ = seen(data)
    dataset, now, _ = seen(changed(data, tmp_path / "b", change))
    line = file_difference(before, now, dataset)
    assert line.startswith("split train: ")
    assert line.endswith(said.format(tmp_path / "b"))
    assert file_difference(now, now, dataset) == ""


def test_another_order_and_exchanged_labels_of_one_size_are_named(data, tmp_path):
    """A list file gives the order, and the order the batches."""
    dataset, before, labels = seen(data)
    dataset.pairs.reverse()
    now = hash_files(dataset, str(data))
    assert "order of the files differ" in file_difference(before, now, dataset)
    dataset, now, others = seen(changed(data, tmp_path / "b", exchange_labels))
    assert now == before
    before = replace(before, labels=labels)
    assert label_difference(before, others, dataset) == (
        f"split train: 2 labels hold something else; the first is {tmp_path}/b/labels/train/1.png"
    )
    assert label_difference(before, labels, dataset) == ""


def test_large_splits_have_few_hashes_that_still_say_where_to_look(tmp_path):
    paths = [tmp_path / f"{i:03d}.png" for i in range(200)]
    for path in paths:
        path.write_bytes(b"x")
    dataset = SegDataset([Pair(path, path, path.stem) for path in paths], None, split="a")
    before = hash_files(dataset, str(tmp_path))
    assert (before.num_pairs, before.pairs_per_hash, len(before.files)) == (200, 4, 50)
    paths[102].write_bytes(b"longer")
    line = file_difference(before, hash_files(dataset, str(tmp_path)), dataset)
    assert line.endswith(f"difference is among the 4 from {paths[100]} to {paths[103]}")


def test_a_label_that_cannot_be_read_is_an_error_of_the_data(data, tmp_path):
    dataset, _, _ = seen(changed(data, tmp_path / "b"))
    (tmp_path / "b/labels/train/4.png").unlink()
    message = r"labels/train/4\.png: cannot be read: no such file"
    with closing(LabelHashing([(dataset, 1)])) as hashing, pytest.raises(DataError, match=message):
        hashing.result()


ONE_AND_TWO = SegClass("one", (9, 9, 9), (1,)), SegClass("two", (8, 8, 8), (2,))
BEFORE = ClassFile("c", ONE_AND_TWO, (255,), (0, 0, 0))


@pytest.mark.parametrize("label_format", ["ids", "colors", "train_ids"])
@pytest.mark.parametrize(
    ("change", "line", "counts"),
    [
        ({"name": "no"}, "2 classes there, 2 now; class 1 is two there, no now", "all"),
        ({"ids": (3,)}, "ids of two: [2] there, [3] now", "ids"),
        ({"ignore_ids": (254, 255)}, "ignore_ids: [255] there, [254, 255] now", "ids"),
        ({"color": (7, 7, 7)}, "color of two: [8, 8, 8] there, [7, 7, 7] now", "colors"),
        ({"more_colors": ((5, 5, 5),)}, "more_colors of two: [] there, [(5, 5, 5)] now", "colors"),
    ],
)
def test_colors_count_where_labels_are_colors_and_ids_where_they_are_ids(
    label_format, change, line, counts
):
    of_file = {key: value for key, value in change.items() if key == "ignore_ids"}
    two = replace(BEFORE.classes[1], **{} if of_file else change)
    now = replace(BEFORE, classes=(BEFORE.classes[0], two), **of_file)
    lines = [f"class file: {line}"]
    expected = (lines, []) if counts in ("all", label_format) else ([], lines)
    assert class_differences(BEFORE, now, told_by(label_format)) == expected
    turned = replace(now, ignore_ids=now.ignore_ids[::-1])
    assert class_differences(now, turned, told_by(label_format)) == ([], [])


def test_a_class_more_is_named_even_if_it_is_called_none():
    more = replace(BEFORE, classes=(*ONE_AND_TWO, SegClass("none", (5, 5, 5), (5,))))
    line = "class file: 2 classes there, 3 now; class 2 is none there, none now"
    assert class_differences(BEFORE, more, "ids") == ([line], [])


# Training.


def refusals(configs, run):
    """What each of `configs` is refused with when it is to go on with `run`."""
    return [refusal(partial(train, resume=True), config, run) for config in configs]


@pytest.fixture(scope="module")
def stopped(run_ranks, tmp_path_factory, data):
    """A run of few steps that was stopped on its way."""
    where = tmp_path_factory.mktemp("stopped")
    config = write_config(where / "c.yaml", small(data, train=STEPS))
    assert run_ranks(1, stopped_after, 2, config, where / "run") == [143]
    assert 2 <= last(where / "run").step <= 4
    return where / "run"


STEPS = {"steps": 6}


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of it to go on with."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def other_data(data, tmp_path, *changes, steps=STEPS["steps"]):
    """The config of the same experiment on changed data."""
    root = changed(data, tmp_path / "-".join(["b", *(c.__name__ for c in changes)]), *changes)
    return write_config(root.parent / f"{root.name}.yaml", small(root, train={"steps": steps}))


@pytest.mark.fault(93)
def test_other_data_are_refused_at_a_resumption_on_every_rank(run_ranks, data, run, tmp_path):
    """And nothing is written."""
    changes = (add_image, exchange_ids), (exchange_labels, exchange_labels_to_evaluate)
    configs = [other_data(data, tmp_path, *both) for both in changes]
    before = contents(run)
    first, second = run_ranks(2, refusals, configs, run)
    assert first == second
    assert contents(run) == before
    said = (
        "class file: ids of plant: [1] there, [2] now\n  class file: ids of water: [2] there, [1] "
        "now\n  split train: 8 images there, 9 now",
        "split train: 2 labels hold something else; the first is ",
    )
    for (kind, code, text), lines in zip(first, said, strict=True):
        assert (kind, code) == ("ConfigError", 2)
        assert f"the run was trained on other data\n  {lines}" in text
        for way in ("data.root", "--output", "--accept-changes"):
            assert way in text
    assert "\n  split val: 2 labels hold something else; the first is " in first[1][2]


def in_folder(folder, function, *args):
    os.chdir(folder)
    return function(*args)


@pytest.mark.fault(93)
def test_the_same_data_elsewhere_go_on_without_a_word(run_ranks, data, run, tmp_path):
    """By a relative path from another folder."""
    changed(data, tmp_path / "elsewhere" / "moved")
    config = write_config(tmp_path / "moved.yaml", small(Path("moved"), train=STEPS))
    before = last(run).data
    assert run_ranks(1, in_folder, tmp_path / "elsewhere", train, config, run, True) == [0]
    assert last(run).step == STEPS["steps"]
    assert last(run).data == load(run / "checkpoints" / "best.pt").data == before
    assert all(split.labels for split in known(last(run)))
    log = (run / "train.log").read_text()
    assert "changed" not in log
    assert "warning" not in log


def known(record):
    data = parse_data(record, Path())
    return data.train, data.eval


@pytest.mark.fault(93)
def test_changed_data_that_are_meant_are_told_and_kept(run_ranks, data, run, tmp_path):
    """Labels only, whose change is found beside training; then an image as well."""
    config = other_data(data, tmp_path, exchange_labels)
    assert run_ranks(1, train, config, run, True, accept_changes=True) == [0]
    log = (run / "train.log").read_text()
    assert log.count("changed    split train: 2 labels hold something else") == 1
    assert last(run).step == STEPS["steps"]
    config = other_data(data, tmp_path, exchange_labels, add_image, steps=7)
    assert run_ranks(1, train, config, run, True, accept_changes=True) == [0]
    log = (run / "train.log").read_text()
    assert log.count("changed    split train: 8 images there, 9 now") == 1
    assert [split.num_pairs for split in known(last(run))] == [9, 3]
    # A checkpoint that says nothing of its data goes on with a warning.
    for path in (run / "checkpoints").glob("*.pt"):
        save(path, load(path)._replace(data=None))
    (run / "checkpoints" / manifest.MANIFEST).unlink()
    root = tmp_path / "b-exchange_labels-add_image"
    config = write_config(tmp_path / "more.yaml", small(root, train={"steps": 8}))
    assert run_ranks(1, train, config, run, True, accept_changes=True) == [0]
    log = (run / "train.log").read_text()
    assert log.count("does not say which data it was trained on") == 1
    assert all(split.labels for split in known(last(run)))


def slow_labels(step, function, *args):
    """Labels can be read only after `step` updates of this process."""
    from segtrain.trainer import save, setup

    go_on, read, done = threading.Event(), dataset_module.read_bytes, []

    def read_bytes(path):
        go_on.wait()
        return read(path)

    def count(result):
        done.append(result)
        if len(done) == step:
            go_on.set()

    dataset_module.read_bytes = read_bytes
    after_each_step(count)
    setup.DATA_PATIENCE_S = save.DATA_PATIENCE_S = save.STOP_PATIENCE_S = 0.1
    try:
        return function(*args)
    finally:
        go_on.set()


@pytest.mark.fault(93)
def test_labels_that_differ_end_a_run_that_has_gone_on_before_anything_is_saved(
    run_ranks, data, run, tmp_path
):
    """As in a data set so large that its labels are not hashed before the first step."""
    config = other_data(data, tmp_path, exchange_labels, steps=500)
    path = run / "checkpoints" / "last.pt"
    checkpoint = last(run)._replace(config=config_field(load_config(config)))
    (run / "checkpoints" / "manifest.json").unlink()
    save(path, checkpoint)
    saved = path.read_bytes()
    found = run_ranks(2, slow_labels, 2, refusal, train, config, run, True)
    assert found[0] == found[1]
    assert found[0][:2] == ("ConfigError", 2)
    assert "2 labels hold something else" in found[0][2]
    assert path.read_bytes() == saved
    assert 3 < max(logged_steps(run)) < 50


@pytest.mark.fault(93)
def test_a_run_that_is_stopped_before_its_labels_are_hashed_says_so(run_ranks, data, tmp_path):
    """It must not wait for them: who asks for the stop does not wait either."""
    config, run = write_config(tmp_path / "c.yaml", small(data, train=STEPS)), tmp_path / "run"
    assert run_ranks(1, slow_labels, 99, stopped_after, 2, config, run) == [143]
    assert "warning: stopped before all labels were hashed" in (run / "train.log").read_text()
    assert [split.labels for split in known(last(run))] == [None, None]
    assert run_ranks(1, train, config, run, True) == [0]
    log = (run / "train.log").read_text()
    assert log.count("does not say what all labels held: changes since then are not noticed") == 1
    assert all(split.labels for split in known(last(run)))


@pytest.mark.fault(93)
def test_what_the_labels_held_is_not_forgotten_before_they_have_been_compared(
    run_ranks, data, run, tmp_path
):
    """Stopped, resumed with other labels, stopped before they were hashed, resumed."""
    config = other_data(data, tmp_path, exchange_labels)
    step = last(run).step + 1
    assert run_ranks(1, slow_labels, 99, stopped_after, step, config, run, True) == [143]
    assert last(run).step >= step
    (((kind, _, said),),) = run_ranks(1, refusals, [config], run)
    assert kind == "ConfigError"
    assert "2 labels hold something else" in said


def on_a_machine_of_its_own(configs, run):
    """Every rank is the only one of its machine and has a data set there."""
    from segtrain.distributed import collectives as dist

    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return refusal(train, configs[dist.rank()], run)


@pytest.mark.fault(93)
def test_machines_with_different_data_are_refused(run_ranks, data, tmp_path):
    configs = [other_data(data, tmp_path), other_data(data, tmp_path, grow_image)]
    found = run_ranks(2, on_a_machine_of_its_own, configs, tmp_path / "run")
    assert found[0] == found[1]
    assert found[0][:2] == ("DataError", 3)
    said = "the machine of rank 1 sees other data than that of rank 0: names or sizes of the files"
    assert said in found[0][2]


def test_a_damaged_fingerprint_is_a_damaged_checkpoint(stopped):
    record = last(stopped)
    content = json.loads(record.data)
    content["eval"]["pairs_per_hash"] = 0
    for text in ("", "[1]", record.data.replace("num_pairs", "pairs"), json.dumps(content)):
        with pytest.raises(CheckpointError, match=r"x\.pt: damaged: the field data cannot be read"):
            parse_data(record._replace(data=text), Path("x.pt"))
    assert fingerprint_to_json(fingerprint_from_json(record.data)) == record.data


# Evaluation.


@pytest.fixture
def score(run, capsys):
    """Runs `segtrain eval` and returns what it says on stderr about the data."""
    from segtrain.commands import evaluate

    def score(*overrides, split=None):
        words = [f"--set={text}" for text in overrides] + ([f"--split={split}"] if split else [])
        args = cli._parser().parse_args(["eval", str(run), "--device", "cpu", *words])
        assert evaluate.run_eval(args) == 0
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if line.startswith("segtrain: ")]

    return score


@pytest.mark.fault(93)
def test_eval_warns_of_other_data_than_those_of_the_training(run, score, data, tmp_path):
    assert score() == []
    root = changed(data, tmp_path / "b", exchange_labels_to_evaluate, add_image)
    record = last(run)
    config = record.config.replace(str(data), str(root))
    path = run / "checkpoints" / "last.pt"
    save(path, record._replace(config=config))
    (run / "checkpoints" / manifest.MANIFEST).unlink()
    (line,) = score()
    start = "segtrain: warning: not the data of the training: split "
    assert line.startswith(start + "val: 2 labels hold something else; the first is ")
    (line,) = score(split="train")
    assert line.startswith(start + "train: 8 images there, 9 now")
    exchange_ids(root)
    lines = score()
    assert len(lines) == 3
    said = "class file: ids of plant: [1] there, [2] now"
    assert lines[0] == f"segtrain: warning: not the data of the training: {said}"
    # A copy of the class file is another, which may be meant.
    (tmp_path / "copy.yaml").write_text((root / "classes.yaml").read_text())
    copy = f"data.classes={tmp_path / 'copy.yaml'}"
    notes = [line.replace("warning", "note") for line in lines]
    assert score(copy, f"data.root={root}/") == notes
    # Who asks for other data is told so and not warned; another split is not compared.
    classes = f"data.classes={data / 'classes.yaml'}"
    (root / "images/val/2.png").unlink()
    (line,) = score(f"data.root={root}/", classes)
    start = start.replace("warning", "note")
    assert line.startswith(start + "val: 3 images there, 2 now")
    for kind in ("images", "labels"):
        (root / kind / "val").rename(root / kind / "test")
    assert score(classes, split="test") == []


# Weights of another run.


@pytest.mark.parametrize(
    ("here", "sources", "said"),
    [
        ((), [0, 1, 2, 3], None),
        (("ground", "plant", "water", "sand"), [0, 1, 2, 3], None),
        (("Ground", "plant", "-water", "sand_"), [0, 1, 2, 3], None),
        (("sand", "water", "plant", "ground"), [3, 2, 1, 0], "sand, water, plant, ground"),
        (("water", "GROUND"), [2, 0], "water, GROUND; only there: plant, sand"),
        (("ground", "tree"), [0, None], "ground; new, from random numbers: tree; only there: p"),
        (("a", "b", "c", "d"), [None] * 4, "none; new, from random numbers: a, b, c, d; only th"),
    ],
)
def test_classifiers_keep_the_rows_of_classes_with_the_same_names(stopped, here, sources, said):
    """In both heads; a layer with a new row counts as random, so that it decays as a new one."""
    saved = last(stopped)
    config = load_config(stopped / "config.yaml")
    assert class_file_from_json(saved.classes).names == ("ground", "plant", "water", "sand")
    model = build_model(config.model, num_classes=len(sources))
    keys = [key for key in model.state_dict() if ".classifier." in key]
    assert len(keys) == 4
    before = {key: model.state_dict()[key].clone() for key in keys}
    started = load_initial(model, stopped / "checkpoints" / "last.pt", here)
    intro = "init       classes that keep their rows of the classifiers: "
    assert len(started.lines[1:]) == (said is not None)
    assert said is None or started.lines[1].startswith(intro + said)
    assert started.random == (sorted(keys) if None in sources else [])
    for key in keys:
        after = model.state_dict()[key]
        for row, source in enumerate(sources):
            expected = before[key][row] if source is None else saved.average[key][source]
            assert torch.equal(after[row], expected), (key, row)


def test_class_names_that_cannot_be_told_apart_are_refused(stopped):
    model = build_model(load_config(stopped / "config.yaml").model, num_classes=3)
    path = stopped / "checkpoints" / "last.pt"
    said = r"last\.pt: classes sand there, Sand, sand here: names are .* one; rename"
    with pytest.raises(CheckpointError, match=said):
        load_initial(model, path, ("Sand", "tree", "sand"))
    # Two that meet no class there are only new.
    load_initial(model, path, ("a_b", "sand", "a b"))
