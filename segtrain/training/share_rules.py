"""What a model must not do where train.shares is set: have a result that depends on when it runs.

Shares are computed by several threads, in an order that differs from rank to rank and from run to
run. Random numbers from a generator that they have in common, or a buffer that each of them
changes, would give other bits without a word.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.errors import ConfigError
from segtrain.norm import FrozenBatchNorm2d, SyncBatchNorm


def refuse_layers(model: nn.Module) -> None:
    """Raises ConfigError for torch's layers that break a rule; `watch` finds the others."""
    refuse_torchs_layers(
        model,
        "train.shares",
        dropout="draws from a generator that all shares have in common",
        batch_norm="updates its running statistics in every share",
    )


def refuse_torchs_layers(model: nn.Module, option: str, *, dropout: str, batch_norm: str) -> None:
    """Raises ConfigError for torch's own dropout and batch norm, with what each does wrong."""
    for name, layer in model.named_modules():
        what = None
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            what = f"{dropout}; take `DropoutMasks`"
        elif isinstance(layer, _BatchNorm) and not isinstance(
            layer, SyncBatchNorm | FrozenBatchNorm2d
        ):
            what = f"{batch_norm}; make it by `norm`"
        if what is not None:
            raise ConfigError(f"{option}: {name}, a {type(layer).__name__}, {what}")


@contextmanager
def watch(model: nn.Module) -> Iterator[None]:
    """Raises ConfigError if what is inside, a step, has drawn random numbers or changed buffers.

    Those of synchronized batch norm are changed in order.
    """
    generators, before = _generators(), {k: v.clone() for k, v in _buffers(model).items()}
    yield
    if any(not torch.equal(a, b) for a, b in zip(generators, _generators(), strict=True)):
        raise ConfigError(
            "train.shares: the model or the loss draws from torch's generator, which all shares "
            "have in common; let random numbers be arguments, as `DropoutMasks` is, or set "
            "train.shares to null"
        )
    for name, buffer in _buffers(model).items():
        if name not in before or not torch.equal(before[name], buffer):
            raise ConfigError(
                f"train.shares: the model changes its buffer {name} while it computes a share; "
                "only the layers that `norm` makes may do that; set train.shares to null otherwise"
            )


def _generators() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{name}": buffer
        for path, layer in model.named_modules()
        if not isinstance(layer, SyncBatchNorm)
        for name, buffer in layer.named_buffers(recurse=False)
    }
