"""optim.large_batch sets the rules for large minibatches of arXiv:1706.02677 that are options."""

import pytest
import yaml
from experiments import sections

from segtrain.config import config_to_yaml, override_config, parse_config
from segtrain.errors import ConfigError
from segtrain.training.optim.schedule import base_lr, learning_rate

DATA = "data: {layout: folders, root: x, classes: y}\n"


def config(train, model="{}"):
    written = yaml.safe_dump(sections(**yaml.safe_load(train)))
    return parse_config(f"{DATA}model: {model}\n{written}", source="c.yaml")


def test_warmup_begins_with_the_rate_of_the_small_batch():
    """arXiv:1706.02677, section 2.2: from eta to k eta in equal steps."""
    train = config("{large_batch: true, batch_size: 64, steps: 90, poly_power: 0.0}")
    assert (train.optim.lr_batch_size, train.schedule.warmup_steps) == (16, 5)
    found = [learning_rate(train, step) for step in range(7)]
    assert found == pytest.approx([0.01 + 0.03 * i / 5 for i in range(6)] + [0.04])
    assert base_lr(train) == pytest.approx(0.04)


def test_large_batch_sets_its_rules_where_the_file_says_nothing():
    found = config("{large_batch: true, batch_size: 64, steps: 900}")
    optim, schedule = found.optim, found.schedule
    assert (optim.lr_batch_size, schedule.warmup_steps, schedule.warmup_start) == (16, 50, 0.25)
    assert not optim.decay_norm_and_bias
    assert optim.momentum_correction
    assert found.model.zero_init_residual


def test_large_batch_keeps_what_the_file_says():
    found = config(
        "{large_batch: true, lr: 0.1, lr_batch_size: 256, batch_size: 512, warmup_steps: 7}",
        "{backbone: mobilenet_v2}",
    )
    assert (found.optim.lr_batch_size, found.schedule.warmup_steps) == (256, 7)
    assert found.schedule.warmup_start == 0.5
    assert not found.model.zero_init_residual  # there is no such option for MobileNets
    # Loaded weights have no branches to begin at zero.
    assert not config("{large_batch: true}", "{pretrained: DEFAULT}").model.zero_init_residual
    assert not config("{large_batch: true, init_from: runs/a}").model.zero_init_residual


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("optimizer: adamw", "optim.kind: adamw cannot go with large_batch"),
        ("lr: 0.1", "optim.lr_batch_size: large_batch scales lr with the batch"),
        ("warmup_steps: 0", "schedule.warmup_steps: 0 contradicts optim.large_batch"),
        ("decay_norm_and_bias: true", "optim.decay_norm_and_bias: true cannot go with large_batch"),
        ("momentum_correction: false", "optim.momentum_correction: false cannot go with"),
        ("schedule: one_cycle", "schedule.kind: one_cycle cannot go with optim.large_batch"),
    ],
)
def test_what_contradicts_large_batch_is_refused(train, message):
    with pytest.raises(ConfigError) as caught:
        config(f"{{large_batch: true, {train}}}")
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match=r"zero_init_residual: false contradicts optim\.large_b"):
        config("{large_batch: true}", "{zero_init_residual: false}")


def test_the_printed_config_says_what_was_chosen_and_loads_back():
    found = config("{large_batch: true, batch_size: 64}")
    text = config_to_yaml(found)
    for line in ("lr_batch_size: 16", "warmup_steps: 2222", "zero_init_residual: true"):
        assert f"  {line}\n" in text
    assert parse_config(text, source="d.yaml") == found
    longer = override_config(found, ["train.steps=90000"], source="d.yaml")
    assert longer.schedule.warmup_steps == 2222
