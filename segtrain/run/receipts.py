"""receipts.jsonl: what every step of a run with train.shares computed, in a few bytes.

With shares, a step gives the same bits wherever it is computed. So a step that is computed again,
on any number of ranks, must give the same receipt: `segtrain verify` compares them.

    {"step": 7, "samples": "5d41402abc4b2a76", "loss": "0x1.2p-1", "aux_loss": null,
     "grad_norm": "0x1.8p+1", "gradients": "q83vEjRW", "weights": "...", "pixels": "..."}
"""

import base64
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter

from segtrain.files import read_bytes


class Receipt(NamedTuple):
    """One step; the names of the fields are those of the file."""

    step: int  # updates done, counted from 1
    samples: str  # 16 hex digits of the SHA-256 of the names of the whole batch, in order
    loss: str  # `float.hex` of a mean over all valid pixels, likewise the next two
    aux_loss: str | None  # None without an auxiliary head
    grad_norm: str
    gradients: str  # `pack` of 16 bits for each parameter
    weights: str | None = None  # `pack` of 64 bits for each tensor of the model; None: not taken
    average: str | None = None  # likewise of the averaged model
    pixels: str | None = None  # 16 hex digits of all crops and labels of the whole batch
    start: str | None = None  # as `weights`, before the step: in the first receipt of a run

    def line(self) -> str:
        """The receipt as JSON."""
        fields = self._asdict().items()
        return json.dumps({k: v for k, v in fields if k == "aux_loss" or v is not None})


_RECEIPT = TypeAdapter(Receipt)

GRADIENT, WEIGHT = np.dtype("<u2"), np.dtype("<u8")
"""What each field packs for a tensor: the numbers in the file are little-endian."""


def pack(values: np.ndarray) -> str:
    """Integers, of the type in which they are to be written, in base64."""
    return base64.b64encode(values.tobytes()).decode()


def unpack(text: str | None, dtype: np.dtype) -> list[int]:
    """The integers that `pack` has written; none for None."""
    packed = base64.b64decode(text or "", validate=True)
    return np.frombuffer(packed, dtype).tolist()


def read_receipts(path: Path) -> dict[int, Receipt]:
    """The receipts in the file by step; damaged lines and a line cut short are left out.

    Raises:
        OSError: it cannot be read.
    """
    lines = read_bytes(path).decode(errors="replace").splitlines(keepends=True)
    receipts = [_parse(line) for line in lines if line.endswith("\n")]
    return {receipt.step: receipt for receipt in filter(None, receipts)}


def _parse(line: str) -> Receipt | None:
    try:
        receipt = _RECEIPT.validate_json(line, strict=True)
        for number in filter(None, (receipt.loss, receipt.aux_loss, receipt.grad_norm)):
            float.fromhex(number)
        unpack(receipt.gradients, GRADIENT)
        for text in (receipt.weights, receipt.average, receipt.start):
            unpack(text, WEIGHT)
    except (ValueError, OverflowError):
        return None
    return receipt
