"""The experiment files that come with segtrain: complete, documented and buildable."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from segtrain.config import Config, load_config
from segtrain.config.warnings import config_warnings
from segtrain.data.class_file import load_class_file
from segtrain.models import build_model
from segtrain.training.optim import learning_rate

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
NAMES = [path.stem for path in CONFIGS]
# The class file of a newcomer, whom own_data.yaml is for, does not exist yet.
PLACEHOLDER = "my_data/classes.yaml"

every_config = pytest.mark.parametrize("path", CONFIGS, ids=NAMES)


def load(name: str) -> Config:
    return load_config(next(path for path in CONFIGS if path.stem == name))


def num_classes(config: Config) -> int:
    if config.data.classes == PLACEHOLDER:
        return 3
    return load_class_file(config.data.classes).num_classes


def test_the_promised_recipes_are_there():
    archs = ("pspnet", "deeplabv3", "deeplabv3plus")
    cityscapes = {f"cityscapes_{arch}_r{depth}" for arch in archs for depth in (50, 101)}
    assert cityscapes | {"demo", "own_data", "camvid_pspnet_r50"} <= set(NAMES)


@every_config
def test_it_opens_with_source_hardware_duration_and_result(path):
    header = path.read_text().partition("\ndata:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for word in ("Recipe: ", "Hardware: ", "Duration: ", "Expected: "):
        assert header.count(word) == 1, f"{word!r} in the comment at the top"


@every_config
def test_a_published_score_says_that_it_is_not_ours(path):
    header = " ".join(path.read_text().partition("\ndata:")[0].replace("#", " ").split())
    if "published mIoU" in header:
        assert "not yet reproduced with segtrain" in header.lower()


@every_config
def test_it_has_no_option_without_effect(path):
    assert config_warnings(load_config(path)) == []


@every_config
def test_its_lines_fit(path):
    assert [line for line in path.read_text().splitlines() if len(line) > 100] == []


@every_config
def test_its_model_gives_one_logit_for_each_class_at_the_size_of_the_crop(path, monkeypatch):
    # Autocast does not know the meta device, on which sizes are computed without numbers.
    monkeypatch.setattr("segtrain.models.pspnet.without_autocast", lambda _: nullcontext())
    config = load_config(path)
    crop = config.augment.crop_size
    with torch.device("meta"):
        model = build_model(config.model, num_classes=num_classes(config))
        logits = model(torch.empty(2, 3, *crop))
    assert logits.out.shape == (2, num_classes(config), *crop)
    assert (logits.aux is not None) == config.model.aux_head


@every_config
def test_class_weights_are_one_for_each_class(path):
    config = load_config(path)
    if config.loss.class_weights is not None:
        classes = load_class_file(config.data.classes)
        assert len(config.loss.class_weights) == classes.num_classes


def test_the_class_weights_in_a_comment_are_one_for_each_class():
    for name in ("camvid_pspnet_r50", "camvid_deeplabv3plus_r50"):
        text = next(path for path in CONFIGS if path.stem == name).read_text()
        (numbers,) = re.findall(r"#   class_weights: \[(.*)\]", text)
        weights = tuple(float(number) for number in numbers.split(","))
        assert len(weights) == load_class_file("camvid").num_classes


@every_config
def test_crops_line_up_with_features_under_align_corners(path):
    config = load_config(path)
    if config.model.align_corners:
        sizes = config.augment.crop_size + (config.eval.crop_size or ())
        assert [size for size in sizes if size % 8 != 1] == []


@every_config
def test_torchvision_weights_are_asked_for_only_where_they_fit_the_stem(path):
    model = load_config(path).model
    if (model.pretrained or "").startswith("IMAGENET1K"):
        assert model.stem == "7x7"


@pytest.mark.parametrize("name", [n for n in NAMES if re.fullmatch(r"cityscapes_.*_r\d+", n)])
def test_the_cityscapes_recipes_share_mmsegmentations_schedule(name):
    config = load(name)
    other = config.model_copy(update={"model": load("cityscapes_pspnet_r50").model})
    assert other == load("cityscapes_pspnet_r50")
    train = config.train
    assert (train.steps, train.batch_size, train.optimizer) == (80_000, 8, "sgd")
    assert (train.momentum, train.weight_decay, train.head_lr_mult) == (0.9, 5e-4, 1.0)
    for step in (0, 20_000, 79_999):  # mmengine's PolyLR with eta_min 1e-4
        expected = (0.01 - 1e-4) * (1 - step / 80_000) ** 0.9 + 1e-4
        assert learning_rate(train, step) == pytest.approx(expected, rel=1e-12)
    assert config.loss.aux_weight == 0.4
    assert config.eval.mode == "whole"


def test_the_semseg_recipe_is_semsegs():
    config = load("cityscapes_pspnet_r50_semseg")
    train, augment, model = config.train, config.augment, config.model
    assert train.steps == 200 * -(-2975 // 16)
    assert (train.lr, train.head_lr_mult, train.weight_decay) == (0.01, 10.0, 1e-4)
    assert (train.poly_power, train.min_lr, train.warmup_steps) == (0.9, 0.0, 0)
    assert (augment.crop_size, augment.scale_range) == ((713, 713), (0.5, 2.0))
    assert (augment.rotate_deg, augment.rotate_prob, augment.blur_prob) == (10.0, 0.5, 0.5)
    assert (model.stem, model.contract_dilation, model.output_stride) == ("64-64-128", False, 8)
    assert (config.eval.mode, config.eval.flip, config.eval.overlap) == ("slide", True, 1 / 3)


def test_the_semseg_recipe_has_semsegs_learning_rate_at_every_step():
    """tool/train.py sets the rate of the next step, by its number, after the optimizer's step."""
    train = load("cityscapes_pspnet_r50_semseg").train
    rate, rates = 0.01, []
    for i in range(train.steps):
        rates.append(rate)
        rate = 0.01 * (1 - float(i + 1) / train.steps) ** 0.9
    assert [learning_rate(train, step) for step in range(train.steps)] == pytest.approx(rates)
    shown = [f"{rates[step]:.8f}" for step in (0, 12_400, 24_800)]
    assert shown == ["0.01000000", "0.00694253", "0.00372041"]


def test_own_data_marks_what_a_newcomer_must_change():
    text = next(path for path in CONFIGS if path.stem == "own_data").read_text()
    body = text.partition("\ndata:")[2]
    marked = [line.split(":")[0].strip(" #") for line in body.splitlines() if "<--" in line]
    assert marked == ["root", "classes", "label_format", "crop_size"]
