"""train.split: unequal ranks have unequal parts of a microbatch; the result stays what it is."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from experiments import bits, experiment, last, logged, losses, stopped_after, train, write_config

from segtrain.commands.train import split as split_module
from segtrain.config import load_config
from segtrain.data.read.image import ImageForm
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Layout
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.training import speed
from segtrain.training.speed import Speed, fastest_split, measure_speed, step_time
from segtrain.training.state import make_state, use_split


def config_file(path, data, **sections):
    model = {"head_channels": 8, "aux_channels": 8}
    sections = {"augment": {"crop_size": [25, 33]}, "model": model} | sections
    return write_config(path, experiment(data, **sections))


@pytest.mark.parametrize(
    ("speeds", "total", "least", "counts"),
    [
        ([Speed(1, 1.0), Speed(1, 2.0)], 9, 0, (6, 3)),
        ([Speed(1, 1.0), Speed(1, 1.01)], 8, 0, (4, 4)),
        ([Speed(1, 1.0), Speed(1, 9.0)], 4, 0, (4, 0)),
        ([Speed(1, 1.0), Speed(1, 9.0)], 4, 1, (3, 1)),
        # Four shares at a time take as long as one.
        ([Speed(4, 1.0), Speed(1, 1.0)], 5, 1, (4, 1)),
        # The faster rank has memory for 5 images only; without space for all, speed alone decides.
        ([Speed(1, 1.0, 5), Speed(1, 4.0, 9)], 8, 0, (5, 3)),
        ([Speed(1, 1.0, 2), Speed(1, 2.0, 2)], 6, 0, (4, 2)),
    ],
)
def test_the_slowest_rank_is_done_as_soon_as_possible(speeds, total, least, counts):
    assert fastest_split(total, speeds, least=least) == counts
    assert step_time(counts, speeds) == max(
        -(-n // one.at_once) * one.seconds for n, one in zip(counts, speeds, strict=True)
    )


CASES = {
    "microbatches, lovasz, mixup": {
        "train": {"steps": 3, "batch_size": 7, "accumulate_steps": 2},
        "augment": {"crop_size": [25, 33], "mixup_alpha": 1.0},
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


def measured(plan, function, *args, rest=0):
    """Calls `function`; rank r then has speed plan[i][r] at the i-th measurement of the process."""
    plan, split_module._LEAST_REST = iter(plan), rest
    split_module.measure_speed = lambda *_: Speed(1, 1.0 / next(plan)[dist.rank()])
    return function(*args)


def test_a_split_that_changes_leaves_every_bit_in_peace(run_ranks, tmp_path, data):
    """Shares; three changes, then a kill, then another one before the resumed steps."""
    config = config_file(
        tmp_path / "c.yaml",
        data,
        train={"steps": 10, "batch_size": 8, "shares": 6, "split": "measured"},
        optim={"ema_decay": 0.9},
        checkpoint={"every_steps": 2},
        eval={"every_steps": 4},
        log={"every_steps": 1},
    )
    alone, changing = tmp_path / "alone", tmp_path / "changing"
    assert run_ranks(1, train, config, alone) == [0]
    plan = [(2, 1), (1, 2), (1, 5), (1, 1)]
    stop = stopped_after, 7, config, changing
    assert run_ranks(2, measured, plan, *stop) == [143] * 2
    assert last(changing).split["counts"] == [3, 3]
    assert run_ranks(2, measured, [(5, 1)] * 9, train, config, changing, True) == [0] * 2
    assert bits(last(changing)) == bits(last(alone))
    assert logged(changing) == logged(alone)
    log = (changing / "train.log").read_text()
    for change in ("4 + 2 shares of a microbatch instead of 3 + 3", "2 + 4", "1 + 5", "5 + 1"):
        assert f"split      {change}" in log
    assert log.count("images/s") >= 4
    saved = last(changing).split
    assert (saved["counts"], saved["predicted"] > 1.5) == ([5, 1], True)
    assert saved["images_per_s"][1] > 0


def test_the_log_tells_of_ranks_alike_and_of_whole_intervals(tmp_path, data, monkeypatch):
    config = load_config(config_file(tmp_path / "c.yaml", data, train={"batch_size": 8}))
    monkeypatch.setattr(split_module, "measure_speed", lambda *_: Speed(1, 0.25))
    state = SimpleNamespace(layout=Layout(8, 1, (1,)), shares=None)
    train_set = SimpleNamespace(form=ImageForm(), classes=SimpleNamespace(num_classes=4))
    split = split_module.MeasuredSplit(state, config, train_set, torch.device("cpu"), None)
    stays = "split      8 images of a microbatch stay: ranks take 250.0 ms an image"
    assert split.measure() == (False, [stays])
    split.fields = {"counts": [5, 3], "step": 7, "predicted": 1.5, "images_per_s": [4.0, None]}
    split.update(9.0)  # some of these steps came before the change
    assert split.reached() == []
    split.update(1.0)
    said = "5 + 3 reach 8.0 images/s, 2.00 times the 4.0 before; predicted 1.50"
    assert split.reached() == [f"split      {said}"]


def test_a_compiled_run_may_be_divided_more_often_than_torch_keeps_graphs(tmp_path, data):
    config = load_config(config_file(tmp_path / "c.yaml", data, train={"compile": True}))
    graph = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True, dynamic=False)
    for images in range(1, 11):
        use_split(SimpleNamespace(model=torch.nn.Identity()), config, (images,))
        assert graph(torch.zeros(images)).tolist() == [1.0] * images


def test_measuring_takes_a_small_part_of_the_time(run_ranks, tmp_path, data):
    """A second measurement would have no speeds."""
    options, every = {"steps": 4, "batch_size": 6, "split": "measured"}, {"every_steps": 1}
    config = config_file(tmp_path / "c.yaml", data, train=options, checkpoint=every)
    plan, run = [(2, 1)], tmp_path / "run"
    assert run_ranks(2, measured, plan, train, config, run, rest=1e9) == [0] * 2
    assert (run / "train.log").read_text().count("instead of 3 + 3") == 1


def test_a_split_for_other_ranks_is_even_with_a_warning(run_ranks, tmp_path, data):
    config = config_file(tmp_path / "c.yaml", data, train={"steps": 1, "split": [5, 3, 1]})
    assert run_ranks(2, train, config, tmp_path / "run") == [0] * 2
    log = (tmp_path / "run" / "train.log").read_text()
    assert "train.split: [5, 3, 1] is for 3 ranks, and there are 2" in log
    assert "batch      5 images of 25x33, 3 + 2 of a microbatch to the ranks" in log


def speed_and_state(config):
    """The speed of this rank by a clock that knows only its images; what changed in the state."""
    config = load_config(config)
    model = build_model(config.model, num_classes=4, norm=make_norm(config.norm))
    state = make_state(model, config, torch.device("cpu"))
    computed, whole = [], speed.compute_alone

    def compute_alone(state, part, sizes):
        whole(state, part, sizes)
        computed.append((sum(sizes), len(part.images)))

    speed.compute_alone = compute_alone
    # Rank 1 takes three times as long for an image.
    speed.time.perf_counter = lambda: sum(n for n, _ in computed) * (1 + 2 * dist.rank())
    before = copy.deepcopy(state.model.state_dict()), torch.get_rng_state().tolist()
    found = measure_speed(state, config, ImageForm(), 4, torch.device("cpu"))
    assert all(images == size for size, images in computed)
    after = state.model.state_dict()  # which refuses statistics that wait
    torch.testing.assert_close(after, before[0], rtol=0, atol=0)
    assert torch.get_rng_state().tolist() == before[1]
    assert all(p.grad is None for p in state.model.parameters())
    return tuple(found)


@pytest.mark.parametrize(
    ("sections", "seconds"),
    [
        ({"train": {"batch_size": 5}}, (1, 3)),
        # 3 images a rank, each in groups of 2: 4 are measured.
        ({"train": {"batch_size": 6}, "norm": {"images": 2}}, (1, 3)),
        # Rank 1 has none, and is measured with one: a single value where PSPNet pools globally.
        ({"train": {"batch_size": 2, "split": [1, 0]}}, (1, 3)),
        ({"train": {"batch_size": 8, "virtual_ranks": 2}}, (1, 3)),
        # 2 shares of 2 images on each rank, one at a time.
        ({"train": {"batch_size": 8, "shares": 4}}, (2, 6)),
    ],
)
def test_measuring_tells_ranks_apart_and_changes_nothing(
    run_ranks, tmp_path, data, sections, seconds
):
    loss = {"kind": "lovasz_batch"}
    config = config_file(tmp_path / "c.yaml", data, loss=loss, **sections)
    found = run_ranks(2, speed_and_state, config)
    assert found == [(1, s, None) for s in seconds]
