"""The shards of a pack at an address: fetched whole into the user's cache, once.

The folder is named after the hash of `pack.json`, so that another pack at the same address has
another one. Nothing is locked: a shard takes its name when it is whole and has its CRCs, and two
processes that fetch the same one do no harm.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

from segtrain.data.pack.index import Pack, check_shard
from segtrain.data.pack.reader import Shards
from segtrain.errors import DataError
from segtrain.files import cache_failures, cache_folder
from segtrain.files.remote import Store
from segtrain.text import printable, say

# A file that nobody has written to for so long is of a process that was killed.
_ABANDONED_S = 3600


def fetch_shards(url: str, pack: Pack, sha256: str, wanted: Set[int]) -> Path:
    """The folder of the cache that holds these shards; those that it lacks are fetched.

    sha256: of the manifest.

    Raises:
        DataError: a shard is missing there, or is not what was packed.
        ExecutionError: it cannot be fetched, or the cache cannot be written.
    """
    folder, store = cache_folder("packs", sha256[:16]), Store(url)
    with cache_failures():
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        # Another process may fetch meanwhile: each shard is looked for once more before its turn.
        absent = [number for number in wanted if not _is_there(folder, pack, number)]
        if absent and os.environ.get("LOCAL_RANK", "0") == "0":
            size = sum(pack.shards[number].num_bytes for number in absent) / 1e9
            say(f"fetching {len(absent)} shards, {size:.3g} GB, of {printable(url)} to {folder}")
        # Each process in another order: ranks of a machine fetch different shards.
        for number in SystemRandom().sample(absent, len(absent)):
            if not _is_there(folder, pack, number):
                _fetch(store, folder, pack, number)
    return folder


def _is_there(folder: Path, pack: Pack, number: int) -> bool:
    """Whether the folder holds a shard, not cut off by others."""
    with suppress(DataError):
        check_shard(folder, pack.shards[number])
        return True
    return False


def _fetch(store: Store, folder: Path, pack: Pack, number: int) -> None:
    """Fetches a shard and compares each image in it, of all splits, with its CRC."""
    name = pack.shards[number].name
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as draft:
        try:
            store.get(name, Path(draft, name))
            shards = Shards(Path(draft), pack.shards)
            for split in pack.splits.values():
                for image in split.images:
                    if image.shard == number:
                        shards.check(image)
        except FileNotFoundError:
            raise DataError(f"{printable(store.url)}/{name}: no such shard") from None
        except DataError as error:
            what = "not the shard that pack.json describes; copy the pack there again"
            raise DataError(f"{printable(store.url)}/{name}: {what}") from error
        Path(draft, name).replace(folder / name)


def _remove_abandoned(folder: Path) -> None:
    """Removes what processes that were killed have left."""
    for draft in folder.glob(".*"):
        with suppress(FileNotFoundError):  # it has ended meanwhile
            written = max(path.stat().st_mtime for path in (draft, *draft.iterdir()))
            if time.time() - written > _ABANDONED_S:
                shutil.rmtree(draft, ignore_errors=True)
