"""The tools that show the promise: their experiments are configs, and they run."""

import subprocess
import sys

import bits
import chaos
import invariance
import promise_figure
import pytest
from commands import DEMO
from processes import REPOSITORY

from segtrain.config import load_config, parse_config


@pytest.mark.parametrize("kind", bits.KINDS)
def test_every_experiment_of_bits_is_a_config(kind):
    text = bits.EXPERIMENT.format(data="x")
    assert parse_config(text, source="bits", overrides=bits.KINDS[kind]).data.root == "x"


@pytest.mark.parametrize("shares", ["null", 7])
def test_the_experiment_of_the_figure_is_a_config(shares):
    text = promise_figure.EXPERIMENT.format(data="x", steps=80, shares=shares)
    found = parse_config(text, source="promise_figure").train
    assert (found.steps, found.shares) == (80, None if shares == "null" else shares)


@pytest.mark.parametrize("tool", [chaos, invariance])
def test_settings_of_the_demo_are_accepted(tool):
    assert load_config(DEMO, (*tool.SETTINGS, "train.steps=150")).train.steps == 150


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["invariance", "promise_figure"])
def test_ranks_do_not_show_in_the_tool(tmp_path, tool):
    output = ["--output", tmp_path / "figure.png"] if tool == "promise_figure" else []
    command = [sys.executable, f"tools/{tool}.py", tmp_path / "runs", "--steps", "2", *output]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
