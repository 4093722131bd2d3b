"""How the C library keeps memory, which training on a CPU and loader workers feel."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>
_KEPT_BYTES = 1 << 30  # the largest tensor that is kept for reuse


def keep_freed_memory() -> None:
    """Has glibc keep freed blocks for the next allocation; does nothing with another C library.

    Every step allocates the same large tensors, and every sample the same large images: by default
    as fresh pages that the kernel clears.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
