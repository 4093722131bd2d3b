"""Reads a file of another program: no code runs, and every tensor is counted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.serialization import safe_globals

from segtrain.errors import CheckpointError
from segtrain.files import parse_json, read_bytes
from segtrain.models.pretrained import plain_state, read_weights
from segtrain.text import MAX_NAME, first_of, printable

CONFIG_JSON = "config.json"
_MAX_CONFIG_BYTES = 1 << 20


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


class TensorFile(NamedTuple):
    """The tensors of a file, under its own keys, and what it stores beside them.

    entry: under which key the state dict lay; "" if it is the whole file.
    """

    state: dict[str, Tensor]
    beside: Mapping[str, Any]
    entry: str


def read_file(path: Path, entry: str | None = None) -> TensorFile:
    """The state dict in a .safetensors file or one of torch.save.

    entry: its key, where the file holds several, such as averaged weights beside others.

    Raises:
        CheckpointError: no such file; it holds more than tensors and plain data, which could run
            code; no state dict, or several and no `entry`.
    """
    # `_Inert` stands for these names: torch accepts the file, and nothing of theirs is called.
    with safe_globals(_RUNNER):
        content = read_weights(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: expected a state dict, found {type(content).__name__}")
    if "format" in content and "segtrain" in content:
        raise CheckpointError(f"{path}: this is a checkpoint of segtrain already")
    entries = {str(key): value for key, value in content.items() if _is_state(value)}
    names = first_of(entries) or "none"
    if entry is not None and entry not in entries:
        raise CheckpointError(f"{path}: --entry {entry}: no state dict there; found {names}")
    if entry is None and _is_state(content):
        entry, entries = "", {"": content}
    if entry is None and len(entries) != 1:
        what = f"holds {len(entries)} state dicts: {names}; --entry NAME says which to read"
        raise CheckpointError(f"{path}: {what}")
    entry = entry if entry is not None else next(iter(entries))
    state = entries[entry]
    if entry:
        # The config and the names of classes, where a trainer stores them.
        beside = {key: value for key, value in content.items() if value is not state}
    else:
        beside = {CONFIG_JSON: _config_json(path)} if path.suffix == ".safetensors" else {}
    return TensorFile(plain_state(state, path), beside, entry)


def _config_json(path: Path) -> Any:
    """The config that save_pretrained writes into the folder of a .safetensors file, or None."""
    there = path.with_name(CONFIG_JSON)
    try:
        return parse_json(read_bytes(there, _MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        # Without it, the stride and the rates would be guessed.
        why = f"cannot be read ({printable(error, MAX_NAME)})"
        raise CheckpointError(f"{there}: {why}; move it away if it is no part of it") from None


def _is_state(value: object) -> bool:
    """Whether `value` looks like a state dict: names, and tensors under most of them."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    tensors = sum(isinstance(item, Tensor) for item in value.values())
    return tensors > len(value) / 2 and any(key.endswith("weight") for key in value)
