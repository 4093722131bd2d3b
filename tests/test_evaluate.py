import argparse
import json
import re
import shutil
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from experiments import contents, refusal
from folders import save
from PIL import Image
from torch import nn

from segtrain import cli
from segtrain.checkpoint.trained import LoadedModel
from segtrain.commands import evaluate
from segtrain.commands.evaluate import run_eval
from segtrain.config import AugmentConfig, Config, DataConfig, EvalConfig
from segtrain.data.read.classes import ClassFile, default_palette, load_class_file
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError, DataError
from segtrain.types import SegLogits

# Raw ids of the test scenes: ignored ones too; `train` (31) occurs nowhere.
VOID, ROAD, PERSON, RIDER, CAR, BUS, CARAVAN = 0, 7, 24, 25, 26, 28, 29
HAVE_INSTANCES = [PERSON, RIDER, CAR, CARAVAN]
NAMES = ["aachen_000000_000019", "aachen_000001_000019", "ulm_000000_000019"]
SIZES = [(30, 44), (26, 50), (30, 44)]


class ColorModel(nn.Module):
    """Takes each pixel for the class of the nearest colour; a 1x1 convolution can do that."""

    def __init__(self, classes: ClassFile) -> None:
        super().__init__()
        palette = torch.tensor(classes.palette, dtype=torch.float32) / 255
        self.conv = nn.Conv2d(3, len(palette), 1)
        self.conv.weight.data = 2 * palette.view(-1, 3, 1, 1)
        self.conv.bias.data = -palette.square().sum(1)

    def forward(self, images):
        return SegLogits(self.conv(images))


def scene(index, classes):
    """An image in the classes' colours and its raw label; a fifth of the pixels disagree."""
    rng, size = np.random.default_rng(index), SIZES[index]
    label = rng.choice([VOID, 3, 9, ROAD, PERSON, RIDER, CAR, CARAVAN], size).astype(np.uint8)
    shown = np.where(rng.random(size) < 0.2, rng.choice([ROAD, RIDER, CAR, BUS], size), label)
    shown[label == VOID] = CAR
    colors = np.full((256, 3), (0, 0, 142))
    for one in classes.classes:
        colors[one.ids[0]] = one.color
    image = colors[shown] + rng.integers(-3, 4, (*size, 3))
    return image.clip(0, 255).astype(np.uint8), label


def instances_of(label):
    """The instance map: strips of unequal width, of which the last is a group without instances."""
    strips = np.floor(np.sqrt(np.arange(label.shape[1])))
    single = np.isin(label, HAVE_INSTANCES) & (strips < strips.max())
    ids = label.astype(np.uint16)
    return np.where(single, 1000 * ids + strips, ids).astype(np.uint16)


@pytest.fixture
def cityscapes(tmp_path):
    root, classes = tmp_path / "city scapes", load_class_file("cityscapes")
    for i, name in enumerate(NAMES):
        image, label = scene(i, classes)
        for kind, end, array in (
            ("leftImg8bit", "", image),
            ("gtFine", "_labelIds", label),
            ("gtFine", "_instanceIds", instances_of(label)),
        ):
            save(root / kind / "val" / name.split("_")[0] / f"{name}_{kind}{end}.png", array)
    return root


def data_of(root, layout="cityscapes"):
    """Data whose pixels a ColorModel is given as they are, divided by 255."""
    units = {"mean": (0.0, 0.0, 0.0), "std": (255.0, 255.0, 255.0)}
    return DataConfig(layout=layout, root=str(root), classes=layout, **units)


def config_of(root, mode="slide"):
    options = {"augment": AugmentConfig(crop_size=(16, 24)), "eval": EvalConfig(mode=mode)}
    return Config(data=data_of(root), **options)


@pytest.fixture
def know_the_colors(monkeypatch):
    """What is evaluated of `config` is a model that knows the colours of its `classes`."""

    def know(config, classes, step=1):
        loaded = LoadedModel(ColorModel(classes).eval(), config, classes, step)
        monkeypatch.setattr(evaluate, "load_model", lambda *paths, device: loaded)

    return know


@pytest.fixture
def command(cityscapes, know_the_colors, tmp_path):
    """Runs `segtrain eval` with a model that knows the colours; returns what --json wrote."""
    know_the_colors(config_of(cityscapes), load_class_file("cityscapes"), 1200)

    def run(*overrides, **options):
        scores = tmp_path / "scores.json"
        assert run_eval(arguments("run", set=list(overrides), json=scores, **options)) == 0
        return json.loads(scores.read_text())

    return run


def arguments(checkpoint, **options):
    given = cli._parser().parse_args(["eval", checkpoint, "--device", "cpu"])
    return argparse.Namespace(**vars(given) | options)


OFFICIAL_MEANS = {
    "mIoU": "averageScoreClasses",
    "miIoU": "averageScoreInstClasses",
    "category_mIoU": "averageScoreCategories",
    "category_miIoU": "averageScoreInstCategories",
}
OFFICIAL_ROWS = {
    ("classes", "IoU"): "classScores",
    ("classes", "iIoU"): "classInstScores",
    ("categories", "IoU"): "categoryScores",
    ("categories", "iIoU"): "categoryInstScores",
}


def official_scores(root, predictions):
    """What cityscapesscripts' own functions return for these label maps, which they find."""
    name = "cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling"
    how = "pip install --no-deps cityscapesscripts pyquaternion"
    official = pytest.importorskip(name, reason=how)
    if not hasattr(np, "in1d"):  # version 2.3.0 calls what NumPy 2.4 has removed
        np.in1d = np.isin
    args = official.args
    args.evalInstLevelScore, args.JSONOutput, args.quiet = True, False, True
    args.predictionPath, args.predictionWalk = str(predictions), None
    labels = [str(path) for path in sorted(root.glob("gtFine/val/*/*_gtFine_labelIds.png"))]
    found = [official.getPrediction(args, label) for label in labels]
    return official.evaluateImgLists(found, labels, args)


def test_scores_equal_the_official_evaluator_on_the_saved_predictions(
    command, cityscapes, tmp_path
):
    """Label ids at the size of the label."""
    scores = command(save_predictions=tmp_path / "out")
    for name, (height, width) in zip(NAMES, SIZES, strict=True):
        path = tmp_path / "out" / name.split("_")[0] / f"{name}_pred_labelIds.png"
        with Image.open(path) as picture:
            assert (picture.mode, picture.size) == ("L", (width, height))
            assert set(np.unique(np.array(picture))) <= {ROAD, PERSON, CAR, BUS, *range(7, 34)}
    official = official_scores(cityscapes, tmp_path / "out")
    pairs = [(scores[ours], official[theirs]) for ours, theirs in OFFICIAL_MEANS.items()]
    for (kind, key), theirs in OFFICIAL_ROWS.items():
        pairs += [(row[key], official[theirs][row["name"]]) for row in scores[kind]]
    assert len(pairs) == 2 * (19 + 7) + 4
    ours, theirs = np.array(pairs, dtype=float).T  # None is not a number
    assert ours == pytest.approx(theirs, rel=0, abs=1e-9, nan_ok=True)
    categories = {row["name"]: row for row in scores["categories"]}
    assert 0.1 < categories["human"]["iIoU"] < 1
    assert 0.1 < scores["miIoU"] < scores["category_miIoU"]
    by_name = {row["name"]: row["IoU"] for row in scores["classes"]}
    assert by_name["train"] is None
    assert by_name["bus"] == 0
    assert 0.5 < by_name["road"] < 1


def test_where_instance_maps_are_missing_no_score_is_of_the_rest(command, cityscapes, capsys):
    before, paths = command(), sorted(cityscapes.rglob("*_instanceIds.png"))
    assert "iIoU" in capsys.readouterr().out
    for missing, gone in (1, paths[:1]), (3, paths[1:]):
        for path in gone:
            path.unlink()
        scores, output = command(), capsys.readouterr().out
        assert f"{missing} of 3 labels have no instance map, such as {paths[0]}: no inst" in output
        assert "iIoU" not in output
        assert scores["miIoU"] is scores["category_miIoU"] is None
        assert {row["iIoU"] for row in [*scores["classes"], *scores["categories"]]} == {None}
        for key in ("mIoU", "category_mIoU", "confusion_matrix"):
            assert scores[key] == before[key]


def test_an_instance_map_that_does_not_fit_is_refused(command, cityscapes):
    path = cityscapes / "gtFine/val/ulm/ulm_000000_000019_gtFine_instanceIds.png"
    Image.fromarray(np.zeros((44, 30), np.uint16)).save(path)
    with pytest.raises(DataError, match=r"ulm.*instanceIds\.png: instance map 44x30, label 30x44"):
        command()
    Image.fromarray(np.full((30, 44), 50001, np.uint16)).save(path)
    with pytest.raises(DataError, match="instance 50001 is of class id 50, to which"):
        command()


def test_a_split_for_a_test_server_has_predictions_and_no_scores(
    command, cityscapes, tmp_path, capsys
):
    """Its labels are dummies, as gtFine/test is published, or not there."""
    command(save_predictions=tmp_path / "labelled")
    for path in cityscapes.rglob("*_gtFine_*.png"):
        with Image.open(path) as label:
            dummy = np.full(label.size[::-1], 3, np.uint8)
        Image.fromarray(dummy).save(path)
    scores = command(save_predictions=tmp_path / "dummies")
    assert scores["num_pixels"] == 0
    assert {scores[key] for key in ("mIoU", "aAcc", "miIoU", "category_mIoU")} == {None}
    assert "no pixel of val is labelled: there is nothing to score" in capsys.readouterr().out
    shutil.rmtree(cityscapes / "gtFine")
    assert run_eval(arguments("run", no_labels=True, save_predictions=tmp_path / "none")) == 0
    assert "mIoU" not in capsys.readouterr().out
    labelled, *others = (contents(tmp_path / kind) for kind in ("labelled", "dummies", "none"))
    assert len(labelled) == 3
    assert others == [labelled] * 2


def test_voc_predictions_are_indices_into_the_palette_of_voc(tmp_path, know_the_colors):
    classes = load_class_file("voc")
    label = np.array([[0, 15, 20], [7, 255, 0]], np.uint8)
    colors = np.array(default_palette(256), np.uint8)[label]
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (tmp_path / folder).mkdir(parents=True)
    Image.fromarray(colors).save(tmp_path / "JPEGImages/2007_000033.png")
    Image.fromarray(label).save(tmp_path / "SegmentationClass/2007_000033.png")
    (tmp_path / "ImageSets/Segmentation/val.txt").write_text("2007_000033\n")
    know_the_colors(Config(data=data_of(tmp_path, "voc")), classes)
    for options in ({}, {"no_labels": True}):
        run_eval(arguments("run", save_predictions=tmp_path / "out", **options))
        with Image.open(tmp_path / "out/2007_000033.png") as picture:
            assert picture.mode == "P"
            indices = np.array(picture)
            assert np.array_equal(indices[label != 255], label[label != 255])
            rgb = np.array(picture.convert("RGB"))
        assert np.array_equal(rgb, np.array(default_palette(256), np.uint8)[indices])


def test_scores_say_their_precision_and_which_images_went_by_windows(
    command, cityscapes, know_the_colors, monkeypatch
):
    know_the_colors(config_of(cityscapes, mode="whole"), load_class_file("cityscapes"))
    monkeypatch.setattr("segtrain.inference.predictor.fitting_pixels", lambda *_: 0)
    found = command("eval.precision=bfloat16")["inference"]
    assert (found["mode"], found["images_by_windows"]) == ("whole", len(NAMES))
    assert found["precision"] == found["autocast"] == "bfloat16"


def test_a_scale_that_leaves_next_to_nothing_of_an_image_is_refused(command):
    with pytest.raises(ConfigError, match=r"eval\.scales: 0\.01 makes 1x1 pixels of an image of"):
        command("eval.scales=[0.01]")
    command("eval.scales=[0.31]")  # 8 pixels of 26


def test_overlays_are_spread_over_the_data_set(command, tmp_path):
    command(overlays=tmp_path / "overlays", num_overlays=2)
    written = sorted(p.name for p in (tmp_path / "overlays").rglob("*.png"))
    assert written == ["aachen_000000_000019.png", "ulm_000000_000019.png"]


def evaluated_at(steps, cityscapes):
    """What `segtrain eval` of this rank says to a checkpoint of the rank's own step."""
    loaded = LoadedModel(nn.Identity(), config_of(cityscapes), load_class_file("cityscapes"), 0)
    here = loaded._replace(step=steps[dist.rank()])
    evaluate.load_model = lambda *paths, device: here
    return refusal(run_eval, arguments("runs/x"))


def test_ranks_that_have_loaded_different_checkpoints_do_not_evaluate(run_ranks, cityscapes):
    """As when a run replaces best.pt meanwhile."""
    found = run_ranks(2, evaluated_at, (500, 1000), cityscapes)
    (kind, code, said), second = found
    assert second == (kind, code, said)
    assert (kind, code) == ("CheckpointError", 4)
    assert said.startswith("runs/x: replaced while the ranks were loading it (steps 500, 1000); ")


def test_images_that_are_left_out_are_told(command, cityscapes, capsys):
    (cityscapes / "leftImg8bit/val/ulm/ulm_000001_000019_leftImg8bit.exr").touch()
    command()
    assert "warning: 1 image is left out, no reader" in capsys.readouterr().out


def test_normalization_that_is_not_that_of_the_training_is_said(command, capsys):
    command("data.mean=[0.485,0.456,0.406]", "data.std=[0.229,0.224,0.225]")
    first, second = [
        line for line in capsys.readouterr().err.splitlines() if "units of 0..1" in line
    ]
    assert first.startswith("segtrain: warning: data.mean: [0.485, 0.456, 0.406] is in units")
    assert "segtrain: warning: data.std" in second
    command("data.std=[250.0,250.0,250.0]")
    note = "segtrain: note: data.std: [250.0, 250.0, 250.0] here, [255.0, 255.0, 255.0] in the"
    assert note in capsys.readouterr().err


GROUPS = {"aachen": NAMES[:2], "ulm": NAMES[2:]}


def pixels_of(names, root, predictions):
    """Labels and predictions as train ids, of the pixels that are not ignored."""
    ids = load_class_file("cityscapes").train_id_of
    train_id = np.vectorize(lambda raw: ids.get(raw, 255))

    def read(folder, end):
        files = [next(folder.rglob(f"{name}_{end}.png")) for name in names]
        return train_id(np.concatenate([np.array(Image.open(file)).ravel() for file in files]))

    label, pred = read(root, "gtFine_labelIds"), read(predictions, "pred_labelIds")
    return label[label != 255], pred[label != 255]


def test_scores_of_groups_are_those_of_their_pixels(command, cityscapes, tmp_path, capsys):
    from sklearn.metrics import f1_score, jaccard_score

    pattern = re.compile(r"/val/(\w+)/")
    scores = command(group=pattern, save_predictions=tmp_path / "out")
    output = capsys.readouterr().out
    found = scores["by_group"]
    assert {row["group"]: row["num_images"] for row in found["groups"]} == {"aachen": 2, "ulm": 1}
    names, expected = [row["name"] for row in scores["classes"]], {}
    for row in found["groups"]:
        label, pred = pixels_of(GROUPS[row["group"]], cityscapes, tmp_path / "out")
        present = sorted(set(label) | set(pred))
        for title, score in (("IoU", jaccard_score), ("Dice", f1_score)):
            theirs = score(label, pred, labels=present, average=None, zero_division=0)
            by_name = dict(zip((names[i] for i in present), theirs, strict=True))
            expected[row["group"], title] = by_name
            ours = {name: x for name, x in row[title].items() if x is not None}
            assert ours == pytest.approx(by_name)
            assert row[f"m{title}"] == pytest.approx(theirs.mean())
    pair = [expected[group, "Dice"]["road"] for group in GROUPS]
    over_groups = found["over_groups"]["Dice"]["road"]
    assert over_groups == pytest.approx({"mean": mean(pair), "sd": stdev(pair)})
    assert found["over_groups"]["IoU"]["train"] == {"mean": None, "sd": None}
    assert found["over_groups"]["IoU"]["bus"] == {"mean": 0, "sd": 0}
    assert "mean and standard deviation over 2 groups" in output
    cells = [f"{100 * x:.2f}" for x in over_groups.values()]
    assert [line.split()[-2:] for line in output.splitlines() if line[:5] == "road "][1] == cells
    worst = min(found["groups"], key=lambda row: row["mIoU"])
    assert f"lowest mIoU of groups: {worst['group']} {100 * worst['mIoU']:.2f}, " in output


def test_an_image_of_no_group_is_named(command):
    with pytest.raises(ConfigError, match=r"--group \(ulm\): 2 images have no group: .*aachen"):
        command(group=re.compile("(ulm)"))


def test_the_mean_without_some_classes_stands_beside_the_mean(command, capsys):
    found = command("eval.without=[road, person]")
    rest = [x["IoU"] for x in found["classes"] if x["name"] not in ("road", "person")]
    expected = mean(x for x in rest if x is not None)
    assert found["without"] == {"classes": ["road", "person"], "mIoU": pytest.approx(expected)}
    assert f"mIoU without road, person  {100 * expected:.2f}" in capsys.readouterr().out
    assert "without" not in command()
    assert "mIoU without" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no class raod; did you mean road"):
        command("eval.without=[raod]")
    everything = ",".join(load_class_file("cityscapes").names)
    with pytest.raises(ConfigError, match="without: no class is left"):
        command(f"eval.without=[{everything}]")
