import torch
from torchvision.transforms.v2 import functional as tv

from segtrain.models.blocks import Normalize, normalize

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def images(dtype=torch.uint8):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, 3, 4, 6), generator=generator).to(dtype)


def test_bytes_and_floats_in_their_units_are_normalized_as_torchvision_does():
    expected = tv.normalize(images() / 255, [m / 255 for m in MEAN], [s / 255 for s in STD])
    found = normalize(images(), MEAN, STD)
    torch.testing.assert_close(found, expected)
    module = Normalize(MEAN, STD)
    assert torch.equal(module(images()), found)
    assert torch.equal(module(images(torch.float32)), found)
    assert not module.state_dict()


def test_module_in_float64_works_in_float64_and_keeps_the_memory_format():
    nhwc = images().contiguous(memory_format=torch.channels_last)
    expected = normalize(images(), MEAN, STD, dtype=torch.float64)
    actual = Normalize(MEAN, STD).double()(nhwc)
    assert actual.dtype == torch.float64
    assert actual.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
