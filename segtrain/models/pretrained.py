"""ImageNet weights for a backbone: torchvision's by name, or a file in torchvision's layout.

A key that finds no partner is never passed over: it belongs to a part that the backbone does not
have and is reported by name, or the load is refused with all such keys in one message.
"""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from segtrain.errors import CheckpointError, ConfigError
from segtrain.files import open_regular, torch_file
from segtrain.text import MAX_NAME, printable

_SUFFIXES = (".pth", ".pt", ".safetensors")
# Where training programs put the weights beside other state (torchvision's and semseg's trainers).
_NESTED = ("state_dict", "model", "model_state")
# The other parts of a segmentation model, once its backbone's keys are told by their prefix.
_HEADS = ("head.", "aux_head.", "classifier.", "aux_classifier.")
_COUNTER = "num_batches_tracked"
_SHOWN = 10


class Backbone(Protocol):
    """What of a backbone its loading needs; see `ResNet` and `MobileNet`."""

    name: str
    classifier_keys: tuple[str, ...]
    stem_keys: tuple[str, ...]

    def state_dict(self) -> dict[str, Tensor]:
        """Its parameters and buffers."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> Any:
        """Takes them over, strictly."""


@dataclass(frozen=True)
class PretrainedReport:
    """What became of the keys of the file and of the backbone.

    Attributes:
        source: the URL or path.
        loaded: number of tensors taken over.
        ignored: keys of the file for parts that the backbone does not have.
        random: keys of the backbone that stay random, because its deep stem differs from the
            file's 7x7 stem.
        counters: number of batch counters that the file lacks, as old files do; they start at 0.
    """

    source: str
    loaded: int
    ignored: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    counters: int = 0

    def lines(self) -> list[str]:
        """One line of the start-up log for each kind of finding."""
        lines = [f"pretrained  {self.source}  {self.loaded} tensors"]
        if self.ignored:
            lines.append(f"pretrained  ignored, of other parts: {_listed(self.ignored)}")
        if self.random:
            lines.append(
                "pretrained  left random, the file has a 7x7 stem and the model a deep one: "
                f"{_listed(self.random)}"
            )
        if self.counters:
            lines.append(f"pretrained  {self.counters} batch counters not in the file, set to 0")
        return lines


def load_backbone(backbone: Backbone, spec: str, *, progress: bool = False) -> PretrainedReport:
    """Fills `backbone` with the weights that `spec` names.

    A file may hold a whole classifier, the keys may carry the prefixes "module." and "backbone.",
    and the weights may lie under "state_dict" or "model". torchvision caches what it downloads; let
    one process of a machine call this before the others.

    Args:
        spec: a weight of torchvision's model of the same name, such as IMAGENET1K_V1 or DEFAULT, or
            a .pth, .pt (loaded weights-only) or .safetensors file.
        progress: shows the download on stderr.

    Raises:
        ConfigError: no such weight and not a file.
        CheckpointError: the file is missing, damaged or cannot be fetched; keys missing, left over,
            of another shape or not finite.
    """
    if Path(spec).suffix in _SUFFIXES or Path(spec).is_file():
        source, state = spec, _read(Path(spec))
    else:
        source, state = _fetch(backbone.name, spec, progress)
    return _fill(backbone, _own_keys(_unwrapped(state, source)), source)


def _fetch(name: str, spec: str, progress: bool) -> tuple[str, Any]:
    """URL and content of torchvision's weights `spec` for the model `name`."""
    from torchvision.models import get_model_weights  # slow to import and needed here alone

    known = get_model_weights(name)
    try:
        weights = known.verify(spec)
    except KeyError:
        names = ", ".join(known.__members__)
        raise ConfigError(
            f"model.pretrained: {spec!r} is neither a weight of torchvision's {name} ({names}) nor "
            f"a file; files end in {', '.join(_SUFFIXES)}"
        ) from None
    cache = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
    try:
        state = weights.get_state_dict(
            progress=progress, check_hash=True, map_location="cpu", weights_only=True
        )
    except (OSError, HTTPException) as error:
        raise CheckpointError(
            f"model.pretrained: {spec}: cannot fetch {weights.url}: {error}; fetch it by hand and "
            f"set model.pretrained to its path, or put it at {cache}"
        ) from error
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        refused = isinstance(error, pickle.UnpicklingError)
        problem = "it holds more than weights" if refused else _first_line(error)
        raise CheckpointError(
            f"model.pretrained: {spec}: {weights.url} or its copy {cache} is damaged: {problem}; "
            "delete the copy and try again"
        ) from error
    return weights.url, state


def _read(path: Path) -> Any:
    """The content of the weights file `path`, on the CPU."""
    if not path.is_file():
        problem = "not a regular file" if path.exists() else "no such file"
        raise CheckpointError(f"model.pretrained: {path}: {problem}")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with open_regular(path) as file:
            return torch_file.load(file)
    except pickle.UnpicklingError:
        # torch's own words advise to load the file with all that it may run.
        raise CheckpointError(
            f"model.pretrained: {path}: refused: it holds more than weights, which could run code; "
            "or it is damaged, or no torch file; save the state dict alone, or as safetensors"
        ) from None
    # safetensors knows kinds of number that torch does not (KeyError).
    except (torch_file.DamagedError, safetensors.SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(
            f"model.pretrained: {path}: cannot be read: {_first_line(error)}"
        ) from error


def _unwrapped(content: Any, source: str) -> dict[str, Tensor]:
    """The state dict in `content`, which may lie under a key of its own."""
    if isinstance(content, Mapping):
        for key in _NESTED:
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(
            f"model.pretrained: {source}: expected a state dict, got {type(content).__name__}"
        )
    foreign = [
        str(key)
        for key, value in content.items()
        if not isinstance(key, str) or not torch_file.is_plain(value)
    ]
    if foreign:
        raise CheckpointError(
            f"model.pretrained: {source}: expected plain tensors only, found other values under "
            f"{_listed(foreign)}; save the state dict alone"
        )
    return dict(content)


def _own_keys(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under the backbone's own keys, and the keys of a segmentation model's heads."""
    if all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    if not any(key.startswith("backbone.") for key in state):
        return state, []
    heads = [key for key in state if key.startswith(_HEADS)]
    return {
        key.removeprefix("backbone."): value for key, value in state.items() if key not in heads
    }, heads


def _fill(
    backbone: Backbone, content: tuple[dict[str, Tensor], list[str]], source: str
) -> PretrainedReport:
    """Takes over what fits, all of it or nothing."""
    state, ignored = content
    wanted = backbone.state_dict()
    ignored += [key for key in state if key.startswith(backbone.classifier_keys)]
    random: list[str] = []
    if backbone.stem_keys and state.get("conv1.weight", torch.empty(0)).shape[2:] == (7, 7):
        # bn1 would fit by its shape, but its statistics are those of another convolution.
        ignored += [key for key in state if key.startswith(backbone.stem_keys)]
        random = [key for key in wanted if key.startswith(backbone.stem_keys)]

    offered = {key: value for key, value in state.items() if key not in ignored}
    missing = [key for key in wanted if key not in offered and key not in random]
    counters = [key for key in missing if key.endswith(_COUNTER)]
    _refuse_misfits(wanted, offered, [key for key in missing if key not in counters], source)

    for key in counters:
        offered[key] = torch.zeros_like(wanted[key])
    backbone.load_state_dict({**wanted, **offered})
    return PretrainedReport(
        source=source,
        loaded=len(offered) - len(counters),
        ignored=tuple(ignored),
        random=tuple(random),
        counters=len(counters),
    )


def _refuse_misfits(
    wanted: dict[str, Tensor], offered: dict[str, Tensor], missing: list[str], source: str
) -> None:
    shapes, infinite = [], []
    for key in wanted.keys() & offered.keys():
        expected, found = tuple(wanted[key].shape), tuple(offered[key].shape)
        if expected != found:
            shapes.append(f"{key} (expected {expected}, found {found})")
        elif not torch.isfinite(offered[key]).all():
            infinite.append(key)
    findings = {
        "missing from the file": missing,
        "in the file but not in the backbone": [key for key in offered if key not in wanted],
        "of another shape": sorted(shapes),
        "not finite": sorted(infinite),
    }
    if any(findings.values()):
        lines = [
            f"  {len(keys)} {kind}: {_listed(keys)}" for kind, keys in findings.items() if keys
        ]
        raise CheckpointError(
            f"model.pretrained: {source} does not fit model.backbone and model.stem; expected the "
            "layout of torchvision's model of that name:\n" + "\n".join(lines)
        )


def _listed(keys: Iterable[str]) -> str:
    """The first few, and how many more."""
    keys = list(keys)
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(printable(key, MAX_NAME) for key in keys[:_SHOWN]) + more


def _first_line(error: Exception) -> str:
    return printable((str(error) or type(error).__name__).splitlines()[0], 3 * MAX_NAME)
