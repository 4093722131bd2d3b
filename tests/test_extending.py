"""The code blocks in segtrain/EXTENDING.md do what they say."""

import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from experiments import unread
from stepping import train_steps

from segtrain import plugins
from segtrain.api import train
from segtrain.config import AugmentConfig
from segtrain.data import open_dataset
from segtrain.data.read.image import RGB
from segtrain.data.read.layouts import LAYOUTS
from segtrain.data.sample.transforms import TrainTransform
from segtrain.errors import ConfigError
from segtrain.models import BACKBONES, MODELS, build_backbone, build_model
from segtrain.training.losses import LOSSES
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch

EXTENDING = (Path(__file__).parent.parent / "segtrain/EXTENDING.md").read_text()
CPU = torch.device("cpu")


def code(title):
    """The code block below the heading that begins with `title`."""
    text = EXTENDING.partition(f"## {title}")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```(?:python|yaml)\n(.*?)```", text, flags=re.DOTALL)
    return block


@pytest.fixture(autouse=True)
def restored_tables():
    tables = (LOSSES, BACKBONES, MODELS, LAYOUTS, plugins._plugins)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def add(title):
    exec(compile(code(title), title, "exec"), {"__name__": "mine"})


def config(**choices):
    """A small experiment. `choices` are set as if segtrain/config/ allowed the names already."""
    model = {"backbone": "resnet18", "head_channels": 8, "aux_channels": 8}
    whole = unread(model=model, train={"steps": 1, "batch_size": 2})
    for key, name in choices.items():
        section, _, option = key.partition("__")
        changed = getattr(whole, section).model_copy(update={option: name})
        whole = whole.model_copy(update={section: changed})
    return whole


def train_one_step(experiment):
    torch.manual_seed(0)
    state = make_state(build_model(experiment.model, num_classes=3), experiment, CPU)
    images = torch.randint(256, (2, 3, 33, 41), dtype=torch.uint8)
    batch = Batch(images, (images.sum(1) % 3).to(torch.uint8), ["a", "b"])
    before = state.model.head.classifier.conv.weight.detach().clone()
    sync = StepSync(lambda: False)
    (result,) = train_steps(state, [batch], experiment, device=CPU, step_sync=sync)
    assert result.loss.isfinite()
    assert not torch.equal(state.model.head.classifier.conv.weight, before)


@pytest.mark.parametrize("table", [LOSSES, BACKBONES, MODELS, LAYOUTS])
def test_a_choice_that_other_processes_would_not_know_is_refused_where_they_start(table, data, lab):
    """Two ranks and `segtrain.train` would train the shipped one."""
    config, run = lab.config(data), lab.folder / "run"
    name, *_, other = table
    table[name] = table[other]
    said = lab.refused("train", config, "--nproc", 2, "--output", run)
    assert f"{name} changed in this process, and those that" in said
    with pytest.raises(ConfigError, match=f"{name} changed in this process"):
        train(config, output=run)
    assert not run.exists()


def test_the_backbone_trains_and_keeps_its_strides():
    add("A backbone")
    train_one_step(config(model__backbone="dilated", model__output_stride=8))
    for output_stride in (8, 16, 32):
        model = config(model__backbone="dilated", model__output_stride=output_stride).model
        with torch.device("meta"):
            features = build_backbone(model)(torch.zeros(2, 3, 64, 96))
        strides = [64 // feature.shape[2] for feature in features]
        assert strides == [4, min(16, output_stride), output_stride]


def test_the_layout_lists_a_data_set(tmp_path):
    add("A data layout")
    (tmp_path / "classes.yaml").write_text("classes: [ground, plant]\nignore_ids: [255]\n")
    (tmp_path / "train").mkdir()
    cv2.imwrite(str(tmp_path / "train/a_img.jpg"), np.zeros((6, 8, 3), np.uint8))
    cv2.imwrite(str(tmp_path / "train/a_lab.png"), np.ones((6, 8), np.uint8))
    names = {"data__root": str(tmp_path), "data__classes": str(tmp_path / "classes.yaml")}
    dataset = open_dataset(config(data__layout="pairs", **names).data, "train")
    assert [pair.name for pair in dataset.pairs] == ["a"]


def test_the_transform_changes_the_image():
    options = yaml.safe_load(code("A transform"))["augment"]
    options["extra"][0]["args"]["p"] = 1.0
    augment = AugmentConfig(crop_size=(8, 8), scale_range=(1.0, 1.0), flip_prob=0.0)
    noisy = AugmentConfig.model_validate(augment.model_dump() | options, strict=False)
    image, label = np.full((8, 8, 3), 100, np.uint8), np.zeros((8, 8), np.uint8)
    plain, changed = (
        TrainTransform(how, form=RGB)(image, label, np.random.default_rng(0))[0]
        for how in (augment, noisy)
    )
    assert (plain == 100).all()
    assert not (changed == 100).all()
