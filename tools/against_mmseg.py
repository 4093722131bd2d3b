"""mmsegmentation without mmcv's compiled operators, and its two networks for bench_against.py."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

Options = dict[str, Any]


@cache
def load_mmseg() -> Any:
    """The registry of mmsegmentation's models.

    mmcv-lite has no compiled operators. None of these networks uses one, but mmsegmentation imports
    their module: one whose functions raise stands in for it.
    """

    class NoOperators(types.ModuleType):
        def __getattr__(self, name: str) -> Callable[..., None]:
            if name.startswith("__"):
                raise AttributeError(name)

            def raises(*_: object, **__: object) -> None:
                raise NotImplementedError(f"mmcv-lite has no compiled operators, such as {name}")

            return raises

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if importlib.util.find_spec("mmcv._ext") is None:
            stand_in = NoOperators("mmcv._ext")
            # mmengine asks for it, to see whether there are operators.
            stand_in.__spec__ = importlib.machinery.ModuleSpec("mmcv._ext", loader=None)
            sys.modules["mmcv._ext"] = stand_in
        importlib.import_module("mmseg.utils").register_all_modules(init_default_scope=True)
        return importlib.import_module("mmseg.registry").MODELS


def build_mmseg(options: Options) -> nn.Module:
    """The model of these options of a config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry = load_mmseg()
        return registry.build(importlib.import_module("mmengine.config").ConfigDict(options))


def _options(num_classes: int, backbone: Options, head: Options, aux: Options) -> Options:
    norm = {"type": "BN", "requires_grad": True}
    common = {"num_classes": num_classes, "norm_cfg": norm, "dropout_ratio": 0.1}
    common["align_corners"] = False
    loss = {"type": "CrossEntropyLoss", "use_sigmoid": False}
    return {
        "type": "EncoderDecoder",
        "data_preprocessor": {
            "type": "SegDataPreProcessor",
            "mean": [123.675, 116.28, 103.53],
            "std": [58.395, 57.12, 57.375],
            "bgr_to_rgb": True,
            "pad_val": 0,
            "seg_pad_val": 255,
        },
        "backbone": {**backbone, "norm_cfg": norm},
        "decode_head": {**common, **head, "loss_decode": {**loss, "loss_weight": 1.0}},
        "auxiliary_head": {
            "type": "FCNHead",
            "num_convs": 1,
            "concat_input": False,
            **common,
            **aux,
            "loss_decode": {**loss, "loss_weight": 0.4},
        },
        "train_cfg": {},
        "test_cfg": {"mode": "whole"},
    }


def pspnet_r18(num_classes: int) -> Options:
    """pspnet_r18-d8, with torchvision's stem."""
    return _options(
        num_classes,
        {
            "type": "ResNet",
            "depth": 18,
            "num_stages": 4,
            "out_indices": (0, 1, 2, 3),
            "dilations": (1, 1, 2, 4),
            "strides": (1, 2, 1, 1),
            "style": "pytorch",
            "contract_dilation": True,
        },
        {"type": "PSPHead", "in_channels": 512, "in_index": 3, "channels": 128},
        {"in_channels": 256, "in_index": 2, "channels": 64},
    )


def deeplabv3plus_mnv2(num_classes: int) -> Options:
    """mobilenet-v2-d8_deeplabv3plus at stride 16, with a head of 256 channels."""
    return _options(
        num_classes,
        {
            "type": "MobileNetV2",
            "strides": (1, 2, 2, 2, 1, 1, 1),
            "dilations": (1, 1, 1, 1, 1, 2, 2),
            "out_indices": (1, 2, 4, 6),
        },
        {
            "type": "DepthwiseSeparableASPPHead",
            "in_channels": 320,
            "in_index": 3,
            "channels": 256,
            "dilations": (1, 6, 12, 18),
            "c1_in_channels": 24,
            "c1_channels": 48,
        },
        {"in_channels": 96, "in_index": 2, "channels": 256},
    )
