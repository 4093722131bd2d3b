"""The weights alone, as safetensors: no graph, no pickle, the key layout of the run."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from segtrain.errors import ExecutionError


def write_weights(weights: dict[str, Tensor], metadata: dict[str, str], file: Path) -> None:
    """Writes `weights` under their own keys, contiguous, on the CPU, in their own dtypes."""
    # A copy each: safetensors refuses tensors that share memory or are stored channels-last.
    copies = {
        key: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, value in weights.items()
    }
    # Written by Python, which reports a full disk as what it is.
    file.write_bytes(save(copies, metadata=metadata))


def check_weights(weights: dict[str, Tensor], metadata: dict[str, str], file: Path) -> None:
    """Reads `file` back and compares it with `weights` bit for bit.

    Raises:
        ExecutionError: anything differs; the message names the keys.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            found = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
            same_metadata = stored.metadata() == metadata
    except SafetensorError as error:
        raise ExecutionError(f"{file}: the file just written cannot be read: {error}") from error
    wrong = sorted(
        key
        for key in weights.keys() | found.keys()
        if key not in weights or key not in found or not _same_bits(weights[key], found[key])
    )
    if wrong or not same_metadata:
        what = ", ".join(wrong[:10]) or "metadata"
        raise ExecutionError(f"{file}: {len(wrong)} tensors differ from the model's: {what}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    # As bytes, so that a NaN equals itself and -0.0 differs from 0.0.
    return torch.equal(_bytes(a.detach().cpu()), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
