"""What a file of another program becomes, and the parts that several programs share."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from segtrain.errors import CheckpointError
from segtrain.models.resnet import DEPTHS
from segtrain.text import MAX_NAME, printable

State = Mapping[str, Tensor]
Options = dict[str, Any]
"""Values by `section.key`, such as model.output_stride."""
Keys = Mapping[str, str]
"""The module of theirs for each of ours; the first row that fits counts. `*` is a number, the same
on both sides; `+` is the next one."""


class Rotation(NamedTuple):
    """The first `count` channels of dimension `dim` go to the end: another order of branches."""

    dim: int
    count: int


@dataclass(frozen=True)
class Conversion:
    """How the tensors of one file become a model.

    found: what keys and shapes decide.
    stated: what a config inside the file says; it comes before `assumed`.
    assumed: what the file cannot say, by the defaults of its program.
    rotations: by the beginning of our key.
    left_out: why keys of theirs with this beginning have no place here.
    drops_zero: the labels' id 0 is ignored, and class i has id i + 1.
    notes: further lines for the report.
    """

    source: str
    num_classes: int
    found: Options
    keys: Keys
    stated: Options = field(default_factory=dict)
    assumed: Options = field(default_factory=dict)
    rotations: Mapping[str, Rotation] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    drops_zero: bool = False
    notes: tuple[str, ...] = ()

    def options(self) -> Options:
        """All options; what keys decide cannot be stated or assumed otherwise."""
        return {**self.assumed, **self.stated, **self.found}

    def without_aux_head(self) -> "Conversion":
        """The same model without its auxiliary head, whose tensors are left out."""
        found = {k: v for k, v in self.found.items() if not k.startswith("model.aux_")}
        theirs = (f"{theirs}." for ours, theirs in self.keys.items() if ours.startswith("aux_head"))
        # The tensors are in the file still: each needs a reason why it has no place.
        left_out = {**self.left_out, **dict.fromkeys(theirs, "--set model.aux_head=false")}
        return replace(self, found={**found, "model.aux_head": False}, left_out=left_out)

    def their_key(self, key: str) -> str | None:
        """The key in the file of our `key`; None if the plan has no place for it.

        >>> keys = {"backbone.stages.*": "encoder.layer+", "head": "decode_head"}
        >>> plan = Conversion("another program", num_classes=2, found={}, keys=keys)
        >>> plan.their_key("backbone.stages.0.conv.weight"), plan.their_key("head.bias")
        ('encoder.layer1.conv.weight', 'decode_head.bias')
        """
        # The first row that fits counts, so exact names stand before those with `*`.
        for ours, theirs in self.keys.items():
            if match := re.match(re.escape(ours).replace(r"\*", r"(\d+)") + r"\.", key):
                if match.groups():
                    theirs = theirs.replace("*", match[1]).replace("+", str(int(match[1]) + 1))
                return f"{theirs}.{key[match.end() :]}".removeprefix(".")
        return None

    def rotated(self, key: str, tensor: Tensor) -> Tensor:
        """`tensor` of the file for our `key`, its channels in the order of segtrain."""
        for ours, (dim, count) in self.rotations.items():
            if key.startswith(ours) and tensor.dim() > dim:  # a counter has no channels
                return tensor.roll(-count, dim)
        return tensor


def size(state: State, key: str, dim: int = 0) -> int:
    """A dimension of a tensor that decides a width of the model.

    Raises:
        CheckpointError: it is missing, or has no such dimension.
    """
    if key not in state:
        raise CheckpointError(f"missing: {key}, whose shape decides the model")
    shape = tuple(state[key].shape)
    if dim >= len(shape) or shape[dim] == 0:
        raise CheckpointError(f"{key}: expected a convolution's weight, found the shape {shape}")
    return shape[dim]


Accepted = Mapping[str, tuple[Any, ...] | None]
"""The keys of a foreign dict that are understood, and the values that each may have; None: any."""


def accepting(any_value: str, **values: tuple[Any, ...]) -> Accepted:
    """The keys in `any_value`, separated by blanks, with any value, and `values`."""
    return {**dict.fromkeys(any_value.split()), **values}


def misfits(place: str, given: Any, accepted: Accepted) -> Iterator[str]:
    """What stands in the dict `given`, which is that at `place`, and is not understood."""
    if not isinstance(given, dict):
        yield f"{place}: expected a dict, found {short(given)}"
        return
    for key, value in given.items():
        where = f"{place}.{printable(key, MAX_NAME)}"
        if key not in accepted:
            yield f"{where}: {short(value)}: segtrain does not know this key"
        elif (values := accepted[key]) is not None and value not in values:
            yield f"{where}: expected {' or '.join(map(repr, values))}, found {short(value)}"


def short(value: Any) -> str:
    """`value` as Python writes it, short enough for a message."""
    return printable(repr(value), MAX_NAME)


def count_children(state: State, prefix: str) -> int:
    """How many different names stand after `prefix`, up to the next dot."""
    return len(
        {key.removeprefix(prefix).partition(".")[0] for key in state if key.startswith(prefix)}
    )


def resnet_name(state: State, prefix: str) -> str:
    """`model.backbone` of the stages layer1 to layer4 under `prefix`.

    Raises:
        CheckpointError: another network, such as ResNet-152. The shapes of a ResNeXt or a Wide
            ResNet are found not to fit later.
    """
    depths = tuple(count_children(state, f"{prefix}layer{i + 1}.") for i in range(4))
    # Only blocks of three convolutions have a conv3.
    bottleneck = f"{prefix}layer1.0.conv3.weight" in state
    for name, known in DEPTHS.items():
        if known == (depths, bottleneck):
            return name
    raise CheckpointError(
        f"the backbone has {list(depths)} blocks under {prefix}layer1 to layer4; expected one of "
        f"{', '.join(DEPTHS)}"
    )


def deep_stem(theirs: str) -> Keys:
    """conv1, bn1, conv2 and so on, which are 0, 1, 3, 4, 6, 7 of a Sequential."""
    return {
        f"backbone.{kind}{i + 1}": f"{theirs}.{3 * i + place}"
        for i in range(3)
        for place, kind in enumerate(("conv", "bn"))
    }


def aspp(state: State, theirs: str, *, separable: tuple[str, str] | None = None) -> Keys:
    """torchvision's ASPP. The last branch begins with a pooling, which has no weights.

    separable: the names of the depthwise and of the 1x1 convolution of a dilated branch.
    """
    # In the last branch the pooling is 0: convolution and norm are 1 and 2, and not 0 and 1.
    last = count_children(state, f"{theirs}.convs.") - 1
    keys = {
        "head.aspp.convs.0": f"{theirs}.convs.0.0",
        f"head.aspp.convs.{last}": f"{theirs}.convs.{last}.1",
        f"head.aspp.norms.{last}": f"{theirs}.convs.{last}.2",
        "head.aspp.norms.*": f"{theirs}.convs.*.1",
        "head.aspp.project.conv": f"{theirs}.project.0",
        "head.aspp.project.norm": f"{theirs}.project.1",
    }
    if separable is None:
        return {**keys, "head.aspp.convs.*": f"{theirs}.convs.*.0"}
    depthwise, pointwise = separable
    dilated = {"head.aspp.depthwise.*": f"{theirs}.convs.+.0.{depthwise}"}
    return {**keys, **dilated, "head.aspp.convs.*": f"{theirs}.convs.*.0.{pointwise}"}


def aux_options(state: State, conv: str, classifier: str) -> Options:
    """Whether the file has an auxiliary head, by the weight of its classifier, and its width."""
    if classifier not in state:
        return {"model.aux_head": False}
    return {"model.aux_head": True, "model.aux_channels": size(state, conv)}
