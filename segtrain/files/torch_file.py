"""Loading files of torch.save from strangers: no code runs, memory stays bounded, and damage shows.

torch.load does not compare the CRC-32 of a record, so a flipped bit would be a wrong weight.
"""

import errno
import os
import pickletools
import re
import struct
import warnings
import zipfile
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from segtrain.files import open_regular


class DamagedError(Exception):
    """A file is not what torch.save writes; says what is wrong with it."""


_MAX_WORD = 20_000  # characters
_BLOCK_BYTES = 1 << 20
# What torch's unpickler raises, depending on which byte is wrong.
_DAMAGED = (
    *(RuntimeError, EOFError, OSError, ValueError, TypeError, AttributeError, ImportError),
    *(LookupError, AssertionError, ArithmeticError, MemoryError, struct.error),
)


class _NumpyType:
    """What a pickle says of a NumPy number's type. numpy.dtype itself would trust any state."""

    def __init__(self, code: str, *_: bool) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.code = state[1] + self.code  # the order of bytes


def _number(kind: _NumpyType, content: bytes) -> float | int | bool:
    """A pickled NumPy number, as a plain one."""
    if not re.fullmatch("[<>|][bfiu][1248]", kind.code):
        raise DamagedError("it holds a NumPy object that is no number")
    return np.frombuffer(content, kind.code, count=1)[0].item()


# A training program's best score is often a NumPy number. "core": NumPy 1.
_NUMPY = (
    (_NumpyType, "numpy.dtype"),
    (_number, "numpy._core.multiarray.scalar"),
    (_number, "numpy.core.multiarray.scalar"),
)


def load(file: IO[bytes], *, verified: bool = False) -> Any:
    """The content of an open file: tensors, all on the CPU, and plain data; numbers of NumPy become
    those of Python.

    verified: the caller compares the SHA-256 of the file, so that no CRC-32 has to be compared.

    Raises:
        pickle.UnpicklingError: it holds more, which could run code; or it is no pickle.
        DamagedError, OSError: it is damaged in another way; the disk fails.
    """
    try:
        _check(file, verified)
        file.seek(0)
        with warnings.catch_warnings():
            # torch warns about foreign pickles just before it refuses them.
            warnings.simplefilter("ignore")
            with torch.serialization.safe_globals(_NUMPY):
                return torch.load(file, map_location="cpu", weights_only=True)
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise
        text = str(error) or type(error).__name__
        raise DamagedError(text.splitlines()[0]) from error


def _check(file: IO[bytes], verified: bool) -> None:
    """Refuses files that cost torch all memory, or hours, and those whose CRC-32 do not fit.

    verified: the CRC-32 are not compared.
    """
    if file.read(4) != b"PK\3\4":
        file.seek(0)
        # torch's format before 1.6 begins with five pickles.
        _refuse_long_words(file, 5)
        return
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            num_bytes = sum(member.file_size for member in members)
            # torch.save never compresses, but torch.load inflates: 400 kB can become 400 MB.
            if num_bytes > os.fstat(file.fileno()).st_size or not all(map(_is_stored, members)):
                raise DamagedError("its members are compressed, which torch.save does not do")
            for member in members:
                # What torch stores after set_crc32_options(False); zipfile then compares nothing.
                if has_none := member.CRC == 0:
                    del member.CRC
                if member.filename.endswith("data.pkl"):
                    pickled = archive.read(member)
                    # A cheap test that most files pass: a word has no more letters than bytes.
                    if max(map(len, pickled.split()), default=0) > _MAX_WORD:
                        _refuse_long_words(BytesIO(pickled), 1)
                elif not (verified or has_none):
                    with archive.open(member) as record:
                        for _ in iter(partial(record.read, _BLOCK_BYTES), b""):
                            pass  # at its end zipfile compares the CRC-32
    except (zipfile.BadZipFile, NotImplementedError) as error:
        what = "damaged, not the archive that was saved"
        raise DamagedError(f"{what}: {error}; copy or download it again") from error


def _is_stored(member: zipfile.ZipInfo) -> bool:
    """Whether torch reads these bytes as they are."""
    # torch reads nothing of what is marked as a folder: the weight would be what the memory held.
    is_folder = member.external_attr & 0x10 and member.file_size
    return member.compress_size == member.file_size and not (member.compress_type or is_folder)


def _refuse_long_words(file: BufferedReader | BytesIO, num_pickles: int) -> None:
    """Refuses long words: torch puts them in an error that takes quadratic time to format."""
    try:
        for i in range(num_pickles):
            if i > 0 and not file.peek(1):
                return  # fewer pickles; torch refuses the file
            for _, argument, _ in pickletools.genops(file):
                words = argument.split() if isinstance(argument, str) else ()
                if max(map(len, words), default=0) > _MAX_WORD:
                    raise DamagedError("a word of too many letters")
    except ValueError as error:
        # torch might read on, such as past a name without a line end.
        raise DamagedError(f"no whole pickle: {error}") from error


def is_plain(value: object) -> bool:
    """Whether `value` is a dense tensor of real numbers; sparse and quantized ones fail later."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type != "meta"
        and not (value.is_quantized or value.is_complex() or value.is_nested)
    )


# What `read` raises for a file that cannot be read, besides pickle.UnpicklingError for one that may
# hold code. KeyError: safetensors knows number types that torch does not.
UNREADABLE = (DamagedError, safetensors.SafetensorError, OSError, KeyError)


def read(path: Path) -> Any:
    """The content of `path`, on the CPU; no code in it runs."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    with open_regular(path) as file:
        return load(file)
