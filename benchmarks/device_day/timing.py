"""Measures the seconds of a call on the device."""

import statistics
import time
from collections.abc import Callable

import jax


def seconds_of(call: Callable[[], object], *, rounds: int = 5, calls: int = 4) -> float:
    """Returns the seconds of one call, as the median over rounds of `calls` calls that are issued
    one after the other. The host's work to issue calls is thus hidden if the device takes longer.
    The first call, which compiles, is not counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)
