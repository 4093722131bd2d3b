import numpy as np
import pytest
import torch

from segtrain import seed


def test_every_epoch_is_a_permutation_of_its_own_for_every_seed():
    orders = [seed.sample_order(*key, 50) for key in ((7, 0), (7, 1), (7, 2), (8, 2))]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
    assert len({tuple(order) for order in orders}) == 4
    np.random.seed(1)
    assert np.array_equal(seed.sample_order(7, 2, 50), orders[2])
    # Order and augmentation with the same key are not one stream.
    assert not np.array_equal(orders[0], seed.augment_rng(7, 0, 0).permutation(50))


def test_augmentations_differ_by_seed_step_and_position():
    keys = [(s, step, place) for s in (0, 1, 2**40) for step in range(6) for place in range(6)]
    draws = {key: tuple(seed.augment_rng(*key).random(2)) for key in keys}
    draws |= {("partner", *key): tuple(seed.partner_rng(*key).random(2)) for key in keys}
    assert len(set(draws.values())) == 2 * len(keys)
    assert tuple(seed.augment_rng(1, 2, 3).random(2)) == draws[1, 2, 3]


def mask(step=0, layer=0, p=0.3, batch_size=64, channels=257):
    return seed.dropout_mask(3, step, layer, batch_size=batch_size, channels=channels, p=p)


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_drops_with_its_probability_and_keeps_the_mean(p):
    values = mask(p=p)
    assert values.shape == (64, 257, 1, 1)
    assert values.dtype == torch.float32
    kept = values > 0
    torch.testing.assert_close(values[kept], torch.full_like(values[kept], 1 / (1 - p)))
    sigma = (p * (1 - p) / values.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * sigma


def test_dropout_masks_differ_by_step_layer_and_image():
    masks = [mask(), mask(step=1), mask(layer=1)]
    assert len({tuple(m.flatten().tolist()) for m in masks}) == 3
    assert len({tuple(row.flatten().tolist()) for row in mask()}) == 64
    assert torch.equal(mask(), masks[0])


def test_seed_everything_fixes_the_global_generators():
    draws = []
    for value in (2**40 + 1, 2**40 + 1, 3):
        seed.seed_everything(value)
        draws.append((torch.rand(1).item(), np.random.random()))
    assert draws[0] == draws[1] != draws[2]
