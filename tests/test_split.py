"""train.split: unequal ranks have unequal parts of a microbatch; the result stays what it is."""

import numpy as np
import pytest
import torch
from experiments import bits, experiment, last, losses, train, write_config


def config_file(path, data, **sections):
    model = {"head_channels": 8, "aux_channels": 8}
    sections = {"augment": {"crop_size": [25, 33]}, "model": model} | sections
    return write_config(path, experiment(data, **sections))


CASES = {
    "microbatches, lovasz": {
        "train": {"steps": 3, "batch_size": 7, "accumulate_steps": 2},
        "augment": {"crop_size": [25, 33]},
        "loss": {"kind": "ohem", "also": [{"kind": "lovasz_batch"}]},
    },
    "groups of two images": {
        "train": {"steps": 3, "batch_size": 8, "virtual_ranks": 2},
        "norm": {"images": 2, "precise_batches": 1},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_training_does_not_see_the_split(run_ranks, tmp_path, data, case):
    def run(name, ranks, split):
        sections = {name: dict(values) for name, values in CASES[case].items()}
        sections["train"]["split"] = split
        config = config_file(tmp_path / f"{name}.yaml", data, **sections, optim={"lr": 0.002})
        assert set(run_ranks(ranks, train, config, tmp_path / name)) == {0}
        return losses(tmp_path / name), last(tmp_path / name).model

    one, weights = run("alone", 1, [3])
    assert len(one) == 3
    for split in ([5, 1], [0, 1, 3]):
        found, model = run(str(split), len(split), split)
        np.testing.assert_allclose(found, one, rtol=1e-9, atol=0)
        torch.testing.assert_close(model, weights, rtol=1e-7, atol=1e-9)


def test_with_shares_the_split_changes_no_bit(run_ranks, tmp_path, data):
    found = []
    for split in ([1], [5, 1]):
        options = {"steps": 3, "batch_size": 8, "shares": 6, "split": split}
        config = config_file(tmp_path / f"{split}.yaml", data, train=options)
        run = tmp_path / str(split)
        assert set(run_ranks(len(split), train, config, run)) == {0}
        found.append(bits(last(run)))
    assert "7 + 1 of a microbatch to the ranks" in (run / "train.log").read_text()
    assert found[0] == found[1]


def test_a_split_for_other_ranks_is_even_with_a_warning(run_ranks, tmp_path, data):
    config = config_file(tmp_path / "c.yaml", data, train={"steps": 1, "split": [5, 3, 1]})
    assert run_ranks(2, train, config, tmp_path / "run") == [0] * 2
    log = (tmp_path / "run" / "train.log").read_text()
    assert "train.split: [5, 3, 1] is for 3 ranks, and there are 2" in log
    assert "batch      5 images of 25x33, 3 + 2 of a microbatch to the ranks" in log
