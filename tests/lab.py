"""Command lines in this process: their exit code, what they say, and what they leave untouched."""

import os
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from experiments import segtrain, small, write_config


class Outcome(NamedTuple):
    """What a command has ended with and printed."""

    code: int
    out: str
    err: str


class Lab:
    """Runs `segtrain` as a user would, but in this process, for tests that need no signals.

    A command is its words, `("eval", run, "--worst", 2)`, or one string as in a shell, which may
    begin with variables, `"RANK=1 train c.yaml"`.
    """

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]):
        self.folder = folder
        self._capture = capture

    def config(self, root: Path, name: str = "c.yaml", **sections: dict[str, Any]) -> Path:
        """Writes a config of `small` into the folder of the test."""
        return write_config(self.folder / name, small(root, **sections))

    def command(self, *words: object) -> Outcome:
        """Runs it; what was printed before is not part of the outcome."""
        variables: dict[str, str] = {}
        if len(words) == 1:
            split = shlex.split(str(words[0]))
            while split and split[0].partition("=")[0].isupper():
                name, _, value = split.pop(0).partition("=")
                variables[name] = value
            words = tuple(split)
        self._capture.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            try:
                code = segtrain(*words)
            except SystemExit as left:  # argparse
                code = left.code or 0
        return Outcome(code, *self._capture.readouterr())

    def done(self, *words: object) -> Outcome:
        """The outcome of a command that succeeds."""
        outcome = self.command(*words)
        assert outcome.code == 0, outcome.err
        return outcome

    def refused(self, *words: object, code: int = 2) -> str:
        """What a command says that is refused with this code; no file of `folder` changes."""
        before = _files(self.folder)
        outcome = self.command(*words)
        assert outcome.code == code, outcome
        assert outcome.err.startswith(("segtrain: ", "usage: segtrain"))
        assert "Traceback" not in outcome.err
        assert _files(self.folder) == before
        return outcome.err


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """All that lies below a folder, by path: of files the size and the time of the last change."""
    found = {}
    for path in folder.rglob("*"):
        status = os.stat(path, follow_symlinks=False)
        # A lock that comes and goes changes the time of its folder.
        found[str(path)] = (0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns)
    return found
