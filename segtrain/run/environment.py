"""environment.json: the versions, devices and commits that a run was trained with."""

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from segtrain import __version__, files
from segtrain.text import MAX_NAME, printable

ENVIRONMENT = "environment.json"

LIBRARIES = (
    *("torch", "torchvision", "albumentations", "opencv-python-headless", "numpy", "pillow"),
    *("tifffile", "imagecodecs"),
)
"""The libraries on which the numbers of a run depend."""

_HOME = Path(__file__).resolve().parent.parent
_DIGITS = 12  # of a commit
_MAX_BYTES = 1 << 20  # far more than the file ever holds


def library_version(package: str) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment_json(devices: list[str], plugins: list[dict[str, str | None]]) -> str:
    """The content of environment.json.

    devices: the device name of every rank. plugins: their records (`Plugin.record`).
    """
    content = {
        "segtrain": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: library_version(name) for name in LIBRARIES},
        "plugins": plugins,
        "devices": devices,
        "git": git_revision(),
        "segtrain_commit": own_commit(),
        "command": sys.argv,
    }
    return json.dumps(content, indent=2) + "\n"


def changed_versions(directory: Path) -> list[str]:
    """A line for each version that differs from the environment.json in `directory`."""
    try:
        saved = files.parse_json(files.read_bytes(directory / ENVIRONMENT, _MAX_BYTES))
        before = {name: saved[name] for name in ("segtrain", "python")} | saved["libraries"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # only people read it: a damaged one stops nothing
    now = {"segtrain": __version__, "python": platform.python_version()}
    now |= {name: library_version(name) for name in LIBRARIES}
    return [
        f"{name} {printable(before[name] or 'none', MAX_NAME)} there, {now[name] or 'none'} now"
        for name in now
        if name in before and before[name] != now[name]
    ]


def git_revision() -> str | None:
    """The commit of the working directory; None outside of git."""
    return _git("rev-parse", f"--short={_DIGITS}", "HEAD")


def own_commit(home: Path = _HOME) -> str | None:
    """The commit of the package that runs, whose folder is `home`; None: nothing tells it.

    A checkout tells it by git, a package that was installed from a repository by direct_url.json
    (PEP 610).
    """
    # An environment may lie in the repository of a user, whose commit says nothing.
    top = _git("-C", str(home), "rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == home.parent:
        return _git("-C", str(home), "rev-parse", f"--short={_DIGITS}", "HEAD")
    try:
        installed = distribution(home.name)
        if Path(installed.locate_file(home.name)).resolve() != home:
            return None  # of another copy
        origin = files.parse_json(installed.read_text("direct_url.json") or "")
        return printable(origin["vcs_info"]["commit_id"])[:_DIGITS]
    except (PackageNotFoundError, OSError, ValueError, KeyError, TypeError):
        return None


def _git(*words: str) -> str | None:
    """What `git` answers; None if it fails."""
    # Never `git status`: it runs programs that the repository's own configuration names, and the
    # repository may have come with an unpacked data set.
    command = ["git", "-c", "core.fsmonitor=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
