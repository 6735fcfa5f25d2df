"""Keeps the C allocator from giving memory back to the kernel between steps.

XLA on CPU allocates its temporaries anew in each step; with glibc's defaults large ones are mapped
and unmapped every time, and the page faults cost 10-20 % of a long bfloat16 prefill. This is what
the environment variables MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ do,
without a restart and without touching the environment."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TRIM_BYTES = 2**31 - 1
_TOP_PAD_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Returns whether the allocator took the settings (glibc on Linux). Affects the whole process;
    call it once at start."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _TRIM_BYTES), (_M_TOP_PAD, _TOP_PAD_BYTES))
    return all([mallopt(option, value) == 1 for option, value in settings])
