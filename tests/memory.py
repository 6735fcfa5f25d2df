"""Bounds the memory of a process that runs many tests: JAX's caches are cleared between two tests
once they are large."""

import ctypes
import gc
import sys
from collections.abc import Callable

import psutil

MUCH = 2 * 2**30  # bytes; a test may need half a gigabyte on top
also_dropped: list[Callable[[], object]] = []  # what else keeps executables


def set_aside() -> None:
    """Collections of garbage that come later look at new objects alone."""
    gc.collect()
    gc.freeze()


class Memory:
    """JAX's caches keep executables and their constants after all other references are gone, and
    the allocator keeps freed memory."""

    def __init__(self) -> None:
        self._bound = MUCH

    def drop(self) -> None:
        """Runs between two tests. Memory in use stays, and then the bound grows."""
        if psutil.Process().memory_info().rss < self._bound:
            return
        for drop in also_dropped:
            drop()
        gc.unfreeze()  # what was set aside may be garbage by now
        gc.collect()
        if jax := sys.modules.get("jax"):
            jax.clear_caches()
        set_aside()
        if sys.platform == "linux":
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._bound = max(MUCH, 1.2 * psutil.Process().memory_info().rss)
