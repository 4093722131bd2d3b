"""What a file of another program becomes, and the parts that several programs share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from segtrain.errors import CheckpointError
from segtrain.models.resnet import DEPTHS

State = Mapping[str, Tensor]
Options = dict[str, Any]
"""Values by `section.key`, such as model.output_stride."""
Renames = tuple[tuple[str, str], ...]


class Rotation(NamedTuple):
    """The first `count` channels of dimension `dim` go to the end: another order of branches."""

    dim: int
    count: int


@dataclass(frozen=True)
class Plan:
    """How the tensors of one file become a model.

    found: what keys and shapes decide.
    stated: what a config inside the file says; it comes before `assumed`.
    assumed: what the file cannot say, by the defaults of its program.
    renames: (beginning of our key, beginning of theirs); the first that fits counts.
    rotations: by the beginning of our key.
    left_out: (beginning of their key, why it has no place here).
    drops_zero: the labels' id 0 is ignored, and class i has id i + 1.
    notes: further lines for the report; warnings: those that may change predictions.
    """

    source: str
    num_classes: int
    found: Options
    renames: Renames
    stated: Options = field(default_factory=dict)
    assumed: Options = field(default_factory=dict)
    rotations: Mapping[str, Rotation] = field(default_factory=dict)
    left_out: Renames = ()
    class_names: tuple[str, ...] = ()
    palette: tuple[tuple[int, int, int], ...] = ()
    drops_zero: bool = False
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def options(self) -> Options:
        """All options; what keys decide cannot be stated or assumed otherwise."""
        return {**self.assumed, **self.stated, **self.found}

    def their_key(self, key: str) -> str | None:
        """The key in the file of our `key`; None if the plan has no place for it."""
        for ours, theirs in self.renames:
            if key.startswith(ours):
                return theirs + key.removeprefix(ours)
        return None

    def without_aux_head(self) -> "Plan":
        """The same model without its auxiliary head, whose keys are left out."""
        found = {k: v for k, v in self.found.items() if not k.startswith("model.aux_")}
        found["model.aux_head"] = False
        why = "--set model.aux_head=false"
        keys = tuple((theirs, why) for ours, theirs in self.renames if ours.startswith("aux_head."))
        return replace(self, found=found, left_out=(*self.left_out, *keys))

    def rotation(self, key: str) -> Rotation | None:
        """How the channels of our `key` are put in order; None: they are."""
        return next((r for ours, r in self.rotations.items() if key.startswith(ours)), None)


def size(state: State, key: str, dim: int = 0) -> int:
    """A dimension of a tensor that decides a width of the model.

    Raises:
        CheckpointError: it is missing, or has no such dimension.
    """
    if key not in state:
        raise CheckpointError(
            f"missing: {key}, whose shape decides the model; the file is not whole, --ignore took "
            "it, or this is another model"
        )
    shape = tuple(state[key].shape)
    if dim >= len(shape) or shape[dim] == 0:
        raise CheckpointError(f"{key}: expected a convolution's weight, found the shape {shape}")
    return shape[dim]


def count_children(state: State, prefix: str) -> int:
    """How many different names stand after `prefix`, up to the next dot."""
    return len(
        {key.removeprefix(prefix).partition(".")[0] for key in state if key.startswith(prefix)}
    )


_NUM_STAGES = 4
_WIDTH = 64


def resnet_name(state: State, prefix: str) -> str:
    """`model.backbone` of the stages layer1 to layer4 under `prefix`.

    Raises:
        CheckpointError: another network, such as ResNet-152 or a ResNeXt.
    """
    depths = tuple(count_children(state, f"{prefix}layer{i + 1}.") for i in range(_NUM_STAGES))
    bottleneck, conv = f"{prefix}layer1.0.conv3.weight" in state, f"{prefix}layer1.0.conv2.weight"
    what = None
    if f"{prefix}layer1.0.se_module.fc1.weight" in state:
        what = "an SE-ResNet, SE-ResNeXt or SENet: its blocks have squeeze and excitation"
    elif bottleneck and size(state, conv, 0) != size(state, conv, 1):
        what = "a ResNeXt: its 3x3 convolutions have groups"
    elif bottleneck and size(state, conv) != _WIDTH:
        what = f"a Wide ResNet: its first block has {size(state, conv)} channels, not {_WIDTH}"
    if what is not None:
        raise CheckpointError(f"the backbone is {what}; segtrain has {', '.join(DEPTHS)}")
    for name, known in DEPTHS.items():
        if known == (depths, bottleneck):
            return name
    kind = "bottlenecks" if bottleneck else "blocks"
    raise CheckpointError(
        f"the backbone has {list(depths)} {kind} under {prefix}layer1 to layer4; expected one of "
        f"{', '.join(DEPTHS)}"
    )


def resnet_widths(name: str) -> list[int]:
    """The channels of each of the four stages."""
    return [(4 if DEPTHS[name][1] else 1) * _WIDTH * 2**i for i in range(_NUM_STAGES)]


def deep_stem(theirs: str) -> Renames:
    """conv1, bn1, conv2 and so on, which are 0, 1, 3, 4, 6, 7 of a Sequential under `theirs`."""
    return tuple(
        (f"backbone.{kind}{i + 1}.", f"{theirs}{3 * i + place}.")
        for i in range(3)
        for place, kind in enumerate(("conv", "bn"))
    )


def conv_norm(ours: str, conv: str, norm: str) -> Renames:
    """One ConvNormReLU: our module, and the beginnings of their convolution and norm."""
    return ((f"{ours}.conv.", conv), (f"{ours}.norm.", norm))


def aspp(theirs: str, num_branches: int, *, separable: tuple[str, str] | None = None) -> Renames:
    """torchvision's ASPP under `theirs`.

    separable: the names of the depthwise and of the 1x1 convolution of a dilated branch.
    """
    renames: list[tuple[str, str]] = []
    for i in range(num_branches):
        branch = f"{theirs}convs.{i}."
        dilated, last = 0 < i < num_branches - 1, i == num_branches - 1
        conv, norm = ("1.", "2.") if last else ("0.", "1.")  # the last one begins with a pooling
        if dilated and separable is not None:
            depthwise, pointwise = separable
            renames.append((f"head.aspp.depthwise.{i - 1}.", f"{branch}0.{depthwise}"))
            conv = f"0.{pointwise}"
        renames += [(f"head.aspp.convs.{i}.", branch + conv)]
        renames += [(f"head.aspp.norms.{i}.", branch + norm)]
    return (*renames, *conv_norm("head.aspp.project", f"{theirs}project.0.", f"{theirs}project.1."))


def aux_head(state: State, conv: str, norm: str, classifier: str) -> tuple[Options, Renames]:
    """The auxiliary head, if the file has one."""
    if f"{classifier}weight" not in state:
        return {"model.aux_head": False}, ()
    found = {"model.aux_head": True, "model.aux_channels": size(state, f"{conv}weight")}
    return found, (
        *conv_norm("aux_head.conv", conv, norm),
        ("aux_head.classifier.conv.", classifier),
    )
