"""Which slow tests continuous integration runs."""

import subprocess
from types import SimpleNamespace

import conftest
import pytest


def item(*marks):
    found = [SimpleNamespace(args=folders) for folders in marks]
    return SimpleNamespace(iter_markers=lambda name: found if name == "slow" else [])


@pytest.mark.parametrize(
    ("marks", "changed", "due"),
    [
        ([], {"norm"}, True),
        ([("norm", "models")], {"models", "data"}, True),
        ([("norm", "models")], {"data"}, False),
        ([("norm",)], None, True),  # it is not known what has changed
        ([()], {"norm"}, False),
        ([()], None, False),
        ([("norm",), ()], {"norm"}, False),  # of a row and its test
    ],
)
def test_a_slow_test_is_due_where_its_folder_has_changed(marks, changed, due):
    assert conftest.is_due(item(*marks), changed) is due


def test_changes_since_a_commit_are_folders_and_modules_of_segtrain(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)

    files = [
        tmp_path / name for name in ("segtrain/norm/sync.py", "segtrain/seed.py", "tools/a.py")
    ]
    git("init", "-q")
    for text in ("1", "2"):
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        git("add", ".")
        git("commit", "-qm", text)
    monkeypatch.setattr(conftest, "_TESTS", tmp_path / "tests")
    assert conftest.changed_folders("HEAD") == set()
    assert conftest.changed_folders("HEAD~1") == {"norm", "seed"}
