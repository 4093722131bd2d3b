"""How often the ranks meet for statistics in one training step."""

import pytest
import torch
from torch.distributed import all_reduce

from segtrain.config import ModelConfig
from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.norm import SyncBatchNorm2d

# 61 layers, or 59 with the 7x7 stem: four downsamples share the collective of their bn3, the four
# grids of the PPM share one, and the auxiliary head shares that of the head's last convolution.
PSPNET = {"arch": "pspnet", "backbone": "resnet50", "head_channels": 8, "aux_channels": 8}
# 62 layers without an auxiliary head: likewise, the five branches of the ASPP share one, and the
# low-level features share that of its projection.
PLUS = {"arch": "deeplabv3plus", "backbone": "resnet50", "head_channels": 8, "aux_head": False}
MOBILE = {"arch": "deeplabv3plus", "backbone": "mobilenet_v2", "head_channels": 8}


def collectives(options):
    """The number of batch norms, and of all_reduces forward and backward."""
    dist.use_shared_sum(None)  # where they could not be seen
    calls = []

    def count(*args, **kwargs):
        calls.append(1)
        return all_reduce(*args, **kwargs)

    torch.distributed.all_reduce = count
    try:
        torch.manual_seed(0)
        model = build_model(ModelConfig(**options), num_classes=3, norm=SyncBatchNorm2d).train()
        logits = model(torch.randn(1, 3, 33, 33))
        forward = len(calls)
        heads = [logits.out] if logits.aux is None else [logits.out, logits.aux]
        sum(head.square().mean() for head in heads).backward()
        layers = sum(isinstance(layer, SyncBatchNorm2d) for layer in model.modules())
        return layers, forward, len(calls) - forward
    finally:
        torch.distributed.all_reduce = all_reduce


@pytest.mark.parametrize(
    ("options", "layers", "each_way"),
    [
        (PSPNET | {"stem": "64-64-128"}, 61, 53),
        (PSPNET, 59, 51),
        (PLUS, 62, 53),
        # 1x1, three rates, mean, projection; low; two in the decoder; auxiliary: 51 + 10.
        (MOBILE | {"aux_channels": 8}, 61, 55),
    ],
    ids=["pspnet deep stem", "pspnet", "deeplabv3plus", "mobilenet"],
)
def test_branches_share_their_collectives(run_ranks, options, layers, each_way):
    assert run_ranks(2, collectives, options) == [(layers, each_way, each_way)] * 2
