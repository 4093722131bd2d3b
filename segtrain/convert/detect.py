"""Finds the program that wrote a file by its keys."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from segtrain.convert import mmseg, semseg, smp, torchvision, vainf
from segtrain.convert.plan import Plan, State
from segtrain.convert.read import listed
from segtrain.errors import CheckpointError, ConfigError
from segtrain.text import MAX_NAME, printable

PROGRAMS: tuple[tuple[str, Callable[[State, Mapping[str, Any]], Plan]], ...] = (
    ("ppm.features.0.1.weight", lambda state, _: semseg.plan(state)),
    ("decode_head.conv_seg.weight", mmseg.plan),
    ("decode_head.0.conv_seg.weight", mmseg.plan),  # several heads: refused by their names
    ("segmentation_head.0.weight", smp.plan),
    ("classifier.aspp.convs.0.0.weight", lambda state, _: vainf.plan(state)),
    # Before torchvision's, with which it ends.
    ("classifier.classifier.0.convs.0.0.weight", lambda state, _: vainf.plan(state)),
    ("classifier.0.convs.0.0.weight", lambda state, _: torchvision.plan(state)),
)
"""A key that only files of one program have, and the function that makes the plan of the state
dict and what the file stores beside it."""

# Keys of what is not read, and what to say of it.
_OTHERS = {
    "head.classifier.conv.weight": "a bare state dict of segtrain; a checkpoint holds its config "
    "too: use the one that training wrote",
    "classifier.cbr.0.weight": "torchvision's LRASPP, which segtrain does not have",
    "classifier.4.weight": "torchvision's FCN, which segtrain does not have",
    "psa.conv6.0.weight": "semseg's PSANet, which segtrain does not have",
    "cls.0.weight": "semseg's PSPNet without its pyramid (use_ppm), which segtrain does not have",
    "fc.weight": "a classifier of images, without a head for segmentation; name it in "
    "model.pretrained",
    "layer1.0.conv1.weight": "a backbone without a head; name it in model.pretrained",
}
# Counters of averages (torch.optim.swa_utils, mmengine's EMAHook), which no model has.
_COUNTERS = ("n_averaged", "steps")


class Found(NamedTuple):
    """A plan, and the state dict without the prefix of its keys."""

    plan: Plan
    state: dict[str, Any]
    prefix: str
    outside: tuple[str, ...]  # the keys without the prefix
    ignored: tuple[str, ...] = ()  # those that the user leaves out


def detect(state: State, beside: Mapping[str, Any], ignored: Sequence[str] = ()) -> Found:
    """What the file is; keys may have a common prefix, such as "module." or "model.".

    ignored: beginnings of keys that the user leaves out, with or without that prefix. The model is
        that of the other keys.

    Raises:
        CheckpointError: no program that is read, or a model that segtrain does not have.
        ConfigError: no key begins with one of `ignored`.
    """
    starts = tuple(ignored)
    whole = {key: value for key, value in state.items() if not key.startswith(starts)}
    found = _detect(whole, beside)
    inner = [f"{found.prefix}{start}" for start in starts]
    rest = {key: value for key, value in whole.items() if not key.startswith(tuple(inner))}
    for start, with_prefix in zip(starts, inner, strict=True):
        if not any(key.startswith((start, with_prefix)) for key in state):
            raise ConfigError(f"--ignore {printable(start, MAX_NAME)}: no key begins so")
    if len(rest) < len(whole):
        found = _detect(rest, beside)
    return found._replace(ignored=tuple(key for key in state if key not in rest))


def _detect(state: State, beside: Mapping[str, Any]) -> Found:
    for marker, make in PROGRAMS:
        prefixes = [key.removesuffix(marker) for key in state if _ends(key, marker)]
        if len(prefixes) > 1:
            raise CheckpointError(
                f"the keys hold {len(prefixes)} models: {_quoted(prefixes)}; --ignore PREFIX "
                "leaves one out, or save one of them alone"
            )
        for prefix in prefixes:
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            outside = [key for key in state if not key.startswith(prefix)]
            outside = [key for key in outside if key not in _COUNTERS]
            if prefix == "":
                own = {key: value for key, value in own.items() if key not in _COUNTERS}
            return Found(make(own, beside), own, prefix, tuple(outside))
    for marker, what in _OTHERS.items():
        if any(_ends(key, marker) for key in state):
            raise CheckpointError(f"this is {what}")
    raise CheckpointError(
        "the keys are those of no model that is read: DeepLabV3 of torchvision; PSPNet of semseg; "
        "PSPNet, DeepLabV3 and DeepLabV3+ of mmsegmentation and segmentation_models.pytorch; "
        f"DeepLabV3 and DeepLabV3+ of VainF; found {listed(sorted(state))}"
    )


def _quoted(prefixes: Sequence[str]) -> str:
    return listed([repr(prefix) for prefix in prefixes])


def _ends(key: str, marker: str) -> bool:
    return key == marker or key.endswith(f".{marker}")
