"""Whether the files that a pack was made from have changed since.

At each start: names and order, sizes and times. Where only the time differs, as after a copy, the
contents of a few files are compared; of many, a warning says how to compare them.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from segtrain.config import DataConfig
from segtrain.data.layouts import LAYOUTS, list_split, scan_layout
from segtrain.data.listing import first_lines
from segtrain.data.pack.manifest import PackedImage, SourceFile
from segtrain.data.pack.plan import source_name
from segtrain.errors import DataError
from segtrain.files import open_regular
from segtrain.text import counted, printable

# Asking for sizes waits for the disk, not for the processor.
_THREADS = 16
_MAX_HASHED = 64
_WAY_OUT = "delete the pack and make it again, or read the files themselves (data.pack: null)"


class SourceState(NamedTuple):
    """What is known of the files of a split. is_there: False if there are none of them."""

    is_there: bool
    warnings: list[str]


def check_source(
    data: DataConfig,
    split: str,
    images: Sequence[PackedImage],
    *,
    quoted: bool = True,
    labelled: bool = True,
) -> SourceState:
    """Compares the files in data.root with those that were packed.

    Nothing is compared if data.root holds no images of this split: a pack is enough to train.

    quoted, labelled: as for `list_split`.

    Raises:
        DataError: files were changed, added or removed, or their order is another.
    """
    root = Path(os.path.expanduser(data.root))
    pack = printable(data.pack)
    sources = [file for image in images for file in (image.image, image.label)[: 1 + labelled]]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda file: _stat(root, file), sources))
    if not any(found):
        what = f"data.pack {pack}: its files are not in data.root {printable(data.root)}"
        if _has_images(data, split):
            raise DataError(f"{what}, which holds others; {_WAY_OUT}")
        return SourceState(False, [f"{what}: changes since they were packed are not noticed"])
    problems, touched = [], []
    for file, now in zip(sources, found, strict=True):
        if now is None:
            problems.append(f"{printable(root / file.name)}: gone since it was packed")
        elif now.st_size != file.num_bytes:
            problems.append(_changed(root, file))
        elif now.st_mtime_ns != file.mtime_ns:
            touched.append(file)
    if len(touched) <= _MAX_HASHED:
        problems += [
            _changed(root, file) for file in touched if not has_content(root / file.name, file)
        ]
        touched = []
    if labelled and not problems:
        problems = _other_names(data, split, images, quoted=quoted)
    if problems:
        title = f"data.pack {pack}, split {split!r}: {_WAY_OUT}"
        raise DataError(first_lines(title, problems))
    if not touched:
        return SourceState(True, [])
    one = "file has another time than when it was packed"
    many = "files have other times than when they were packed"
    what = f"data.pack {pack}: {counted(len(touched), one, many)}"
    return SourceState(True, [f"{what}, as after a copy; segtrain data check compares them"])


def has_content(path: Path, file: SourceFile) -> bool:
    """Whether the file at `path` has the bytes that were packed; DataError: it is unreadable."""
    try:
        with open_regular(path) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
    except OSError as error:
        raise DataError(f"{printable(path)}: {(error.strerror or '').lower()}") from error


def _has_images(data: DataConfig, split: str) -> bool:
    """Whether data.root holds the split, of whatever images."""
    try:
        labelled = LAYOUTS[data.layout].images is None
        return bool(scan_layout(data, split, labelled=labelled).pairs)
    except DataError:
        return False


def _stat(root: Path, file: SourceFile) -> os.stat_result | None:
    try:
        return os.stat(root / file.name)
    except OSError:
        return None


def _changed(root: Path, file: SourceFile) -> str:
    return f"{printable(root / file.name)}: changed since it was packed"


def _other_names(
    data: DataConfig, split: str, images: Sequence[PackedImage], *, quoted: bool
) -> list[str]:
    """How the split, listed now, differs from `images`."""
    now = {
        pair.name: (source_name(pair.image, data.root), source_name(pair.label, data.root))
        for pair in list_split(data, split, quoted=quoted).pairs
    }
    packed = {image.name: (image.image.name, image.label.name) for image in images}
    problems = [f"{printable(name)}: not in the pack" for name in now if name not in packed]
    problems += [f"{printable(name)}: no longer in the split" for name in packed if name not in now]
    problems += [
        f"{printable(name)}: made from other files than the split names now"
        for name in now
        if packed.get(name, now[name]) != now[name]
    ]
    if not problems and list(now) != list(packed):
        problems = ["the images have another order now"]
    return problems
