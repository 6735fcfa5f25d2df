"""Keeps a process that runs many tests small: what JAX holds on to is dropped between two tests
once there is much of it."""

import ctypes
import gc
import sys

import jax
import psutil

MUCH = 1.2 * 2**30  # bytes; a test may need half a gigabyte on top


class Memory:
    """Executables that functions were jitted to stay in JAX's caches, with their constants, after
    everybody else has let go of them; freed memory stays with the allocator."""

    def __init__(self) -> None:
        self._bound = MUCH

    def drop(self) -> None:
        """Between two tests. What is in use stays: then the bound grows."""
        if psutil.Process().memory_info().rss < self._bound:
            return
        gc.collect()
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._bound = max(MUCH, 1.2 * psutil.Process().memory_info().rss)
