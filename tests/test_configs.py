"""The experiment files that come with segtrain: complete, documented and buildable."""

import math
import re
from functools import cache
from itertools import repeat
from pathlib import Path

import pytest
import torch
from experiments import on_meta
from stepping import train_steps
from torch import nn

from segtrain.checkpoint import load_model
from segtrain.config import Config, ModelConfig, load_config, recipes
from segtrain.config.experiment import config_warnings
from segtrain.data.read.classes import load_class_file
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.run.directory import config_differences
from segtrain.training.optim.layers import parameter_groups
from segtrain.training.optim.schedule import learning_rate
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
NAMES = [path.stem for path in CONFIGS]


# A full model takes seconds; these differ from each other in kind.
MARKS = {
    **dict.fromkeys(("demo", "voc_deeplabv3_mobilenet_v3"), ()),
    **dict.fromkeys(
        ("cityscapes_pspnet_r50", "ade20k_deeplabv3plus_r101"),
        pytest.mark.slow("models", "training"),
    ),
}

every_config = pytest.mark.parametrize("path", CONFIGS, ids=NAMES)


def load(name: str) -> Config:
    return load_config(next(path for path in CONFIGS if path.stem == name))


class_file = cache(load_class_file)


def num_classes(config: Config) -> int:
    return class_file(config.data.classes).num_classes


@every_config
def test_it_is_documented_and_every_option_has_an_effect(path):
    text = path.read_text()
    header = text.partition("\ndata:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for word in ("Recipe: ", "Hardware: ", "Duration: ", "Expected: "):
        assert header.count(word) == 1, f"{word!r} in the comment at the top"
    if "published mIoU" in header_of(path):
        assert "not yet reproduced with segtrain" in header_of(path).lower()
    assert [line for line in text.splitlines() if len(line) > 100] == []
    assert config_warnings(load_config(path)) == []
    for numbers in re.findall(r"#   class_weights: \[(.*)\]", text):
        assert len(numbers.split(",")) == load_class_file("camvid").num_classes


@every_config
def test_its_model_has_one_logit_for_each_class_and_its_numbers_fit(path):
    config = load_config(path)
    model, crop = built(config), config.augment.crop_size
    heads = [head for head in (model.head, model.aux_head) if head is not None]
    assert {head.classifier.conv.out_channels for head in heads} == {num_classes(config)}
    assert len(heads) == 1 + config.model.aux_head
    if config.loss.class_weights is not None:
        assert len(config.loss.class_weights) == num_classes(config)
    if config.model.align_corners:  # crops line up with features
        assert [size for size in crop + (config.eval.crop_size or ()) if size % 8 != 1] == []
    if (config.model.pretrained or "").startswith("IMAGENET1K"):
        assert config.model.stem == "7x7"


# What the sources' files say, as they were read; nothing here is computed from the configs.
MMSEG = [n for n in NAMES if re.fullmatch(r"cityscapes_.*_r\d+(_769)?|voc_\w+_r101", n)]
SEMSEG = [n for n in NAMES if n.endswith("_semseg")]
SMALL_OR_D16 = [f"{arch}_mobilenet_v2" for arch in ("pspnet", "deeplabv3plus")]
SMALL_OR_D16 += [f"{arch}_r101_d16" for arch in ("deeplabv3", "deeplabv3plus")]


def half(rate: float, end: float, power: float = 0.9) -> float:
    """mmengine's PolyLR at half of the steps: decay from `rate` to `end`."""
    return (rate - end) * 0.5**power + end


POLY = (0.01, half(0.01, 1e-4), 1e-4)
TO_ZERO, TWICE = ((rate, half(rate, 0), 0.0) for rate in (0.01, 0.02))
WARMED = (0.01 * 0.001, *TO_ZERO[1:])
# The learning rate at the first step, in the middle and at the last step; steps, batch size, crop.
SOURCES = {
    **{n: (POLY, (80_000, 8, (769, 769) if "769" in n else (512, 1024))) for n in MMSEG},
    **{n: (POLY, (40_000, 16, (512, 512))) for n in MMSEG if n.startswith("voc")},
    **{n: (TO_ZERO, (200 * -(-2975 // 16), 16, (713, 713))) for n in SEMSEG if "city" in n},
    **{n: (TO_ZERO, (100 * (20210 // 16), 16, (473, 473))) for n in SEMSEG if "ade" in n},
    **{n: (TO_ZERO, (50 * (10582 // 16), 16, (473, 473))) for n in SEMSEG if "voc" in n},
    **{f"cityscapes_{n}": (POLY, (80_000, 8, (512, 1024))) for n in SMALL_OR_D16},
    "cityscapes_deeplabv3plus_r101_paddleseg": (TO_ZERO, (80_000, 8, (769, 769))),
    "cityscapes_deeplabv3plus_r101_detectron2": (WARMED, (90_000, 16, (512, 1024))),
    "cityscapes_pspnet_r50_l2sp": (TO_ZERO, (30_000, 16, (816, 816))),
    "ade20k_pspnet_r50": (POLY, (80_000, 16, (512, 512))),
    "ade20k_deeplabv3plus_r101": (POLY, (160_000, 16, (512, 512))),
    "voc_deeplabv3_mobilenet_v3": (TWICE, (30 * -(-10582 // 32), 32, (480, 480))),
}
PUBLISHED = sorted(SOURCES)
# Dilations of the 3x3 convolutions in the last two stages of a ResNet.
CONTRACTED_101 = ([1] + [2] * 22, [2, 4, 4])
DILATIONS = {
    **{n: CONTRACTED_101 if "r101" in n else ([1] + [2] * 5, [2, 4, 4]) for n in MMSEG},
    **{n: ([2] * (23 if "r101" in n else 6), [4] * 3) for n in SEMSEG},
    "cityscapes_deeplabv3_r101_d16": ([1] * 23, [1, 2, 4]),
    "cityscapes_deeplabv3plus_r101_d16": ([1] * 23, [1, 2, 4]),
    "cityscapes_deeplabv3plus_r101_detectron2": ([1] * 23, [2, 4, 8]),
    "cityscapes_deeplabv3plus_r101_paddleseg": ([2] * 23, [4, 8, 16]),
    "cityscapes_pspnet_r50_l2sp": ([1] + [2] * 5, [2, 4, 4]),
    "ade20k_pspnet_r50": ([1] + [2] * 5, [2, 4, 4]),
    "ade20k_deeplabv3plus_r101": CONTRACTED_101,
}
# For each parameter group: factor of the rate, weight decay.
GROUPS = {
    **{n: {(1.0, 5e-4)} for n in MMSEG},
    **{n: {(1.0, 1e-4), (10.0, 1e-4)} for n in SEMSEG},
    "cityscapes_pspnet_r50_l2sp": {(1.0, 1e-4), (1.0, 1e-3), (1.0, 0.0)},
    "cityscapes_deeplabv3plus_r101_detectron2": {(1.0, 1e-4), (1.0, 0.0)},
    "cityscapes_deeplabv3plus_r101_paddleseg": {(1.0, 4e-5)},
}


def built(config: Config) -> nn.Module:
    """The model of a config without numbers, at full size, to look at."""
    return built_once(config.model, num_classes(config))


@cache  # many recipes share a model
def built_once(model: ModelConfig, num_classes: int) -> nn.Module:
    return on_meta(lambda: build_model(model, num_classes=num_classes))


def loaded_names(config: Config, model: nn.Module) -> list[str]:
    """The weights that model.pretrained fills; the files of the published recipes are not here."""
    names = [name for name, _ in model.named_parameters()]
    return [n for n in names if n.startswith("backbone.")] if config.model.pretrained else []


def test_every_published_recipe_is_held_by_numbers():
    own = {"demo", *(name for name in NAMES if name.startswith("camvid"))}
    assert set(PUBLISHED) == set(NAMES) - own


def test_the_readme_lists_each_recipe_with_the_scores_of_its_header():
    rows = (CONFIGS[0].parent / "README.md").read_text().splitlines()
    rows = {row.split("`")[1]: row for row in rows if row.startswith("| `") and row.count("|") == 7}
    own = {"camvid_pspnet_r50", "camvid_deeplabv3plus_r50", "camvid_deeplabv3plus_convnext_tiny"}
    assert set(rows) == set(PUBLISHED) | own
    for name, row in rows.items():
        _, _, _, crop, steps, scores, weights, _ = row.split("|")
        config, header = load(name), header_of(next(p for p in CONFIGS if p.stem == name))
        assert crop.strip() == "x".join(map(str, config.augment.crop_size))
        assert steps.strip() == f"{config.train.steps:,} x {config.train.batch_size}"
        published = re.findall(r"published mIoU ([\d.]+)", header)
        assert [scores.split("/")[0].strip()] == (published or ["none"])
        own_weights = not (config.model.pretrained or "").startswith("IMAGENET")
        assert (weights.strip() != "") == own_weights


def header_of(path: Path) -> str:
    """The comment at the top, on one line."""
    return " ".join(path.read_text().partition("\ndata:")[0].replace("#", " ").split())


@pytest.mark.parametrize("name", PUBLISHED)
def test_rates_steps_batches_crops_and_scales_are_those_of_the_source(name):
    config, (rates, sizes) = load(name), SOURCES[name]
    steps = config.train.steps
    found = [learning_rate(config, step) for step in (0, steps // 2, steps - 1)]
    assert found[:2] == pytest.approx(rates[:2], rel=1e-3)
    # The last step is one before the end of the schedule.
    assert found[2] == pytest.approx(rates[2], abs=2e-5)
    assert (steps, config.train.batch_size, config.augment.crop_size) == sizes
    assert config.augment.scale_range == (0.5, 2.0)
    assert config.optim.momentum == 0.9
    if name.endswith("_769"):  # from window to window, as mmsegmentation's test_cfg
        assert math.ceil(769 * (1 - config.eval.overlap)) == 513


@pytest.mark.parametrize("name", sorted(DILATIONS))
def test_dilations_are_those_of_the_source(name):
    backbone = built(load(name)).backbone
    stages = backbone.layer3, backbone.layer4
    assert tuple([x.conv2.dilation[0] for x in stage] for stage in stages) == DILATIONS[name]


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_parameter_groups_are_those_of_the_source(name):
    config = load(name)
    model = built(config)
    groups = parameter_groups(model, config.optim, loaded_names(config, model))
    assert {(g["lr_mult"], g["weight_decay"] or g["pull"]) for g in groups} == GROUPS[name]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    for group in groups:
        in_backbone = {n.startswith("backbone.") for n in group["param_names"]}
        if name in SEMSEG:
            assert in_backbone == {group["lr_mult"] == 1.0}
        if name == "cityscapes_pspnet_r50_l2sp" and group["pull"] + group["weight_decay"] > 0:
            assert bool(group["pull"]) == (in_backbone == {True})
            assert {p.dim() for p in group["params"]} == {4}


def test_the_d16_recipes_mine_as_many_pixels_as_mmsegmentation():
    for arch in ("deeplabv3", "deeplabv3plus"):
        config = load(f"cityscapes_{arch}_r101_d16")
        loss = config.loss
        assert (loss.kind, loss.ohem_threshold) == ("ohem", 0.0)
        assert loss.ohem_min_kept == 100_000 * config.train.batch_size
        assert loss.weight == pytest.approx(100_000 / (512 * 1024), abs=1e-4)


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=MARKS.get(p.stem, pytest.mark.slow), id=p.stem) for p in CONFIGS]
)
def test_it_takes_a_step(path):
    """At full width and depth, on two small crops."""
    small = ["augment.crop_size=[33, 33]", "train.batch_size=2"]
    # The first steps in float16 overflow until the scale fits, and leave the weights alone.
    if load_config(path).train.precision == "float16":
        small.append("train.precision=float32")
    if load_config(path).eval.mode == "slide":
        small.append("eval.crop_size=[33, 33]")
    config = load_config(path, small)
    torch.manual_seed(0)
    options = {"num_classes": num_classes(config), "norm": make_norm(config.norm)}
    model = filled(on_meta(lambda: build_model(config.model, **options)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    cpu = torch.device("cpu")
    state = make_state(model, config, cpu, loaded=loaded_names(config, model) or None)
    images = torch.randint(256, (2, 3, 33, 33), dtype=torch.uint8)
    labels = torch.randint(num_classes(config), (2, 33, 33), dtype=torch.uint8)
    batches, sync = repeat(Batch(images, labels, ["a", "b"])), StepSync(lambda: False)
    result = next(train_steps(state, batches, config, device=cpu, step_sync=sync))
    assert math.isfinite(result.loss)
    assert result.grad_norm > 0
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) > 0.9 * len(before)


def filled(model: nn.Module) -> nn.Module:
    """`model`, made on meta, with numbers; drawing them layer by layer would take seconds."""
    model.to_empty(device="cpu")
    for name, tensor in model.state_dict().items():
        if tensor.dim() > 1:
            tensor.copy_(torch.randn(tensor.shape) * (2 / tensor[0].numel()) ** 0.5)
        else:
            tensor.fill_(1.0 if name.endswith(("weight", "running_var", "gamma")) else 0.0)
    return model


def test_weights_that_come_with_a_config_are_of_it(tmp_path, monkeypatch):
    """And are found by its name, wherever one works."""
    monkeypatch.chdir(tmp_path)
    with_weights = [name for name in NAMES if recipes.weights(name) is not None]
    assert with_weights == ["camvid_deeplabv3plus_r34"]
    for name in with_weights:
        loaded = load_model(name)
        config = load(name)
        assert config_differences(loaded.config, config) == []  # but for what changes no weight
        assert loaded.step == config.train.steps
        assert loaded.classes.names == load_class_file(config.data.classes).names
        for layer in loaded.model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                assert layer.running_var.min() > 0
                assert layer.running_mean.abs().max() > 0
