"""Tests run on the simulator's virtual time (jdisagg/simulator/virtual_time.py).

A `conftest.py` that imports `pytest_collectstart` from here runs coroutine tests of its folder so,
except those with the mark `real_time`."""

import functools
import inspect
from collections.abc import Callable, Coroutine

import pytest

from jdisagg.simulator.virtual_time import Stuck, VirtualClock, VirtualLoop, run_virtually

__all__ = ["Stuck", "VirtualClock", "VirtualLoop", "pytest_collectstart", "run_virtually"]


def _virtually(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: object) -> None:
        run_virtually(lambda: test(**arguments))

    return run


def pytest_collectstart(collector: pytest.Collector) -> None:
    if not isinstance(collector, pytest.Module):
        return
    try:
        tests = vars(collector.obj)
    except collector.CollectError:
        return  # pytest meets it again, and reports it
    real = {mark.name for mark in collector.iter_markers()}
    for name, test in list(tests.items()):
        marks = real | {mark.name for mark in getattr(test, "pytestmark", ())}
        if (
            inspect.iscoroutinefunction(test)
            and name.startswith("test_")
            and "real_time" not in marks
        ):
            setattr(collector.obj, name, _virtually(test))
