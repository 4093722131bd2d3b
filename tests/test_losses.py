"""The oracles are torch's own functions and the papers' formulas, in float64, over the valid pixels
of the whole batch."""

import re
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from experiments import experiment, unread, write_config

from segtrain.config import LossConfig, load_config, parse_config
from segtrain.data import open_dataset
from segtrain.distributed import collectives as dist
from segtrain.distributed.shares import ShareThreads
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.errors import ConfigError
from segtrain.norm import placed
from segtrain.trainer.preflight import check_experiment
from segtrain.training.losses import LOSSES, LossOptions, SegLoss
from segtrain.training.losses.total import MULTILABEL_LOSSES
from segtrain.training.step_sync import StepSync
from segtrain.types import IGNORE_INDEX, SegLogits

K, H, W = 4, 5, 7
WEIGHTS = (1.0, 2.5, 0.25, 0.5)
ADJUSTMENT = torch.tensor(WEIGHTS).double().log().view(-1, 1, 1)
TWICE_THE_ODDS_OF_2 = torch.tensor((1.0, 1.0, 2.0, 1.0)).double().log().view(-1, 1, 1)
CPU = torch.device("cpu")
IMAGES = 5


def noise(num_images, seed=0):
    """Logits and labels, a fifth of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((num_images, K, H, W), generator=generator, dtype=torch.float64)
    labels = torch.randint(K, (num_images, H, W), generator=generator)
    ignored = torch.rand(labels.shape, generator=generator) < 0.2
    return logits, labels.masked_fill(ignored, IGNORE_INDEX)


def scene():
    """Noise in which the last image is ignored; equally hard pixels; one class only in the first
    image."""
    logits, labels = noise(IMAGES, seed=7)
    labels[1:][labels[1:] == 3] = 0
    labels[-1] = IGNORE_INDEX
    logits[1:3, :, 1:3] = 0.5
    return logits, labels


def seg_loss(config):
    return SegLoss(LossConfig.model_validate(config), CPU)


def of_one_rank(config, logits, labels):
    """The loss of the head, with a gradient."""
    loss = seg_loss(config)
    return loss.objective(sums := loss(SegLogits(logits), labels), sums.detach())


# The formulas, written naively.


def valid_pixels(logits, labels):
    """(pixels, K) logits and (pixels,) labels."""
    valid = labels != IGNORE_INDEX
    return logits.movedim(1, -1)[valid], labels[valid]


def weighted_mean(losses, labels, weights):
    w = torch.tensor(weights, dtype=losses.dtype)[labels]
    return (w * losses).sum() / w.sum()


def focal(logits, labels, gamma=2.0, weights=(1.0,) * K):
    pixels, labels = valid_pixels(logits, labels)
    p = pixels.softmax(1)[torch.arange(len(labels)), labels]
    return weighted_mean((1 - p) ** gamma * -p.log(), labels, weights)


def cross_entropy(logits, labels, weights=None, smoothing=0.0):
    weight = None if weights is None else torch.tensor(weights, dtype=logits.dtype)
    options = {"ignore_index": IGNORE_INDEX, "label_smoothing": smoothing}
    return F.cross_entropy(logits, labels, weight=weight, **options)


def relaxed(logits, labels, radius=1, weights=(1.0,) * K):
    losses, own = [], []
    for n, i, j in (labels != IGNORE_INDEX).nonzero().tolist():
        window = labels[n, max(0, i - radius) : i + radius + 1, max(0, j - radius) : j + radius + 1]
        classes = sorted({c for c in window.flatten().tolist() if c != IGNORE_INDEX})
        losses.append(-logits[n, :, i, j].softmax(0)[classes].sum().log())
        own.append(labels[n, i, j])
    return weighted_mean(torch.stack(losses), torch.stack(own), weights)


def lovasz_flat(logits, labels):
    """Algorithm 1 of arXiv:1705.08790 for each class that occurs; the mean over them."""
    losses = []
    for k in range(K):
        truth = (labels == k).double()
        if not truth.any():
            continue
        errors = (truth - logits.softmax(1)[:, k]).abs()
        errors, order = errors.sort(descending=True, stable=True)
        truth = truth[order]
        iou = (truth.sum() - truth.cumsum(0)) / (truth.sum() + (1 - truth).cumsum(0))
        losses.append(errors @ torch.diff(1 - iou, prepend=torch.zeros(1).double()))
    return torch.stack(losses).mean()


def lovasz_batch(logits, labels):
    return lovasz_flat(*valid_pixels(logits, labels))


def lovasz_images(logits, labels):
    images = [valid_pixels(a[None], b[None]) for a, b in zip(logits, labels, strict=True)]
    return torch.stack([lovasz_flat(a, b) for a, b in images if len(b)]).mean()


def hardest(logits, labels, fraction=0.2):
    losses = F.cross_entropy(*valid_pixels(logits, labels), reduction="none")
    limit = losses.sort(descending=True).values[max(1, int(fraction * len(losses))) - 1]
    return losses[losses >= limit - 1e-12].mean()


def easy_left_out(logits, labels, threshold, weights):
    """Cross entropy of the pixels that mmsegmentation's OHEMPixelSampler keeps by its threshold."""
    valid = labels != IGNORE_INDEX
    p = logits.softmax(1).gather(1, labels.where(valid, 0).unsqueeze(1)).squeeze(1)
    return cross_entropy(logits, labels.where(p < threshold, IGNORE_INDEX), weights)


def dice(logits, labels, power=2):
    """Without the squares: MONAI's with softmax and batch, without its epsilon."""
    pixels, labels = valid_pixels(logits, labels)
    p, g = pixels.softmax(1), F.one_hot(labels, K).double()
    dice = 2 * (p * g).sum(0) / ((p**power).sum(0) + g.sum(0))
    return (1 - dice)[g.any(0)].mean()


def recipe(logits, labels):
    """That of Composer's DeepLabV3+ for ADE20K."""
    return 0.375 * cross_entropy(logits, labels) + 1.125 * dice(logits, labels, power=1)


def everything(logits, labels):
    return (
        0.5 * cross_entropy(logits, labels, WEIGHTS)
        + 2 * lovasz_batch(logits, labels)
        + focal(logits, labels)
        + hardest(logits, labels)
    )


FOCAL, MINED = {"kind": "focal"}, {"kind": "ohem", "ohem_threshold": 0.2, "ohem_min_kept": 3}
THREE = {"kind": "lovasz_batch", "weight": 2.0}, FOCAL, {"kind": "ohem", "ohem_fraction": 0.2}
CASES = {
    "cross entropy": ({}, cross_entropy),
    "weighted": ({"class_weights": WEIGHTS}, partial(cross_entropy, weights=WEIGHTS)),
    "mined, weighted": (
        MINED | {"class_weights": WEIGHTS},
        partial(easy_left_out, threshold=0.2, weights=WEIGHTS),
    ),
    "too few to mine": ({"kind": "ohem", "ohem_min_kept": 5000}, cross_entropy),
    "dice": ({"kind": "dice"}, dice),
    "focal, weighted": (FOCAL | {"class_weights": WEIGHTS}, partial(focal, weights=WEIGHTS)),
    "adjusted, a weight of 0": (
        {"class_weights": (0.0, 1.0, 4.0, 1.0), "logit_adjustment": 0.5},
        lambda z, y: cross_entropy(z + TWICE_THE_ODDS_OF_2, y, (0.0, 1.0, 4.0, 1.0)),
    ),
    "mined, adjusted, weighted": (
        MINED | {"class_weights": WEIGHTS, "logit_adjustment": 1.0},
        lambda z, y: easy_left_out(z + ADJUSTMENT, y, 0.2, WEIGHTS),
    ),
    "smoothed, weighted": (
        {"label_smoothing": 0.1, "class_weights": WEIGHTS},
        partial(cross_entropy, weights=WEIGHTS, smoothing=0.1),
    ),
    "relaxed, weighted": (
        {"kind": "boundary_relaxation", "class_weights": WEIGHTS},
        partial(relaxed, weights=WEIGHTS),
    ),
    "lovasz of images": ({"kind": "lovasz"}, lovasz_images),
    "lovasz of the batch": ({"kind": "lovasz_batch"}, lovasz_batch),
    "hardest pixel": ({"kind": "ohem", "ohem_fraction": 1e-9}, partial(hardest, fraction=1e-9)),
    "Composer's recipe": (
        {"weight": 0.375, "also": ({"kind": "dice_linear", "weight": 1.125},)},
        recipe,
    ),
    "four terms": ({"weight": 0.5, "class_weights": WEIGHTS, "also": THREE}, everything),
}


def with_gradient(function, logits, labels):
    logits = logits.clone().requires_grad_()
    value = function(logits, labels)
    return value.detach(), torch.autograd.grad(value, logits)[0]


def assert_equal_up_to_rounding(found, wanted, name=""):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=0, msg=f"{name}: value")
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-9, atol=1e-15, msg=f"{name}: gradient")


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_its_gradient_are_those_of_the_formula(name):
    config, formula = CASES[name]
    found = with_gradient(partial(of_one_rank, config), *scene())
    assert_equal_up_to_rounding(found, with_gradient(formula, *scene()))


def of_part(part):
    """The losses of both heads over all parts, and the gradient of this one, in every case."""
    logits, labels = part
    results = {}
    for name, (config, _) in CASES.items():
        own = logits.clone().requires_grad_()
        loss = seg_loss(config)
        sums = loss(SegLogits(own, -own), labels)
        totals = StepSync(lambda: False).reduce(sums)
        (gradient,) = torch.autograd.grad(loss.objective(sums, totals), own)
        results[name] = loss.means(totals), gradient
    return results


def of_rank(splits):
    with placed(splits):
        return of_part([part.split(splits)[dist.rank()] for part in scene()])


def assert_one_batch(parts):
    """`parts`: what `of_part` returned for each."""
    for name, (_, formula) in CASES.items():
        logits, labels = scene()
        out, gradient = with_gradient(formula, logits, labels)
        aux, aux_gradient = with_gradient(lambda x, y: formula(-x, y), logits, labels)  # noqa: B023
        found = torch.cat([part[name][1] for part in parts])
        wanted = torch.stack([out, aux]), gradient + 0.4 * aux_gradient
        for part in parts:
            assert_equal_up_to_rounding((part[name][0], found), wanted, name)


@pytest.mark.fault(74)
def test_ranks_together_have_the_loss_of_the_whole_batch(run_ranks):
    """Unequal parts, of which the last has ignored pixels alone."""
    assert_one_batch(run_ranks(3, of_rank, (1, 3, 1)))


@pytest.mark.parametrize("shares", [None, (3,)])
def test_virtual_ranks_and_shares_have_the_loss_of_the_whole_batch(shares):
    parts = list(zip(*(part.split((2, 2, 1)) for part in scene()), strict=True))
    group = VirtualRanks(3) if shares is None else ShareThreads(shares, 3)
    with placed([(2, 2, 1)]):
        assert_one_batch(group.run([partial(of_part, part) for part in parts]))


@pytest.mark.parametrize("name", CASES)
def test_half_precision_logits_are_widened_first(name):
    logits, labels = scene()
    half = logits.bfloat16()
    found, gradient = with_gradient(partial(of_one_rank, CASES[name][0]), half, labels)
    assert found == of_one_rank(CASES[name][0], half.float(), labels)
    assert gradient.isfinite().all()


@pytest.mark.fault(73)
@pytest.mark.parametrize("name", CASES)
def test_odd_logits_and_labels_have_a_finite_loss_and_gradient(name):
    """Ignored pixels alone: 0. Probabilities of exactly 1 and 0, right and wrong: finite."""
    logits, labels = scene()
    nothing = torch.full_like(labels, IGNORE_INDEX)
    loss, gradient = with_gradient(partial(of_one_rank, CASES[name][0]), logits, nothing)
    assert (loss, gradient.count_nonzero()) == (0, 0)
    for factor in (1e3, 1e30):
        certain = (logits.sign() * factor).float()
        loss, gradient = with_gradient(partial(of_one_rank, CASES[name][0]), certain, labels)
        assert loss.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["focal, weighted", "smoothed, weighted", "relaxed, weighted"])
def test_a_mean_over_pixels_is_exact_over_microbatches(name):
    """The step weighs microbatches by `label_weight`, whatever the loss."""
    config, formula = CASES[name]
    logits, labels = scene()
    loss, parts = seg_loss(config), []
    for one, other in zip(logits.split([3, 2]), labels.split([3, 2]), strict=True):
        parts.append((of_one_rank(config, one, other), loss.label_weight(other)))
    mean = sum(value * weight for value, weight in parts) / loss.label_weight(labels)
    torch.testing.assert_close(mean, formula(logits, labels), rtol=1e-12, atol=0)
    # Of several terms, the first one that weighs classes says what a microbatch weighs.
    terms = {"kind": "dice", "also": ({"kind": "focal", "class_weights": WEIGHTS},)}
    assert seg_loss(terms).label_weight(torch.tensor([[[0, 1, IGNORE_INDEX]]])) == 3.5


def test_the_losses_of_other_trainers_in_the_readme_are_accepted():
    text = (Path(__file__).parent.parent / "configs" / "README.md").read_text()
    sections = re.findall(r"`(loss: \{.*?\})`", text)
    assert len(sections) == 4
    for section in sections:
        config = "data: {layout: voc, root: x, classes: voc}\n" + section
        assert parse_config(config, source="README").loss != LossConfig()


def test_microbatches_cannot_be_weighed_by_two_sets_of_class_weights():
    term = {"kind": "focal", "class_weights": WEIGHTS}
    train = {"accumulate_steps": 2}
    with pytest.raises(ValueError, match=r"loss\.also: with train\.accumulate_steps"):
        unread(train=train, loss={"also": (term,)})
    both = {"class_weights": WEIGHTS, "also": (term, {"kind": "dice"})}
    config = unread(train=train, loss=both)
    assert config.loss.also[0].class_weights == WEIGHTS


def test_the_class_weights_of_every_term_are_one_for_each_class(tmp_path, data):
    term = {"kind": "focal", "class_weights": [1.0, 2.0]}
    options = experiment(data, loss={"class_weights": [1.0, 2.0, 3.0], "also": [term]})
    config = load_config(write_config(tmp_path / "c.yaml", options))
    sets = [open_dataset(config.data, split) for split in ("train", "val")]
    with pytest.raises(ConfigError) as caught:
        check_experiment(config, *sets, device=CPU)
    first, second = str(caught.value).splitlines()
    assert first.startswith("loss.class_weights: 3 numbers for the 4 classes of ")
    assert second.startswith("loss.also[0].class_weights: 2 numbers for the 4 classes of ")


# Hard example mining.


def sums_of(logits, labels, **config):
    """The losses and weights of a mean over pixels."""
    return LOSSES[config["kind"]](LossOptions(LossConfig(**config))).sums(logits, labels)[:, 0]


def ohem(logits, labels, threshold, min_kept):
    options = {"ohem_threshold": threshold, "ohem_min_kept": min_kept}
    return sums_of(logits, labels, kind="ohem", **options)


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
    logits, labels = noise(3)
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


def test_the_config_knows_the_losses_that_there_are_and_each_has_a_formula():
    kinds = {config.get("kind", "cross_entropy") for config, _ in CASES.values()}
    assert kinds | {"dice_linear"} == {*LOSSES}  # dice_linear is in the recipe
    assert get_args(LossConfig.model_fields["kind"].annotation) == (*LOSSES, "tversky")
    assert MULTILABEL_LOSSES.keys() - LOSSES.keys() == {"tversky"}


def test_microbatches_share_the_number_of_pixels_to_keep():
    """Else four microbatches would keep four times as many easy pixels as the batch at once."""
    logits, labels = noise(3)
    config = LossConfig(kind="ohem", ohem_threshold=0.0, ohem_min_kept=41)
    loss = SegLoss(config, CPU, microbatches=4)
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
NUMBERS_KEPT = range(1, 6 * 23 * 31, 503)


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


def test_ranks_pick_the_very_pixels_of_one_process(run_ranks):
    """Whatever the number kept: among equally hard pixels too, which rounding tells apart anew for
    every split, and where it reaches over ranks."""
    ranks = run_ranks(3, all_picks, (1, 3, 2))
    for case, one in all_picks((6,)).items():
        many = torch.cat([masks[case] for masks in ranks], dim=1)
        assert torch.equal(many, one), case
