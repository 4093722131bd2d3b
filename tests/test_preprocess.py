import torch
from torchvision.transforms.v2 import functional as tv

from segtrain.models.blocks import Normalize, normalize

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def images(dtype=torch.uint8):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, 3, 4, 6), generator=generator).to(dtype)


def test_bytes_are_normalized_as_torchvision_does():
    expected = tv.normalize(images() / 255, [m / 255 for m in MEAN], [s / 255 for s in STD])
    torch.testing.assert_close(normalize(images(), MEAN, STD), expected)


def test_module_equals_function():
    assert torch.equal(Normalize(MEAN, STD)(images()), normalize(images(), MEAN, STD))


def test_floats_are_taken_in_units_of_bytes():
    module = Normalize(MEAN, STD)
    assert torch.equal(module(images(torch.float32)), module(images()))


def test_module_in_float64_works_in_float64():
    expected = normalize(images(), MEAN, STD, dtype=torch.float64)
    actual = Normalize(MEAN, STD).double()(images())
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_state_dict_is_empty():
    assert not Normalize(MEAN, STD).state_dict()


def test_memory_format_is_kept():
    nhwc = images().contiguous(memory_format=torch.channels_last)
    assert Normalize(MEAN, STD)(nhwc).is_contiguous(memory_format=torch.channels_last)
