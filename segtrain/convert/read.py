"""Reads a file of another program: no code runs, and every tensor is counted."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.serialization import safe_globals

from segtrain.errors import CheckpointError
from segtrain.files import kind_of, parse_json, read_bytes, torch_file
from segtrain.text import MAX_NAME, first_of, printable

CONFIG_JSON = "config.json"
_MAX_CONFIG_BYTES = 1 << 20
_SAVE_AGAIN = """where you trust it, save what is needed in the program that wrote it:
  torch.save(model.state_dict(), "new.pth")
or, of mmsegmentation, whose meta holds the classes and the config:
  c = torch.load("old.pth", map_location="cpu", weights_only=False)
  torch.save({k: c[k] for k in ("meta", "state_dict")}, "new.pth")"""
# It exchanges the two before it saves (hooks/ema_hook.py).
_SWAPPED = (
    "mmengine's EMAHook stores the averaged weights under state_dict, and the others under "
    "ema_state_dict; --entry chooses"
)


class _Inert:
    """Stands in for an object that mmengine's Runner stores; keeps and calls nothing."""

    def __new__(cls, *_args: object) -> "_Inert":
        return super().__new__(cls)

    def __setstate__(self, _state: object) -> None:
        pass


# Its message hub holds histories: arrays of numpy, and methods found by getattr.
_RUNNER = [
    (_Inert, name)
    for name in (
        *("mmengine.logging.history_buffer.HistoryBuffer", "builtins.getattr"),
        *("__builtin__.getattr", "numpy.ndarray", "numpy.core.multiarray._reconstruct"),
        "numpy._core.multiarray._reconstruct",
    )
]


@dataclass(frozen=True)
class SourceFile:
    """The tensors of a file, under its own keys, and what it stores beside them.

    entry: under which key the state dict lay; "" if it is the whole file.
    notes: lines for the report.
    """

    state: dict[str, Tensor]
    beside: Mapping[str, Any]
    entry: str
    notes: tuple[str, ...] = ()


def read_file(path: Path, entry: str | None = None) -> SourceFile:
    """The state dict in a .safetensors file or one of torch.save.

    entry: its key, where the file holds several, such as averaged weights beside others.

    Raises:
        CheckpointError: no such file; it holds more than tensors and plain data, which could run
            code; no state dict, or several and no `entry`.
    """
    content = _content(path)
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(
            f"{path}: expected a state dict, found {type(content).__name__}; save "
            "model.state_dict() in the program that made the model"
        )
    if "format" in content and "segtrain" in content:
        raise CheckpointError(f"{path}: this is a checkpoint of segtrain already")
    entries = {str(key): value for key, value in content.items() if _is_state(value)}
    if _is_state(content):
        entries[""] = content
    swapped = _is_swapped(content)
    name = _chosen(path, entries, "state_dict" if swapped and entry is None else entry)
    state = entries[name]
    foreign = [key for key, value in state.items() if not torch_file.is_plain(value)]
    if foreign:
        raise CheckpointError(
            f"{path}: expected plain tensors only, found other values under {first_of(foreign)}; "
            "save the state dict alone"
        )
    if name:
        beside = {key: value for key, value in content.items() if value is not state}
    else:
        beside = {CONFIG_JSON: _config_json(path)} if path.suffix == ".safetensors" else {}
    return SourceFile(dict(state), beside, name, (_SWAPPED,) if swapped else ())


def _content(path: Path) -> Any:
    if not path.is_file():
        found = f"found {kind_of(path)}" if path.exists() else "no such file"
        raise CheckpointError(f"{path}: expected a file of weights, {found}")
    try:
        with safe_globals(_RUNNER):
            return torch_file.read(path)
    except pickle.UnpicklingError:
        # torch's own message advises to load the file unsafely.
        raise CheckpointError(
            f"{path}: refused: it holds more than tensors and plain data, which could run code; or "
            f"it is damaged; {_SAVE_AGAIN}"
        ) from None
    except torch_file.UNREADABLE as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: {printable(text, 3 * MAX_NAME)}") from None


def _config_json(path: Path) -> Any:
    """The config that save_pretrained writes into the folder of a .safetensors file, or None."""
    there = path.with_name(CONFIG_JSON)
    try:
        return parse_json(read_bytes(there, _MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        # Without it, the stride and the rates would be guessed.
        what = printable((str(error) or type(error).__name__).splitlines()[0], MAX_NAME)
        raise CheckpointError(
            f"{there}: cannot be read ({what}); move it away if it is no part of the model"
        ) from None


def _is_state(value: object) -> bool:
    """Whether `value` looks like a state dict: names, and tensors under most of them."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    tensors = sum(isinstance(item, Tensor) for item in value.values())
    return tensors > len(value) / 2 and any(key.endswith("weight") for key in value)


def _is_swapped(content: Mapping[str, Any]) -> bool:
    """Whether mmengine's EMAHook wrote this: the average under state_dict, the weights beside."""
    weights, other = content.get("state_dict"), content.get("ema_state_dict")
    if not (_is_state(weights) and _is_state(other) and isinstance(content.get("meta"), Mapping)):
        return False
    return "steps" in other and {f"module.{key}" for key in weights} <= other.keys()


def _chosen(path: Path, entries: Mapping[str, Any], entry: str | None) -> str:
    names = [name for name in entries if name]
    if entry is not None:
        if entry in names:
            return entry
        found = first_of(names) or "none"
        raise CheckpointError(f"{path}: --entry {entry}: no state dict there; found {found}")
    if not entries:
        raise CheckpointError(f"{path}: no state dict in it; save the state dict alone")
    if "" in entries or len(names) == 1:
        return "" if "" in entries else names[0]
    raise CheckpointError(
        f"{path}: holds {len(names)} state dicts: {first_of(names)}; --entry NAME says which "
        "to read (some are averages of the weights)"
    )
