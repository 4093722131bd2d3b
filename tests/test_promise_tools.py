"""The tools that show the promise: their experiments are configs, and they run."""

import subprocess
import sys

import bits
import chaos
import invariance
import pytest
from commands import DEMO
from processes import REPOSITORY

from segtrain.config import load_config, parse_config


@pytest.mark.parametrize("kind", bits.KINDS)
def test_every_experiment_of_bits_is_a_config(kind):
    text = bits.EXPERIMENT.format(data="x")
    assert parse_config(text, source="bits", overrides=bits.KINDS[kind]).data.root == "x"


@pytest.mark.parametrize("tool", [chaos, invariance])
def test_settings_of_the_demo_are_accepted(tool):
    assert load_config(DEMO, (*tool.SETTINGS, "train.steps=150")).train.steps == 150


@pytest.mark.slow
def test_ranks_do_not_show_in_the_losses(tmp_path):
    command = [sys.executable, "tools/invariance.py", tmp_path / "runs", "--steps", "2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
