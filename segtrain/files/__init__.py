"""Files that survive crashes and files from strangers: atomic writes, manifest, safe loading."""

from segtrain.files.local import (
    NotRegularError,
    is_at,
    is_temporary,
    kind_of,
    open_regular,
    output_place,
    read_bytes,
    refuse_odd,
    sync_directory,
    temporary,
    walk,
    write_output,
    write_whole,
)

__all__ = [
    "NotRegularError",
    "is_at",
    "is_temporary",
    "kind_of",
    "open_regular",
    "output_place",
    "read_bytes",
    "refuse_odd",
    "sync_directory",
    "temporary",
    "walk",
    "write_output",
    "write_whole",
]
