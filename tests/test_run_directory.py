import json
import subprocess
from pathlib import Path

import pytest
from experiments import experiment, fill, write_config

from segtrain.config import load_config
from segtrain.errors import ConfigError
from segtrain.run import directory as run_directory
from segtrain.run import environment
from segtrain.run.directory import RunLock
from segtrain.run.environment import git_revision


@pytest.fixture
def config(tmp_path):
    return load_config(write_config(tmp_path / "c.yaml", experiment(tmp_path)))


def changed(config, section, **values):
    part = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: part})


def checkpoint_in(directory, name="last.pt"):
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "checkpoints" / name).write_bytes(b"content")


def check(directory, config, *, resume=False):
    run_directory.check_directory(directory, config, resume=resume)


@pytest.mark.parametrize("name", ["last.pt", "best.pt", "manifest.json"])
def test_a_run_that_has_saved_goes_on(config, tmp_path, name):
    checkpoint_in(tmp_path, name)
    run_directory.write_description(tmp_path, config, ["cpu"])
    check(tmp_path, config, resume=True)


def test_what_has_saved_nothing_is_replaced_with_and_without_resume(config, tmp_path):
    """A job script has one line that starts or goes on; a repaired config is taken as well."""
    (tmp_path / "notes.txt").touch()
    for directory in (tmp_path, tmp_path / "a" / "b"):
        check(directory, config)
        check(directory, config, resume=True)
    run_directory.write_description(tmp_path, config, ["cpu"])
    (tmp_path / "checkpoints").mkdir()
    for resume in (False, True):
        check(tmp_path, changed(config, "optim", lr=1.0), resume=resume)


@pytest.mark.fault(27)
@pytest.mark.parametrize("below", [".", "run", "a/b"])
def test_a_directory_that_cannot_be_made_is_refused(config, tmp_path, below):
    (tmp_path / "file").touch()
    run = tmp_path / "file" / below
    said = rf"{run}: cannot be written \(--output names another\): "
    with pytest.raises(ConfigError, match=said):
        RunLock(run).__enter__()
    with pytest.raises(ConfigError, match=said):
        run_directory.write_description(run, config, ["cpu"])


def test_a_run_that_was_begun_in_the_folder_of_the_images_goes_on(config, tmp_path):
    run = tmp_path / "images" / "run"  # the data set lies in tmp_path
    run_directory.write_description(run, config, ["cpu"])
    checkpoint_in(run)
    check(run, config, resume=True)


@pytest.mark.fault(42)
def test_resuming_with_another_config_lists_every_difference(config, tmp_path):
    other = changed(changed(config, "optim", lr=0.5), "train", steps=99)
    other = changed(other, "augment", crop_size=(33, 65))
    other = changed(other, "model", pretrained="no: file")
    with pytest.raises(ConfigError) as refusal:
        run_directory.check_config(tmp_path, config, other, accept_changes=False)
    assert str(refusal.value).splitlines()[1:] == [
        "  augment.crop_size: [41, 57] there, [33, 65] now",
        '  model.pretrained: null there, "no: file" now',
        "  optim.lr: 0.02 there, 0.5 now",
        "  train.steps: 20 there, 99 now",
        f"to go on as it was started: segtrain train {tmp_path} --resume "
        "(if its config.yaml has been edited, undo that first)",
        "if the changes are meant: add --accept-changes",
        "to start a new run: --output DIR instead of --resume",
    ]


def test_options_that_do_not_change_the_model_may_differ_at_a_resumption(config, tmp_path):
    moved = {"root": "/elsewhere", "classes": "/c.yaml", "num_workers": 3}
    other = changed(changed(config, "data", **moved), "train", timeout_s=30.0)
    other = changed(changed(other, "log", every_steps=7), "checkpoint", every_steps=7)
    assert run_directory.check_config(tmp_path, config, other, accept_changes=False) == []


def test_the_description_tells_config_versions_devices_and_command(config, tmp_path):
    run_directory.write_description(tmp_path, config, ["cpu", "H200"])
    assert load_config(tmp_path / run_directory.CONFIG) == config
    environment = json.loads((tmp_path / run_directory.ENVIRONMENT).read_text())
    assert environment["devices"] == ["cpu", "H200"]
    assert environment["libraries"]["torch"].startswith("2.")
    assert {"segtrain", "python", "platform", "git", "command"} <= environment.keys()


def test_a_repository_in_the_current_folder_runs_no_code(tmp_path, monkeypatch):
    """It may come from an unpacked data set, and git runs programs that its configuration names."""
    ran = tmp_path / "ran"
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\necho x >> {ran}\ncat\n")
    hook.chmod(0o755)
    repository = tmp_path / "data"
    repository.mkdir()
    monkeypatch.chdir(repository)

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=b"]
        subprocess.run(["git", *who, *words], check=True, capture_output=True)

    git("init")
    (repository / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    (repository / ".gitattributes").write_text("a filter=x\n")
    for key in ("core.fsmonitor", "filter.x.clean", "filter.x.smudge", "diff.external"):
        git("config", key, str(hook))
    (repository / "a").write_text("2")
    ran.unlink(missing_ok=True)
    revision = git_revision()
    assert not ran.exists()
    assert len(revision) == 12


def test_the_commit_of_segtrain_is_that_of_its_checkout_or_of_its_installation(
    tmp_path, monkeypatch
):
    """A package in an environment below the repository of a user is not of its commit."""
    here = Path(environment.__file__).resolve().parents[2]
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True)
    expected = told.stdout[:12] if (here / ".git").exists() else None
    assert environment.own_commit() == expected

    who = ["-c", "user.name=a", "-c", "user.email=b", "-C", str(tmp_path)]
    for words in (["init"], ["commit", "--allow-empty", "-m", "a"]):
        subprocess.run(["git", *who, *words], check=True, capture_output=True)
    site = tmp_path / "env" / "site-packages"
    info = site / "tried-1.dist-info"
    info.mkdir(parents=True)
    (site / "tried").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tried\nVersion: 1\n")
    monkeypatch.syspath_prepend(site)
    assert environment.own_commit(site / "tried") is None
    vcs = {"vcs": "git", "commit_id": "0123456789abcdef0123456789abcdef01234567"}
    for origin, commit in (
        ({"url": "https://x/y.git", "vcs_info": vcs}, "0123456789ab"),
        ({"url": "file:///y", "dir_info": {"editable": True}}, None),
        ([], None),
    ):
        (info / "direct_url.json").write_text(json.dumps(origin))
        assert environment.own_commit(site / "tried") == commit
    (info / "direct_url.json").write_text(json.dumps({"url": "x", "vcs_info": vcs}))
    (tmp_path / "copy" / "tried").mkdir(parents=True)  # not the one that is installed
    assert environment.own_commit(tmp_path / "copy" / "tried") is None


def test_on_a_full_disk_the_lock_works(small_disk):
    fill(small_disk)
    in_use = pytest.raises(ConfigError, match="in use by another run")
    with RunLock(small_disk), in_use, RunLock(small_disk):
        pytest.fail("two runs in one directory")
    assert [path.name for path in small_disk.iterdir()] == ["other"]
