"""The loss of each image and class, as training measures it; `bits` in experiments.py has it."""

import itertools

import numpy as np
import pytest
import torch
from stepping import train_steps
from test_step import CPU, N, TwoHeads, config, whole_batch

from segtrain.distributed import collectives as dist
from segtrain.training import sample_losses
from segtrain.training.sample_losses import (
    LOSS,
    PIXELS,
    UNITS,
    SampleLosses,
    parse_sums,
    why_unmeasured,
)
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import IGNORE_INDEX, Batch

K, IMAGES = 3, 7
NAMES = [f"image {i}" for i in range(IMAGES)]


class Full(TwoHeads):
    """As a SegModel, for model.recompute."""

    def small_logits(self, images, dropout=None):
        return self.forward(images, dropout)

    def full_size(self, logits, size, head):
        return logits


def shown(step):
    """The images of a step: one is shown twice, one crop is made of two images."""
    return torch.tensor([(step + i) % IMAGES for i in range(N - 2)] + [step % IMAGES, -1])


def measured(settings, steps=4):
    """What a run on this rank keeps after some steps, and its logits before each of them."""
    state = make_state(Full(), settings, CPU)
    state.sample_losses = SampleLosses(NAMES, K, steps=settings.train.steps, device=CPU)
    train = settings.train
    rows = state.layout.positions(dist.rank())

    def batches():
        for step in range(train.steps):
            images, labels = whole_batch(step)
            for mine in map(list, rows):
                yield Batch(images[mine], labels[mine], [""] * len(mine), shown=shown(step)[mine])

    sync = StepSync(lambda: False)
    done = train_steps(state, batches(), settings, device=CPU, step_sync=sync)
    logits = []
    for step in range(steps):
        with torch.no_grad():
            images = state.normalize(whole_batch(step)[0])
            logits.append(state.model(images).out.numpy())
        next(done)
    state.sample_losses.gather()
    return state.sample_losses.fields()["sums"], logits


def by_hand(logits):
    """(6, IMAGES, K, 2) float64, pixel by pixel."""
    found = np.zeros((6, IMAGES, K, 2))
    for step, scores in enumerate(logits):
        labels = whole_batch(step)[1].numpy()
        for crop, image in enumerate(shown(step).tolist()):
            for y, x in itertools.product(*map(range, labels.shape[1:])):
                label = labels[crop, y, x]
                if image >= 0 and label != IGNORE_INDEX:
                    p = np.exp(scores[crop, :, y, x])
                    found[step, image, label] += [-np.log(p[label] / p.sum()), 1]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_steps": 2},
        {"virtual_ranks": 2},
        {"shares": 3, "sam_rho": 0.1},
        {"loss": {"kind": "dice"}},
        {"loss": {"kind": "cross_entropy", "label_smoothing": 0.2, "class_weights": (1, 2, 0)}},
    ],
    ids=str,
)
def test_every_pixel_counts_once_with_its_plain_cross_entropy(options, monkeypatch):
    """Also where a step is computed again: the first with shares, the second gradient of SAM."""
    monkeypatch.setattr(sample_losses, "_MOST_PHASES", 6)  # one for each of the steps
    sums, logits = measured(config(**options))
    wanted = by_hand(logits)
    assert (sums[..., PIXELS].numpy() == wanted[..., 1]).all()
    pixels = wanted[..., 1].sum()
    np.testing.assert_allclose(sums[..., LOSS] / UNITS, wanted[..., 0], atol=pixels / UNITS)
    assert pixels > 300
    assert (sums[4:] == 0).all()


def test_recomputation_changes_no_bit_of_them():
    settings = config()
    again = settings.model_copy(
        update={"model": settings.model.model_copy(update={"recompute": "blocks"})}
    )
    assert torch.equal(measured(settings)[0], measured(again)[0])


def sums_of_rank(options):
    return measured(config(**options))[0]


def test_shares_give_the_same_bits_on_other_ranks_and_without_them_rounding_differs(run_ranks):
    for options, room in (({"shares": 3}, 0), ({}, 2 * N)):
        alone, both = sums_of_rank(options), run_ranks(2, sums_of_rank, options)
        assert torch.equal(*both)
        assert (both[0] - alone).abs().max() <= room


def test_phases_are_as_many_as_there_is_room_for_then_classes_are_added_up(monkeypatch):
    def shape(most_bytes):
        monkeypatch.setattr(sample_losses, "_MOST_BYTES", most_bytes)
        made = SampleLosses(["a", "b", "c"], K, steps=9, device=CPU)
        labels = torch.tensor([[[0, 0, 1, 255]], [[2, 2, 2, 2]]])
        for step in (0, 8):
            made.add(made.phase(step), torch.tensor([2, -1]), torch.zeros(2, K, 1, 4), labels)
            made.gather()
        sums = made.fields()["sums"]
        ends = sums[sorted({0, len(sums) - 1}), 2].sum((0, 1))
        assert ends[PIXELS] == sums[..., PIXELS].sum() == 6
        assert (ends[LOSS] / 6 / UNITS).item() == pytest.approx(np.log(K), abs=1e-4)
        assert (sums[-1] == sums[0]).all()
        return sums.shape[0], sums.shape[2]

    one_phase = 2 * 8 * 3 * K
    assert [shape(x) for x in (10**6, 3 * one_phase, one_phase, one_phase - 1, one_phase // K)] == [
        (8, K),
        (3, K),
        (1, K),
        (2, 1),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("options", "images", "said"),
    [
        ({}, 3_000_000, ""),
        ({}, 4_000_000, "4000000 images take more than 50 MB"),
        ({"train": {"compile": True}}, 1, "train.compile"),
        ({"train": {"parallel": "hogwild"}}, 1, "hogwild"),
        ({"train": {"parallel": "server"}}, 1, "server"),
        ({"augment": {"mixup_alpha": 0.2}}, 1, "two images"),
        ({"augment": {"class_mix_prob": 0.5}}, 1, ""),
    ],
)
def test_what_cannot_be_measured_is_said(options, images, said):
    base = config()
    changed = {key: getattr(base, key).model_copy(update=value) for key, value in options.items()}
    reason = why_unmeasured(base.model_copy(update=changed), images)
    assert said in reason
    assert bool(said) == bool(reason)


def test_they_go_on_with_the_same_images_only_and_damaged_ones_are_refused():
    made = SampleLosses(NAMES, K, steps=9, device=CPU)
    sums = torch.ones_like(made.fields()["sums"])
    saved = made.fields() | {"sums": sums}
    assert made.restore(saved)
    assert torch.equal(made.fields()["sums"], sums)
    for names, classes in ((NAMES[::-1], K), (NAMES[1:], K), (NAMES, 2)):
        assert not SampleLosses(names, classes, steps=9, device=CPU).restore(saved)
    for damaged in (
        {},
        {"names": 3},
        {"sums": -sums},
        {"sums": sums[0]},
        {"sums": sums.float()},
        {"sums": sums[:0]},
    ):
        with pytest.raises(ValueError, match="sample_losses"):
            parse_sums((saved if damaged else {}) | damaged)
