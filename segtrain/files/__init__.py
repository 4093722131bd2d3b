"""Files that survive crashes and files from strangers: atomic writes, manifest, safe loading."""

from segtrain.files.atomic import (
    check_replaceable,
    open_output,
    sync_directory,
    temporary,
    write_atomic,
    write_output,
)
from segtrain.files.reading import (
    NotRegularError,
    is_same_file,
    kind_of,
    open_regular,
    read_bytes,
    walk,
)

__all__ = [
    "NotRegularError",
    "check_replaceable",
    "is_same_file",
    "kind_of",
    "open_output",
    "open_regular",
    "read_bytes",
    "sync_directory",
    "temporary",
    "walk",
    "write_atomic",
    "write_output",
]
