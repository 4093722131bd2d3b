"""The oracle is a loop anybody would write: one process, the whole batch, torch's own mean."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from experiments import sections, unread
from stepping import train_steps
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import partition
from segtrain.models import DropoutChannels
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import IGNORE_INDEX, Batch, DropoutMasks, SegLogits

CPU = torch.device("cpu")
K, H, W, N = 3, 6, 9, 5
CLASS_WEIGHTS = (0.001, 0.003, 0.0005)  # so small that a whole batch weighs less than 1


class TwoHeads(nn.Module):
    """Without batch norm, so that passes of a batch do not depend on each other."""

    dropout_channels = DropoutChannels(None, None)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Conv2d(4, K, 1)
        self.aux_head = nn.Conv2d(4, K, 1)
        self.seen = []

    def forward(self, images, dropout=None):
        self.seen.append(images)
        features = torch.tanh(self.backbone(images))
        return SegLogits(self.head(features), self.aux_head(features))


def config(*, loss=None, norm=None, dropout=0.0, **train):
    options = {"steps": 6, "batch_size": N, "lr": 0.5, "precision": "float64"} | train
    model = {"dropout": dropout}
    return unread(model=model, loss=loss or {}, norm=norm or {}, **sections(**options))


def whole_batch(step):
    """Images of which the last are ignored more and more, so that every pass weighs differently."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(256, (N, 3, H, W), generator=generator, dtype=torch.uint8)
    labels = (images.sum(1) % K).to(torch.uint8)
    for i in range(N):
        labels[i, : i + 1] = IGNORE_INDEX
    return images.contiguous(memory_format=torch.channels_last), labels


def batches(settings, rows, start):
    for step in range(start, settings.train.steps):
        images, labels = whole_batch(step)
        for mine in map(list, rows):
            yield Batch(images[mine], labels[mine], [f"{step}/{i}" for i in mine])


def run(settings, state, step_sync=None):
    train = settings.train
    rows = state.layout.positions(dist.rank())
    sync = step_sync or StepSync(lambda: False, overflow_allowed=train.precision == "float16")
    return train_steps(
        state,
        batches(settings, rows, state.step),
        settings,
        device=CPU,
        step_sync=sync,
    )


def new_state(settings):
    return make_state(TwoHeads(), settings, CPU)


def weights(state):
    return copy.deepcopy(state.model.state_dict())


def trained(settings, make_state=new_state):
    """The results of all steps as numbers, and the weights at the end."""
    state = make_state(settings)
    results = [
        (r.step, r.loss.item(), r.aux_loss.item(), r.grad_norm.item(), r.lr)
        for r in run(settings, state)
    ]
    return results, weights(state)


def plain_loop(settings, make_model=TwoHeads, masks=lambda step: torch.ones(N)):
    """The same without any of segtrain's parts but the dropout masks, which are given."""
    train, optim, loss = settings.train, settings.optim, settings.loss
    model = make_model().double()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=optim.momentum, weight_decay=optim.weight_decay
    )
    mean = torch.tensor(settings.data.mean).double().view(3, 1, 1)
    std = torch.tensor(settings.data.std).double().view(3, 1, 1)
    weights = None if loss.class_weights is None else torch.tensor(loss.class_weights).double()
    options = {"weight": weights, "ignore_index": IGNORE_INDEX, "reduction": "sum"}

    def gradient(images, labels, mask):
        optimizer.zero_grad()
        total = torch.zeros(2).double()
        # A loss of 1 for each valid pixel, times the weight of its class.
        whole = F.nll_loss(torch.full((N, K, H, W), -1.0).double(), labels, **options)
        for i in range(train.accumulate_steps):
            mine = list(partition(N, train.accumulate_steps, i))
            heads = model((images[mine].double() - mean) / std, DropoutMasks(mask[mine]))
            losses = [F.cross_entropy(head, labels[mine], **options) / whole for head in heads]
            (losses[0] + loss.aux_weight * losses[1]).backward()
            total += torch.stack(losses).detach()
        return total.tolist()

    results = []
    for step in range(train.steps):
        lr = optim.lr * (1 - step / train.steps) ** 0.9
        optimizer.param_groups[0]["lr"] = lr
        images, labels = whole_batch(step)
        out, aux = gradient(images, labels.long(), masks(step))
        norm = nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad_norm or 1e9)
        optimizer.step()
        results.append((step + 1, out, aux, norm.item(), lr))
    return results, model.state_dict()


TWO_WEIGHTED = config(accumulate_steps=2, loss={"class_weights": CLASS_WEIGHTS})
SETTINGS = {
    "plain": config(),
    "weighted": config(loss={"class_weights": CLASS_WEIGHTS, "aux_weight": 0.7}),
    "two passes": config(accumulate_steps=2),
    "two weighted passes": TWO_WEIGHTED,
    "clipped": config(clip_grad_norm=0.05, weight_decay=0.01),
}


def assert_same_training(found, wanted):
    torch.testing.assert_close(
        torch.tensor(found[0]).double(), torch.tensor(wanted[0]).double(), rtol=1e-9, atol=0
    )
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_training_is_the_plain_loop_over_the_whole_batch(name):
    """Passes of unequal weight too: what they share is the valid pixels of the whole step."""
    assert_same_training(trained(SETTINGS[name]), plain_loop(SETTINGS[name]))


def trainings_of_rank():
    results = {name: trained(settings) for name, settings in SETTINGS.items()}

    settings = config()
    stop = StepSync(lambda: dist.rank() == 1)
    results["stopped"] = [result.step for result in run(settings, new_state(settings), stop)]

    half = config(precision="float16")
    state = new_state(half)
    factors = iter([1.0, 1.0, torch.inf, 1.0, 1.0, 1.0])
    if dist.rank() == 1:
        state.model.head.weight.register_hook(lambda gradient: gradient * next(factors))
    finite = [bool(result.grad_norm.isfinite()) for result in run(half, state)]
    results["float16"] = finite, state.scaler.get_scale(), weights(state)
    return results


def test_ranks_with_unequal_rows_train_like_the_plain_loop(run_ranks):
    """5 images are 3 + 2. Ranks stop together, and an overflow of float16 on one is one on all."""
    ranks = run_ranks(2, trainings_of_rank)
    for results in ranks:
        for name, settings in SETTINGS.items():
            assert_same_training(results[name], plain_loop(settings))
        assert results["stopped"] == [1, 2]
        finite, scale, final = results["float16"]
        assert finite == [True, True, False, True, True, True]
        assert scale == 2.0**15
        assert all(torch.equal(v, ranks[0]["float16"][2][name]) for name, v in final.items())


def test_images_are_channels_last_and_the_average_is_evaluated():
    settings = config(steps=1, ema_decay=0.4)
    state = new_state(settings)
    wanted = 2 / 11 * state.model.head.weight.detach()
    next(run(settings, state))
    wanted += 9 / 11 * state.model.head.weight.detach()
    torch.testing.assert_close(state.eval_model.head.weight, wanted, rtol=1e-12, atol=0)
    (images,) = state.model.seen
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_step_leaves_no_tensor_to_the_garbage_collector():
    """The command lets it look rarely: what waited for it would pile up."""
    settings = config(accumulate_steps=2, ema_decay=0.4, dropout=0.1)
    steps = run(settings, new_state(settings))
    next(steps)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert len(list(steps)) == 5
        gc.collect()
        assert not [left for left in gc.garbage if isinstance(left, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.fault(73)
def test_a_batch_of_ignored_pixels_is_a_step_without_a_gradient():
    settings = config(steps=1, weight_decay=0.0, accumulate_steps=2)
    state = new_state(settings)
    before = weights(state)
    images, labels = whole_batch(0)
    ignored = torch.full_like(labels, IGNORE_INDEX)
    rows = map(list, state.layout.positions(0))
    given = [Batch(images[mine], ignored[mine], ["a"]) for mine in rows]
    step_sync = StepSync(lambda: False)
    result = next(train_steps(state, given, settings, device=CPU, step_sync=step_sync))
    step_sync.check_finite()
    assert (result.loss.item(), result.grad_norm.item()) == (0.0, 0.0)
    assert all(torch.equal(value, before[name]) for name, value in weights(state).items())


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_stays_near_float32(precision):
    exact, _ = trained(config(precision="float32"))
    mixed, final = trained(config(precision=precision))
    for (_, loss, _, norm, _), (_, wanted, _, wanted_norm, _) in zip(mixed, exact, strict=True):
        assert loss == pytest.approx(wanted, rel=0.02)
        assert norm == pytest.approx(wanted_norm, rel=0.1)
    assert {value.dtype for value in final.values()} == {torch.float32}


@pytest.mark.fault(78)
def test_float16_skips_steps_that_overflow_until_the_scale_fits():
    settings = config(precision="float16", steps=40)
    state = new_state(settings)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    step_sync = StepSync(lambda: False, overflow_allowed=True)
    before = weights(state)
    finite = []
    for result in run(settings, state, step_sync):
        finite.append(bool(result.grad_norm.isfinite()))
        if not any(finite):
            assert all(torch.equal(v, before[name]) for name, v in weights(state).items())
    step_sync.check_finite()
    assert not finite[0]
    assert finite[-1]
    assert not torch.equal(state.model.head.weight, before["head.weight"])
