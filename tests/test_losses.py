"""Sums, means and hard example mining; the values of all losses are in test_loss_kinds.py."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from segtrain.config import LossConfig
from segtrain.distributed import collectives as dist
from segtrain.training.losses import LOSSES, LossOptions, SegLoss
from segtrain.types import IGNORE_INDEX, SegLogits

K, H, W = 4, 5, 7
CLASS_WEIGHTS = torch.tensor([1.0, 2.5, 0.25, 0.0])


CPU = torch.device("cpu")


def cross_entropy(logits, labels, *, class_weights=None):
    return LOSSES["cross_entropy"](LossOptions(LossConfig(), class_weights)).sums(logits, labels)


def ohem_cross_entropy(logits, labels, *, threshold, min_kept, class_weights=None):
    config = LossConfig(kind="ohem", ohem_threshold=threshold, ohem_min_kept=min_kept)
    return LOSSES["ohem"](LossOptions(config, class_weights)).sums(logits, labels)


def seg_loss(**config):
    return SegLoss(LossConfig(**config), CPU)


def scene(num_images, seed=0):
    """Logits and labels, a fifth of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((num_images, K, H, W), generator=generator, dtype=torch.float64)
    labels = torch.randint(K, (num_images, H, W), generator=generator)
    ignored = torch.rand(labels.shape, generator=generator) < 0.2
    return logits, labels.masked_fill(ignored, IGNORE_INDEX)


def test_millions_of_pixels_are_summed_without_float32_rounding():
    """A float32 sum is off by 1e-8 to 1e-6, and differently for every split over ranks."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, 3, 300, 500), generator=generator)
    labels = torch.randint(3, (2, 300, 500), generator=generator)
    pixels = F.cross_entropy(logits, labels, reduction="none").double()
    total, _ = cross_entropy(logits, labels)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, pixels.sum(), rtol=1e-13, atol=0)


def test_label_weight_counts_valid_pixels_or_adds_their_class_weights():
    labels = torch.tensor([[[0, 1, 1], [2, 3, IGNORE_INDEX]]])
    assert seg_loss().label_weight(labels).item() == 5
    weighted = seg_loss(class_weights=tuple(CLASS_WEIGHTS.tolist()))
    assert weighted.label_weight(labels).item() == 1 + 2.5 + 2.5 + 0.25 + 0


def reference_mining(logits, labels, threshold, min_kept):
    """mmsegmentation's OHEMPixelSampler: the valid pixels that it keeps, (N, H, W) bool."""
    valid = labels != IGNORE_INDEX
    prob = logits.softmax(1).gather(1, labels.masked_fill(~valid, 0).unsqueeze(1)).squeeze(1)
    ordered = prob[valid].sort().values
    limit = max(ordered[min(min_kept, len(ordered) - 1)].item(), threshold)
    return valid & (prob < limit)


def mined(logits, labels, threshold, min_kept):
    """The pixels whose gradient is not zero."""
    logits = logits.clone().requires_grad_()
    total, weight = ohem_cross_entropy(logits, labels, threshold=threshold, min_kept=min_kept)
    kept = torch.autograd.grad(total, logits)[0].abs().sum(1) > 0
    assert weight == kept.sum()
    return kept


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.4, 0.7, 1.0])
@pytest.mark.parametrize("min_kept", [1, 20, 60])
def test_mining_keeps_the_pixels_of_mmsegmentation(threshold, min_kept):
    logits, labels = scene(3)
    wanted = reference_mining(logits, labels, threshold, min_kept)
    assert torch.equal(mined(logits, labels, threshold, min_kept), wanted)
    assert min_kept <= wanted.sum() <= (labels != IGNORE_INDEX).sum()


def test_mining_means_over_the_pixels_kept():
    logits, labels = scene(3)
    kept = reference_mining(logits, labels, 0.3, 10)
    wanted = F.cross_entropy(
        logits, labels.masked_fill(~kept, IGNORE_INDEX), ignore_index=IGNORE_INDEX
    )
    total, weight = ohem_cross_entropy(logits, labels, threshold=0.3, min_kept=10)
    torch.testing.assert_close(total / weight, wanted, rtol=1e-14, atol=0)


def test_mining_keeps_everything_of_too_few_valid_pixels():
    logits, labels = scene(1)
    assert torch.equal(mined(logits, labels, 0.01, 10_000), labels != IGNORE_INDEX)


def test_mining_keeps_all_of_equally_hard_pixels():
    """Otherwise the order in memory, and thereby the split over ranks, would choose among them."""
    logits = torch.zeros(1, K, H, W, dtype=torch.float64)
    logits[0, 0, :2] = 1.0
    labels = torch.zeros(1, H, W, dtype=torch.int64)
    kept = mined(logits, labels, 0.0, 3)
    assert kept[0, 2:].all()
    assert not kept[0, :2].any()


def test_class_weights_weigh_the_mined_pixels_but_do_not_choose_them():
    logits, labels = scene(3)
    kept = labels.masked_fill(~reference_mining(logits, labels, 0.3, 10), IGNORE_INDEX)
    wanted = F.cross_entropy(logits, kept, weight=CLASS_WEIGHTS.double(), ignore_index=IGNORE_INDEX)
    total, weight = ohem_cross_entropy(
        logits, labels, threshold=0.3, min_kept=10, class_weights=CLASS_WEIGHTS
    )
    torch.testing.assert_close(total / weight, wanted, rtol=1e-14, atol=0)


def test_both_heads_have_the_configured_loss():
    logits, labels = scene(2)
    loss = seg_loss(class_weights=tuple(CLASS_WEIGHTS.tolist()))
    out, aux = loss(SegLogits(logits, logits.flip(0)), labels)
    assert torch.equal(out, cross_entropy(logits, labels, class_weights=CLASS_WEIGHTS))
    assert torch.equal(aux, cross_entropy(logits.flip(0), labels, class_weights=CLASS_WEIGHTS))
    assert len(loss(SegLogits(logits), labels)) == 1
    assert loss.label_weight(labels) == out[1]


def test_means_are_sums_over_weights_and_nan_without_an_auxiliary_head():
    totals = torch.tensor([[6.0, 4], [3, 2]], dtype=torch.float64)
    assert seg_loss().means(totals).tolist() == [1.5, 1.5]
    out, aux = seg_loss().means(totals[:1])
    assert out == 1.5
    assert aux.isnan()


def test_the_objective_has_the_gradient_of_the_weighted_sum_of_both_heads():
    totals = torch.tensor([[6.0, 4], [3, 2]], dtype=torch.float64)
    mine = torch.tensor([[2.0, 1], [1, 1]], dtype=torch.float64, requires_grad=True)
    seg_loss(aux_weight=0.5).objective(mine, totals).backward()
    assert mine.grad[:, 0].tolist() == [1 / 4, 0.5 / 2]


def test_the_config_knows_the_losses_that_there_are():
    assert get_args(LossConfig.model_fields["kind"].annotation) == tuple(LOSSES)


def test_microbatches_share_the_number_of_pixels_to_keep():
    """Else four microbatches would keep four times as many easy pixels as the batch at once."""
    logits, labels = scene(3)
    config = LossConfig(kind="ohem", ohem_threshold=0.0, ohem_min_kept=41)
    ((_, weight),) = SegLoss(config, CPU, microbatches=4)(SegLogits(logits), labels)
    assert weight == 11


def enlarged_scene(dtype, split=0):
    """Six images whose logits repeat along the border, as enlarged ones do.

    The last bits are other ones for every `split` of the batch, as behind a convolution.
    """
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn((6, K, 3, 4), generator=generator, dtype=torch.float64).to(dtype)
    generator.manual_seed(split)
    ulps = torch.randint(-1, 2, coarse.shape, generator=generator)
    coarse *= 1 + ulps * torch.finfo(dtype).eps
    labels = torch.randint(K, (6, 1, 3, 4), generator=generator.manual_seed(2))
    size = (23, 31)
    labels = F.interpolate(labels.double(), size).squeeze(1).long()
    labels[2, :9] = IGNORE_INDEX
    return F.interpolate(coarse, size, mode="bilinear", align_corners=False), labels


# From a few pixels to more than any rank has; the threshold decides where it keeps more.
NUMBERS_KEPT = range(1, 6 * 23 * 31, 83)


def picks(dtype, threshold, splits):
    """The pixels of this rank that are mined, for each number to keep."""
    scene = enlarged_scene(dtype, split=dist.world_size())
    logits, labels = (part.split(splits)[dist.rank()] for part in scene)
    masks = []
    for min_kept in NUMBERS_KEPT:
        own = logits.clone().requires_grad_()
        total, _ = ohem_cross_entropy(own, labels, threshold=threshold, min_kept=min_kept)
        masks.append(torch.autograd.grad(total, own)[0].abs().sum(1) > 0)
    return torch.stack(masks)  # (numbers, n, H, W)


def all_picks(splits):
    cases = [(dtype, limit) for dtype in (torch.float32, torch.float64) for limit in (0.0, 0.4)]
    return {case: picks(*case, splits) for case in cases}


@pytest.mark.parametrize("splits", [(5, 1), (1, 3, 2), (2, 2, 1, 1)])
def test_ranks_pick_the_very_pixels_of_one_process(run_ranks, splits):
    """Whatever the number kept: among equally hard pixels too, which rounding tells apart anew for
    every split, and where it reaches over ranks."""
    ranks = run_ranks(len(splits), all_picks, splits)
    for case, one in all_picks((6,)).items():
        many = torch.cat([masks[case] for masks in ranks], dim=1)
        assert torch.equal(many, one), case


def test_pixels_as_hard_as_the_last_but_for_rounding_are_mined_with_it():
    logits, labels = scene(1)
    labels[:] = 0
    logits[0, :, :3] = logits[0, :, :1, :1]
    # The last bits, as they come out of kernels that begin elsewhere.
    noise = torch.tensor([0.0, 1.0, -1.0]) * torch.finfo(torch.float64).eps
    logits[0, :, :3] *= 1 + noise.double()[None, :, None]
    losses = F.cross_entropy(logits, labels, reduction="none")[0]
    harder = (losses[3:] > losses[:3].max()).sum().item()
    for extra in (1, W, 3 * W - 1):
        kept = mined(logits, labels, 0.0, harder + extra)
        assert kept[0, :3].all()
        assert kept.sum() == harder + 3 * W
