"""Cross entropy of enlarged logits beside torch's formulas in float64, and in the losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from segtrain import kernels
from segtrain.config import LossConfig, ModelConfig, TrainConfig
from segtrain.models import SegModel, build_model
from segtrain.models.enlarged import Enlarged, enlarged
from segtrain.models.resizing import enlarge
from segtrain.training import losses as seg_losses
from segtrain.training.losses import SegLoss
from segtrain.training.losses.total import LOSSES
from segtrain.training.state import ModelWithLoss
from segtrain.types import IGNORE_INDEX, DropoutMasks, SegLogits

CPU, SLOW = torch.device("cpu"), pytest.mark.slow("kernels", "models", "training")
# Of float32 in sums of up to some hundred numbers of about the same size.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

CASES = {  # n, K, h, w, H, W, stride; None: corners are aligned
    "whole": (1, 5, 1, 2, 8, 16, 8),
    "cut": (1, 19, 2, 3, 11, 18, 8),
    "odd": (2, 7, 3, 2, 8, 5, 3),
    "small": (1, 7, 1, 2, 3, 5, 3),
    "one pixel": (1, 2, 1, 1, 1, 1, 1),
    "stride 1": (1, 4, 3, 5, 3, 5, 1),
    "two blocks of columns": (1, 3, 1, 40, 3, 158, 4),
    "150 classes": (1, 150, 2, 2, 3, 4, 2),
    "255 classes": (1, 255, 1, 2, 1, 3, 2),
    "one class": (1, 1, 2, 2, 4, 3, 2),
    "corners": (1, 6, 2, 3, 5, 9, None),
    "corners of one row": (2, 6, 1, 3, 4, 5, None),
}


def scene(case, *, dtype=torch.float32, scale=3.0, channels_last=True):
    """Small logits, labels of which a fifth is ignored, size and stride."""
    n, classes, h, w, height, width, stride = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    small = (scale * torch.randn(n, classes, h, w, generator=generator)).to(dtype)
    if channels_last:
        small = small.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(classes, (n, height, width), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE_INDEX
    labels[0, 0, 0] = classes - 1
    return small.requires_grad_(), labels, stride


def lazy(small, labels, stride):
    made = enlarged(small, labels.shape[1:], stride, align_corners=stride is None)
    assert made.shape == (*small.shape[:2], *labels.shape[1:])
    return made


def by_formula(function, small, labels, stride):
    """The value of `function` of enlarged logits, and the gradient of its sum, in float64."""
    wide = small.detach().double().requires_grad_()
    size = labels.shape[1:]
    value = function(enlarge(wide, size, stride, align_corners=stride is None))
    return value.detach(), torch.autograd.grad(value.sum(), wide)[0]


def assert_like(found, wanted, **tolerance):
    torch.testing.assert_close(found.double(), wanted.double(), **(CLOSE | tolerance))


def torch_losses(labels, **options):
    return lambda z: F.cross_entropy(z, labels, ignore_index=IGNORE_INDEX, **options)


# The interpreter takes time by the number of classes and pixels.
LARGE = ("odd", "255 classes")


@pytest.mark.parametrize("case", [pytest.param(x, marks=SLOW) if x in LARGE else x for x in CASES])
def test_the_losses_of_pixels_are_those_of_the_formula(case):
    small, labels, stride = scene(case, channels_last=case != "cut")
    factors = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0))
    pixels = torch_losses(labels, reduction="none")
    wanted, _ = by_formula(pixels, small, labels, stride)
    _, gradient = by_formula(lambda z: pixels(z) * factors, small, labels, stride)
    losses = lazy(small, labels.to(torch.uint8), stride).cross_entropy(labels.to(torch.uint8))
    assert_like(losses.detach(), wanted)
    (found,) = torch.autograd.grad((losses * factors).sum(), small)
    assert found.stride() == small.stride()
    assert_like(found, gradient)


@pytest.mark.parametrize(
    ("case", "smoothing", "is_weighted"),
    [("cut", 0.0, True), ("odd", 0.1, True), ("corners", 0.0, True), ("small", 0.3, False)],
)
def test_the_sums_are_weighted_and_smoothed(case, smoothing, is_weighted):
    small, labels, stride = scene(case)
    table = torch.rand(small.shape[1], generator=torch.Generator().manual_seed(0))
    table[1] = 0
    weights = table if is_weighted else None
    table = table.double() if is_weighted else torch.ones(small.shape[1]).double()
    options = {"weight": table, "label_smoothing": smoothing, "reduction": "sum"}
    wanted, gradient = by_formula(torch_losses(labels, **options), small, labels, stride)
    sums = lazy(small, labels, stride).cross_entropy_sums(labels, weights, smoothing)
    assert (sums.dtype, sums.shape) == (torch.float64, (2, 1))
    valid = table[labels[labels != IGNORE_INDEX]]
    assert_like(sums.detach()[:, 0], torch.stack([wanted, valid.sum()]), rtol=1e-6)
    (found,) = torch.autograd.grad(3 * sums[0, 0] + 5 * sums[1, 0], small)
    assert_like(found, 3 * gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype):
    """The formula gets the rounded logits; only the gradient is rounded, or cut off, at the end."""
    small, labels, stride = scene("small", dtype=dtype)
    function = torch_losses(labels, reduction="sum")
    wanted, gradient = by_formula(function, small, labels, stride)
    total = lazy(small, labels, stride).cross_entropy_sums(labels, None, 0.0)[0, 0]
    assert_like(total.detach(), wanted, rtol=1e-6)
    (found,) = torch.autograd.grad(total, small)
    assert found.dtype == dtype
    assert_like(found, gradient, rtol=2 * torch.finfo(dtype).eps)


def test_exponentials_of_large_logits_neither_vanish_nor_overflow():
    for scale in (300.0, 1e30):
        small, labels, stride = scene("small", scale=scale)
        function = torch_losses(labels, reduction="none")
        wanted, _ = by_formula(function, small, labels, stride)
        losses = lazy(small, labels, stride).cross_entropy(labels)
        assert_like(losses.detach(), wanted, atol=1e-6 * scale)
        assert torch.autograd.grad(losses.sum(), small)[0].isfinite().all()


def test_the_sum_is_that_of_the_losses_in_float64():
    small, labels, stride = scene("two blocks of columns")
    logits = lazy(small.detach(), labels, stride)
    exact = logits.cross_entropy(labels).double().sum()
    assert_like(logits.cross_entropy_sums(labels, None, 0.0)[0, 0], exact, rtol=1e-14, atol=0)


def test_ignored_pixels_alone_and_no_images_have_sums_and_gradients_of_zero():
    small, labels, stride = scene("small")
    for number, table in ((1, None), (0, torch.ones(7))):
        part = small[:number].detach().requires_grad_()
        nothing = torch.full_like(labels[:number], IGNORE_INDEX)
        sums = lazy(part, nothing, stride).cross_entropy_sums(nothing, table, 0.0)
        pixels = lazy(part, nothing, stride).cross_entropy(nothing)
        assert sums.tolist() == [[0.0], [0.0]]
        assert pixels.shape == nothing.shape
        for value in (sums.sum(), pixels.sum()):
            (gradient,) = torch.autograd.grad(value, part)
            assert gradient.shape == part.shape
            assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_loss_of_logits_that_are_no_numbers_is_not_a_number(value):
    small, labels, stride = scene("small")
    with torch.no_grad():
        small[0, 3, 0, 1] = value
    for smoothing in (0.0, 0.1):
        sums = lazy(small, labels, stride).cross_entropy_sums(labels, None, smoothing)
        assert sums[0].isnan()
    assert lazy(small, labels, stride).cross_entropy(labels).isnan().any()


@pytest.mark.parametrize("label", [7, -1])
def test_the_loss_of_a_label_that_is_no_class_is_not_a_number(label):
    """The plain way raises an error on a CPU and ends the process on CUDA."""
    small, labels, stride = scene("small")
    labels[0, 2, 3] = label
    logits = lazy(small, labels, stride)
    assert logits.cross_entropy(labels).isnan().nonzero().tolist() == [[0, 2, 3]]
    for weights in (None, torch.ones(7)):
        assert logits.cross_entropy_sums(labels, weights, 0.0)[0].isnan()


def test_labels_of_another_size_are_refused():
    small, labels, stride = scene("odd")
    with pytest.raises(ValueError, match="expected"):
        lazy(small, labels, stride).cross_entropy(labels[:, 1:])


WEIGHTS = (1.0, 2.5, 0.25, 0.5, 1.0, 0.0, 1.0)
MINED = {"kind": "ohem", "ohem_threshold": 0.2, "ohem_min_kept": 8}
# The config of a loss, and whether it needs logits at full size.
LOSS_CONFIGS = {
    "cross entropy": ({}, False),
    "smoothed, weighted": ({"label_smoothing": 0.1, "class_weights": WEIGHTS}, False),
    "adjusted": ({"class_weights": WEIGHTS, "logit_adjustment": 0.5}, False),
    "mined, adjusted": (MINED | {"class_weights": WEIGHTS, "logit_adjustment": 1.0}, False),
    "hardest fifth": ({"kind": "ohem", "ohem_fraction": 0.2}, False),
    "focal": ({"kind": "focal", "class_weights": WEIGHTS}, False),
    "two of pixels": ({"weight": 0.5, "also": ({"kind": "focal"},)}, False),
    "boundary": ({"kind": "boundary_relaxation"}, True),
    "three": ({"also": ({"kind": "dice"}, {"kind": "lovasz"})}, True),
}


@pytest.mark.parametrize("name", LOSS_CONFIGS)
def test_a_loss_and_its_gradient_are_those_of_logits_at_full_size(name):
    options, needs_full = LOSS_CONFIGS[name]
    loss = SegLoss(LossConfig.model_validate(options), CPU)
    small, labels, stride = scene("small")
    logits = lazy(small, labels, stride)
    found, wanted = (
        (sums, torch.autograd.grad(loss.objective(sums, sums.detach()), small)[0])
        for sums in (loss(SegLogits(x), labels) for x in (logits, logits.full))
    )
    assert_like(found[0], wanted[0])
    assert_like(found[1], wanted[1])
    fresh = lazy(small, labels, stride)
    loss(SegLogits(fresh), labels)
    assert ("full" in vars(fresh)) == needs_full


def test_a_loss_derived_from_cross_entropy_gets_logits_at_full_size(monkeypatch):
    class Sharp(seg_losses.CrossEntropy):
        def pixel_losses(self, logits, labels):
            return super().pixel_losses(2 * logits, labels)

    monkeypatch.setitem(LOSSES, "cross_entropy", Sharp)
    loss = SegLoss(LossConfig(), CPU)
    small, labels, stride = scene("small")
    logits = lazy(small, labels, stride)
    assert torch.equal(loss.sums(logits, labels), loss.sums(logits.full, labels))


REFUSED = {  # shape, size, stride, align_corners
    "stretched": ((1, 3, 2, 2), (8, 8), None, False),
    "corners with a fractional ratio": ((1, 3, 3, 3), (8, 9), None, True),
    "corners made smaller": ((1, 3, 3, 3), (1, 3), None, True),
    "a stride beyond 128": ((1, 3, 1, 1), (129, 129), 129, False),
    "another stride": ((1, 3, 3, 3), (40, 40), 8, False),
    "256 classes": ((1, 256, 2, 2), (8, 8), 4, False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_cannot_compute_goes_the_plain_way(name):
    shape, size, stride, corners = REFUSED[name]
    assert enlarged(torch.zeros(shape), size, stride, align_corners=corners) is None


def test_float64_and_what_no_kernel_takes_go_the_plain_way(monkeypatch):
    args = (8, 8), 4
    assert enlarged(torch.zeros(1, 3, 2, 2).double(), *args, align_corners=False) is None
    assert enlarged(torch.zeros(1, 3, 2, 2), *args, align_corners=False) is not None
    monkeypatch.setattr(kernels, "interpreted", False)
    assert enlarged(torch.zeros(1, 3, 2, 2), *args, align_corners=False) is None


# The way from a model to its loss.


class Renamed(SegModel):
    """A class of a user's own, whose `forward` may be its own too."""


def model_with_loss(kind=SegModel, *, recompute="none", train=None):
    torch.manual_seed(0)
    sizes = {"num_stages": 2, "output_stride": 8, "head_channels": 8, "aux_channels": 8}
    sizes["ppm_bins"] = (2,)
    config = ModelConfig(backbone="resnet18", dropout=0.0, recompute=recompute, **sizes)
    model = build_model(config, num_classes=5, norm=lambda channels: nn.Identity())
    model.__class__ = kind
    options = {"recompute": recompute == "blocks"}
    criterion = SegLoss(LossConfig(), CPU)
    return ModelWithLoss(model.train(), criterion, train or TrainConfig(), **options)


def measured(module):
    """The sums and their gradient, and which logits these were of."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(1, 3, 7, 6, generator=generator)
    labels = torch.randint(5, (1, 7, 6), generator=generator)
    labels[:, :2] = IGNORE_INDEX
    seen, sums_of = set(), module.criterion.sums

    def watched(logits, labels):
        seen.add(type(logits))
        return sums_of(logits, labels)

    module.criterion.sums = watched
    sums = module(images, labels, DropoutMasks())
    objective = module.criterion.objective(sums, sums.detach())
    return [sums.detach(), *torch.autograd.grad(objective, list(module.parameters()))], seen


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_a_model_trains_alike_without_its_logits_at_full_size(monkeypatch, recompute):
    found, seen = measured(model_with_loss(recompute=recompute))
    monkeypatch.setattr(kernels, "interpreted", False)
    wanted, plain = measured(model_with_loss(recompute=recompute))
    assert (seen, plain) == ({Enlarged}, {torch.Tensor})
    for one, other in zip(found, wanted, strict=True):
        assert_like(one, other)


def test_hooks_shares_and_models_of_a_users_own_see_logits_at_full_size():
    hooked = model_with_loss()
    hooked.model.register_forward_hook(lambda module, args, output: None)
    shares = model_with_loss(train=TrainConfig(batch_size=2, shares=2))
    for module in (hooked, shares, model_with_loss(Renamed)):
        assert measured(module)[1] == {torch.Tensor}


def test_weights_that_are_a_slice_are_read_as_such_and_their_number_is_checked():
    small, labels, stride = scene("whole")
    weights = torch.rand(10)[::2]
    made = lazy(small, labels, stride)
    assert torch.equal(
        made.cross_entropy_sums(labels, weights, 0.1),
        made.cross_entropy_sums(labels, weights.contiguous(), 0.1),
    )
    with pytest.raises(ValueError, match=r"3,.*class weights for 5 classes"):
        made.cross_entropy_sums(labels, torch.ones(3), 0.0)
