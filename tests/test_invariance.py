"""The promise: how ranks share the work does not show in the result, whatever the options.

Each row of a covering array is trained by one rank, in shares, and again in other ways: in shares
too, with equal bits; or without them, in float64, equal to rounding.
"""

from itertools import combinations
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import tifffile
import torch
import yaml
from covering import covering, pairs_of
from experiments import bits, experiment, logged, train, write_config

from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.distributed import collectives as dist
from segtrain.distributed import shares
from segtrain.trainer.preflight import _split_warnings, start_lines
from segtrain.training import state as training_state
from segtrain.training.exact_sum import ExactGradientSum

STEPS, CLIP = 2, 0.7
# More pixels than some parts have, and probabilities that leave it to the hardest of them.
MINED = "loss.kind=ohem loss.ohem_min_kept=1500"
WEIGHTS = "loss.class_weights=[1.0,2.3,0.4,1.7]"
# Sums of float32 weights are exact in float64 unless they are many, and as far apart as these.
FAR = "loss.class_weights=[1.3e7,1.1e-9,1.7e-5,0.7] train.batch_size=10 train.shares=5"
# The gradient of a mean over pixels contains their number alone, that of dice all sums.
SEVEN = (
    "[{kind:ohem,ohem_fraction:0.2},{kind:focal,weight:0.7},"
    "{kind:boundary_relaxation},{kind:cross_entropy,label_smoothing:0.1},{kind:lovasz},"
    "{kind:lovasz_batch}]"
)
SIX = "[{kind:focal},{kind:dice},{kind:dice_linear},{kind:tversky},{kind:lovasz}]"
BANDS = "task=multilabel data.label_format=bands augment.max_class_share=1.0"
# Of each group a row has one option at most.
OPTIONS = {
    "loss": {
        "mining": f"{MINED} loss.ohem_threshold=0.2 {WEIGHTS}",
        "weights far apart": f"{MINED} loss.ohem_threshold=0.0 {FAR}",
        "seven losses": f"loss.kind=dice loss.also={SEVEN}",
        "overlapping classes": f"{BANDS} loss.class_weights=[1.3,0.4] loss.also={SIX}",
    },
    "norm": {
        "groups of two": "norm.images=2 norm.running=sequential",
        "groups of four": "norm.images=4 norm.running=first",
        "single images": "norm.images=1 norm.running=mean",
        "group norm": "norm.kind=group",
    },
    "statistics": {"precise": "norm.precise_batches=1 eval.every_steps=1"},
    "passes": {"two passes": "train.accumulate_steps=2"},
    "optimizer": {
        "adamw": "optim.kind=adamw optim.lr=0.001",
        "muon": "optim.kind=muon optim.lr=0.001",
    },
    "average": {"clipping": f"optim.clip_grad_norm={CLIP} optim.ema_decay=0.9"},
    "precision": {
        "float32": "train.precision=float32",
        "bfloat16": "train.precision=bfloat16",
        # Which takes ten times as long on a CPU.
        "float16": "train.precision=float16 eval.precision=float32 augment.crop_size=[9,17]",
    },
    "samples": {
        "mixed": "augment.class_mix_prob=0.5 data.class_uniform=0.4",
        "turned": "augment.quarter_turn_prob=0.5",
    },
    "model": {
        "deeplabv3": "model.arch=deeplabv3",
        "deeplabv3plus": "model.arch=deeplabv3plus",
    },
    "memory": {
        "recomputed": "model.recompute=blocks",
        "recomputed norms": "model.recompute=norm",
    },
    "log": {"means of two steps": "log.every_steps=2"},
}


class Way(NamedTuple):
    """How a row is trained."""

    ranks: tuple[int, ...]  # all but the last pause after a step, and the next go on
    train: dict[str, Any]
    at_once: int = 1  # shares that a rank computes at the same time
    twice: bool = False  # each step is computed again, as if the first time had overflowed


ONE = Way((1,), {})
# Of three shares the second rank has two: a + (b + c) stands against (a + b) + c.
EQUAL = {
    "2 ranks": Way((2,), {"split": [1, 2]}, at_once=2),
    "3 ranks": Way((3,), {}, twice=True),
    "from 2 ranks to 1": Way((2, 1), {}),
}
ROUNDED = {
    "6 virtual ranks": Way((3,), {"shares": None, "split": [0, 1, 3], "virtual_ranks": 2}),
    "from 1 rank to 2": Way((1, 2), {"shares": None, "split": [5, 1]}),
    "workers": Way(
        (3,), {"shares": None, "parallel": "server", "staleness": 0, "accumulate_steps": 1}
    ),
}
GROUPS = [*map(tuple, OPTIONS.values()), tuple(EQUAL), tuple(ROUNDED)]
GROUP_OF = {name: group for group, names in OPTIONS.items() for name in names}
# The groups with whose options each of these is to meet.
MEETS = {
    "precise": "norm",
    "recomputed norms": "norm",
    "2 ranks": "loss norm statistics memory",
    "3 ranks": "passes average samples model",
    "from 2 ranks to 1": "optimizer average precision samples statistics log",
    "6 virtual ranks": "loss norm passes samples memory model",
    "from 1 rank to 2": "optimizer average samples",
    "workers": "optimizer average",
}
APART = [
    ({*OPTIONS["precision"], "muon"}, {*ROUNDED}),  # muon computes in bfloat16
    ({"overlapping classes"}, {"mixed"}),
    # Where they pool globally, a channel has one value.
    ({"single images", "group norm"}, {*OPTIONS["model"]}),
    ({"group norm"}, {"precise", "recomputed norms"}),
    ({"workers"}, {"precise", *OPTIONS["norm"]}),
    ({"weights far apart"}, {"groups of two", "groups of four"}),  # of which five are none
    ({"two passes", "workers"}, {"weights far apart"}),  # which has them
    ({"two passes"}, {"workers"}),
    ({"means of two steps"}, {*ROUNDED}),
]


def valid(row):
    return not any({*row} & some and {*row} & others for some, others in APART)


def interact(pair):
    return any(
        GROUP_OF.get(one) in MEETS.get(other, "").split() for one, other in (pair, pair[::-1])
    )


# Each option once, but those that are short elsewhere: float16 in test_surroundings.py, workers in
# test_server.py.
FEW = [
    "mining, groups of four, precise, clipping, muon, float32, recomputed norms, deeplabv3, "
    "2 ranks, means of two steps",
    "weights far apart, single images, bfloat16, turned, recomputed, from 2 ranks to 1",
    "seven losses, group norm, two passes, mixed, 3 ranks",
    "overlapping classes, groups of two, clipping, deeplabv3plus, 6 virtual ranks",
    "mixed, turned, adamw, from 1 rank to 2",
]
FEW = [tuple(row.split(", ")) for row in FEW]
MET = {frozenset(pair) for row in FEW for pair in combinations(row, 2)}
MORE = covering(
    GROUPS, valid, seed=27, wanted=lambda pair: interact(pair) and frozenset(pair) not in MET
)
SLOW = pytest.mark.slow("training", "norm", "distributed", "models", "data", "checkpoint")


def test_each_row_is_trained_in_several_ways_and_each_pair_in_one():
    rows = [*FEW, *MORE]
    met = {frozenset(pair) for row in rows for pair in combinations(row, 2)}
    assert met >= {frozenset(pair) for pair in pairs_of(GROUPS, valid) if interact(pair)}
    assert all({*row} & {*EQUAL, *ROUNDED} and valid(row) for row in rows)
    short = {option for group in GROUPS for option in group} - {*sum(FEW, ())}
    assert short == {"float16", "workers"}


def banded(root, where):
    """The data set at `root` with labels of two bands: classes 1 and 2, and classes 2 and 3."""
    (where / "images").symlink_to(root / "images")
    for path in (root / "labels").glob("*/*.png"):
        label = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        bands = np.stack([np.where(label == 255, 255, np.isin(label, k)) for k in ((1, 2), (2, 3))])
        file = where / path.relative_to(root).with_suffix(".tif")
        file.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(file, bands.astype(np.uint8), planarconfig="separate", metadata=None)
    (where / "classes.yaml").write_text("classes: [red, blue]\nignore_ids: [255]\n")
    return where


def config_of(root, row, way):
    """Uneven parts, augmentation, dropout, an auxiliary loss, and the options of a row."""
    in_groups = {"groups of two", "groups of four", "single images"} & {*row}
    in_passes = {"two passes", "weights far apart", "workers"} & {*row}
    values = {
        "augment": {"crop_size": [25, 33]},
        "model": {"head_channels": 8, "aux_channels": 8},
        "train": {
            "steps": STEPS,
            "batch_size": 8 if in_groups or "workers" in row else 7,
            "accumulate_steps": 2 if in_passes else 1,
            "shares": 3,
        },
    }
    if not {*OPTIONS["model"]} & {*row}:
        values["model"]["ppm_bins"] = [2, 3]  # after a global pool, training amplifies rounding
    for word in " ".join(OPTIONS[GROUP_OF[name]][name] for name in row if name in GROUP_OF).split():
        key, _, value = word.partition("=")
        *section, key = key.split(".")
        inner = values.setdefault(section[0], {}) if section else values
        inner[key] = yaml.safe_load(value.replace(":", ": "))
    values["train"] |= way.train
    task = values.pop("task", "semantic")
    return {"task": task} | experiment(root, **values)


class Trained(NamedTuple):
    """What a rank holds at the end; of the first one its weights and what it has logged, too."""

    bits: dict[str, str]
    weights: dict[str, Any]
    curves: dict[str, list[float]]
    receipts: str = ""


def trained(config, directory, way, resume):
    """Trains to the end on this rank, without saving, which takes most of a short run."""
    from segtrain.checkpoint.manager import CheckpointManager
    from segtrain.trainer import loop, save

    found, finish = [], loop.finish

    def finish_and_keep(run):
        finish(run)
        found.append(save.checkpoint_of(run))

    loop.finish = finish_and_keep
    CheckpointManager.save_last = CheckpointManager.save_best = lambda *_: None
    shares._threads_at_start = lambda: way.at_once
    if way.twice:
        ExactGradientSum.finish = finish_twice(ExactGradientSum.finish)
    assert quickly(train, config, directory, resume) == 0
    (record,) = found
    if not dist.is_main():
        return Trained(bits(record), {}, {})
    weights = {"model": record.model, "average": record.average or {}}
    receipts = directory / "receipts.jsonl"
    told = receipts.read_text() if receipts.exists() else ""
    return Trained(bits(record), weights, logged(directory), told)


def quickly(function, *args, **options):
    """Calls it without the digits of this machine, which take a second."""
    training_state.fingerprint = lambda *_: "0"
    return function(*args, **options)


def finish_twice(finish):
    first_time = [True]

    def again(self):
        before = self.exponents
        done = finish(self)
        if done and first_time[0]:
            self.exponents, done = before, False
        first_time[0] = done
        return done

    return again


def run(run_ranks, where, options, way):
    """What the first rank holds at the end; those that keep the weights have its bits."""
    config = write_config(where.with_suffix(".yaml"), options)
    *before, ranks = way.ranks
    for number in before:
        codes = run_ranks(number, quickly, train, config, where, until=1)
        assert codes == [0] * number
    first, *others = run_ranks(ranks, trained, config, where, way, bool(before))
    if options["train"].get("parallel") is None:
        assert all(other.bits == first.bits for other in others)
    return first


@pytest.mark.fault(44, 69)
@pytest.mark.parametrize(
    "row", [*FEW, *(pytest.param(row, marks=SLOW) for row in MORE)], ids=", ".join
)
def test_the_result_is_that_of_one_rank(run_ranks, tmp_path, data, row):
    root = data
    if "overlapping classes" in row:
        (tmp_path / "data").mkdir()
        root = banded(data, tmp_path / "data")
    one = run(run_ranks, tmp_path / "one", config_of(root, row, ONE), ONE)
    assert len(one.curves["train/loss"]) == (1 if "means of two steps" in row else STEPS)
    assert one.receipts.count("\n") == STEPS
    assert "clipping" not in row or max(one.curves["train/grad_norm"]) > CLIP
    for name in {*row} & {*EQUAL}:
        other = run(run_ranks, tmp_path / name, config_of(root, row, EQUAL[name]), EQUAL[name])
        for what in ("bits", "curves", "receipts"):
            assert getattr(other, what) == getattr(one, what)
    for name in {*row} & {*ROUNDED}:
        way = ROUNDED[name]
        other = run(run_ranks, tmp_path / name, config_of(root, row, way), way)
        for tag, rtol in (("train/loss", 1e-9), ("train/grad_norm", 1e-7)):
            np.testing.assert_allclose(other.curves[tag], one.curves[tag], rtol=rtol, atol=0)
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("ranks", "options", "warning", "line"),
    [
        (3, {"batch_size": 2}, "train.batch_size: 1 of 3 ranks have no image of a", "25x33"),
        (3, {"split": [0, 1, 3]}, "train.split: 1 of 3 ranks have no image of a", "0 + 1 + 4 of"),
        (2, {"split": [5, 3, 1]}, "train.split: [5, 3, 1] is for 3 ranks, and there", "3 + 2 of"),
        (2, {"split": [5, 1], "batch_size": 8, "shares": 6}, None, "7 + 1 of"),
        (1, {"split": [1, 2]}, "train.split: [1, 2] is for 2 ranks, and there is one", "25x33"),
    ],
)
def test_the_log_tells_how_images_are_divided(tmp_path, data, ranks, options, warning, line):
    values = experiment(data, augment={"crop_size": [25, 33]}, train=options)
    config = load_config(write_config(tmp_path / "c.yaml", values))
    sets = [open_dataset(config.data, split) for split in ("train", "val")]
    found = _split_warnings(config.train, ranks)
    assert [said[: len(warning)] for said in found] == ([warning] if warning else [])
    lines = start_lines(config, tmp_path, torch.nn.Linear(1, 1), *sets, ["cpu"] * ranks, 0)
    (said,) = (each for each in lines if each.startswith("batch "))
    assert line in said
