"""Replayed steps on the device are eager ones; tests/gpu/test_kernels.py has how long they take."""

import pytest
import torch
from replays import SETS, config_of, trained

from gpu.watching import as_among_two, one_rank
from segtrain.commands.train.setup import make_repeatable


@pytest.mark.gpu(limit_s=240)
@pytest.mark.parametrize("names", SETS, ids=" and ".join)
def test_replayed_steps_are_eager_ones(device, figures, names):
    """To the last bit with train.deterministic; otherwise within rounding, which steps amplify."""
    replayed = device.type == "cuda"
    with one_rank(device):
        for deterministic in (True, False):
            config = config_of(names)
            train = config.train.model_copy(update={"deterministic": deterministic})
            config = config.model_copy(update={"train": train})
            make_repeatable(config, device)
            numbers, left = trained(config, device, around=as_among_two)
            found, kept = trained(config, device, replayed=replayed, around=as_among_two)
            pairs = zip(numbers, found, strict=True)
            figures[f"deterministic {deterministic}"] = max(abs(a[1] / b[1] - 1) for a, b in pairs)
            if deterministic:
                assert found == numbers
                assert all(map(torch.equal, kept, left))
    assert figures["deterministic False"] < 1e-2
