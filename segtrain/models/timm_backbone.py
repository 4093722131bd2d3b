"""timm's networks as backbones: `model.backbone: timm/NAME`.

timm (https://github.com/huggingface/pytorch-image-models) is an optional dependency,
`pip install '.[timm]'` in the checkout.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.config import ModelConfig
from segtrain.config.messages import did_you_mean
from segtrain.config.model import TIMM
from segtrain.errors import ConfigError
from segtrain.models.blocks import FeatureChannels, Features, FeatureStrides
from segtrain.models.trial import refuse_by_trial
from segtrain.norm import NormFactory, is_batch_norm, keep_inside
from segtrain.parts import draws_random_numbers
from segtrain.text import MAX_NAME, install_line, printable

# What timm raises for what a network cannot do; there is no class for it.
_UNABLE = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
# How networks are asked for features of images of any size. The "getter" keeps the keys of the
# network below `model`; MobileNets have only a class of their own, with the same keys at its top.
# Swin would take one size, and leave out shifts where that size has a single window.
_WAYS = (
    {"feature_cls": "getter"},
    {},
    {"feature_cls": "getter", "strict_img_size": False, "always_partition": True},
)


class TimmBackbone(nn.Module):
    """The timm network that `model` names, without its classifier: images to `Features`.

    timm replaces strides by dilations for `output_stride`. Every batch norm is made by `norm` and
    gets the eps that timm chose, which pretrained weights belong to. Other norms (LayerNorm of
    ConvNeXt) stay: they look at one image alone. Dropout and stochastic depth are off. Features
    have the sizes that the network gives them: a stem of 4x4 patches rounds down.

    Raises:
        ConfigError: timm is not installed or has no such network, or the network has no features of
            stride 4, cannot have this output stride, takes images of one size, keeps statistics of
            another kind, or computes an image from others (`trial`).
    """

    stem_keys: tuple[str, ...] = ()

    def __init__(self, model: ModelConfig, *, norm: NormFactory = nn.BatchNorm2d) -> None:
        super().__init__()
        self.name = model.backbone
        self.network, has_strides = _features_only(model)
        replace_norms(self.network, norm, self.name)
        switch_off_random_layers(self.network)
        info = self.network.feature_info
        strides = info.reduction()
        # A network may take `output_stride` and do nothing with it.
        if 4 not in strides[:-2] or strides[-1] != model.output_stride:
            raise ConfigError(
                f"model.backbone: {self.name} has features of strides {strides}; needed are three "
                f"or more, 4 before the last two and model.output_stride {model.output_stride} last"
            )
        if norm is not nn.BatchNorm2d:  # the norm of inference: what is trained was tried
            refuse_by_trial(self.network, self.name)
        self._low, self._aux = strides.index(4), len(strides) - 2
        channels = info.channels()
        self.channels = FeatureChannels(channels[self._low], channels[self._aux], channels[-1])
        self.strides = None
        if has_strides:
            self.strides = FeatureStrides(4, strides[self._aux], strides[-1])

    @property
    def weights(self) -> nn.Module:
        """The part whose keys are those of timm's own files."""
        return getattr(self.network, "model", self.network)

    @property
    def classifier_keys(self) -> tuple[str, ...]:
        """The keys of timm's whole network that this backbone does not have."""
        # Only keys are asked for: no weight is drawn or stored.
        with torch.device("meta"):
            whole = _timm().create_model(_timm_name(self.name), exportable=False)
        return tuple(whole.state_dict().keys() - self.weights.state_dict().keys())

    def forward(self, images: Tensor) -> Features:
        """Features of normalized images (N, 3, H, W)."""
        features = self.network(images)
        return Features(features[self._low], features[self._aux], features[-1])


def fetch(name: str, spec: str) -> tuple[str, dict[str, Tensor]]:
    """Source and state dict of timm's weights `spec` (a tag, or DEFAULT) for the backbone `name`.

    Raises:
        ConfigError: timm has no such weights.
        OSError: they cannot be downloaded.
    """
    timm, arch = _timm(), _timm_name(name)
    # timm's names of weights are NETWORK.TAG.
    known = [full.partition(".")[2] for full in timm.list_pretrained(f"{arch}.*")]
    if spec not in (*known, "DEFAULT"):
        names = ", ".join(known) or "none"
        raise ConfigError(
            f"model.pretrained: {spec!r} is neither a tag of timm's weights for {name} ({names}), "
            "nor DEFAULT, nor a file"
        )
    full = arch if spec == "DEFAULT" else f"{arch}.{spec}"
    network = timm.create_model(full, pretrained=True)
    return f"timm/{network.pretrained_cfg['architecture']}.{network.pretrained_cfg['tag']}", (
        network.state_dict()
    )


def expected_normalization(name: str, spec: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of RGB, in units of 0..255, of timm's weights `spec`.

    Those of the default weights if `spec` is a file.
    """
    timm, arch = _timm(), _timm_name(name)
    tagged = f"{arch}.{spec}"
    cfg = timm.get_pretrained_cfg(tagged if tagged in timm.list_pretrained(tagged) else arch)
    return tuple(255 * x for x in cfg.mean), tuple(255 * x for x in cfg.std)


def _timm() -> Any:
    try:
        import timm  # optional, and slow to import
    except ImportError:
        raise ConfigError(
            f"model.backbone: timm is not installed; {install_line('timm')}"
        ) from None
    return timm


def _timm_name(name: str) -> str:
    timm, arch = _timm(), name.removeprefix(TIMM)
    if not timm.is_model(arch):
        hint = did_you_mean(arch, timm.list_models())
        raise ConfigError(f"model.backbone: timm has no network {arch!r}{hint}")
    return arch


def _features_only(model: ModelConfig) -> tuple[nn.Module, bool]:
    """timm's network that returns a list of features, and `_has_strides` of it."""
    arch, options = _timm_name(model.backbone), {}
    if model.output_stride != 32:
        options["output_stride"] = model.output_stride
    reasons = []
    for way in _WAYS:
        try:
            network = _timm().create_model(arch, features_only=True, **options, **way)
            for layer in network.modules():
                if hasattr(layer, "dynamic_img_pad"):  # patches at the edge are filled up
                    layer.dynamic_img_pad = True
            return network, _has_strides(network)
        except _UNABLE as error:
            reasons.append(str(error))
    # The last way may fail by arguments that are Swin's alone.
    reason = f"(timm: {printable(reasons[1], MAX_NAME)})"
    if "output_stride" in reason:
        reason = "(timm cannot dilate it)"
    raise ConfigError(
        f"model.backbone: {model.backbone} cannot give features at output stride "
        f"{model.output_stride} for images of any size {reason}; try "
        f"{'' if model.output_stride == 32 else 'model.output_stride 32, '}another network"
    )


def _has_strides(network: nn.Module) -> bool:
    """Whether features lie over their strides at any size.

    Stems of patches round sizes down. Layers of TensorFlow's "same" padding pad the top and the
    left more or less by the size of the image, so that all features move.

    Raises an error unless features have the channels and strides promised, at odd sizes too.
    """
    # Shapes without computing anything; the network itself stays as it is.
    shapes = copy.deepcopy(network).to("meta").eval()
    info, rounds_up = network.feature_info, True
    for height, width in ((256, 320), (65, 97)):
        features = shapes(torch.empty(2, 3, height, width, device="meta"))
        promised = zip(features, info.channels(), info.reduction(), strict=True)
        for feature, channels, stride in promised:
            down = (2, channels, height // stride, width // stride)
            up = (2, channels, -(-height // stride), -(-width // stride))
            found = tuple(feature.shape)
            if len(found) != 4 or not all(
                a <= b <= c for a, b, c in zip(down, found, up, strict=True)
            ):
                raise ValueError(f"features of shape {found} at stride {stride}")
            rounds_up = rounds_up and found == up
    moves = any(type(layer).__name__.endswith("Same") for layer in network.modules())
    return rounds_up and not moves


def replace_norms(network: nn.Module, norm: NormFactory, name: str) -> None:
    """Puts a layer of `norm` in the place of each batch norm; keys stay.

    Raises:
        ConfigError: a layer has running statistics of another kind.
    """
    made = type(norm(1))
    # Lists, since layers are exchanged on the way.
    for parent_name, parent in list(network.named_modules()):
        for child_name, layer in list(parent.named_children()):
            if type(layer) is made:
                continue
            if isinstance(layer, nn.BatchNorm2d) and is_batch_norm(layer):
                setattr(parent, child_name, _like(layer, norm))
            elif isinstance(layer, _BatchNorm) or hasattr(layer, "running_var"):
                raise ConfigError(
                    f"model.backbone: {name}: {parent_name}.{child_name} is a "
                    f"{type(layer).__name__}, whose statistics cannot be synchronized; "
                    "use another network"
                )


def _like(layer: nn.BatchNorm2d, norm: NormFactory) -> nn.Module:
    """A layer of `norm` that does what `layer` does."""
    new = norm(layer.num_features)
    new.eps = layer.eps
    if layer.affine:
        with torch.no_grad():  # some blocks start with weight 0
            new.weight.copy_(layer.weight)
            new.bias.copy_(layer.bias)
    keep_inside(new, layer)
    return new


def switch_off_random_layers(network: nn.Module) -> None:
    """Sets what dropout and stochastic depth leave out to 0: it would depend on the rank."""
    for layer in network.modules():
        if draws_random_numbers(layer):
            setattr(layer, "drop_prob" if hasattr(layer, "drop_prob") else "p", 0.0)


def refuse_random_layers(network: nn.Module, name: str) -> None:
    """ConfigError if a layer draws random numbers by itself."""
    for path, layer in network.named_modules():
        if draws_random_numbers(layer):
            raise ConfigError(
                f"model.backbone: {name}: {path}, a {type(layer).__name__}, draws random numbers "
                "that depend on the rank; use another network"
            )
