"""ImageNet weights for a backbone: torchvision's or timm's by name, or a file in their layout.

Every key of the file ends in the backbone, in the report (keys of other parts, such as a
classifier) or in an error that lists all keys without a place.
"""

import pickle
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from segtrain.config.model import TIMM
from segtrain.errors import CheckpointError, ConfigError
from segtrain.files import kind_of, torch_file
from segtrain.models.stem import RGB_CHANNELS, first_convolution, widened
from segtrain.text import MAX_NAME, counted, first_of, printable

_SUFFIXES = (".pth", ".pt", ".safetensors")
# Where training programs put the weights beside other state (torchvision's and semseg's trainers).
_NESTED = ("state_dict", "model", "model_state")
# The other parts of a segmentation model whose backbone has the prefix "backbone.".
_HEADS = ("head.", "aux_head.", "classifier.", "aux_classifier.")
_SAVE_AGAIN = """where you trust it, save what is needed in the program that wrote it:
  c = torch.load("old.pth", map_location="cpu", weights_only=False)
  torch.save(c["state_dict"], "new.pth")
or, of mmsegmentation, whose meta holds the classes and the config:
  torch.save({k: c[k] for k in ("meta", "state_dict")}, "new.pth")"""

State = dict[str, Tensor]


class PretrainedReport(NamedTuple):
    """What happened to the keys of the file and of the backbone."""

    source: str  # the URL or path
    loaded: int  # number of tensors
    ignored: tuple[str, ...]  # keys of the file for parts that the backbone does not have
    random: tuple[str, ...]  # keys that stay random: the stem is deep, the file's is 7x7
    widened: str = ""  # how the kernels for RGB became those of other images

    def lines(self) -> list[str]:
        """The lines for the start-up log."""
        lines = [f"pretrained  {self.source}  {self.loaded} tensors"]
        if self.widened:
            lines.append(f"pretrained  {self.widened}")
        if self.ignored:
            lines.append(f"pretrained  ignored, of other parts: {first_of(self.ignored)}")
        if self.random:
            stems = "the file has a 7x7 stem and the model a deep one"
            lines.append(f"pretrained  left random, {stems}: {first_of(self.random)}")
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
    try:
        if Path(spec).suffix in _SUFFIXES or Path(spec).is_file():
            source, content = spec, read_weights(Path(spec))
        elif _is_of_timm(backbone):
            from segtrain.models import timm_backbone

            source, content = timm_backbone.fetch(backbone.name, spec)
        else:
            source, content = _fetch(backbone.name, spec, progress)
        if isinstance(content, Mapping):
            nested = (content[key] for key in _NESTED if isinstance(content.get(key), Mapping))
            content = next(nested, content)
        state, heads = _without_prefixes(plain_state(content, source))
        return _fill(backbone, state, heads, source)
    except CheckpointError as error:
        raise CheckpointError(f"model.pretrained: {error}") from error
    except (OSError, HTTPException, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"model.pretrained: {spec}: cannot be fetched: {_first_line(error)}; or fetch the file "
            "by hand and set model.pretrained to its path"
        ) from error


def read_weights(path: Path) -> Any:
    """The content of a stranger's file of weights, on the CPU; no code in it runs.

    Raises:
        CheckpointError: no such file; it is damaged; it holds more than tensors and plain data.
    """
    if not path.is_file():
        there = f"found {kind_of(path)}" if path.exists() else "no such file"
        raise CheckpointError(f"{path}: expected a file of weights, {there}")
    try:
        return torch_file.read(path)
    except pickle.UnpicklingError:
        # torch's own message advises to load the file unsafely.
        raise CheckpointError(
            f"{path}: refused: it holds more than tensors and plain data, which could run code; or "
            f"it is damaged; {_SAVE_AGAIN}"
        ) from None
    except torch_file.UNREADABLE as error:
        raise CheckpointError(f"{path}: {_first_line(error)}") from None


def plain_state(content: Any, source: object) -> State:
    """`content` as a state dict, whose tensors have no trick that fills the memory later.

    Raises:
        CheckpointError: it is no dict of names and plain tensors.
    """
    if not isinstance(content, Mapping) or not content:
        kind = type(content).__name__
        raise CheckpointError(f"{source}: expected a state dict, found {kind}")
    plain = {k for k, v in content.items() if isinstance(k, str) and torch_file.is_plain(v)}
    foreign = [key for key in content if key not in plain]
    if foreign:
        raise CheckpointError(
            f"{source}: expected plain tensors only, found other values under {first_of(foreign)}; "
            "save the state dict alone"
        )
    return dict(content)


def _first_line(error: Exception) -> str:
    return printable((str(error) or type(error).__name__).splitlines()[0], 3 * MAX_NAME)


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
    # get_state_dict would load an older copy without comparing anything.
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        digest = torch.hub.HASH_REGEX.search(cache.name)
        torch.hub.download_url_to_file(weights.url, str(cache), digest and digest[1], progress)
    return weights.url, read_weights(cache)


def _without_prefixes(state: State) -> tuple[State, list[str]]:
    """The tensors under the backbone's own keys, and the keys of a segmentation model's heads."""
    # DistributedDataParallel puts it before every key.
    if all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    # A backbone alone, such as a classifier of ImageNet.
    if not any(key.startswith("backbone.") for key in state):
        return state, []
    heads = [key for key in state if key.startswith(_HEADS)]
    own = {k.removeprefix("backbone."): v for k, v in state.items() if k not in heads}
    return own, heads


def _fill(backbone: nn.Module, state: State, heads: list[str], source: str) -> PretrainedReport:
    """Loads what fits, all of it or nothing."""
    if not hasattr(backbone, "classifier_keys"):
        what = "does not say how its weights lie in files (segtrain/models/__init__.py)"
        raise ConfigError(f"model.pretrained: {type(backbone).__name__} {what}")
    # Backbones around a network of another library keep it one level deeper than its files do.
    weights = getattr(backbone, "weights", backbone)
    wanted = weights.state_dict()
    leave_out, random = backbone.classifier_keys, []
    if backbone.stem_keys and state.get("conv1.weight", torch.empty(0)).shape[2:] == (7, 7):
        # bn1 would fit by its shape, but its statistics are those of another convolution.
        leave_out = leave_out + backbone.stem_keys
        random = [key for key in wanted if key.startswith(backbone.stem_keys)]
    ignored = [key for key in state if key.startswith(leave_out)]
    offered = {key: value for key, value in state.items() if key not in ignored}
    note = _widen_stem(weights, offered)
    missing = [key for key in wanted if key not in offered and key not in random]
    # Old files have no batch counters.
    counters = [key for key in missing if key.endswith("num_batches_tracked")]
    both = sorted(wanted.keys() & offered.keys())
    shapes = {key: (tuple(wanted[key].shape), tuple(offered[key].shape)) for key in both}
    misfits = {
        "missing from the file": [key for key in missing if key not in counters],
        "in the file but not in the backbone": [key for key in offered if key not in wanted],
        "of another shape": [
            f"{key} (expected {ours}, found {theirs})"
            for key, (ours, theirs) in shapes.items()
            if ours != theirs
        ],
        "not finite": [key for key in both if not torch.isfinite(offered[key]).all()],
    }
    lines = [f"  {len(keys)} {kind}: {first_of(keys)}" for kind, keys in misfits.items() if keys]
    if lines:
        by_timm = _is_of_timm(backbone)
        library = "torchvision" if weights is backbone else "timm" if by_timm else "its library"
        raise CheckpointError(
            f"{source} does not fit model.backbone and model.stem; expected the layout of "
            f"{library}'s model of that name:\n" + "\n".join(lines)
        )
    zeros = {key: torch.zeros_like(wanted[key]) for key in counters}
    weights.load_state_dict({**wanted, **offered, **zeros})
    return PretrainedReport(source, len(offered), (*heads, *ignored), tuple(random), note)


def _widen_stem(weights: nn.Module, offered: State) -> str:
    """Fits kernels for RGB in `offered` to the images of the backbone; says how, or nothing."""
    name, conv = first_convolution(weights)
    kernels, channels = offered.get(key := f"{name}.weight"), conv.in_channels
    if kernels is None or channels == RGB_CHANNELS or kernels.shape[1:2] != (RGB_CHANNELS,):
        return ""
    offered[key] = widened(kernels, channels)
    how = "their sum" if channels == 1 else f"those of red, green, blue in turn, times 3/{channels}"
    return f"{key}: kernels for {counted(channels, 'channel', 'channels')} from RGB: {how}"


def _is_of_timm(backbone: nn.Module) -> bool:
    return str(getattr(backbone, "name", "")).startswith(TIMM)
