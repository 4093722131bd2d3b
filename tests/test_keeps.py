"""What segtrain exists for: things that may change their names and places, but not disappear."""

from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from segtrain.cli.table import COMMANDS
from segtrain.config import load_config, parse_config

TESTS = Path(__file__).parent
DATA = "data: {layout: folders, root: x, classes: y}\n"
L2_SP = "cityscapes_pspnet_r50_l2sp"
HELD = "optim.layers=[{names: [a], keep_zeros: true}, {zero: ['a.weight[:, 29, 13]']}]"


@pytest.mark.parametrize(
    "options",
    [
        "norm.kind=sync",  # statistics of batch norm shared inside of a layer
        "norm.images=2 norm.running=first",  # batch norm of each device alone
        "norm.images=2 norm.running=mean",  # all of them update, by three estimators
        "norm.images=2 norm.running=sequential",
        "norm.images=2 norm.running=pooled",
        "train.init_from=x optim.decay_toward=start",  # L2-SP
        "train.parallel=sync",  # synchronous SGD, gradients summed while they are computed
        # Large minibatches.
        "optim.lr_batch_size=16 schedule.warmup_steps=9 schedule.warmup_start=0.1 norm.images=2 "
        "optim.decay_norm_and_bias=false optim.momentum=0.8",
        "train.parallel=hogwild",  # asynchronous SGD
        "train.parallel=server train.staleness=4",  # between machines, too
        "data.num_workers=4",  # read beside training
        "data.pack=x",  # from a decoded store
        "train.compile=true",  # on the device from one end of a step to the other
        "loss.kind=dice",  # from logits: test_losses.py has odd ones
    ],
)
def test_it_is_an_option(options):
    config = parse_config(DATA, source="c.yaml", overrides=options.split())
    for option in options.split():
        key, _, value = option.partition("=")
        assert str(attrgetter(key)(config)) == str(yaml.safe_load(value))


def test_weights_are_held_at_0_while_others_train():
    """How is in test_zeros.py."""
    config = parse_config(DATA, source="c.yaml", overrides=["train.init_from=x", HELD])
    held, zero = config.optim.layers
    assert (held.names, held.keep_zeros) == (("a",), True)
    assert zero.zero == ("a.weight[:, 29, 13]",)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train", ["--nproc", "--device"]),  # statistics gathered on CPUs, too
        ("data pack", []),
        ("population", ["--members"]),  # networks that learn from each other
    ],
)
def test_it_is_a_command(command, options):
    (found,) = (one for one in COMMANDS if one.name == command)
    assert {*options} <= {argument.name for argument in found.arguments}


def test_it_comes_with_segtrain():
    assert load_config(TESTS.parent / f"configs/{L2_SP}.yaml").optim.decay_toward == "start"
    assert (TESTS.parent / "tools/norm_simulation.py").is_file()  # of the three estimators
    assert (TESTS / "fixtures/keras_sync_batch_norm.npz").is_file()  # parity with Keras
