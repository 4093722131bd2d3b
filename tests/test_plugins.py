"""Code of somebody's own under names in a config: of a package or a file, never by a checkpoint.

The package is the one under "A package" in segtrain/EXTENDING.md.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from experiments import bits, forgetting, last, losses, segtrain, small, write_config
from experiments import train as train_here
from preloaded import PipedFork
from processes import Command
from torch import nn

from segtrain import plugins
from segtrain.api import Predictor, train
from segtrain.config import LossConfig, config_schema, load_config, override_config
from segtrain.data.read.image import RGB
from segtrain.data.sample.transforms import TrainTransform
from segtrain.desk.results.runs import summarize
from segtrain.errors import ConfigError
from segtrain.models import build_model
from segtrain.norm import SyncBatchNorm2d
from segtrain.score.records import load_records
from segtrain.training.losses import CrossEntropy, LossOptions, PixelMean, SegLoss
from segtrain.training.measure import training_flops
from segtrain.types import SegLogits

EXTENDING = (Path(__file__).parent.parent / "segtrain/EXTENDING.md").read_text()
WEIGHTS = [1.0, 2.0, 1.0, 1.0]
EXTRAS = {
    "loss": {"kind": "poly1", "options": {"epsilon": 2.0}, "class_weights": WEIGHTS},
    "model": {
        "backbone": "tiny",
        "backbone_options": {"widths": [8, 16, 24]},
        "arch": "fcn",
        "output_stride": 16,
        "head_channels": 8,
        "aux_channels": 8,
    },
    "optim": {"kind": "adamax", "lr": 0.01, "ema_decay": None},
    "augment": {"extra": [{"name": "Grain", "args": {"sigma": 20.0, "p": 1.0}}]},
    "eval": {"metrics": [{"name": "share"}]},
    "train": {"steps": 2, "batch_size": 4, "shares": 4},
}
MY_LOSS = """
from segtrain.config import Section, option
from segtrain.plugins import loss
from segtrain.training.losses import CrossEntropy

class Config(Section):
    factor: float = option(1.0, "of cross entropy", gt=0)
    names: tuple[str, ...] = option((), "nothing")

@loss("times", options=Config)
class Times(CrossEntropy):
    def pixel_losses(self, logits, labels):
        return self.options.config.options.factor * super().pixel_losses(logits, labels)
"""

MY_METRIC = """
import numpy as np
from segtrain.plugins import metric

@metric("sums")
class Sums:
    def __init__(self, classes, options):
        pass

    def counts(self, label, pred):
        return np.array([1, label.sum()])

    def scores(self, totals):
        return {"images": totals[0], "labels": totals[1]}
"""


@pytest.fixture(autouse=True)
def forgotten():
    with forgetting():
        yield


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder into which pip has installed the package of the README."""
    text = EXTENDING.partition("## A package\n")[2]
    folder = tmp_path_factory.mktemp("extras")
    for name, language in (("pyproject.toml", "toml"), ("segtrain_extras.py", "python")):
        block = re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)[1]
        (folder / name).write_text(block)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--no-index", "--target", str(folder / "site"), str(folder)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def extras(installed, monkeypatch):
    """The package is installed for this process and those that it starts."""
    monkeypatch.syspath_prepend(installed)
    paths = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{installed}{os.pathsep}{paths}")
    return installed


@pytest.fixture(scope="module")
def whole(installed, tmp_path_factory, data):
    """A config of the names in the package, and the run of its steps on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder / "extras.yaml", small(data, **EXTRAS))
    with forgetting(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(installed)
        assert segtrain("train", config, "--nproc", 1, "--output", folder / "run") == 0
    return config, folder / "run"


@pytest.fixture(scope="module")
def once(tmp_path_factory, data):
    """As `trained`, for all tests."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "my_loss.py").write_text(MY_LOSS)
    loss = {"kind": "times", "options": {"factor": 3.0}}
    options = small(data, loss=loss, train={"steps": 2})
    config = write_config(folder / "c.yaml", {"plugins": ["./my_loss.py"], **options})
    with forgetting():
        assert segtrain("train", config, "--nproc", 1, "--output", folder / "run") == 0
    return folder


@pytest.fixture
def trained(once, lab):
    """A config with `my_loss.py` beside it, and a copy of the run of its two steps."""
    run = lab.folder / "run"
    shutil.copytree(once / "run", run)
    yield once / "c.yaml", run
    (once / "my_loss.py").write_text(MY_LOSS)


def with_two_ranks(lab, *words):
    """Such a command, which has ended well."""
    command = Command(lab.folder, *words, "--nproc", 2)
    assert command.wait() == 0, command.errors
    return command


def train_with(site, config, directory):
    """Goes on with a run in a rank, to which the package is installed."""
    sys.path.insert(0, str(site))
    return train_here(config, directory, True)


def test_the_package_of_the_readme_trains_and_resumes_with_equal_bits(
    extras, whole, lab, data, run_ranks
):
    """Six kinds by their names alone; 1 rank, and 2 ranks that go on after one."""
    config, alone = whole
    stopped = lab.folder / "stopped"
    lab.done("verify", alone, "--nproc", 1)
    lab.done("train", config, "--nproc", 1, "--output", stopped, "--until", 1)
    # Loader processes make the plugin's transform.
    options = small(data, data={"num_workers": 1}, **EXTRAS)
    other = write_config(lab.folder / "other.yaml", options)
    assert run_ranks(2, train_with, extras, other, stopped) == [0, 0]
    assert bits(last(stopped)) == bits(last(alone))
    kinds = {(one["kind"], one["name"]) for one in last(alone).plugins}
    used = {"poly1", "tiny", "fcn", "adamax", "Grain", "share"}
    assert {name for _, name in kinds} == used
    assert len({kind for kind, _ in kinds}) == 6
    assert {one["package"] for one in last(alone).plugins} == {"segtrain-extras 1.0"}
    environment = json.loads((alone / "environment.json").read_text())
    assert environment["plugins"] == last(alone).plugins


def test_each_of_them_does_what_it_says(extras, whole):
    """The loss is its formula, the optimizer has the state of Adamax, and the image has grain."""
    config = load_config(whole[0])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (2, 5, 7), generator=generator)
    loss = SegLoss(config.loss, torch.device("cpu"))
    found = loss.objective(sums := loss(SegLogits(logits), labels), sums)
    pixels = F.cross_entropy(logits, labels, reduction="none")
    weights = torch.tensor(WEIGHTS)[labels]
    expected = (weights * (pixels + 2 * (1 - (-pixels).exp()))).sum() / weights.sum()
    torch.testing.assert_close(found, expected)
    states = last(whole[1]).optimizer["state"].values()
    assert all({"exp_avg", "exp_inf"} <= state.keys() for state in states)
    still = {"scale_range": (1.0, 1.0), "rotate_deg": 0.0, "blur_prob": 0.0, "color_prob": 0.0}
    augment = config.augment.model_copy(update=still)
    image, label = np.full((80, 80, 3), 100, np.uint8), np.zeros((80, 80), np.uint8)
    changed, _ = TrainTransform(augment, form=RGB)(image, label, np.random.default_rng(0))
    assert 17 < changed.std() < 23


def test_bench_counts_the_operations_of_its_network(extras, whole):
    """They are more than those of its first convolution, 5x5 of stride 4."""
    config = load_config(whole[0])
    height, width = config.augment.crop_size
    assert training_flops(config, 4) > 3 * 2 * 25 * 3 * 8 * (height // 4) * (width // 4)


def test_a_metric_counts_every_image_once(extras, whole, lab, data):
    """On two ranks, whose images are not as many; also that of the package."""
    (lab.folder / "sums.py").write_text(MY_METRIC)
    file, folder = lab.folder / "scores.json", lab.folder / "predicted"
    words = ("--plugin", extras / "segtrain_extras.py", "--plugin", lab.folder / "sums.py")
    words += ("--set", "eval.metrics=[{name: share}, {name: sums}]", "--json", file)
    command = with_two_ranks(lab, "eval", whole[1], *words, "--save-predictions", folder)
    labels = [cv2.imread(str(x), -1) for x in sorted((data / "labels" / "val").glob("*.png"))]
    preds = [cv2.imread(str(x), -1) for x in sorted(folder.glob("*.png"))]
    pixels = np.concatenate([p[y != 255] for y, p in zip(labels, preds, strict=True)])
    shares = np.bincount(pixels, minlength=4) / pixels.size
    found = json.loads(file.read_text())["metrics"]
    assert found["share"] == dict(zip(("ground", "plant", "water", "sand"), shares, strict=True))
    assert found["sums"] == {"images": 3, "labels": sum(int(y.sum()) for y in labels)}
    assert f"share: sand {shares[3]:g}" in command.output


def test_a_score_of_a_metric_is_logged_and_chooses_the_best(lab, data, run_ranks):
    """On two ranks, whose images are not as many; one that no evaluation finds is told."""
    (lab.folder / "sums.py").write_text(MY_METRIC)
    chosen = {"every_steps": 1, "best": "sums/labels", "metrics": [{"name": "sums"}]}
    options = small(data, train={"steps": 2}, eval=chosen)
    config = write_config(lab.folder / "c.yaml", {"plugins": ["./sums.py"], **options})
    assert run_ranks(2, train_here, config, lab.folder / "run") == [0, 0]
    labels = [cv2.imread(str(x), -1) for x in sorted((data / "labels" / "val").glob("*.png"))]
    total = sum(int(label.sum()) for label in labels)
    found = summarize(lab.folder / "run")
    assert (found.best, found.best_by) == ((1, total), "sums/labels")
    assert losses(lab.folder / "run", "metric/sums/images") == [3, 3]
    assert last(lab.folder / "run").best["step"] == 1  # the second is as high
    # What has chosen the best is of no use to eval, which may do without the metric.
    lab.done("eval", lab.folder / "run", "--set", "eval.metrics=[]")
    words = ("train", config, "--nproc", 1, "--output", lab.folder / "b", "--set")
    said = lab.command(*words, "eval.best=sums/area").err
    assert "eval.best: no score sums/area was found, only sums/images, sums/labels" in said
    said = lab.command(*words, "task=multilabel").err
    assert "eval.metrics: they take one class a pixel" in said


def test_where_the_package_is_missing_a_checkpoint_asks_for_it_by_name(
    installed, whole, lab, data, monkeypatch
):
    run, image = whole[1], data / "images" / "val" / "0.png"
    weights = lab.folder / "w.safetensors"
    for words in (
        ("eval", run),
        ("predict", run, image, "--output", lab.folder / "p"),
        ("export", run, "--format", "safetensors", "--output", weights),
    ):
        said = lab.refused(*words, code=4)
        for what in ("backbone 'tiny'", "head 'fcn'"):
            assert f"needs the {what} of a plugin that is not imported here" in said
        assert "loss" not in said, "the model needs none of what has trained it"
        assert "install segtrain-extras 1.0, or give --plugin segtrain_extras" in said
    lab.done("runs", run.parent)  # which reads numbers
    # So do these, of scores that are kept; a page shows no pictures then.
    other = shutil.copytree(run, lab.folder / "other")
    assert "there is no difference" in lab.done("compare", run, other).out
    said = lab.done("report", run, "--output", lab.folder / "p.html").err
    assert "no pictures: " in said
    assert "needs the backbone 'tiny' of a plugin" in said
    page = (lab.folder / "p.html").read_text()
    assert "data:image/webp" not in page
    assert f"<b>{100 * load_records(run).scores.mean_iou:.1f}</b>mIoU" in page
    assert lab.done("report", run, other, "--output", lab.folder / "p.html").err == ""
    assert "freed" in lab.done("runs", "--clear", other).out
    (run / "evaluation.npz").rename(run / "kept.npz")
    assert "needs the backbone 'tiny'" in lab.refused("compare", run, other, code=4)
    (run / "kept.npz").rename(run / "evaluation.npz")
    said = lab.refused("train", run, "--nproc", 1, "--resume")
    assert "config.yaml" in said
    assert "the name of a loss that plugins import or an installed package offers" in said
    # And what a file without the record says, of another segtrain.
    monkeypatch.syspath_prepend(installed)
    lab.done("export", run, "--format", "safetensors", "--output", weights)
    lab.done("predict", weights, image, "--output", lab.folder / "p")


def test_a_file_beside_the_config_trains_and_its_options_count(trained, lab, data, monkeypatch):
    """With three times the factor the first loss is three times as large, from equal weights."""
    config, run = trained
    file = config.with_name("my_loss.py")
    shown = yaml.safe_load(lab.done("config", "show", config).out)
    assert shown["plugins"] == [str(file)]
    assert shown["loss"]["options"] == {"factor": 3.0, "names": []}
    two = lab.folder / "two"
    with_two_ranks(lab, "train", config, "--set", "train.steps=1", "--output", two)
    (record,) = last(two).plugins
    assert record["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr("subprocess.Popen", PipedFork)
    options = yaml.safe_load(config.read_text())
    os.chdir(config.parent)
    overrides = ["train.steps=1", "loss.options.factor=1.0"]
    assert train(options, output=lab.folder / "dict", overrides=overrides).best
    one, three = (losses(x)[0] for x in (lab.folder / "dict", run))
    assert three == pytest.approx(3 * one, rel=1e-5)


def test_a_wrong_option_of_a_plugin_is_refused_at_its_line(lab, data):
    (lab.folder / "my_loss.py").write_text(MY_LOSS)
    text = "plugins:\n- ./my_loss.py\n\nloss:\n  kind: times\n  options:\n    faktor: 2.0\n"
    config = lab.folder / "c.yaml"
    config.write_text(f"{text}{yaml.safe_dump(small(data))}")
    message = ":7: loss.options.faktor: unknown key; did you mean 'factor'?"
    assert f"{config}{message}" in lab.refused("train", config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loss.options.factor=-1", "loss.options.factor: must be greater than 0, got -1"),
        ("loss.options.factor=x", "loss.options.factor: must be a number, got 'x'"),
        ("loss.options.names=[3]", "loss.options.names[0]: must be text, got 3"),
        ("loss.kind=time", "got 'time'; did you mean times?"),
        ("loss.kind=dice", "has no effect: dice has no options of its own; remove it"),
        ("loss.label_smoothing=0.1", "loss.label_smoothing: has no effect with kind times"),
        ("plugins=[json]", "json: registers nothing by segtrain.plugins"),
        ("plugins=[no.such]", "no.such: cannot be imported: ModuleNotFoundError"),
        ("plugins=[./gone.py]", "gone.py: cannot be imported: no such file or directory"),
        ("plugins=[./bad.py]", "bad.py: cannot be imported: ZeroDivisionError"),
        ("plugins=['a b']", "expected a module, such as my_pkg.losses, or a file"),
        ("eval.metrics=[{name: times}]", "the name of a metric that plugins import"),
        ("eval.best=times/x", "eval.best: no metric times in eval.metrics; name it there"),
        ("eval.best=times", "must be 'miou' or 'mdice' or METRIC/SCORE or a list"),
    ],
)
def test_what_no_plugin_is_is_refused(lab, data, change, message):
    (lab.folder / "my_loss.py").write_text(MY_LOSS)
    (lab.folder / "bad.py").write_text("1 / 0")
    options = small(data, loss={"kind": "times", "options": {"factor": 2.0}})
    config = write_config(lab.folder / "c.yaml", {"plugins": ["./my_loss.py"], **options})
    os.chdir(lab.folder)
    assert message in lab.refused("train", config, "--set", change)


def test_what_a_pixel_costs_is_never_replaced_by_smoothed_cross_entropy():
    class Ten(CrossEntropy):
        def pixel_losses(self, logits, labels):
            return torch.full(labels.shape, 10.0)

    class Smoothed(Ten):
        def sums(self, logits, labels):
            return PixelMean.sums(self, logits, labels)

    scene = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 4, dtype=torch.long)
    smoothing = LossOptions(LossConfig(label_smoothing=0.1))
    for loss in (Ten(LossOptions(LossConfig())), Smoothed(smoothing)):
        assert loss.loss_from_sums(loss.sums(*scene)) == 10
    with pytest.raises(ConfigError, match=r"label_smoothing: would take the place of what Ten"):
        Ten(smoothing)


def test_changed_code_is_refused_where_a_run_goes_on_and_told_where_it_is_used(trained, lab):
    config, run = trained
    file = config.with_name("my_loss.py")
    file.write_text(MY_LOSS.replace("return ", "return 2 * "))
    longer = ("--set", "train.steps=3", "--set", "train.shares=null")
    said = lab.refused("train", config, "--nproc", 1, "--output", run, "--resume", *longer)
    assert f"plugins: the code of loss times of {file}: SHA-256" in said
    told = lab.done("eval", run, "--plugin", file).err
    assert f"warning: {run}/checkpoints/best.pt: plugins: the code of loss times of" in told
    words = ("--output", run, "--resume", "--accept-changes", *longer)
    lab.done("train", config, "--nproc", 1, *words)
    assert last(run).plugins[0]["sha256"] == plugins.registered("loss", "times").sha256


@pytest.mark.parametrize(
    ("source", "package", "way"),
    [
        ("my_pkg.losses", None, "give --plugin my_pkg.losses,"),
        ("./my loss;.py", None, "give --plugin './my loss;.py',"),
        ("; touch file #", None, "give --plugin MODULE or FILE.py,"),
        ("x\n$(touch file)", "a; b", "give --plugin MODULE or FILE.py,"),
        ("my_pkg", "my-pkg", "; install my-pkg, or give --plugin my_pkg"),
    ],
)
def test_a_strangers_words_are_no_command_to_paste(source, package, way):
    record = {"kind": "loss", "name": "gone", "sha256": 64 * "0"}
    (line,) = plugins.missing([record | {"source": source, "package": package}])
    assert way in line


def test_a_moved_file_is_named_by_the_user(trained, lab):
    """In every command; the checkpoint says which hash it had, not what to import."""
    config, run = trained
    file, moved = config.with_name("my_loss.py"), lab.folder / "elsewhere.py"
    file.rename(moved)
    # What has trained a model is not needed where it predicts.
    words = ("train", run / "checkpoints" / "last.pt", "--nproc", 1, "--finish", 1, "--output")
    shutil.copytree(run, lab.folder / "other")
    for command in (("eval", run), ("report", run), ("compare", run, lab.folder / "other")):
        lab.done(*command)
    Predictor(run)
    own = run / "config.yaml"
    text = own.read_text()
    own.unlink()
    said = lab.refused(*words, lab.folder / "branch", code=4)
    own.write_text(text)
    assert "needs the loss 'times' of a plugin that is not imported here (SHA-256" in said
    assert f"if you trust that code, give --plugin {file}" in said
    lab.done("eval", run, "--plugin", moved)
    plugins.load(str(moved))
    Predictor(run)
    lab.done("train", run, "--nproc", 1, "--resume", "--set", f"plugins=[{moved}]")
    branch, own = lab.folder / "branch", run / "config.yaml"
    own.write_text(own.read_text().replace(str(file), str(moved)))
    words = ("--output", branch, "--plugin", moved)
    lab.done("train", run, "--nproc", 1, "--finish", 1, *words)
    assert load_config(branch / "config.yaml").plugins == (str(moved),)


def test_verify_asks_for_the_plugin_alone(trained, lab):
    """A near name of segtrain's own is no second mistake, either."""
    file = trained[1] / "config.yaml"
    text = file.read_text()
    plugins._absent.clear()
    for kind in ("times", "fokal"):
        file.write_text(text.replace("kind: times", f"kind: {kind}"))
        (line,) = lab.refused("verify", trained[1]).splitlines()
        assert "plugins: not imported: what is only looked at" in line
        assert line.endswith(f"give --plugin {trained[0].with_name('my_loss.py')}")


HOSTILE = "from pathlib import Path\nPath({!r}).touch()\n"


def test_no_checkpoint_makes_code_run(trained, lab, data, monkeypatch):
    """It names files beside it, modules, and names of entry points that nobody has installed."""
    config, run = trained
    touched, evil, bare = (lab.folder / name for name in ("touched", "evil.py", "bare.pt"))
    evil.write_text(HOSTILE.format(str(touched)) + MY_LOSS)
    monkeypatch.syspath_prepend(lab.folder)
    os.chdir(lab.folder)
    content = torch.load(run / "checkpoints" / "best.pt", weights_only=True)
    commands = (
        ("eval", bare),
        ("predict", bare, data / "images/val/0.png", "--output", lab.folder / "p", "--overwrite"),
        ("export", bare, "--format", "safetensors", "--output", lab.folder / "o.safetensors"),
    )
    sources = ("evil", "./evil.py", str(evil), "os")
    for i, source in enumerate(sources):
        settings = json.loads(content["config"]) | {"plugins": [source]}
        content["config"] = json.dumps(settings, indent=1)
        content["plugins"][0] |= {"source": source, "package": None}
        torch.save(content, bare)
        lab.done(*commands[i % 3])  # without the loss
        torch.save({**content, "plugins": None}, bare)
        plugins._absent.clear()
        said = lab.refused(*commands[(i + 1) % 3], code=4)
        assert "the name of a loss that plugins import" in said
    # The directory of somebody's run, which is only looked at; verify computes its steps.
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(config.with_name("my_loss.py")), str(evil)))
    for words in (("report", run), ("compare", run, run), ("runs", run), ("verify", run)):
        lab.command(*words)
    # With the user's word for other code under that name, the file's own word still counts nothing.
    good = config.with_name("my_loss.py")
    lab.done("eval", bare, "--plugin", good)
    content |= torch.load(run / "checkpoints" / "last.pt", weights_only=True) | {
        "config": content["config"]
    }
    (run / "config.yaml").write_text(text)
    other, branch = run / "checkpoints" / "other.pt", lab.folder / "branch"
    torch.save(content, other)
    lab.done("train", other, "--nproc", 1, "--finish", 1, "--output", branch)
    assert load_config(branch / "config.yaml").plugins == (str(good),)
    assert not touched.exists()
    assert "evil" not in sys.modules


class Ladder(nn.Module):
    """Features at the strides of `kernels`, one after the other."""

    def __init__(self, *steps, inner=nn.Identity, norm=nn.BatchNorm2d):
        super().__init__()
        self.stages = nn.ModuleList()
        width = 3
        for step in steps:
            conv = nn.Conv2d(width, width + 2, 3, step, 1)
            self.stages.append(nn.Sequential(conv, norm(width + 2), inner()))
            width += 2

    def forward(self, images):
        maps = []
        for stage in self.stages:
            images = stage(images)
            maps.append(images)
        return {f"c{i}": x for i, x in enumerate(maps)}


def ladder_model(data, make):
    plugins.backbone("ladder")(lambda model, *, norm: make())
    options = {"backbone": "ladder", "head_channels": 8, "aux_channels": 8, "output_stride": 16}
    return override_config(small(data, model=options), [], source="c").model


@pytest.mark.parametrize("steps", [(4, 2, 2), (2, 2, 2, 2), (4, 4, 1)])
def test_any_module_with_features_at_strides_is_a_backbone(data, steps):
    """Its maps are those that it returns alone, and its batch norm is segtrain's."""
    torch.manual_seed(0)
    network = Ladder(*steps).double()
    alone = list(network.eval()(images := torch.randn(2, 3, 65, 97).double()).values())
    config = ladder_model(data, lambda: network)
    model = build_model(config, num_classes=3, norm=SyncBatchNorm2d).double().eval()
    kinds = {type(x) for x in model.backbone.modules() if "BatchNorm" in type(x).__name__}
    assert kinds == {SyncBatchNorm2d}
    low = steps.index(4) if 4 in steps else 1
    found = model.backbone(images)
    for one, other in zip(found, (alone[low], alone[-2], alone[-1]), strict=True):
        assert torch.equal(one, other)
    assert model.backbone.channels == tuple(x.shape[1] for x in found)
    assert model.backbone.strides == tuple(2 ** round(np.log2(65 / x.shape[2])) for x in found)
    assert model(images).out.shape == (2, 3, 65, 97)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ladder(4, 2), r"returns maps of shapes \[\(2, 5, 64, 80\), "),
        (lambda: Ladder(2, 4, 2), "one of stride 4 before the last two"),
        (lambda: Ladder(4, 2, 4), "is of stride 32, and model.output_stride is 16"),
        (lambda: Ladder(4, 2, 2, inner=nn.Dropout), "draws random numbers"),
        (
            lambda: Ladder(4, 2, 2, norm=lambda n: nn.BatchNorm2d(n, affine=False)),
            "without weights",
        ),
        (lambda: Ladder(4, 2, 2, inner=nn.Flatten), "cannot be tried on images"),
        (lambda: "ladder", "expected a torch.nn.Module, found str"),
    ],
)
def test_a_module_that_cannot_be_one_is_refused(data, make, message):
    with pytest.raises(ConfigError, match=message):
        build_model(ladder_model(data, make), num_classes=3)


def test_two_plugins_and_segtrains_own_do_not_share_a_name(tmp_path, data):
    (tmp_path / "one.py").write_text(MY_LOSS)
    (tmp_path / "two.py").write_text(MY_LOSS)
    (tmp_path / "own.py").write_text(MY_LOSS.replace('"times"', '"dice"'))
    for files, message in (
        (["./one.py", "./two.py"], "loss times: .*two.py and .*one.py both register it"),
        (["./own.py"], "'dice' is segtrain's and that of .*own.py; rename the latter"),
    ):
        options = {"plugins": files, **small(data, loss={"kind": "dice"})}
        with pytest.raises(ConfigError, match=message):
            load_config(write_config(tmp_path / "c.yaml", options))


def test_the_hash_of_a_package_is_that_of_all_its_files(tmp_path, monkeypatch):
    package = tmp_path / "mine_too"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("FACTOR = 1")
    (package / "losses.py").write_text("from mine_too.helper import FACTOR" + MY_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for factor in (1, 1, 2):
        (package / "helper.py").write_text(f"FACTOR = {factor}")
        for name in [name for name in sys.modules if name.startswith("mine_too")]:
            del sys.modules[name]
        assert plugins.load("mine_too.losses") == "mine_too.losses"
        found.append(plugins.registered("loss", "times").sha256)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "name", ["Adafactor", pytest.param("ASGD", marks=pytest.mark.slow("checkpoint", "training"))]
)
def test_what_an_optimizer_keeps_comes_back_whatever_its_shape(lab, data, name):
    """Adafactor's rows and columns are smaller than their weight, and ASGD has numbers alone."""
    made = f"return torch.optim.{name}(groups, lr)"
    (lab.folder / "my_optimizer.py").write_text(
        "import torch\nfrom segtrain.plugins import optimizer\n"
        f"@optimizer('mine')\ndef make(groups, lr, options):\n    {made}\n"
    )
    options = small(data, optim={"kind": "mine", "lr": 0.01}, train={"steps": 2})
    config = write_config(lab.folder / "c.yaml", {"plugins": ["./my_optimizer.py"], **options})
    alone, stopped = lab.folder / "alone", lab.folder / "stopped"
    lab.done("train", config, "--nproc", 1, "--output", alone)
    lab.done("train", config, "--nproc", 1, "--output", stopped, "--until", 1)
    lab.done("train", config, "--nproc", 1, "--output", stopped, "--resume")
    assert bits(last(stopped)) == bits(last(alone))


def test_what_is_no_optimizer_or_head_is_refused(lab, data):
    (lab.folder / "no.py").write_text(
        "from segtrain.plugins import head, optimizer\n"
        "head('no')(lambda *_, **__: 3)\noptimizer('none')(lambda *_: 3)\n"
    )
    config = write_config(lab.folder / "c.yaml", {"plugins": ["./no.py"], **small(data)})
    for change, message in (
        ("model.arch=no", "expected a segtrain.models.blocks.Head, found int"),
        ("optim.kind=none", "expected a torch.optim.Optimizer whose groups have lr"),
    ):
        outcome = lab.command("train", config, "--nproc", 1, "--set", change)
        assert outcome.code == 2
        assert message in outcome.err


@pytest.mark.parametrize(
    ("option", "says", "message"),
    [
        ({"dropout": 0.3}, {}, None),
        ({"dropout": 0.3}, {"ignores": "dropout"}, "dropout: has no effect with arch mine; remove"),
        ({"dropout": 0.3}, {"ignores": "drop"}, "mine says that it uses or ignores drop, which is"),
        ({"ppm_channels": 7}, {}, "model.ppm_channels: has no effect with arch mine"),
        ({"ppm_channels": 7}, {"uses": "ppm_channels"}, None),
    ],
)
def test_a_plugin_says_which_of_segtrains_options_serve_it(data, option, says, message):
    plugins.head("mine", **says)(object)
    config = small(data, model={"arch": "mine", **option})
    refusal = pytest.raises(ConfigError, match=message) if message else nullcontext()
    with refusal:
        override_config(config, [], source="c")


def test_a_class_that_does_not_register_itself_is_an_entry_point_too(tmp_path, monkeypatch, data):
    """And a name that two packages offer is nobody's."""
    (tmp_path / "bare_losses.py").write_text(
        "from segtrain.training.losses import CrossEntropy\nclass Bare(CrossEntropy): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def offer(package):
        about = tmp_path / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        points = "[segtrain.losses]\nbare = bare_losses:Bare\ngone = no_such_module:Loss\n"
        (about / "entry_points.txt").write_text(points)

    def config_of(kind):
        return override_config(small(data, loss={"kind": kind}), [], source="c")

    offer("bare")
    assert config_of("bare").loss.kind == "bare"
    assert plugins.registered("loss", "bare").made.__name__ == "Bare"
    with pytest.raises(ConfigError, match=r"no_such_module:Loss.: cannot be imported"):
        config_of("gone")
    plugins._plugins.clear()
    offer("other")
    for kind in ("bare", "gone"):
        with pytest.raises(ConfigError, match="several installed packages offer it"):
            config_of(kind)


def test_options_that_take_any_key_are_refused():
    from pydantic import BaseModel

    class Loose(BaseModel):
        factor: float = 1.0

    with pytest.raises(ConfigError, match="take keys that are misspelt"):
        plugins.loss("loose", options=Loose)(object)


def test_the_schema_has_the_names_and_options_of_plugins(lab):
    (lab.folder / "my_loss.py").write_text(MY_LOSS)
    before = json.dumps(config_schema())
    assert '"times"' not in before
    out = lab.done("config", "schema", "--plugin", lab.folder / "my_loss.py").out
    loss = json.loads(out)["$defs"]["LossConfig"]["properties"]
    assert {"enum": ["times"]} in loss["kind"]["anyOf"]
    assert "factor" in json.dumps(loss["options"])


def test_help_and_a_config_import_neither_torch_nor_what_nobody_names(extras, lab, data):
    code = "import sys; from segtrain import cli; cli.main(['config', 'show', sys.argv[1]]); "
    code += "print(sorted({'torch', 'segtrain_extras'} & sys.modules.keys()))"
    config = lab.config(data)
    done = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_callback_sees_every_step_on_each_rank_and_may_end_the_training(data, lab):
    """It writes what it sees, and ends the run after a step of its options."""
    (lab.folder / "tell.py").write_text(
        """
from pathlib import Path

from segtrain.config import Section
from segtrain.distributed import collectives as dist
from segtrain.plugins import callback
from segtrain.training.part import Part


class Options(Section):
    folder: str
    last: int


@callback("tell", options=Options)
class Tell(Part):
    def __init__(self, options):
        self.options = options

    def after_step(self, run, local, result):
        with Path(self.options.folder, f"rank{dist.rank()}.txt").open("a") as file:
            print(result.step, result.loss.item(), file=file)
        if result.step == self.options.last:
            run.step_sync.ask(end=True)
"""
    )
    options = {"folder": str(lab.folder), "last": 2}
    values = {"callbacks": [{"name": "tell", "options": options}], "every_steps": 1}
    config = lab.config(data, log=values, train={"steps": 20})
    config.write_text(f"plugins: [./tell.py]\n{config.read_text()}")
    run = lab.folder / "run"
    with_two_ranks(lab, "train", config, "--output", run)
    told = [(lab.folder / f"rank{i}.txt").read_text().splitlines() for i in range(2)]
    assert told[0] == told[1]
    steps = [int(line.split()[0]) for line in told[0]]
    assert steps[:2] == [1, 2]
    assert last(run).step == steps[-1] < 20  # the ranks end together, a step later
    assert f"ended after {steps[-1]} of 20 steps\n" in (run / "train.log").read_text()
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line["train/loss"] for line in logged if "train/loss" in line]
    assert found == pytest.approx([float(line.split()[1]) for line in told[0]], rel=1e-6)
    wrong = lab.folder / "wrong.yaml"
    wrong.write_text(config.read_text().replace("last: 2", "lost: 2"))
    said = lab.refused("train", wrong, "--output", lab.folder / "no")
    assert "log.callbacks[0].options.lost: unknown key" in said
