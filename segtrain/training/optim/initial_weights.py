"""What updates need of the weights that training started from: a part of the checkpoint.

Decay may pull toward them (L2-SP, arXiv:1802.01483), and chosen weights may be held at their value.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from segtrain.config import OptimConfig
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.text import MAX_NAME, printable
from segtrain.training.optim.layers import matches, parameter_groups


@dataclass
class InitialWeights:
    """Tensors are on the device of the model, by the names of its parameters.

    loaded: the names of the weights that came from a file; None: all.
    weights: the values at the start of those that decay pulls toward them.
    held: bool masks; where true, a weight keeps its value in every update.
    hold: what of the config decided the masks; "" if it holds nothing.
    is_needed: whether updates depend on anything here, so that a checkpoint must hold it.
    """

    loaded: frozenset[str] | None
    weights: dict[str, Tensor]
    held: dict[str, Tensor]
    hold: str
    is_needed: bool
    _holding: list[tuple[nn.Parameter, Tensor, Tensor]] = field(default_factory=list)

    def points(self, model: nn.Module) -> dict[nn.Parameter, Tensor]:
        """The values that decay pulls toward; `restore` of a checkpoint fills the same tensors."""
        parameters = dict(model.named_parameters())
        return {parameters[name]: value for name, value in self.weights.items()}

    def hold_from_now(self, model: nn.Module) -> None:
        """Holds the values that the weights under the masks have now."""
        parameters = dict(model.named_parameters())
        self._holding = [
            (parameters[name], mask, parameters[name].detach().clone())
            for name, mask in self.held.items()
        ]

    @torch.no_grad()
    def hold_gradients(self) -> None:
        """Takes held weights out of the gradient: neither norm nor momentum count them."""
        for parameter, mask, _ in self._holding:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(mask, 0)

    @torch.no_grad()
    def hold_weights(self) -> None:
        """Puts held weights back after an update, whatever moved them."""
        for parameter, mask, value in self._holding:
            torch.where(mask, value, parameter, out=parameter)


def make_initial_weights(
    model: nn.Module, optim: OptimConfig, loaded: Collection[str] | None, *, resumed: bool = False
) -> InitialWeights:
    """What `optim` needs of the weights that `model` has now (collective).

    The ranks must have equal weights already.

    resumed: they come from a checkpoint, and so does what is held.

    Raises:
        ConfigError: a mask does not fit, there is nothing to hold, or there are no new weights.
    """
    parameters = dict(model.named_parameters())
    weights = {
        name: parameters[name].detach().clone()
        for group in parameter_groups(model, optim, loaded)
        if group["toward_start"]
        for name in group["param_names"]
    }
    rules = [list(rule.names) for rule in optim.layers if rule.hold_zeros]
    hold = f"{rules} {optim.hold_mask}" if rules or optim.hold_mask else ""
    toward = any(x.decay_toward == "start" for x in (optim, *optim.layers))
    is_needed = toward or optim.new_weight_decay is not None or hold != ""
    names = None if loaded is None else frozenset(loaded)
    start = InitialWeights(names, weights, {}, hold, is_needed)
    if optim.new_weight_decay is not None and names is not None and names >= parameters.keys():
        raise ConfigError(
            "optim.new_weight_decay: has no effect: no weight starts from random numbers; remove it"
        )
    if hold and not resumed:
        start.held = _masks(model, optim)
        start.hold_from_now(model)
    return start


def _masks(model: nn.Module, optim: OptimConfig) -> dict[str, Tensor]:
    """Of each weight that is held somewhere, the mask; the same on all ranks (collective)."""
    masks = {} if optim.hold_mask is None else _read(Path(optim.hold_mask), model)
    for number, rule in enumerate(optim.layers):
        # Norm layers and biases may start at 0 without being pruned.
        zeros = {
            name: parameter.detach() == 0
            for name, parameter in model.named_parameters()
            if parameter.dim() > 1 and parameter.requires_grad and matches(rule, name)
        }
        zeros = {name: mask for name, mask in zeros.items() if rule.hold_zeros and mask.any()}
        masks |= {name: masks.get(name, mask) | mask for name, mask in zeros.items()}
        if rule.hold_zeros and not zeros:
            raise ConfigError(
                f"optim.layers[{number}].hold_zeros: no kernel under these names holds a 0 at the "
                "start; name the pruned weights in model.pretrained or train.init_from"
            )
    return masks


def _read(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The masks in a .safetensors file, those of rank 0 on all ranks (collective)."""
    where = f"optim.hold_mask: {printable(str(path), 200)}"
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}

    masks: dict[str, Tensor] = {}

    def read() -> list[str]:
        try:
            masks.update(safetensors.torch.load_file(path))
        except (safetensors.SafetensorError, OSError, KeyError) as error:
            raise ConfigError(f"{where}: cannot be read as safetensors: {error}") from None
        for name, mask in masks.items():
            shape = trainable[name].shape if name in trainable else "no trained weight"
            if (mask.dtype, mask.shape) != (torch.bool, shape):
                raise ConfigError(
                    f"{where}: {printable(name, MAX_NAME)}: found {mask.dtype} {mask.shape}, "
                    f"the model has {shape}; masks are torch.bool"
                )
        return sorted(masks)

    names = dist.run_on_rank0(read)
    bits = [
        masks.get(name, torch.empty(trainable[name].shape)).to(trainable[name].device, torch.uint8)
        for name in names
    ]
    dist.broadcast_from_rank0(bits)
    return {name: mask.bool() for name, mask in zip(names, bits, strict=True)}
