"""train.shares: every bit is the same on any number of ranks, wherever a run was interrupted."""

import copy

import pytest
from experiments import (
    bits,
    experiment,
    last,
    logged,
    refusal,
    stopped_after,
    train,
    trained_bits,
    write_config,
)

from segtrain.distributed import collectives as dist
from segtrain.distributed import shares
from segtrain.training import state as training_state
from segtrain.training.exact_sum import ExactGradientSum

WEIGHTS = [1.0, 2.3, 0.4, 1.7]


def options(data, sections):
    """Augmentation, dropout, an auxiliary loss, and `sections`."""
    changed = copy.deepcopy(sections)
    model = {"head_channels": 8, "aux_channels": 8} | changed.pop("model", {})
    train = {"steps": 2, "batch_size": 5, "precision": "float32"} | changed.pop("train")
    return experiment(
        data,
        augment={"crop_size": [33, 41]} | changed.pop("augment", {}),
        model=model,
        train=train,
        **changed,
    )


def run(run_ranks, directory, config, ranks, function=trained_bits, *args):
    """Trains on so many ranks; returns the hashes and curves of rank 0, which all have."""
    first, *others = run_ranks(ranks, function, *args, config, directory / f"run{ranks}")
    for other in others:
        assert other == {name: first[name] for name in other}
    return first


CASES = {
    # 3 + 2 + 2 images: one rank has them all, two have 5 + 2, three have 3 + 2 + 2.
    "pspnet, ohem, sam": {
        "model": {"arch": "pspnet"},
        "loss": {
            "kind": "ohem",
            "ohem_threshold": 0.3,
            "ohem_min_kept": 6000,
            "class_weights": WEIGHTS,
        },
        "train": {"batch_size": 7, "shares": 3},
        "optim": {"clip_grad_norm": 1.0, "ema_decay": 0.9},
    },
    # Passes of 4 and 3 images, in which three shares are 2 + 1 + 1 and 1 + 1 + 1.
    "deeplabv3plus, adamw, bfloat16, class mix": {
        "model": {"arch": "deeplabv3plus", "backbone": "mobilenet_v3_large"},
        "augment": {"class_mix_prob": 0.5},
        "loss": {"kind": "cross_entropy", "class_weights": WEIGHTS},
        "train": {"batch_size": 7, "accumulate_steps": 2, "shares": 3, "precision": "bfloat16"},
        "optim": {"kind": "adamw", "lr": 1e-3},
    },
    # All losses, so that all sums and sorts of theirs are in it.
    "pspnet, six losses": {
        "model": {"arch": "pspnet", "backbone": "mobilenet_v2"},
        "loss": {
            "kind": "lovasz_batch",
            "also": [
                {"kind": "ohem", "ohem_fraction": 0.2, "class_weights": WEIGHTS},
                {"kind": "focal", "weight": 0.7},
                {"kind": "boundary_relaxation"},
                {"kind": "cross_entropy", "label_smoothing": 0.1},
                {"kind": "lovasz"},
            ],
        },
        "train": {"batch_size": 5, "shares": 3},
        "optim": {"kind": "muon", "lr": 1e-3},
    },
    # Passes of 4, 3 and 3 images.
    "deeplabv3, dice, three passes, float64, precise statistics": {
        "model": {"arch": "deeplabv3", "recompute": "blocks"},
        "loss": {"kind": "dice"},
        "norm": {"precise_batches": 2},
        "train": {
            "batch_size": 10,
            "accumulate_steps": 3,
            "shares": 3,
            "steps": 1,
            "precision": "float64",
        },
        "optim": {"kind": "adamw", "lr": 1e-3, "ema_decay": 0.5},
    },
    # In these two every sum shows its order. Of two ranks, the first has three of five shares, so
    # that ((a + b) + c) + (d + e) stands against (((a + b) + c) + d) + e; float64, since statistics
    # and losses are added up in it, and rounding to float32 would hide most differences. The
    # gradient of a mean over pixels contains their number alone, that of dice all of its sums.
    "dice and lovasz, float64": {
        "loss": {"kind": "dice", "also": [{"kind": "lovasz_batch"}]},
        "norm": {"precise_batches": 1},
        "train": {"steps": 1, "batch_size": 7, "shares": 5, "precision": "float64"},
    },
    # Sums of float32 weights are exact in float64 unless the weights are as far apart as these. The
    # threshold of 0 leaves it to the number of hard pixels which ones are kept.
    "mining, float64": {
        "augment": {"crop_size": [25, 33]},
        "loss": {
            "kind": "ohem",
            "ohem_threshold": 0.0,
            "ohem_min_kept": 3000,
            "class_weights": [1.3e7, 1.1e-9, 1.7e-5, 0.7],
        },
        "train": {
            "steps": 1,
            "batch_size": 10,
            "accumulate_steps": 2,
            "shares": 5,
            "precision": "float64",
        },
    },
    # Shares of 3, 3 and 2 images, of which the second group of two has one in each.
    "statistics over two images": {
        "model": {"arch": "pspnet", "recompute": "norm"},
        "norm": {"images": 2, "running": "sequential", "precise_batches": 1},
        "train": {"batch_size": 8, "shares": 3},
    },
    "group norm, float16": {
        "model": {"arch": "deeplabv3plus", "head_channels": 64},
        "norm": {"kind": "group"},
        "train": {"batch_size": 4, "shares": 4, "precision": "float16"},
        "optim": {"clip_grad_norm": 0.5},
    },
}

RANKS = dict(zip(CASES, [(2, 3), (3,), (2,), (3,), (2,), (2,), (2, 3), (2,)], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_gives_the_same_bits(run_ranks, tmp_path, data, name):
    """Weights, their average, optimizer, loss scale, exponents, best score, losses, norms."""
    values = options(data, CASES[name])
    config = write_config(tmp_path / "c.yaml", values)
    one = run(run_ranks, tmp_path, config, 1)
    assert len(one["train/loss"]) == values["train"]["steps"]
    for ranks in RANKS[name]:
        assert run(run_ranks, tmp_path, config, ranks) == one


def test_a_run_that_goes_on_on_other_numbers_of_ranks_ends_with_the_same_bits(
    run_ranks, tmp_path, data
):
    """Three ranks are stopped, one goes on and is stopped, two finish; so are the means of several
    steps in the log, of which an interruption cuts two in half."""
    sections = {
        "loss": {"kind": "ohem", "ohem_min_kept": 4000},
        "train": {"steps": 7, "shares": 4},
        "optim": {"ema_decay": 0.9, "clip_grad_norm": 1.0},
        "eval": {"every_steps": 3},
        "log": {"every_steps": 4},
    }
    config = write_config(tmp_path / "c.yaml", options(data, sections))
    alone, stopped, steps = tmp_path / "alone", tmp_path / "stopped", []
    assert run_ranks(2, train, config, alone) == [0] * 2
    for ranks, step, resume in ((3, 1, False), (1, 4, True)):
        assert run_ranks(ranks, stopped_after, step, config, stopped, resume) == [143] * ranks
        steps.append(last(stopped).step)
    assert 1 <= steps[0] < 4 <= steps[1] < 7
    assert run_ranks(2, train, config, stopped, True) == [0] * 2
    assert bits(last(stopped)) == bits(last(alone))
    assert logged(stopped) == logged(alone)
    assert len(logged(alone)["train/loss"]) == 2


def trained_at_once(threads, config, directory):
    """One process, in which so many shares are computed at the same time."""
    shares._threads_at_start = lambda: threads
    return trained_bits(config, directory)


@pytest.mark.parametrize(
    ("precision", "threads"), [("float32", 2), pytest.param("float16", 5, marks=pytest.mark.slow)]
)
def test_shares_at_the_same_time_are_shares_one_after_another(
    run_ranks, tmp_path, data, precision, threads
):
    sections = {
        "norm": {"precise_batches": 2},
        "train": {"shares": 5, "precision": precision},
        "optim": {"ema_decay": 0.9},
    }
    config = write_config(tmp_path / "c.yaml", options(data, sections))
    one, at_once = (
        run(run_ranks, tmp_path / str(number), config, 1, trained_at_once, number)
        for number in (1, threads)
    )
    assert at_once == one


def trained_twice(config, directory):
    """Every step is computed once more than it needs to be."""
    whole, first_time = ExactGradientSum.finish, [True]

    def finish(self):
        before = self.exponents
        done = whole(self)
        if done and first_time[0]:
            self.exponents, done = before, False
        first_time[0] = done
        return done

    ExactGradientSum.finish = finish
    return trained_bits(config, directory)


def test_a_step_that_is_computed_again_changes_nothing(run_ranks, tmp_path, data):
    """Running statistics above all. A single share has torch's own batch norm."""
    sections = {"train": {"shares": 1}}
    config = write_config(tmp_path / "c.yaml", options(data, sections))
    once = run(run_ranks, tmp_path / "once", config, 1)
    assert run(run_ranks, tmp_path / "again", config, 1, trained_twice) == once


def test_more_ranks_than_shares_are_refused_by_the_ranks_too(run_ranks, tmp_path, data):
    config = write_config(tmp_path / "c.yaml", options(data, {"train": {"shares": 2}}))
    said = "train.shares: 2 shares leave some of 3 ranks without one; start at most 2 ranks"
    for kind, code, text in run_ranks(3, refusal, train, config, tmp_path / "run"):
        assert (kind, code) == ("ConfigError", 2)
        assert text.startswith(said)


def with_digits(digits, function, *args):
    """Calls `function` on ranks whose arithmetic has these digits."""
    training_state.fingerprint = lambda *_: digits[dist.rank()]
    return function(*args)


def test_the_log_warns_of_ranks_and_checkpoints_with_other_arithmetic(run_ranks, tmp_path, data):
    sections = {"train": {"shares": 3, "steps": 4}}
    config = write_config(tmp_path / "c.yaml", options(data, sections))
    others, saved = "compute other bits than rank 0", "than the one that trained"

    def warnings(directory):
        lines = (directory / "train.log").read_text().splitlines()
        return [line for line in lines if "warning" in line and "other bits" in line]

    stop = (with_digits, ["a", "a"], stopped_after, 1, config, tmp_path / "run")
    assert run_ranks(2, *stop) == [143] * 2
    assert last(tmp_path / "run").shares["arithmetic"] == "a"
    assert warnings(tmp_path / "run") == []
    again = (with_digits, ["b", "b", "c"], train, config, tmp_path / "run", True)
    assert run_ranks(3, *again) == [0] * 3
    first, second = warnings(tmp_path / "run")
    assert "warning: ranks 2 " + others in first
    assert saved in second
