"""The configs and weights that come with segtrain, and the file that CONFIG means."""

import os
import shlex
from pathlib import Path
from typing import NamedTuple

from segtrain.config.messages import did_you_mean
from segtrain.config.strict_yaml import read_text
from segtrain.errors import ConfigError
from segtrain.files import os_errors_as

_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel the configs are inside the package, in a checkout beside it. Only the first folder that
# exists counts: beside an installed package, `configs` may belong to another project.
_DIRECTORIES = (_PACKAGE / "_data" / "configs", _PACKAGE.parent / "configs")
_SUFFIXES = (".yaml", ".yml")


class FoundConfig(NamedTuple):
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


def find(text: str) -> FoundConfig:
    """The config file that `text` means: a path, or the name of a config that comes with segtrain.

    A file of exactly this name in the current folder takes precedence; a folder does not.

    Raises:
        ConfigError: there is no such file, or it is not clear which one is meant.
    """
    shipped = _shipped().get(text)
    is_folder = os.path.isdir(text)  # Path's own methods raise at names that are too long
    if os.path.exists(text) and not is_folder:
        # The name is segtrain's too, so the user is told which of the two it is.
        note = f"using the file {text} in this folder, not segtrain's config of this name"
        return FoundConfig(Path(text), note if shipped else "")
    if shipped is not None:
        for beside in (text + suffix for suffix in _SUFFIXES if os.path.exists(text + suffix)):
            raise ConfigError(
                f"{text}: names a config that comes with segtrain, but {beside} lies in this "
                f"folder; write {beside} to use it, or rename it"
            )
        return FoundConfig(shipped, f"using segtrain's config {text}: {shipped}")
    if is_folder:
        raise ConfigError(
            f"{text}: is a directory; expected a config file, such as my.yaml, or a name from "
            "'segtrain config list'"
        )
    try:
        Path(text).stat()
    except FileNotFoundError:
        raise ConfigError(
            f"{text}: no such file, and no config of this name comes with segtrain"
            f"{_similar(Path(text))}"
        ) from None
    except (OSError, ValueError):
        pass  # reading the file gives the reason
    return FoundConfig(Path(text))


def copy(name: str, target: Path) -> list[str]:
    """Copies the config `name` to `target`, a new file; returns what to do next, line by line."""
    shipped = _shipped()
    if name not in shipped:
        hint = did_you_mean(name, names()) or f"; expected one of {', '.join(names())}"
        raise ConfigError(f"{name}: no config of this name comes with segtrain{hint}")
    if target.suffix not in _SUFFIXES:
        raise ConfigError(f"{target}: expected a name that ends in .yaml")
    text = read_text(shipped[name])
    if os.path.lexists(target):
        raise ConfigError(f"{target}: exists already; choose another name")
    writing = os_errors_as(ConfigError, target, "cannot be written")
    with writing, target.open("x", encoding="utf-8") as file:
        file.write(text)
    written = shlex.quote(str(target))
    return [
        f"wrote {target}; change data.root to your folder of the data set",
        f"then:  segtrain data check {written}",
        f"       segtrain train {written}",
    ]


def weights(name: str) -> Path | None:
    """The trained weights that come with the config `name`; None for most."""
    return _shipped("safetensors").get(name)


def _shipped(suffix: str = "yaml") -> dict[str, Path]:
    folder = next((folder for folder in _DIRECTORIES if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in folder.glob(f"*.{suffix}")}


def _similar(path: Path) -> str:
    """The end of a message: a config whose name is similar to that of `path`."""
    there = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    files = {Path(name).stem: path.parent / name for name in there if name.endswith(_SUFFIXES)}
    choices = {name: name for name in _shipped()} | files
    return did_you_mean(path.stem, choices) or "; see 'segtrain config list'"
