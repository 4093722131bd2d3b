"""How the C library keeps memory, which training on a CPU feels."""

import ctypes
import sys

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# The largest tensor that is still kept for reuse.
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Has glibc keep freed blocks for the next allocation instead of returning them to the system.

    Every step frees and allocates the same large tensors, and by default each of them comes back as
    fresh pages that the kernel must clear. Does nothing where the C library is another.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
