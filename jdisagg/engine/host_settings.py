"""Process-wide settings that improve speed. Each function is called once, when the process starts.

`keep_freed_memory`: XLA on CPU allocates new temporaries in each step. With glibc's defaults glibc
maps and unmaps large ones every time, and the page faults cost 10-20 % of a long bfloat16 prefill.

`hand_over_quickly`: a worker's event loop and the threads of its mesh and channel exchange small
jobs. Each exchange may wait for the interpreter's lock, by default up to 5 ms. `hand_over_quickly`
reduces the limit to 0.5 ms."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TRIM_BYTES = 2**31 - 1
_TOP_PAD_BYTES = 256 << 20
SWITCH_SECONDS = 5e-4


def keep_freed_memory() -> bool:
    """Makes glibc's allocator keep freed memory for reuse. Returns whether that succeeded, which is
    False with other C libraries."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _TRIM_BYTES), (_M_TOP_PAD, _TOP_PAD_BYTES))
    return all([mallopt(option, value) == 1 for option, value in settings])


def hand_over_quickly() -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
