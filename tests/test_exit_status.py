"""The launcher's folder: what another user has put there is neither read nor written."""

import json
import os
import stat

import pytest

from segtrain.distributed import launcher_folder
from segtrain.distributed.liveness import (
    Heartbeat,
    beat,
    is_first_to_print,
    message_file,
    read_exit_statuses,
    read_heartbeats,
    write_exit_status,
)

NOBODY = 65534


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A launcher's folder, in the environment of its rank 0."""
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(launcher_folder.VARIABLE, str(folder))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return folder


def write_everything():
    beat("training", 7)
    write_exit_status(3)
    return is_first_to_print("words")


def read_everything(root):
    return read_exit_statuses(root), read_heartbeats(root)


def test_what_is_written_is_read_and_is_for_this_user_alone(root):
    old = os.umask(0)
    try:
        assert write_everything()
    finally:
        os.umask(old)
    (note,), (rank,) = read_everything(root)
    assert (note.rank, note.code) == (0, 3)
    assert rank[:4] == (0, os.getpid(), "training", 7)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}


@pytest.mark.parametrize("planted", ["root", "attempt", "open to all"])
def test_a_folder_that_another_user_could_have_planted_is_left_alone(root, tmp_path, planted):
    """Under the name of one that a cleaner of /tmp has removed."""
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user takes root")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (root / "0").mkdir()
    for name in ("0.now", "0.json", message_file("words")):
        (root / "0" / name).symlink_to(victim)
    match planted:
        case "root":
            os.chown(root, NOBODY, NOBODY)
        case "attempt":
            os.chown(root / "0", NOBODY, NOBODY)
        case "open to all":
            root.chmod(0o777)
    assert write_everything()  # better printed twice than never
    assert victim.read_text() == "mine"
    assert victim.lstat().st_nlink == 1
    assert read_everything(root) == ([], [])
    assert launcher_folder.ensure_folder(root) is (planted == "attempt")


def test_links_in_its_own_folder_are_not_followed(root, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (root / "0").mkdir(mode=0o700)
    for name in ("0.now", "0.json"):
        (root / "0" / name).symlink_to(victim)
    write_everything()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("words", ["a b c d", "1 training x 2", "1 training 2", ""])
def test_notes_that_make_no_sense_are_passed_over(root, words):
    (root / "0").mkdir(mode=0o700)
    (root / "0" / "0.now").write_text(words)
    (root / "0" / "x.now").write_text("1 training 2 3.0")
    (root / "0" / "0.json").write_text(words)
    (root / "0" / "1.json").write_text(json.dumps({"code": 0}))
    assert read_everything(root) == ([], [])
    beat("training", 7)
    assert [rank.step for rank in read_heartbeats(root)] == [7]
    assert isinstance(read_heartbeats(root)[0], Heartbeat)


def test_a_folder_that_was_removed_is_made_again(root):
    write_everything()
    for path in [*root.glob("*/*"), *root.glob("*"), root]:
        path.rmdir() if path.is_dir() else path.unlink()
    assert read_everything(root) == ([], [])
    write_everything()
    assert not root.exists()  # only the launcher creates it
    assert launcher_folder.ensure_folder(root)
    write_everything()
    (note,), (rank,) = read_everything(root)
    assert (note.code, rank.step) == (3, 7)
