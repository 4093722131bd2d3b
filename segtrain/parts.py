"""The gradient of a whole batch in the memory of a part of it, for a loop of your own.

    from segtrain.parts import backward

A thread computes each part. They take turns, and wait for each other in each batch norm: see
`distributed.virtual_ranks`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.offload import saved_on_host
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.norm import (
    FrozenBatchNorm2d,
    SyncBatchNorm,
    make_groups,
    placed,
    sync_running_stats,
    tracked_together,
)

Loss = Callable[[Any, Any], tuple[Tensor, Tensor | float]]

# Of sums, in half precision too.
_ROUNDING = 1e-3


def backward(
    model: nn.Module, loss: Loss, images: Tensor, labels: Any, *, parts: int = 8
) -> Tensor:
    """Adds the gradient of the whole batch to `.grad`; returns its loss, () float64 (collective).

    The objective is the sum that `loss` returns over the weight that it returns, each added up over
    all parts of all ranks. If the weight is 0, so are objective and gradient. Every rank gets the
    gradient of all ranks together, ready for `optimizer.step()` without DistributedDataParallel.

    On CUDA, what the forward passes save waits on the host. On a CPU it stays, except what
    `torch.utils.checkpoint` in the model leaves out. Autocast is that of the caller.

    The first call, and one after modules went between training and evaluation, tries four images in
    two parts: the output of an image must not depend on another, except through batch norms, and
    `loss` of two images must be the sum of both. It sees gradients: not a choice, such as the
    largest value of the batch, and no branch whose weights are all 0 at that time. A mean over
    pixels times the number of images is a sum where all images have equally many valid pixels: if
    the first labels cannot tell, later ones are tried, less and less often.

    Args:
        model: takes `images`; `segtrain.norm.convert` has replaced its batch norms. Its outputs are
            tensors (n, ...), alone or in tuples, lists or dicts.
        loss: of outputs and labels of a part, the sum and its weight, such as
            `cross_entropy(..., reduction="sum")` and the number of valid pixels. With a GradScaler,
            return `scaler.scale(sum)`.
        images: (N, ...) of this rank, on the device of the model; N may differ between ranks.
        labels: tensors (N, ...), alone or in tuples, lists or dicts.
        parts: into how many parts this rank cuts its images, as evenly as possible; at most N.

    Raises:
        ValueError: the gradient would not be that of the whole batch: dropout or drop-path, batch
            norms that are not converted, other layers that couple images, a loss that is no sum,
            wrapped or compiled models, hooks of parameters, ranks with different weights.
    """
    if not isinstance(parts, int) or parts < 1:
        raise ValueError(f"parts: expected an int of at least 1, got {parts!r}")
    if any(len(values) != len(images) for values in tree_leaves(labels)):
        raise ValueError(f"labels: expected them for each of {len(images)} images")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_distributed():
        raise ValueError(
            "there are several ranks (WORLD_SIZE) and no process group, so each would train alone: "
            "call torch.distributed.init_process_group() first"
        )
    _refuse(model)
    thread = _Thread(images.device, model)
    _try(model, loss, images, labels, thread)

    # At least one: a rank without images takes part in the collectives, too.
    num_parts = max(1, min(parts, len(images)))
    leaves, nesting = tree_flatten((images, labels))
    cut = zip(*(leaf.tensor_split(num_parts) for leaf in leaves), strict=True)
    calls = [partial(_part, model, loss, tree_unflatten(part, nesting), thread) for part in cut]
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    # Groups of `norm.images` need to know how many images lie in each part of each rank.
    grouped, where = any(layer.images for layer in layers), nullcontext()
    if grouped:
        where = placed(dist.all_gather_object([len(i) for i in images.tensor_split(num_parts)]))

    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in trained]
    several = dist.group_size() > 1
    if several:  # what is there already is a sum over the ranks
        for parameter in trained:
            parameter.grad = None
    with where, tracked_together():
        if grouped:
            make_groups(model)
        whole = VirtualRanks(num_parts).run(calls)[0]
    sync_running_stats(model)
    if several:
        _sum_over_ranks(trained, before)
    return whole


class _Thread:
    """What threads take over from the thread that makes this."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self._device, self._parameters = device, list(model.parameters())
        kind = device.type
        self.autocast = partial(
            torch.autocast,
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
            torch.is_autocast_cache_enabled(),
        )
        self._stream = torch.cuda.current_stream(device) if kind == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """As `training.step._in_threads`, which says why."""
        with (
            torch.cuda.stream(self._stream),
            torch.autograd.set_multithreading_enabled(False),
            saved_on_host(self._device, self._parameters),
        ):
            yield


def _part(model: nn.Module, loss: Loss, pair: tuple[Tensor, Any], thread: _Thread) -> Tensor:
    """Adds the gradient of a part, images and labels; returns the loss of all parts."""
    images, labels = pair
    with thread.entered():
        with thread.autocast():
            total, weight = _sum_and_weight(loss, model(images), labels)
        weight = torch.as_tensor(weight, dtype=torch.float64, device=total.device).detach()
        # All parts of all ranks wait here: a loss is divided by the weight of the whole batch.
        whole, weights = dist.all_reduce_sum(torch.stack([total.detach().double(), weight]))
        scale = torch.where(weights == 0, 0.0, 1 / weights)
        (total * scale).backward()
        return whole * scale


@torch.no_grad()
def _sum_over_ranks(parameters: list[nn.Parameter], before: list[Tensor | None]) -> None:
    """Sums the gradients over the ranks and adds those from `before` (collective)."""
    # What no rank has a gradient of keeps its None, as after a backward pass of the whole batch.
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
    used = dist.all_reduce_sum(used.to(parameters[0].device)).tolist()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    # One collective for each dtype instead of one for each parameter.
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        alike = [grad for grad in grads if grad.dtype == dtype]
        total = dist.all_reduce_sum(torch.cat([grad.flatten() for grad in alike]))
        parts = total.split([grad.numel() for grad in alike])
        sums = [part.view(g.shape) for part, g in zip(parts, alike, strict=True)]
        torch._foreach_copy_(alike, sums)
    for parameter, grad, old, ranks in zip(parameters, grads, before, used, strict=True):
        if ranks and old is not None:
            old.add_(grad)
        parameter.grad = grad if ranks and old is None else old


def draws_random_numbers(layer: nn.Module) -> bool:
    """Whether `layer` is dropout or drop-path with a probability above 0."""
    is_dropout = isinstance(layer, nn.modules.dropout._DropoutNd)
    return bool(getattr(layer, "drop_prob", None) or (is_dropout and layer.p))


@contextmanager
def changed_state(model: nn.Module) -> Iterator[list[str]]:
    """On exit, the list has what changed inside: torch's random numbers, and buffers by name.

    Those of synchronized batch norm are left out.
    """

    def state() -> dict[str, Tensor]:
        states = {"torch's random numbers": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states["random numbers of the device"] = torch.cuda.get_rng_state()
        return states | {
            f"the buffer {path}.{name}": buffer
            for path, layer in model.named_modules()
            if not isinstance(layer, SyncBatchNorm)
            for name, buffer in layer.named_buffers(recurse=False)
        }

    before, changed = {name: value.clone() for name, value in state().items()}, []
    yield changed
    changed += [
        name
        for name, value in state().items()
        if name not in before or not torch.equal(before[name], value)
    ]


def _refuse(model: nn.Module) -> None:
    """Raises ValueError for what is known not to work, by its name."""
    for path, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise ValueError(f"{path} is a {type(parameter).__name__}: expected whole parameters")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"{path} has a hook, which would run for each part; remove it")
    for path, layer in model.named_modules():
        what = f"{path or 'the model'} is a {type(layer).__name__}"
        if isinstance(layer, DataParallel | DistributedDataParallel):
            raise ValueError(f"{what}: pass model.module; gradients are summed over all ranks here")
        if hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None:
            raise ValueError(
                f"{what}, compiled, in which parts cannot wait for each other: pass the model "
                "from before torch.compile"
            )
        if layer.training and draws_random_numbers(layer):
            raise ValueError(
                f"{what} that draws random numbers for each part: set its probability to 0, or "
                "call eval() on it"
            )
        is_own = isinstance(layer, SyncBatchNorm | FrozenBatchNorm2d)
        if layer.training and isinstance(layer, _BatchNorm) and not is_own:
            raise ValueError(f"{what} with statistics of each part: segtrain.norm.convert(model)")


@dataclass
class _Tried:
    """A model that has been tried.

    modes: which of its modules were in training. is_decided: whether labels could tell that the
        loss is a sum. calls: of `backward` since the first one.
    """

    modes: list[bool]
    is_decided: bool = False
    calls: int = 0


_tried: WeakKeyDictionary[nn.Module, _Tried] = WeakKeyDictionary()


def _try(model: nn.Module, loss: Loss, images: Tensor, labels: Any, thread: _Thread) -> None:
    """Raises ValueError for what shows when the model runs (collective the first time)."""
    if model not in _tried:
        _compare_ranks(model)
    modes = [layer.training for layer in model.modules()]
    before = _tried.setdefault(model, _Tried([]))
    before.calls += 1
    # Often at first: what all labels so far have left open may never be decided.
    is_due = not before.is_decided and (before.calls < 8 or before.calls.bit_count() == 1)
    if len(images) == 0 or (before.modes == modes and not is_due):
        return
    x = images[:2].detach()
    # Four different images, also of a batch of one or two: flipped and shifted copies.
    x = torch.cat([x, x.flip(-1), x.roll(1, -1), x.roll(2, -1)])[:4]
    x = (x if x.is_floating_point() else x.float()).requires_grad_()
    norms = [m for m in model.modules() if isinstance(m, SyncBatchNorm) and m.training]
    hooks = [norm.register_forward_hook(_scaled, prepend=True) for norm in norms]
    calls = [partial(_try_part, model, loss, x, labels, slot, thread) for slot in range(2)]
    try:
        for norm in norms:
            # By its running statistics a norm couples no images; `_scaled` then replaces its
            # output.
            norm.training = False
        with changed_state(model) as changed:
            is_decided, _ = VirtualRanks(2).run(calls)
    finally:
        for norm, hook in zip(norms, hooks, strict=True):
            norm.training = True
            hook.remove()
    if changed:
        raise ValueError(
            f"the forward pass changes {changed[0]}, once for each part: switch off dropout, "
            "drop-path, stochastic depth, spectral norms and the like"
        )
    before.modes, before.is_decided = modes, is_decided


def _compare_ranks(model: nn.Module) -> None:
    """Raises ValueError on all ranks if they have different parameters (collective)."""
    sums = [p.detach().double().sum() for p in model.parameters()]
    differ = dist.all_gather(torch.stack(sums)) if sums else torch.zeros(1, 0)
    for (name, _), column in zip(model.named_parameters(), differ.T.tolist(), strict=True):
        if len(set(column)) > 1:
            raise ValueError(f"{name} differs between ranks: set a seed, or broadcast from rank 0")


def _scaled(norm: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """In the place of batch norm: every image scaled by itself, without blocking a gradient.

    Running statistics may be far from those of the batch, and let values explode.
    """
    virtual_ranks.current().meet(None, len)  # as in a step, the other part goes on here
    (x,) = inputs
    mean_square = x.detach().double().flatten(1).square().mean(1)
    scale = (mean_square + norm.eps).rsqrt().view(-1, *[1] * (x.dim() - 1))
    return x.to(output.dtype) * scale.to(output.dtype)


def _try_part(
    model: nn.Module, loss: Loss, x: Tensor, labels: Any, slot: int, thread: _Thread
) -> bool:
    """Two of the four images: does the output of images 0 and 3 depend on another?

    Returns, of slot 0, whether the labels could tell that the loss is a sum.
    """
    is_decided = True
    with thread.entered():
        with thread.autocast():
            outputs = model(x[2 * slot : 2 * slot + 2])
        tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if not tensors or any(t.dim() == 0 or len(t) != 2 for t in tensors):
            shapes = [tuple(t.shape) for t in tensors]
            raise ValueError(f"of 2 images the model returns tensors {shapes}: expected (2, ...)")
        if slot == 0:
            with thread.autocast():
                is_decided = _try_loss(loss, tree_map(torch.detach, outputs), labels)
        # Weights that differ, since a softmax adds up to a constant.
        rows = [t[slot].flatten().double() for t in tensors]
        goal = sum((row * torch.linspace(-1, 1, len(row)).to(row)).sum() for row in rows)
        (grad,) = torch.autograd.grad(goal, x, allow_unused=True)
        if grad is not None and grad[torch.arange(4, device=x.device) != 3 * slot].any():
            raise ValueError(
                "the output of an image depends on other images, and not by batch norm alone: the "
                "gradient of the parts would not be that of the batch"
            )
    return is_decided


def _sum_and_weight(loss: Loss, outputs: Any, labels: Any) -> tuple[Tensor, Tensor | float]:
    returned = loss(outputs, labels)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor):
        return returned
    raise ValueError(
        "loss: expected a sum, as a tensor, and its weight, such as cross_entropy(..., "
        f"reduction='sum') and the number of valid pixels; got a {type(returned).__name__}"
    )


def _try_loss(loss: Loss, outputs: Any, labels: Any) -> bool:
    """Raises ValueError unless `loss` of two images is that of the first plus that of the second.

    outputs: of two images. labels: of all images of this rank, of which two that have a weight are
        taken: an image without valid pixels, of sum and weight 0, fits any mean too. Returns
        whether a mean over valid pixels would have been told from a sum.
    """
    number = max(map(len, tree_leaves(labels)), default=0)
    alone = [_values(loss, outputs, labels, [0], [i]) for i in range(number)]
    usable = [i for i, values in enumerate(alone) if values.isfinite().all() and values[1] != 0]
    if alone and not any(values.isfinite().all() for values in alone):
        raise ValueError(
            "loss: not finite for any image of the batch: return a sum, which is 0 where no pixel "
            "is valid, and what to divide it by"
        )
    if not usable:
        return False
    _compare_images(loss, outputs, labels, usable[0], usable[-1])
    # A model that has learnt nothing costs the same in each image, which a mean leaves as it is.
    mixed = tree_map(_mixed, outputs)
    counts = {i: _num_used(loss, mixed, labels, i) or 0 for i in usable}
    # A mean differs most from a sum for images that have the fewest and the most valid pixels.
    i, j = min(usable, key=counts.__getitem__), max(usable, key=counts.__getitem__)
    if counts[i] < counts[j] and _compare_images(loss, mixed, labels, i, j, counts[i], counts[j]):
        return True
    # On the host: a device would not survive a label that is out of range.
    mixed = tree_map(torch.Tensor.cpu, mixed)
    for pair in _half_ignored(labels, j):
        whole, half = (_num_used(loss, mixed, pair, i) for i in range(2))
        if whole and half and half < whole:
            return _compare_images(loss, mixed, pair, 1, 0, half, whole)
    return False


@torch.no_grad()
def _values(loss: Loss, outputs: Any, labels: Any, rows: list[int], images: list[int]) -> Tensor:
    """Sum and weight for these rows of the outputs, with the labels of these images."""
    pair = tree_map(lambda t: t[rows], outputs), tree_map(lambda t: t[images], labels)
    return torch.tensor([*map(float, _sum_and_weight(loss, *pair))], dtype=torch.float64)


def _compare_images(
    loss: Loss, outputs: Any, labels: Any, i: int, j: int, used_i: int = 1, used_j: int = 1
) -> bool:
    """Raises ValueError unless the loss of images i and j is the sum of both.

    Returns whether a mean over `used_i` and `used_j` pixels, times the images, would be another.
    """
    both = _values(loss, outputs, labels, [0, 1], [i, j]).tolist()
    first = _values(loss, outputs, labels, [0], [i]).tolist()
    second = _values(loss, outputs, labels, [1], [j]).tolist()
    for name, a, b, c in zip(("sum", "weight"), both, first, second, strict=True):
        if abs(a - b - c) > _ROUNDING * (abs(b) + abs(c)):
            raise ValueError(
                f"loss: the {name} of two images is {a:.6g}, of each alone {b:.6g} and {c:.6g}: "
                "return a sum over images or pixels, and what to divide it by"
            )
    share = abs(used_i - used_j) / (used_i + used_j)
    return share * abs(first[0] - second[0]) > 1.5 * _ROUNDING * (abs(first[0]) + abs(second[0]))


def _mixed(outputs: Tensor) -> Tensor:
    """Half of each of two images; the first also has half a pattern between 0 and 1."""
    if not outputs.is_floating_point():
        return outputs
    pattern = torch.arange(outputs[0].numel(), device=outputs.device).float().sin().square()
    both = torch.stack([pattern, torch.zeros_like(pattern)]).view_as(outputs)
    return (outputs + both.to(outputs.dtype)) / 2


def _num_used(loss: Loss, outputs: Any, labels: Any, image: int) -> int | None:
    """How many of the first image's outputs its loss depends on, with the labels of `image`.

    None: it refuses these labels, or takes tensors of a device only.
    """
    rows = tree_map(lambda t: t[:1].detach().requires_grad_(t.is_floating_point()), outputs)
    leaves = [leaf for leaf in tree_leaves(rows) if leaf.requires_grad]
    try:
        total, _ = _sum_and_weight(loss, rows, tree_map(lambda t: t[[image]], labels))
    except (IndexError, RuntimeError):
        return None
    if not total.requires_grad:
        return 0
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return sum(int(grad.count_nonzero()) for grad in grads if grad is not None)


def _half_ignored(labels: Any, image: int) -> Iterator[Tensor]:
    """On the host, the labels of an image, and with half of its pixels as what losses ignore."""
    if isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point():
        # What most data sets and what torch's losses ignore.
        for value in (255, -100):
            if labels.dtype.is_signed or (value > 0 and labels.dtype != torch.bool):
                pair = labels[[image, image]].cpu()
                pair[1].view(-1)[::2] = value
                yield pair
