"""The configs that come with segtrain, found by name from any folder."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from segtrain.config import load_config, recipes
from segtrain.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty current folder; what `train` does to signals is undone."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_name_is_a_config_everywhere_a_config_is_expected(lab):
    _, shown, said = lab.done("config show camvid_small")
    Path("shown.yaml").write_text(shown)
    assert load_config("shown.yaml") == load_config(CONFIGS / "camvid_small.yaml")
    used = f"segtrain: using segtrain's config camvid_small: {CONFIGS / 'camvid_small.yaml'}\n"
    assert said == used

    code, out, said = lab.command("data check camvid_small --set data.root=nowhere")
    assert code == 3
    assert f"--set data.root: there is no folder {Path.cwd()}/nowhere" in out
    assert said.startswith(used)

    place = f"{CONFIGS / 'camvid_small.yaml'}:7: data.root: there is no folder"
    assert place in lab.command("train camvid_small --nproc 1").err


def test_a_file_of_that_name_goes_first_and_a_folder_does_not_count():
    Path("demo").mkdir()
    assert recipes.find("demo").path == CONFIGS / "demo.yaml"
    Path("demo").rmdir()
    Path("demo").write_text("seed: 1\n")
    assert recipes.find("demo") == (
        Path("demo"),
        "using the file demo in this folder, not segtrain's config of this name",
    )


def test_a_name_is_refused_where_a_file_beside_may_be_meant():
    """Who has copied demo to demo.yml and changed it would else train the wrong one."""
    Path("demo.yml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"demo\.yml lies in .*; write demo\.yml to use it"):
        recipes.find("demo")
    assert recipes.find("demo.yml") == (Path("demo.yml"), "")


def test_a_copy_is_the_config_and_says_what_to_do_next(lab):
    said = lab.done("config copy demo 'my demo.yaml'").out.splitlines()
    assert Path("my demo.yaml").read_text() == (CONFIGS / "demo.yaml").read_text()
    assert said[0].startswith("wrote my demo.yaml; change data.root")
    assert said[-1] == "       segtrain train 'my demo.yaml'"


def test_an_installed_package_finds_its_own_configs_only(tmp_path):
    """As in a wheel, where they lie in the package; `configs` beside it is another project's."""
    site = tmp_path / "site"
    shutil.copytree(REPOSITORY / "segtrain", site / "segtrain")
    shutil.copytree(CONFIGS, site / "segtrain" / "_data" / "configs")
    (site / "configs").mkdir()
    (site / "configs" / "foreign.yaml").write_text("# Foreign.\n")
    done = subprocess.run(
        [sys.executable, "-m", "segtrain", "config", "list"],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == recipes.names()
    assert "  DeepLabV3+ on ResNet-101 on Pascal VOC 2012, augmented, crops" in done.stdout
