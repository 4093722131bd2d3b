"""Parts that several programs share: torchvision's ResNet and ASPP, and their classifiers."""

from segtrain.convert.plan import Options, Renames, State, count_children, size
from segtrain.errors import CheckpointError
from segtrain.models.resnet import DEPTHS

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
