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


def sums_of(logits, labels, **config):
    """The losses and weights of a mean over pixels."""
    return LOSSES[config["kind"]](LossOptions(LossConfig(**config))).sums(logits, labels)[:, 0]


def ohem(logits, labels, threshold, min_kept):
    options = {"ohem_threshold": threshold, "ohem_min_kept": min_kept}
    return sums_of(logits, labels, kind="ohem", **options)


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
    total, _ = sums_of(logits, labels, kind="cross_entropy")
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, pixels.sum(), rtol=1e-13, atol=0)


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
    total, weight = ohem(logits, labels, threshold, min_kept)
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


def test_mining_keeps_all_of_equally_hard_pixels():
    """Otherwise the order in memory, and thereby the split over ranks, would choose among them."""
    logits = torch.zeros(1, K, H, W, dtype=torch.float64)
    logits[0, 0, :2] = 1.0
    labels = torch.zeros(1, H, W, dtype=torch.int64)
    kept = mined(logits, labels, 0.0, 3)
    assert kept[0, 2:].all()
    assert not kept[0, :2].any()


def test_the_config_knows_the_losses_that_there_are():
    assert get_args(LossConfig.model_fields["kind"].annotation) == tuple(LOSSES)


def test_microbatches_share_the_number_of_pixels_to_keep():
    """Else four microbatches would keep four times as many easy pixels as the batch at once."""
    logits, labels = scene(3)
    config = LossConfig(kind="ohem", ohem_threshold=0.0, ohem_min_kept=41)
    loss = SegLoss(config, torch.device("cpu"), microbatches=4)
    sums = loss(SegLogits(logits), labels)  # (1, 2, 1)
    assert sums[0, 1] == 11
    out, aux = loss.means(sums)
    assert out == sums[0, 0] / 11
    assert aux.isnan()  # there is no auxiliary head


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
        total, _ = ohem(own, labels, threshold, min_kept)
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
