"""Every option, set alone to a second legal value, changes something that can be seen, or refuses.

Compared are lines, curves without times, the names of files, and the bits of a run of two steps.
"""

import json
import re

import pytest
from experiments import bits, last, small, write_config, write_data

from segtrain.config import load_config, override_config
from segtrain.errors import ConfigError
from segtrain.run.directory import flat

# What two steps of one rank on a CPU with small pictures do not show, and what does.
ELSEWHERE = {
    "data.num_workers": "processes: tests/test_loader.py",
    "data.slice_axis": "volumes: tests/test_volumes.py",
    "model.recompute": "memory: tests/test_recompute.py",
    "train.compile": "minutes: tests/test_compile.py",
    "train.timeout_s": "ranks that hang: tests/test_two_nodes.py",
    "train.graph": "CUDA: tests/gpu",
    "train.deterministic": "CUDA: tests/test_invariance.py",
    "checkpoint.every_steps": "saves that later ones replace: tests/test_resume.py",
    "eval.batch_size": "batches: tests/test_batches.py",
}
# The first values where those of `small` leave no room for a second.
FIRST = {
    "eval": {"every_steps": 2},
    "train": {"steps": 2, "batch_size": 4},
    "checkpoint": {"every_steps": 2},
}
SECOND = {
    "seed": 1,
    "task": "multilabel",
    "plugins": "[./own.py]",
    "data.layout": "list",
    "data.root": "other",
    "data.classes": "voc",
    "data.train_split": "val",
    "data.eval_split": "train",
    "data.train_exclude": "[excluded.txt]",
    "data.images_dir": "labels",
    "data.labels_dir": "images",
    "data.label_format": "colors",
    "data.channels": 1,
    "data.value_range": "[0, 200]",
    "data.clip": "true",
    "data.neighbours": 1,
    "data.slice_axis": "z",
    "data.pack": "pack",
    "data.short_side_px": 40,
    "data.mean": "[100, 100, 100]",
    "data.std": "[50, 50, 50]",
    "data.num_workers": 1,
    "data.class_uniform": 0.5,
    "augment.crop_size": "[41, 33]",
    "augment.scale_range": "[0.5, 1.5]",
    "augment.rotate_deg": 20.0,
    "augment.flip_prob": 0.0,
    "augment.quarter_turn_prob": 0.5,
    "augment.max_class_share": 0.5,
    "augment.class_mix_prob": 0.5,
    "augment.blur_prob": 1.0,
    "augment.color_prob": 1.0,
    "augment.color_jitter": "[0.2, 0.2, 0.2, 0.2]",
    "augment.extra": "[{name: GaussNoise, args: {p: 1.0}}]",
    "model.arch": "deeplabv3",
    "model.head_options": "{a: 1}",
    "model.backbone": "resnet34",
    "model.backbone_options": "{a: 1}",
    "model.pretrained": "none.pth",
    "model.num_stages": 3,
    "model.output_stride": 16,
    "model.variant": "torchvision",
    "model.stem": "64-64-128",
    "model.multi_grid": "[1, 2, 4]",
    "model.align_corners": "true",
    "model.head_channels": 8,
    "model.ppm_bins": "[1, 2]",
    "model.ppm_channels": 8,
    "model.aspp_rates": "[2, 4]",
    "model.separable": "true",
    "model.low_level_channels": 24,
    "model.aux_head": "false",
    "model.aux_channels": 8,
    "model.recompute": "blocks",
    "model.dropout": 0.5,
    "norm.kind": "group",
    "norm.images": 2,
    "norm.running": "mean",
    "norm.precise_batches": 1,
    "norm.momentum": 0.5,
    "loss.kind": "focal",
    "loss.options": "{a: 1}",
    "loss.weight": 2.0,
    "loss.class_weights": "[1, 2, 1, 1]",
    "loss.logit_adjustment": 1.0,
    "loss.positive_weights": "[1, 2, 1, 1]",
    "loss.label_smoothing": 0.1,
    "loss.ohem_threshold": 0.5,
    "loss.ohem_min_kept": 10,
    "loss.ohem_fraction": 0.5,
    "loss.also": "[{kind: dice}]",
    "loss.aux_weight": 0.1,
    "train.steps": 3,
    "train.batch_size": 5,
    "train.accumulate_steps": 2,
    "train.virtual_ranks": 2,
    "train.shares": 2,
    "train.split": "[1, 2]",
    "train.parallel": "server",
    "train.staleness": 2,
    "train.precision": "float64",
    "train.compile": "true",
    "train.graph": "false",
    "train.init_from": "none",
    "train.deterministic": "true",
    "train.timeout_s": 500.0,
    "optim.kind": "adamw",
    "optim.options": "{a: 1}",
    "optim.lr": 0.03,
    "optim.lr_batch_size": 8,
    "optim.head_lr_mult": 2.0,
    "optim.momentum": 0.5,
    "optim.weight_decay": 0.01,
    "optim.decay_norm_and_bias": "false",
    "optim.decay_toward": "start",
    "optim.new_weight_decay": 0.01,
    "optim.layers": "[{names: ['*'], lr_mult: 0.5}]",
    "optim.clip_grad_norm": 0.1,
    "optim.ema_decay": 0.1,
    "schedule.kind": "cosine",
    "schedule.poly_power": 2.0,
    "schedule.min_lr": 0.01,
    "schedule.warmup_steps": 1,
    "schedule.warmup_start": 0.5,
    "schedule.finish_from": 1,
    "eval.every_steps": 1,
    "eval.best": "mdice",
    "eval.mode": "slide",
    "eval.crop_size": "[40, 40]",
    "eval.overlap": 0.5,
    "eval.scales": "[1.0, 0.5]",
    "eval.flip": "true",
    "eval.thresholds": "[0.4]",
    "eval.precision": "bfloat16",
    "eval.batch_size": 2,
    "eval.metrics": "[{name: none}]",
    "eval.without": "[sand]",
    "log.every_steps": 2,
    "log.charts": "true",
    "log.trackers": "[wandb]",
    "log.callbacks": "[{name: none}]",
    "checkpoint.every_steps": 1,
    "checkpoint.keep_every_steps": 1,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_data(root)
    return write_config(root / "c.yaml", small(root, **FIRST))


@pytest.fixture(scope="module")
def first():
    """What two runs without another option show, once the first test has made them."""
    return []


def test_every_option_has_a_second_value(config):
    """A new one is tried by the test below once it is named here."""
    read = load_config(config)
    known = flat(read)
    assert known.keys() == SECOND.keys()
    assert ELSEWHERE.keys() <= SECOND.keys()
    for name, value in SECOND.items():
        text = f"{name}={value}"
        try:
            changed = flat(override_config(read, [text], source="c"))
        except ConfigError:
            continue  # it does not go alone
        assert [key for key in known if changed[key] != known[key]] == [name]


def shown(lab, config, run, *words):
    """What is compared of a run; None: the option is refused."""
    outcome = lab.command("train", config, "--nproc", 1, "--output", run, *words)
    if outcome.code in (2, 3, 4):
        return None
    assert outcome.code == 0, outcome
    said = (outcome.out + outcome.err).replace(str(run), "RUN")
    lines = [re.sub(r"\d+(\.\d)? img/s.*|would make.*", "", x) for x in said.splitlines()]
    curves = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curves = [{k: v for k, v in x.items() if not re.search("time|mem/|images_", k)} for x in curves]
    files = {re.sub("tfevents.*", "", str(path.relative_to(run))) for path in run.rglob("*")}
    return lines, curves, files, bits(last(run))


@pytest.mark.slow("training", "commands", "trainer")
@pytest.mark.parametrize("name", [name for name in SECOND if name not in ELSEWHERE])
def test_an_option_set_alone_is_seen_or_refused(config, first, lab, name):
    if not first:
        first += [shown(lab, config, lab.folder / f"first{i}") for i in range(2)]
    assert first[0] == first[1]
    changed = shown(lab, config, lab.folder / "second", "--set", f"{name}={SECOND[name]}")
    assert changed != first[0]
