"""Runs instead of configs on the command line of `segtrain train`."""

from pathlib import Path

import pytest
from experiments import experiment, write_config

from segtrain.commands.run_target import resolve_run
from segtrain.config import load_config
from segtrain.errors import ConfigError
from segtrain.run import directory as run_directory


@pytest.fixture(autouse=True)
def run(tmp_path, monkeypatch):
    """A run in runs/my of the current folder, which also holds my.yaml."""
    monkeypatch.chdir(tmp_path)
    config = write_config(Path("my.yaml"), experiment(tmp_path))
    run_directory.write_description(Path("runs/my"), load_config(config), ["cpu"])
    return Path("runs/my")


def target(text, *, resume=False, output=None):
    config, directory, _ = resolve_run(text, resume=resume, output=output and Path(output))
    return str(config), str(directory)


def refusal(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        target(*args, **kwargs)
    return str(caught.value).splitlines()


def test_a_config_trains_into_the_run_directory_of_its_name():
    assert target("my.yaml") == ("my.yaml", "runs/my")
    assert target("my.yaml", output="runs/other") == ("my.yaml", "runs/other")
    assert target("runs/my/config.yaml", output="runs/my_2")[1] == "runs/my_2"


@pytest.mark.parametrize("text", ["runs/my", "runs/my/", "runs/my/config.yaml"])
@pytest.mark.parametrize("output", [None, "runs/../runs/my/"])
def test_a_run_is_resumed_by_its_directory_or_the_config_in_it(text, output):
    assert target(text, resume=True, output=output) == ("runs/my/config.yaml", "runs/my")


def test_the_config_of_a_run_may_be_that_of_another():
    config = "runs/my/config.yaml"
    assert target(config, resume=True, output="runs/other") == (config, "runs/other")


def test_a_config_of_that_name_outside_of_a_run_is_a_config():
    """A project may have one, and checkpoints of other programs."""
    Path("config.yaml").write_text("seed: 1\n")
    Path("checkpoints").mkdir()
    assert target("config.yaml") == ("config.yaml", "runs/config")
    assert target("config.yaml", resume=True) == ("config.yaml", "runs/config")


def test_in_the_folder_of_an_experiment_the_run_has_its_name(run, lab):
    Path("my.yaml").rename("config.yaml")
    here = Path.cwd().name
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.pt").touch()
    run.rename(Path("runs", here))
    for folder in (".", "runs/.."):
        assert f"runs/{here}: holds a run already" in lab.refused("train", folder, "--nproc", 1)


def test_a_run_goes_before_a_shipped_config_of_its_name_and_in_it_its_directory_is_a_point(
    run, monkeypatch
):
    run.rename("runs/demo")
    monkeypatch.chdir("runs")
    assert target("demo", resume=True) == ("demo/config.yaml", "demo")
    assert refusal("demo")[0] == "demo: expected a config, found a run"
    monkeypatch.chdir("demo")
    assert target(".", resume=True) == ("config.yaml", ".")
    assert refusal("config.yaml")[1] == "to go on with the run: segtrain train . --resume"


def test_a_run_whose_config_is_lost_goes_on_with_another(run):
    (run / "config.yaml").unlink()
    assert target("my.yaml", resume=True, output="runs/my") == ("my.yaml", "runs/my")
