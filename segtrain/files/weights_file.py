"""Weights that other programs saved: .safetensors files, or files of torch.save."""

from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from segtrain.files import open_regular, torch_file

# What `read` raises for a file that cannot be read, besides pickle.UnpicklingError for one that may
# hold code. KeyError: safetensors knows number types that torch does not.
UNREADABLE = (torch_file.DamagedError, safetensors.SafetensorError, OSError, KeyError)


def read(path: Path) -> Any:
    """The content of `path`, on the CPU; no code in it runs."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    with open_regular(path) as file:
        return torch_file.load(file)
