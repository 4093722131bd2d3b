"""What is in a pack: `pack.json`.

A shard is a safetensors file with one tensor for each image, uint8: each row is the row of the
image, W pixels of C samples (little-endian, of the pack's dtype), and behind it the row of the
label, W train ids, with zeros up to a multiple of a sample. Of 8-bit RGB that is (H, 4 W). So the
rows of a crop, with their labels, are one range of bytes.
"""

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, InstanceOf, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from segtrain.data.read.decode import Scaling
from segtrain.errors import DataError
from segtrain.files import os_errors_as, parse_json, read_bytes
from segtrain.files.remote import Store
from segtrain.text import printable, scheme_of

MANIFEST = "pack.json"
FORMAT = 3

_MAX_BYTES = 1 << 30  # an image takes about 600 bytes
REPAIR = "copy it again, or delete the pack and make it again"


# For pydantic, `str` is no text with surrogates, and names of files may have them.
_Text = InstanceOf[str]


@dataclass(frozen=True)
class PackedFile:
    """A file as it was packed. name: its path, relative to data.root. sha256: of its bytes."""

    name: _Text
    num_bytes: NonNegativeInt
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class PackedImage:
    """One image with its label.

    name: unique in the split. images: its files, one or one for each band.
    orientation: of the header of the first. row_bytes: of a row of the tensor.
    shard: its index. offset: of its first row in the shard, in bytes.
    crc: the `checksum` of its rows.
    """

    name: _Text
    images: tuple[PackedFile, ...]
    label: PackedFile
    height: PositiveInt
    width: PositiveInt
    row_bytes: PositiveInt
    orientation: NonNegativeInt
    shard: NonNegativeInt
    offset: NonNegativeInt
    crc: NonNegativeInt

    @property
    def files(self) -> tuple[PackedFile, ...]:
        """Those of the image, then that of the label."""
        return (*self.images, self.label)

    @property
    def shape(self) -> tuple[int, int]:
        """Of its tensor."""
        return self.height, self.row_bytes


@dataclass(frozen=True)
class PackedSplit:
    """The images of a split in their order.

    excluded: the `data.train_exclude` that was applied to it.
    warnings: what the check before packing found odd; training and evaluation show them.
    """

    excluded: tuple[_Text, ...]
    warnings: tuple[_Text, ...]
    images: tuple[PackedImage, ...]


@dataclass(frozen=True)
class Shard:
    """One file of a pack."""

    # Files named here are opened: no name may lead out of the directory.
    name: Annotated[str, Field(pattern=r"^[0-9]{5,9}\.safetensors$")]
    num_bytes: NonNegativeInt


@dataclass(frozen=True)
class Pack:
    """A whole pack.

    made_by: versions of the programs that decoded it: others may decode a JPEG to other bits.
    options: those of the section `data` that say which files are read and how, by name.
    dtype: of a sample of the images: uint8, uint16 or float32.
    classes: the class file, as JSON. It decided which train ids are stored.
    ignores_color: whether the class file gives an `ignore_color`.
    splits: by their names in the config.
    bands, scaling: as of ImageForm.
    """

    format: int
    made_by: dict[str, str]
    options: dict[str, _Text | int | None]
    dtype: Literal["uint8", "uint16", "float32"]
    classes: _Text
    ignores_color: bool
    shards: tuple[Shard, ...]
    splits: dict[_Text, PackedSplit]
    bands: tuple[_Text, ...] = ()
    scaling: Scaling = ()


_ADAPTER = TypeAdapter(Pack)


def to_json(pack: Pack) -> str:
    """The text of `pack.json`."""
    content = asdict(pack)
    return json.dumps({"sha256": sha256_of(content), "pack": content}) + "\n"


def checksum(rows: np.ndarray) -> int:
    """CRC-32 of the rows of an image, (H, bytes) uint8, which begins from their number H.

    So it differs where the manifest exchanges height and width.
    """
    return zlib.crc32(rows, len(rows))


def sha256_of(content: Any) -> str:
    """The SHA-256 of plain data, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_pack(place: str) -> tuple[Pack, str]:
    """The manifest in a folder or at an address, and its SHA-256.

    Raises:
        DataError: there is none, it is not finished, damaged or of another version.
    """
    path = os.path.join(place, MANIFEST)
    with os_errors_as(DataError, path):
        try:
            raw = Store(place).read(MANIFEST) if scheme_of(place) else read_bytes(path, _MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"data.pack: {printable(place)}: no finished pack there; make one with segtrain "
                "data pack, or read the files themselves (data.pack: null)"
            ) from None
    try:
        manifest = parse_json(raw)
        content = manifest["pack"]
        # The version before the hash: others may hash in another way.
        if content["format"] != FORMAT:
            other = "a pack of another version of segtrain; make it again"
            raise DataError(f"{printable(path)}: {other}")
        if manifest["sha256"] != sha256_of(content):
            raise ValueError("its hash differs")
        return _ADAPTER.validate_python(content), manifest["sha256"]
    except (ValidationError, ValueError, LookupError, TypeError):  # also JSON that is not ours
        raise DataError(f"{printable(path)}: damaged; {REPAIR}") from None


def check_shard(directory: Path, shard: Shard) -> None:
    """Raises DataError if this shard is missing or has another size."""
    path = directory / shard.name
    with os_errors_as(DataError, path):
        size = path.stat().st_size
    if size != shard.num_bytes:
        raise DataError(
            f"{printable(path)}: a shard of {size} bytes, expected {shard.num_bytes}; {REPAIR}"
        )
