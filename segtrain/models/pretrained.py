"""ImageNet weights for a backbone: torchvision's or timm's by name, or a file in their layout.

Every key of the file ends in the backbone, in the report (keys of other parts, such as a
classifier) or in an error that lists all keys without a place.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.errors import CheckpointError, ConfigError
from segtrain.files import torch_file
from segtrain.models import timm_backbone
from segtrain.text import MAX_NAME, first_of, printable

_SUFFIXES = (".pth", ".pt", ".safetensors")
# Where training programs put the weights beside other state (torchvision's and semseg's trainers).
_NESTED = ("state_dict", "model", "model_state")
# The other parts of a segmentation model whose backbone has the prefix "backbone.".
_HEADS = ("head.", "aux_head.", "classifier.", "aux_classifier.")
_COUNTER = "num_batches_tracked"

State = dict[str, Tensor]


@dataclass(frozen=True)
class PretrainedReport:
    """What happened to the keys of the file and of the backbone."""

    source: str  # the URL or path
    loaded: int  # number of tensors
    ignored: tuple[str, ...]  # keys of the file for parts that the backbone does not have
    random: tuple[str, ...]  # keys that stay random: the stem is deep, the file's is 7x7
    counters: int  # batch counters missing from the file, as in old files; they start at 0

    def lines(self) -> list[str]:
        """The lines for the start-up log."""
        lines = [f"pretrained  {self.source}  {self.loaded} tensors"]
        if self.ignored:
            lines.append(f"pretrained  ignored, of other parts: {first_of(self.ignored)}")
        if self.random:
            stems = "the file has a 7x7 stem and the model a deep one"
            lines.append(f"pretrained  left random, {stems}: {first_of(self.random)}")
        if self.counters:
            lines.append(f"pretrained  {self.counters} batch counters not in the file, set to 0")
        return lines


def load_backbone(backbone: nn.Module, spec: str, *, progress: bool = False) -> PretrainedReport:
    """Fills `backbone` with the weights that `spec` names, or leaves it as it is and raises.

    A file may hold a whole classifier, its keys may have the prefixes "module." and "backbone.",
    and the weights may lie under "state_dict" or "model". torchvision caches its downloads; let one
    process of a machine call this before the others.

    Args:
        spec: a weight of torchvision's or timm's model of the same name, such as IMAGENET1K_V1,
            a1_in1k or DEFAULT, or a .pth, .pt (loaded weights-only) or .safetensors file.
        progress: shows the download on stderr.

    Raises:
        ConfigError: no such weight and not a file.
        CheckpointError: the file cannot be fetched or read, or does not fit.
    """
    if Path(spec).suffix in _SUFFIXES or Path(spec).is_file():
        source, content = spec, _read(Path(spec))
    elif isinstance(backbone, timm_backbone.TimmBackbone):
        source, content = _fetch_of_timm(backbone.name, spec)
    else:
        source, content = _fetch(backbone.name, spec, progress)
    state, heads = _without_prefixes(_state_dict(content, source))
    return _fill(backbone, state, heads, source)


def _fetch(name: str, spec: str, progress: bool) -> tuple[str, Any]:
    """URL and content of torchvision's weights `spec` for the model `name`."""
    from torchvision.models import get_model_weights  # slow to import, and only needed here

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
        # get_state_dict would load an older copy without comparing anything.
        if not cache.exists():
            cache.parent.mkdir(parents=True, exist_ok=True)
            digest = torch.hub.HASH_REGEX.search(cache.name)
            torch.hub.download_url_to_file(weights.url, str(cache), digest and digest[1], progress)
        return weights.url, torch_file.read(cache)
    except (*torch_file.UNREADABLE, HTTPException, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"model.pretrained: {spec}: cannot load {weights.url}: {_problem(error)}; delete its "
            f"copy {cache}, or fetch it by hand and set model.pretrained to its path"
        ) from error


def _fetch_of_timm(name: str, spec: str) -> tuple[str, Any]:
    """Source and content of timm's weights `spec` for the network `name`."""
    try:
        return timm_backbone.fetch(name, spec)
    except (OSError, HTTPException, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"model.pretrained: {spec}: cannot load timm's weights for {name}: {_problem(error)}; "
            "or fetch the file by hand and set model.pretrained to its path"
        ) from error


def _read(path: Path) -> Any:
    """The content of the weights file `path`, on the CPU."""
    if not path.is_file():
        raise CheckpointError(f"model.pretrained: {path}: no such file, or not a regular one")
    try:
        return torch_file.read(path)
    except (pickle.UnpicklingError, *torch_file.UNREADABLE) as error:
        raise CheckpointError(f"model.pretrained: {path}: {_problem(error)}") from None


def _state_dict(content: Any, source: str) -> State:
    """The state dict in `content`: itself, or what lies under one of its keys."""
    if isinstance(content, Mapping):
        nested = (content[key] for key in _NESTED if isinstance(content.get(key), Mapping))
        content = next(nested, content)
    if not isinstance(content, Mapping) or not content:
        found = type(content).__name__
        raise CheckpointError(f"model.pretrained: {source}: expected a state dict, got {found}")
    plain = {k for k, v in content.items() if isinstance(k, str) and torch_file.is_plain(v)}
    foreign = [key for key in content if key not in plain]
    if foreign:
        raise CheckpointError(
            f"model.pretrained: {source}: expected plain tensors only, found other values under "
            f"{first_of(foreign)}; save the state dict alone"
        )
    return dict(content)


def _without_prefixes(state: State) -> tuple[State, list[str]]:
    """The tensors under the backbone's own keys, and the keys of a segmentation model's heads."""
    if all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    if not any(key.startswith("backbone.") for key in state):
        return state, []
    heads = [key for key in state if key.startswith(_HEADS)]
    own = {k.removeprefix("backbone."): v for k, v in state.items() if k not in heads}
    return own, heads


def _fill(backbone: nn.Module, state: State, heads: list[str], source: str) -> PretrainedReport:
    """Loads what fits, all of it or nothing."""
    weights = backbone.weights if isinstance(backbone, timm_backbone.TimmBackbone) else backbone
    wanted = weights.state_dict()
    leave_out, random = backbone.classifier_keys, []
    if backbone.stem_keys and state.get("conv1.weight", torch.empty(0)).shape[2:] == (7, 7):
        # bn1 would fit by its shape, but its statistics are those of another convolution.
        leave_out = leave_out + backbone.stem_keys
        random = [key for key in wanted if key.startswith(backbone.stem_keys)]
    ignored = [key for key in state if key.startswith(leave_out)]
    offered = {key: value for key, value in state.items() if key not in ignored}
    missing = [key for key in wanted if key not in offered and key not in random]
    counters = [key for key in missing if key.endswith(_COUNTER)]
    library = "torchvision" if weights is backbone else "timm"
    missing = [key for key in missing if key not in counters]
    _refuse_misfits(wanted, offered, missing, source, library)

    zeros = {key: torch.zeros_like(wanted[key]) for key in counters}
    weights.load_state_dict({**wanted, **offered, **zeros})
    ignored = (*heads, *ignored)
    return PretrainedReport(source, len(offered), ignored, tuple(random), len(counters))


def _refuse_misfits(
    wanted: State, offered: State, missing: list[str], source: str, library: str
) -> None:
    shapes, infinite = [], []
    for key in sorted(wanted.keys() & offered.keys()):
        expected, found = tuple(wanted[key].shape), tuple(offered[key].shape)
        if expected != found:
            shapes.append(f"{key} (expected {expected}, found {found})")
        elif not torch.isfinite(offered[key]).all():
            infinite.append(key)
    misfits = {
        "missing from the file": missing,
        "in the file but not in the backbone": [key for key in offered if key not in wanted],
        "of another shape": shapes,
        "not finite": infinite,
    }
    lines = [f"  {len(keys)} {kind}: {first_of(keys)}" for kind, keys in misfits.items() if keys]
    if lines:
        raise CheckpointError(
            f"model.pretrained: {source} does not fit model.backbone and model.stem; expected the "
            f"layout of {library}'s model of that name:\n" + "\n".join(lines)
        )


def _problem(error: Exception) -> str:
    """The first line of what is wrong with a file."""
    if isinstance(error, pickle.UnpicklingError):
        # torch's own message advises to load the file unsafely.
        return (
            "it holds more than weights, which could run code, or it is damaged; save the state "
            "dict alone, or as safetensors"
        )
    return printable((str(error) or type(error).__name__).splitlines()[0], 3 * MAX_NAME)
