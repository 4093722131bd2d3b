"""Files that survive crashes and files from strangers: atomic writes, manifest, safe loading."""

from segtrain.files.atomic import (
    check_replaceable,
    reserve_output,
    sync_directory,
    temporary,
    write_atomic,
    write_output,
)
from segtrain.files.reading import (
    NotRegularError,
    check_utf8,
    is_same_file,
    kind_of,
    open_regular,
    os_errors_as,
    parse_json,
    read_bytes,
    walk,
)

__all__ = [
    "NotRegularError",
    "check_replaceable",
    "check_utf8",
    "is_same_file",
    "kind_of",
    "open_regular",
    "os_errors_as",
    "parse_json",
    "read_bytes",
    "reserve_output",
    "sync_directory",
    "temporary",
    "walk",
    "write_atomic",
    "write_output",
]
