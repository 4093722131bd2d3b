"""tools/hogwild.py: the same images both ways, memory that is shared, and what is refused."""

import hogwild
import pytest
import torch
from experiments import experiment, write_config

from segtrain.config import load_config
from segtrain.errors import ConfigError, ExecutionError

STEPS = 3


def config(data, directory, **train):
    options = experiment(
        data,
        augment={"crop_size": [25, 33]},
        model={"backbone": "mobilenet_v2", "head_channels": 8, "aux_channels": 8},
        train={"steps": STEPS, "batch_size": 4} | train,
    )
    return load_config(write_config(directory / "c.yaml", options))


def snapshots(settings, directory, context, way, processes, steps=()):
    task = hogwild.Task(way, settings, processes, steps, directory, port=0)
    hogwild.train(task, context)
    return [torch.load(path) for path in sorted(directory.glob(f"{way}_0*.pt"))]


def test_a_single_process_of_hogwild_is_a_single_rank_bit_for_bit(forkserver, tmp_path, data):
    """Nobody else writes, and the learning rate is divided by one."""
    assert hogwild.with_divided_lr(config(data, tmp_path, lr=0.02), 4).train.lr == 0.005
    settings = config(data, tmp_path)
    found, wanted = (
        snapshots(settings, tmp_path, forkserver, way, 1, (2,)) for way in ("hogwild", "ranks")
    )
    assert [one["steps"] for one in found] == [one["steps"] for one in wanted] == [2, STEPS]
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(value, one["model"][key]) for key, value in other["model"].items())


def test_processes_share_weights_and_statistics_and_see_every_image_once(
    forkserver, tmp_path, data
):
    (last,) = snapshots(config(data, tmp_path), tmp_path, forkserver, "hogwild", 2)
    assert last["steps"] == 2 * STEPS
    counters = [v.item() for k, v in last["model"].items() if k.endswith("num_batches_tracked")]
    # Each alone would have counted to STEPS; some updates may be lost.
    assert all(STEPS < counter <= 2 * STEPS for counter in counters)
    assert all(torch.isfinite(value).all() for value in last["model"].values())
    model = hogwild.new_state(config(data, tmp_path)).model
    row = hogwild.score(
        hogwild.Task("hogwild", config(data, tmp_path), 2, (), tmp_path, 0),
        tmp_path / f"hogwild_{STEPS:07d}.pt",
        model,
        precise_batches=1,
    )
    assert row.images == 4 * STEPS
    assert 0 <= row.lost < 0.5
    assert row.mean_error > 0


@pytest.mark.slow
def test_a_process_that_fails_ends_the_comparison(forkserver, tmp_path, data):
    settings = config(data, tmp_path, lr=1e30)
    with pytest.raises(ExecutionError, match="hogwild: a process failed"):
        snapshots(settings, tmp_path, forkserver, "hogwild", 2)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"shares": 2}, "train.shares: cannot go with Hogwild!"),
        ({"ema_decay": 0.9}, "train.ema_decay: cannot go"),
        ({"batch_size": 5}, "train.batch_size: 5 leaves less than 2 images to some of 3"),
    ],
)
def test_what_cannot_go_without_waiting_is_refused(tmp_path, data, train, said):
    with pytest.raises(ConfigError, match=said):
        hogwild.check(config(data, tmp_path, **train), 3)
