import errno
import fcntl
import json
import os
import subprocess
from contextlib import suppress

import pytest
from experiments import experiment, write_config

from segtrain.config import load_config
from segtrain.errors import ConfigError
from segtrain.run import directory as run_directory
from segtrain.run.directory import LOCK, RunLock
from segtrain.run.environment import git_revision


@pytest.fixture
def config(tmp_path):
    return load_config(write_config(tmp_path / "c.yaml", experiment(tmp_path)))


def changed(config, section, **values):
    part = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: part})


def test_a_directory_without_a_run_may_be_used(config, tmp_path):
    (tmp_path / "notes.txt").touch()
    for directory in (tmp_path, tmp_path / "a" / "b"):
        run_directory.check_directory(directory, config, resume=False)


@pytest.mark.fault(31)
def test_an_existing_run_is_refused_without_resume_and_accepted_with_it(config, tmp_path):
    run = tmp_path / "run"
    run_directory.write_description(run, config, ["cpu"])
    (run / "checkpoints").mkdir()
    (run / "checkpoints/last.pt").touch()
    with pytest.raises(ConfigError, match=r"run: holds a run already; .*--resume, .*--output"):
        run_directory.check_directory(run, config, resume=False)
    (run / "checkpoints/last.pt").rename(run / "checkpoints/manifest.json")
    with pytest.raises(ConfigError, match=r"run: holds a run already; .*--resume, .*--output"):
        run_directory.check_directory(run, config, resume=False)
    run_directory.check_directory(run, config, resume=True)


def test_a_run_that_has_saved_nothing_may_be_replaced_with_another_config(config, tmp_path):
    run_directory.write_description(tmp_path, config, ["cpu"])
    (tmp_path / "checkpoints").mkdir()
    assert (
        run_directory.check_directory(tmp_path, changed(config, "optim", lr=1.0), resume=False)
        == []
    )


def test_a_config_that_no_run_has_written_is_not_replaced(config, tmp_path):
    (tmp_path / "config.yaml").write_text("# mine\n")
    with pytest.raises(ConfigError, match=r"holds a config\.yaml that no run has written"):
        run_directory.check_directory(tmp_path, config, resume=False)


def test_a_live_run_is_not_replaced(config, tmp_path, monkeypatch):
    """Without locks, the lock file of a killed run counts as that of a live run."""
    run = tmp_path / "run"
    run_directory.write_description(run, config, ["cpu"])
    with RunLock(run):
        assert run_directory.check_directory(run, config, resume=False) == []  # its own
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(ConfigError, match=r"run: in use by process \d+ on .*; wait for it to"):
            run_directory.check_directory(run, config, resume=False)
    (run / LOCK).write_text("process 2 on host7\n")
    assert (
        run_directory.check_directory(run, config, resume=False) == []
    )  # left by one that was killed

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"process 2 on host7; if it has ended, delete .*\.lock"):
        run_directory.check_directory(run, config, resume=False)


def test_what_has_saved_nothing_is_started_by_resume_too(config, tmp_path):
    """A job script has one line that starts or goes on; a repaired config is taken as well."""
    assert run_directory.check_directory(tmp_path / "nothing", config, resume=True) == []
    run_directory.write_description(tmp_path, config, ["cpu"])
    other = changed(config, "optim", lr=1.0)
    assert run_directory.check_directory(tmp_path, other, resume=True) == []


@pytest.mark.fault(27)
@pytest.mark.parametrize("below", [".", "run", "a/b"])
def test_a_file_in_the_way_is_refused(config, tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: a file stands where"):
        run_directory.check_directory(tmp_path / "file" / below, config, resume=False)


def test_a_directory_that_may_not_be_written_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="may not be written"):
        run_directory.check_directory(tmp_path / "run", config, resume=False)


def test_a_directory_that_cannot_be_made_is_a_config_error(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write the run directory: .*--output"):
        run_directory.write_description(tmp_path / "file" / "run", config, ["cpu"])


def test_a_new_run_in_the_folder_of_the_images_is_refused(config, tmp_path):
    run = tmp_path / "images" / "run"  # the data set lies in tmp_path
    with pytest.raises(ConfigError, match=r"would write into .*/images, where .*--output runs/my"):
        run_directory.check_directory(run, config, resume=False)
    run_directory.write_description(run, config, ["cpu"])
    checkpoint_in(run)
    run_directory.check_directory(run, config, resume=True)


@pytest.mark.fault(42)
def test_resuming_with_another_config_lists_every_difference(config, tmp_path):
    run_directory.write_description(tmp_path, config, ["cpu"])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.pt").touch()
    other = changed(changed(config, "train", steps=99), "augment", crop_size=(33, 65))
    other = changed(other, "optim", lr=0.5)
    other = changed(other, "model", pretrained="no: file")
    with pytest.raises(ConfigError) as refusal:
        run_directory.check_directory(tmp_path, other, resume=True)
    assert str(refusal.value).splitlines()[1:] == [
        "  augment.crop_size: [41, 57] there, [33, 65] now",
        '  model.pretrained: null there, "no: file" now',
        "  optim.lr: 0.02 there, 0.5 now",
        "  train.steps: 20 there, 99 now",
        f"to go on as it was started: segtrain train {tmp_path} --resume",
        "if the changes are meant: add --accept-changes",
        "to start a new run: --output DIR instead of --resume",
    ]


@pytest.mark.parametrize(
    ("section", "option"),
    [
        ("data", {"root": "/elsewhere", "classes": "/c.yaml", "num_workers": 3, "prefetch": 7}),
        ("log", {"every_steps": 7}),
        ("checkpoint", {"keep_every_steps": 3, "keep_limit": 1}),
        ("train", {"timeout_s": 30.0}),
    ],
)
def test_options_that_do_not_change_the_model_may_differ_at_a_resumption(
    config, tmp_path, section, option
):
    run_directory.write_description(tmp_path, config, ["cpu"])
    checkpoint_in(tmp_path)
    run_directory.check_directory(tmp_path, changed(config, section, **option), resume=True)


def test_the_description_tells_config_versions_devices_and_command(config, tmp_path):
    run_directory.write_description(tmp_path, config, ["cpu", "H200"])
    assert load_config(tmp_path / run_directory.CONFIG) == config
    environment = json.loads((tmp_path / run_directory.ENVIRONMENT).read_text())
    assert environment["devices"] == ["cpu", "H200"]
    assert environment["libraries"]["torch"].startswith("2.")
    assert {"segtrain", "python", "platform", "git", "command"} <= environment.keys()
    assert sorted(path.name for path in tmp_path.glob("*.tmp")) == []


def fill(disk):
    with (disk / "other").open("wb", buffering=0) as other, suppress(OSError):
        while other.write(bytes(4096)):
            pass


def test_a_full_disk_leaves_nothing_behind_and_asks_for_room(config, small_disk):
    run_directory.write_description(small_disk, config, ["cpu"])
    before = (small_disk / run_directory.CONFIG).read_bytes()
    fill(small_disk)
    with pytest.raises(ConfigError, match=r"No space left on device.*; choose another"):
        run_directory.write_description(small_disk, changed(config, "optim", lr=0.5), ["cpu"])
    assert (small_disk / run_directory.CONFIG).read_bytes() == before
    names = sorted(path.name for path in small_disk.iterdir())
    assert names == ["config.yaml", "environment.json", "other"]


def checkpoint_in(directory, name="last.pt"):
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "checkpoints" / name).write_bytes(b"content")


def test_checkpoints_without_a_config_are_not_overwritten(config, tmp_path):
    checkpoint_in(tmp_path, "best.pt")
    with pytest.raises(ConfigError, match="holds a run already; go on with it by --resume"):
        run_directory.check_directory(tmp_path, config, resume=False)
    assert (
        run_directory.check_directory(tmp_path, config, resume=True) == []
    )  # it tells what it was


@pytest.mark.parametrize("content", [b"", b" \n", bytes(4096)])
def test_an_empty_config_is_restored_only_from_a_checkpoint(config, tmp_path, content):
    (tmp_path / run_directory.CONFIG).write_bytes(content)
    with pytest.raises(ConfigError, match=r"holds a config\.yaml that no run has written"):
        run_directory.check_directory(tmp_path, config, resume=True)
    checkpoint_in(tmp_path)
    assert run_directory.check_directory(tmp_path, config, resume=True) == []


def test_a_damaged_config_is_refused_with_the_repair(config, tmp_path):
    checkpoint_in(tmp_path)
    (tmp_path / run_directory.CONFIG).write_text("optim: {lr: [}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:1: (.|\n)*--resume restores it"):
        run_directory.check_directory(tmp_path, config, resume=True)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("config.yaml", os.mkdir, "expected a file, found a folder"),
        ("config.yaml", os.mkfifo, "expected a file, found a pipe"),
        ("environment.json", os.mkfifo, "expected a file, found a pipe"),
        ("checkpoints", os.mkfifo, "expected a folder, found a pipe"),
        ("checkpoints", lambda path: path.touch(), "expected a folder, found a file"),
        ("checkpoints", lambda path: path.symlink_to("x"), "expected a folder, found a link to no"),
    ],
)
def test_a_folder_or_pipe_in_the_place_of_a_file_is_refused(
    config, tmp_path, name, make, said, resume
):
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}: {said}.*; move it away"):
        run_directory.check_directory(tmp_path, config, resume=resume)


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


def test_a_folder_that_the_user_made_stays(tmp_path):
    with RunLock(tmp_path):
        pass
    assert tmp_path.is_dir()
    with RunLock(tmp_path / "made"):
        assert (tmp_path / "made").is_dir()
    assert not (tmp_path / "made").exists()


def test_on_a_full_disk_the_lock_works(small_disk):
    fill(small_disk)
    in_use = pytest.raises(ConfigError, match="in use by another run")
    with RunLock(small_disk), in_use, RunLock(small_disk):
        pytest.fail("two runs in one directory")
    assert [path.name for path in small_disk.iterdir()] == ["other"]


@pytest.mark.parametrize("make", [os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_no_lock_is_taken_on_a_folder_or_a_link(tmp_path, make):
    make(tmp_path / LOCK)
    with pytest.raises(ConfigError, match=r"cannot write the run directory: .*\(\.lock\)"):
        RunLock(tmp_path).__enter__()
