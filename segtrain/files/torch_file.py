"""Files that torch.save wrote, from anywhere: nothing in them runs, and they grow no larger."""

import errno
import os
import pickletools
import struct
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from segtrain.files import local as files


class DamagedError(Exception):
    """A file that is not what torch.save writes; says what is wrong with it."""


_MAX_WORD = 20_000
# What torch's unpickler runs into, depending on the byte that is wrong.
_DAMAGED = (
    *(RuntimeError, EOFError, OSError, ValueError, TypeError, AttributeError, ImportError),
    *(LookupError, AssertionError, ArithmeticError, MemoryError, struct.error),
)


def read(path: Path) -> Any:
    """The content of the file `path`, as `load`.

    Raises:
        as `load`.
        OSError: there is none, or it is a folder, a pipe or a device.
    """
    with files.open_regular(path) as file:
        return load(file)


def load(file: IO[bytes]) -> Any:
    """The content of an open file: tensors, all on the CPU, and plain data.

    Raises:
        pickle.UnpicklingError: it holds more than that, which could run code; or is no pickle.
        DamagedError: it is damaged in any other way.
        OSError: the disk does not give it back.
    """
    try:
        _refuse_bombs(file, os.fstat(file.fileno()).st_size)
        file.seek(0)
        with warnings.catch_warnings():
            # Of pickles that torch did not write, and refuses in the next moment.
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise
        text = str(error) or type(error).__name__
        raise DamagedError(text.splitlines()[0]) from error


def _refuse_bombs(file: IO[bytes], size: int) -> None:
    """What torch would take all memory or hours to refuse."""
    if file.read(4) != b"PK\3\4":
        file.seek(0)
        _refuse_long_words(file, 5)
        return
    try:
        with zipfile.ZipFile(file) as archive:
            # torch inflates members though it never writes such: 400 kB become 400 MB.
            if sum(member.file_size for member in archive.infolist()) > size:
                raise DamagedError("its members are compressed, which torch.save does not do")
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    pickled = archive.read(name)
                    # No text has more characters than bytes; most files end here.
                    if max(map(len, pickled.split()), default=0) > _MAX_WORD:
                        _refuse_long_words(BytesIO(pickled), 1)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise DamagedError(f"not a whole archive: {error}") from error


def _refuse_long_words(file: IO[bytes], num_pickles: int) -> None:
    """torch's complaint about a name or text is searched in quadratic time: 100 kB take minutes.

    A file in torch's old format begins with five pickles.
    """
    try:
        for number in range(num_pickles):
            if number > 0:
                if not file.read(1):
                    return  # fewer, of which torch refuses what it finds
                file.seek(-1, os.SEEK_CUR)
            for _, argument, _ in pickletools.genops(file):
                if isinstance(argument, str) and len(argument) > _MAX_WORD:
                    longest = max(map(len, argument.split()), default=0)
                    if longest > _MAX_WORD:
                        raise DamagedError(f"a word of {longest} characters")
    except UnicodeDecodeError as error:
        raise DamagedError("a name or text that is damaged") from error
    except ValueError as error:
        # torch may read on, such as a name that no line end follows.
        raise DamagedError(f"no whole pickle: {error}") from error


def is_plain(value: object) -> bool:
    """Whether `value` is a tensor with a real number of its own at each place.

    Sparse, quantized and expanded tensors and those without a storage load, and fail where they are
    used; an expanded one can also be of any size.
    """
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type != "meta"
        and not (value.is_quantized or value.is_complex() or value.is_nested)
        and not _overlaps(value)
    )


def _overlaps(value: Tensor) -> bool:
    """Whether places of `value` may share memory, as those of an expanded tensor do."""
    if value.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
