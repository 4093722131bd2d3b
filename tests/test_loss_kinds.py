"""The oracles are torch's own functions and the papers' formulas, in float64, over the valid pixels
of the whole batch."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from experiments import experiment, write_config

from segtrain.commands.train.preflight import check_experiment
from segtrain.config import (
    Config,
    DataConfig,
    LossConfig,
    TrainConfig,
    config_to_yaml,
    load_config,
    parse_config,
)
from segtrain.data import open_dataset
from segtrain.distributed import collectives as dist
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.errors import ConfigError
from segtrain.training.losses import SegLoss
from segtrain.training.step_sync import StepSync
from segtrain.types import IGNORE_INDEX, SegLogits

K, H, W = 4, 5, 7
WEIGHTS = (1.0, 2.5, 0.25, 0.5)
CPU = torch.device("cpu")
IMAGES = 5


def scene(num_images=IMAGES):
    """Logits and labels: a fifth ignored, the last image throughout; equally hard pixels; one
    class only in the first image."""
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn((num_images, K, H, W), generator=generator, dtype=torch.float64)
    labels = torch.randint(K, (num_images, H, W), generator=generator)
    labels[1:][labels[1:] == 3] = 0
    labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.2, IGNORE_INDEX)
    labels[-1] = IGNORE_INDEX
    logits[1:3, :, 1:3] = 0.5
    return logits, labels


def seg_loss(config):
    return SegLoss(LossConfig.model_validate(config), CPU, batch_size=IMAGES)


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


def easy_left_out(logits, labels, threshold=0.4, weights=None):
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


CASES = {
    "cross entropy": ({}, cross_entropy),
    "weighted": ({"class_weights": WEIGHTS}, partial(cross_entropy, weights=WEIGHTS)),
    "mined": ({"kind": "ohem", "ohem_threshold": 0.4, "ohem_min_kept": 3}, easy_left_out),
    "mined, weighted": (
        {"kind": "ohem", "ohem_threshold": 0.2, "ohem_min_kept": 3, "class_weights": WEIGHTS},
        partial(easy_left_out, threshold=0.2, weights=WEIGHTS),
    ),
    "too few to mine": ({"kind": "ohem", "ohem_min_kept": 5000}, cross_entropy),
    "dice": ({"kind": "dice"}, dice),
    "focal": ({"kind": "focal"}, focal),
    "focal, 0": ({"kind": "focal", "focal_gamma": 0.0}, cross_entropy),
    "focal, 0.5, weighted": (
        {"kind": "focal", "focal_gamma": 0.5, "class_weights": WEIGHTS},
        partial(focal, gamma=0.5, weights=WEIGHTS),
    ),
    "smoothed": ({"label_smoothing": 0.1}, partial(cross_entropy, smoothing=0.1)),
    "smoothed, weighted": (
        {"label_smoothing": 0.1, "class_weights": WEIGHTS},
        partial(cross_entropy, weights=WEIGHTS, smoothing=0.1),
    ),
    "relaxed": ({"kind": "boundary_relaxation"}, relaxed),
    "relaxed, 2 px, weighted": (
        {"kind": "boundary_relaxation", "boundary_px": 2, "class_weights": WEIGHTS},
        partial(relaxed, radius=2, weights=WEIGHTS),
    ),
    "lovasz of images": ({"kind": "lovasz"}, lovasz_images),
    "lovasz of the batch": ({"kind": "lovasz", "lovasz_per_image": False}, lovasz_batch),
    "hardest fifth": ({"kind": "ohem", "ohem_fraction": 0.2}, hardest),
    "hardest 0.73": ({"kind": "ohem", "ohem_fraction": 0.73}, partial(hardest, fraction=0.73)),
    "hardest pixel": ({"kind": "ohem", "ohem_fraction": 1e-9}, partial(hardest, fraction=1e-9)),
    "all pixels": ({"kind": "ohem", "ohem_fraction": 1.0}, cross_entropy),
    "dice without squares": ({"kind": "dice", "dice_squared": False}, partial(dice, power=1)),
    "twice": ({"weight": 2.0}, lambda *args: 2 * cross_entropy(*args)),
    "Composer's recipe": (
        {"weight": 0.375, "also": ({"kind": "dice", "weight": 1.125, "dice_squared": False},)},
        recipe,
    ),
    "four terms": (
        {
            "weight": 0.5,
            "class_weights": WEIGHTS,
            "also": (
                {"kind": "lovasz", "lovasz_per_image": False, "weight": 2.0},
                {"kind": "focal"},
                {"kind": "ohem", "ohem_fraction": 0.2},
            ),
        },
        everything,
    ),
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
@pytest.mark.parametrize("splits", [(3, 2), (2, 2, 1)])
def test_ranks_together_have_the_loss_of_the_whole_batch(run_ranks, splits):
    """Unequal parts, of which the last has an ignored image or nothing else."""
    assert_one_batch(run_ranks(len(splits), of_rank, splits))


@pytest.mark.parametrize("shares", [None, (3,)])
def test_virtual_ranks_and_shares_have_the_loss_of_the_whole_batch(shares):
    parts = list(zip(*(part.split((2, 2, 1)) for part in scene()), strict=True))
    group = VirtualRanks(3, shares=shares)
    assert_one_batch(group.run([partial(of_part, part) for part in parts]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_widened_first(name, dtype):
    logits, labels = scene()
    half = logits.to(dtype)
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


def test_lovasz_of_certain_predictions_is_one_minus_the_mean_iou():
    """At the corners, the extension is the set function itself."""
    labels = scene()[1]
    pred = labels.roll(1, 2).clamp(max=K - 1)
    logits = 1e4 * F.one_hot(pred, K).movedim(-1, 1).double()
    valid = labels != IGNORE_INDEX
    ious = [
        ((pred == k) & (labels == k)).sum() / (((pred == k) & valid) | (labels == k)).sum()
        for k in range(K)
    ]
    found = of_one_rank({"kind": "lovasz", "lovasz_per_image": False}, logits, labels)
    assert found.item() == pytest.approx(1 - torch.stack(ious).mean().item(), rel=1e-6)


@pytest.mark.parametrize("name", ["focal, 0.5, weighted", "smoothed, weighted", "relaxed"])
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


def test_a_sum_of_losses_survives_checkpoint_and_run_directory():
    """As JSON in a checkpoint, as YAML in config.yaml."""
    loss = LossConfig.model_validate(CASES["four terms"][0])
    config = Config(data=DataConfig(layout="folders", root="x", classes="x"), loss=loss)
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert parse_config(config_to_yaml(config), source="config.yaml") == config


def test_the_losses_of_other_trainers_in_the_readme_are_accepted():
    text = (Path(__file__).parent.parent / "configs" / "README.md").read_text()
    sections = re.findall(r"`(loss: \{.*?\})`", text)
    assert len(sections) == 4
    for section in sections:
        config = "data: {layout: voc, root: x, classes: voc}\n" + section
        assert parse_config(config, source="README").loss != LossConfig()


REFUSED = [
    ({"label_smoothing": 0.1, "kind": "ohem"}, "label_smoothing: has no effect with kind ohem"),
    ({"focal_gamma": 1.0}, "focal_gamma: has no effect with kind cross_entropy"),
    ({"ohem_fraction": 0.2}, "ohem_fraction: has no effect with kind cross_entropy"),
    ({"dice_squared": False}, "dice_squared: has no effect"),
    ({"lovasz_per_image": False}, "lovasz_per_image: has no effect"),
    ({"boundary_px": 2}, "boundary_px: has no effect"),
    ({"kind": "lovasz", "class_weights": (1.0,)}, "class_weights: has no effect with kind lovasz"),
    ({"kind": "dice", "class_weights": (1.0,)}, "class_weights: has no effect with kind dice"),
    (
        {"kind": "ohem", "ohem_fraction": 0.2, "ohem_threshold": 0.5},
        "ohem_threshold: has no effect with ohem_fraction 0",
    ),
    ({"also": ({"kind": "dice", "ohem_min_kept": 5},)}, "ohem_min_kept: has no effect with kind"),
    ({"also": ({"weight": 5.0},)}, "kind"),
    ({"also": ({"kind": "focal", "class_weights": (0.0,)},)}, "all weights are 0"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_an_option_without_effect_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        LossConfig.model_validate(config)


def test_microbatches_cannot_be_weighed_by_two_sets_of_class_weights():
    term = {"kind": "focal", "class_weights": WEIGHTS}
    data = DataConfig(layout="folders", root="x", classes="x")
    train = TrainConfig(accumulate_steps=2)
    with pytest.raises(ValueError, match=r"loss\.also: with train\.accumulate_steps"):
        Config(data=data, train=train, loss=LossConfig.model_validate({"also": (term,)}))
    both = {"class_weights": WEIGHTS, "also": (term, {"kind": "dice"})}
    config = Config(data=data, train=train, loss=LossConfig.model_validate(both))
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
