"""What each weight is subject to: learning rate, decay, or nothing at all (frozen, held at 0).

Decay may pull toward the weights that training started from (L2-SP, arXiv:1802.01483), which are a
part of the checkpoint then; so are the masks of weights that are held at 0.
"""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.config import LayerRule, OptimConfig
from segtrain.config.messages import did_you_mean
from segtrain.config.optim import parse_slice
from segtrain.errors import CheckpointError, ConfigError
from segtrain.norm import freeze_statistics
from segtrain.text import MAX_NAME, first_of, printable
from segtrain.training.optim.saved import check_shape


class Settings(NamedTuple):
    """What an update does to a weight; weights with equal settings are one parameter group."""

    in_backbone: bool
    undecayed: bool  # a norm layer or a bias, where these are spared the decay
    lr_mult: float
    decay: float
    toward_start: bool  # decay toward the weights that training started from (L2-SP), not toward 0
    muon: bool = False  # with optim.kind muon the other weights go by AdamW


def parameter_groups(
    model: nn.Module, optim: OptimConfig, loaded: Collection[str] | None = None
) -> list[dict]:
    """The trainable parameters in groups of equal settings, each with `lr_mult`.

    Every parameter is in exactly one group, also one shared by two modules. `param_names` are the
    names of a group's parameters in order. Decay toward the start, which torch's optimizers do not
    have, stands under `pull`, for `optimizer.build_optimizer`.

    loaded: the names of the weights that come from a file; None: all. The others are new layers.
    """
    groups: dict[Settings, dict] = {}
    by_muon: set[str] = set()
    if optim.kind == "muon":
        from segtrain.training.optim.muon import muon_names

        by_muon = muon_names(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_old = loaded is None or name in loaded
        settings = _settings(name, parameter, optim, is_old=is_old)._replace(muon=name in by_muon)
        group = groups.setdefault(
            settings,
            {
                "params": [],
                "param_names": [],
                "lr_mult": settings.lr_mult,
                "weight_decay": 0.0 if settings.toward_start else settings.decay,
                "pull": settings.decay if settings.toward_start else 0.0,
                "muon": settings.muon,
            },
        )
        group["params"].append(parameter)
        group["param_names"].append(name)
    return list(groups.values())


def _settings(name: str, parameter: nn.Parameter, optim: OptimConfig, *, is_old: bool) -> Settings:
    in_backbone = name.startswith("backbone.")
    lr_mult = _of_rules("lr_mult", name, optim, 1.0 if in_backbone else optim.head_lr_mult)
    is_newly_decayed = not is_old and optim.new_weight_decay is not None
    decay = optim.new_weight_decay if is_newly_decayed else optim.weight_decay
    decay = _of_rules("weight_decay", name, optim, decay)
    toward = _of_rules("decay_toward", name, optim, optim.decay_toward if is_old else "zero")
    if toward == "start" and not is_old:
        raise ConfigError(
            f"optim.layers: decay_toward start: {name} starts from random numbers; "
            "leave it out of names"
        )
    undecayed = _is_undecayed(name, parameter, optim)
    decay = 0.0 if undecayed else decay
    return Settings(in_backbone, undecayed, lr_mult, decay, toward == "start" and decay > 0)


def _of_rules(key: str, name: str, optim: OptimConfig, default: Any) -> Any:
    """What the rules set for `name`; of two that set the same, the later one counts."""
    values = [getattr(rule, key) for rule in optim.layers if matches(rule, name)]
    return next((value for value in reversed(values) if value is not None), default)


def _is_undecayed(name: str, parameter: nn.Parameter, optim: OptimConfig) -> bool:
    """Whether it belongs to a norm layer or is a bias, and these are spared the decay."""
    # Norm layers are recognized by their shape, whatever their class: a number a channel.
    is_norm_or_bias = parameter.dim() <= 1 or name.split(".")[-1] == "bias"
    return is_norm_or_bias and not optim.decay_norm_and_bias


def matches(rule: LayerRule, name: str) -> bool:
    """Whether `rule` is about the parameter `name`: a pattern fits it, or a module around it."""
    patterns = (*rule.names, *(f"{pattern}.*" for pattern in rule.names))
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def freeze_layers(
    model: nn.Module, optim: OptimConfig, loaded: Collection[str] | None = None
) -> None:
    """Stops the training of what optim.layers freezes, in place.

    A batch norm with weight and bias frozen is constant altogether: it normalizes by its running
    statistics, in training too, and they never change. Otherwise these would drift away from the
    weights that stand still.

    loaded: the names of the weights that come from a file; None: all.

    Raises:
        ConfigError: a pattern fits nothing, a decay has no effect, or a frozen weight is random.
    """
    names = [name for name, _ in model.named_parameters()]
    undecayed = {n for n, p in model.named_parameters() if _is_undecayed(n, p, optim)}
    modules = {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}
    for number, rule in enumerate(optim.layers):
        for pattern in rule.names:
            single = rule.model_copy(update={"names": (pattern,)})
            if not any(matches(single, name) for name in names):
                hint = did_you_mean(pattern.replace("*", "").strip("."), modules)
                raise ConfigError(
                    f"optim.layers[{number}].names: {printable(pattern, MAX_NAME)} fits no weight "
                    f"of the model{hint}"
                )
        if rule.weight_decay and all(name in undecayed for name in names if matches(rule, name)):
            raise ConfigError(
                f"optim.layers[{number}].weight_decay: has no effect on norm layers and biases "
                "with optim.decay_norm_and_bias false; remove it"
            )
    frozen = {name for name in names if _of_rules("freeze", name, optim, False)}
    random = sorted(frozen.difference(loaded)) if loaded is not None else []
    if random:
        raise ConfigError(
            f"optim.layers: freeze: {first_of(random, 5)}: would stay at random "
            "numbers, because neither model.pretrained nor train.init_from holds them"
        )
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    # A list, because the modules change on the way.
    for path, layer in list(model.named_modules()):
        own = list(layer.parameters(recurse=False))
        if isinstance(layer, _BatchNorm) and own and not any(p.requires_grad for p in own):
            model.set_submodule(path, freeze_statistics(layer))


@dataclass
class InitialWeights:
    """Tensors are on the device of the model, by the names of its parameters.

    loaded: the names of the weights that came from a file; None: all.
    weights: the values at the start of those that decay pulls toward them.
    held: bool masks of the weights that stay 0. They are kept, because a weight that is 0 by chance
        where a run goes on is not one of them.
    is_needed: whether updates depend on anything here, so that a checkpoint must hold it.
    """

    loaded: frozenset[str] | None
    weights: dict[str, Tensor]
    held: dict[str, Tensor]
    is_needed: bool

    def fields(self) -> dict[str, Any] | None:
        """What a checkpoint keeps: loaded, weights and held; None if it needs nothing."""
        if not self.is_needed:
            return None
        return {
            "loaded": None if self.loaded is None else sorted(self.loaded),
            "weights": dict(self.weights),
            "held": dict(self.held),
        }

    def restore(self, model: nn.Module, saved: dict[str, Any] | None) -> None:
        """Sets what `fields` gave, in the same tensors.

        Raises:
            CheckpointError, ValueError: it is not there, or of another model.
        """
        if not self.is_needed:
            return
        if saved is None or not self.weights.keys() <= saved["weights"].keys():
            raise CheckpointError(
                "does not hold the weights that the run started from, which new_weight_decay and "
                "decay_toward need: these cannot change in the middle of a run; start a new one "
                "with train.init_from"
            )
        for name, value in self.weights.items():
            check_shape(name, saved["weights"][name], value.shape)
            value.copy_(saved["weights"][name])
        for name, mask in saved.get("held", {}).items():
            parameter = model.get_parameter(name)
            check_shape(name, mask, parameter.shape)
            self.held[name] = torch.empty_like(parameter, dtype=torch.bool).copy_(mask)

    def points(self, model: nn.Module) -> dict[nn.Parameter, Tensor]:
        """The values that decay pulls toward; `restore` fills the same tensors."""
        parameters = dict(model.named_parameters())
        return {parameters[name]: value for name, value in self.weights.items()}

    @torch.no_grad()
    def hold_gradients(self, model: nn.Module) -> None:
        """Takes held weights out of gradients: no norm, momentum or perturbation counts them."""
        for name, mask in self.held.items():
            if (grad := model.get_parameter(name).grad) is not None:
                grad.masked_fill_(mask, 0)

    @torch.no_grad()
    def hold_weights(self, model: nn.Module) -> None:
        """Sets held weights to 0 after an update, whatever moved them."""
        for name, mask in self.held.items():
            model.get_parameter(name).masked_fill_(mask, 0)

    def lines(self, model: nn.Module) -> list[str]:
        """For the log: how many weights are held; nothing where none is."""
        if not self.held:
            return []
        count = sum(int(mask.sum()) for mask in self.held.values())
        whole = sum(weight.numel() for weight in model.parameters())
        return [f"zeros      {count:,} of {whole:,} weights stay 0 (optim.layers)"]


def zero_masks(model: nn.Module, optim: OptimConfig) -> dict[str, Tensor]:
    """Sets slices to 0 as `optim.layers` says; returns masks of all weights that stay 0, by name.

    The ranks must have equal weights already.

    Raises:
        ConfigError: a slice does not fit the model, or there is no zero to keep.
    """
    masks: dict[str, Tensor] = {}
    for number, rule in enumerate(optim.layers):
        for text in rule.zero:
            where = f"optim.layers[{number}].zero: {printable(text, MAX_NAME)}"
            name, index = _fitting_slice(where, text, model)
            weight = model.get_parameter(name)
            masks.setdefault(name, torch.zeros_like(weight, dtype=torch.bool))[index] = True
            weight.detach().masked_fill_(masks[name], 0)
    zeros = {
        name: weight.detach() == 0
        for name, weight in model.named_parameters()
        # Norm layers and biases may start at 0 without being pruned.
        if weight.dim() > 1 and weight.requires_grad and _of_rules("keep_zeros", name, optim, False)
    }
    zeros = {name: mask for name, mask in zeros.items() if mask.any()}
    for number, rule in enumerate(optim.layers):
        if rule.keep_zeros and not any(matches(rule, name) for name in zeros):
            raise ConfigError(
                f"optim.layers[{number}].keep_zeros: no trained kernel under these names has a 0 "
                "at the start; start from pruned weights, or name slices under zero"
            )
    return masks | zeros


def _fitting_slice(where: str, text: str, model: nn.Module) -> tuple[str, tuple[int | slice, ...]]:
    """The name and the index in `text`; ConfigError if `model` has no such elements to train."""
    name, index = parse_slice(text)
    weights = dict(model.named_parameters())
    if name not in weights:
        raise ConfigError(f"{where}: the model has no such weight{did_you_mean(name, [*weights])}")
    shape = tuple(weights[name].shape)
    if not weights[name].requires_grad:
        raise ConfigError(f"{where}: this weight is frozen by another rule; remove one of the two")
    if len(index) > len(shape):
        raise ConfigError(f"{where}: {len(index)} indices for a weight of shape {shape}")
    for at, size in zip(index, shape, strict=False):
        # A number is checked as the slice of one element: 2 as 2:3. A negative one needs no end.
        bounds = (at.start, at.stop) if isinstance(at, slice) else (at, at + (at >= 0))
        if any(bound is not None and not -size <= bound <= size for bound in bounds):
            raise ConfigError(f"{where}: out of range for a weight of shape {shape}")
        if isinstance(at, slice) and not range(*at.indices(size)):
            raise ConfigError(f"{where}: an empty slice of a weight of shape {shape}")
    return name, index


def make_initial_weights(
    model: nn.Module,
    optim: OptimConfig,
    loaded: Collection[str] | None,
    *,
    resumed: bool = False,
) -> InitialWeights:
    """What `optim` needs of the weights that `model` has now; what is to be 0 is set to 0.

    The ranks must have equal weights already.

    resumed: a checkpoint is going to be restored, with the masks.

    Raises:
        ConfigError: as `zero_masks`, or there are no new weights.
    """
    held = {} if resumed else zero_masks(model, optim)
    weights = {
        name: parameter.detach().clone()
        for group in parameter_groups(model, optim, loaded)
        if group["pull"]
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    toward = any(x.decay_toward == "start" for x in (optim, *optim.layers))
    names = None if loaded is None else frozenset(loaded)
    has_new = names is None or not names >= {name for name, _ in model.named_parameters()}
    if optim.new_weight_decay is not None and not has_new:
        raise ConfigError(
            "optim.new_weight_decay: has no effect: no weight starts from random numbers; remove it"
        )
    is_needed = toward or optim.new_weight_decay is not None or optim.prunes
    return InitialWeights(names, weights, held, is_needed)
