"""The configs that come with segtrain, and the file that CONFIG on a command line means."""

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from segtrain.config.strict_yaml import read_text
from segtrain.config.suggest import did_you_mean
from segtrain.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel the configs are inside the package, in a checkout beside it. Only the first folder that
# exists counts: beside an installed package, `configs` may belong to another project.
_DIRECTORIES = (_PACKAGE / "_data" / "configs", _PACKAGE.parent / "configs")
_SUFFIXES = (".yaml", ".yml")
# Marks the lines of own_data.yaml that everybody has to change.
_MARK = "# <--"


class Found(NamedTuple):
    """The file that CONFIG means, and a note where that may be unexpected, else ""."""

    path: Path
    note: str = ""


def names() -> list[str]:
    """The names of the configs that come with segtrain, sorted."""
    return sorted(_shipped())


def describe(name: str) -> str:
    """What the config `name` is: the first sentence of the comment at its top."""
    first_line = read_text(_shipped()[name]).partition("\n")[0]
    return first_line.removeprefix("# ").partition(". ")[0].removesuffix(".")


def find(text: str) -> Found:
    """The config file that `text` means: a path, or the name of a config that comes with segtrain.

    A file of exactly this name in the current folder takes precedence; a folder does not.

    Raises:
        ConfigError: there is no such file; or `NAME.yaml` is in the current folder and `NAME` comes
            with segtrain, so either may be meant.
    """
    shipped = _shipped().get(text)
    is_folder = os.path.isdir(text)  # Path's own methods raise at names that are too long
    if os.path.exists(text) and not is_folder:
        note = f"using the file {text} in this folder, not segtrain's config of this name"
        return Found(Path(text), note if shipped else "")
    if shipped is not None:
        for beside in (text + suffix for suffix in _SUFFIXES if os.path.exists(text + suffix)):
            raise ConfigError(
                f"{text}: names a config that comes with segtrain, but {beside} lies in this "
                f"folder; write {beside} to use it, or take a copy of the other: "
                f"segtrain config copy {text} {text}_2.yaml"
            )
        return Found(shipped, f"using segtrain's config {text}: {shipped}")
    if is_folder:
        raise ConfigError(
            f"{text}: is a directory; expected a config file, such as my.yaml, or a name from "
            "'segtrain config list'"
        )
    try:
        Path(text).stat()
    except FileNotFoundError:
        raise ConfigError(_not_there(text)) from None
    except (OSError, ValueError):
        pass  # reading the file gives the reason
    return Found(Path(text))


def copy(name: str, target: Path) -> list[str]:
    """Copies the config `name` to `target` and returns what to do next, line by line.

    Raises:
        ConfigError: there is no such config, `target` exists, or it cannot be written.
    """
    shipped = _shipped()
    if name not in shipped:
        hint = did_you_mean(name, names()) or f"; expected one of {', '.join(names())}"
        raise ConfigError(f"{name}: no config of this name comes with segtrain{hint}")
    if target.is_dir():
        raise ConfigError(f"{target}: is a directory; name the file: {target / name}.yaml")
    if target.suffix not in _SUFFIXES:
        raise ConfigError(f"{target}: expected a name that ends in .yaml: {target}.yaml")
    text = read_text(shipped[name])
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{target}: exists already; choose another name") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{target}: cannot be written: {reason}") from None
    written = shlex.quote(str(target))
    return [
        f"wrote {target}; lines to change next:",
        *_lines_to_change(text),
        f"then:  segtrain data check {written}",
        f"       segtrain train {written}",
    ]


def _shipped() -> dict[str, Path]:
    folder = next((folder for folder in _DIRECTORIES if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in folder.glob("*.yaml")}


def _not_there(text: str) -> str:
    """The message about a config that does not exist."""
    path, shipped = Path(text), _shipped()
    if pair := re.match(r"(?:data|model|cfg|config)=(.+)", text):
        return (
            f"{text}: expected the name of a config alone, such as {pair[1]}; options follow it as "
            "--set SECTION.KEY=VALUE"
        )
    there = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    files = {Path(name).stem: path.parent / name for name in there if name.endswith(_SUFFIXES)}
    if path.name != text or path.suffix:
        hint = did_you_mean(path.stem, files)
        if path.stem in shipped:
            hint = f"; the config that comes with segtrain is called {path.stem}"
        return f"{text}: cannot be read: no such file or directory{hint}"
    choices = {name: name for name in shipped} | files
    hint = did_you_mean(text, choices) or "; see 'segtrain config list'"
    return f"{text}: no such file, and no config of this name comes with segtrain{hint}"


def _lines_to_change(text: str) -> list[str]:
    """The marked lines with their numbers; if none is marked, the line of the data set's folder."""
    numbered = list(enumerate(text.splitlines(), start=1))
    body = [(number, line) for number, line in numbered if not line.startswith("#")]
    marked = [(number, line) for number, line in body if _MARK in line]
    marked = marked or [(number, line) for number, line in body if re.match(r"\s+root:", line)]
    return [f"  line {number}: {line.strip()}" for number, line in marked]
