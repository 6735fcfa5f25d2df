"""Eight virtual CPU devices and a strict JAX (`tests/jax_setup.py`) for every test that needs JAX.
`JAX_PLATFORMS=cuda` runs the same tests on a GPU.

All processes of a run, and the next run, share one folder of compiled programs
(`tests/programs.py`).
"""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
_wanted = ["xla_force_host_platform_device_count=8"]
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Tests compile far more than they compute: LLVM's optimizations are a third of all processor
    # time. Tests that start processes without XLA_FLAGS run optimized programs.
    _wanted += ["xla_backend_optimization_level=0"]
for _flag in _wanted:
    if _flag.partition("=")[0] not in _flags:
        _flags = f"{_flags} --{_flag}".strip()
os.environ["XLA_FLAGS"] = _flags

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.cost import Cost  # noqa: E402
from tests.lanes import sort_into_lanes, without_jax  # noqa: E402
from tests.memory import Memory, set_aside  # noqa: E402
from tests.programs import forget_unused  # noqa: E402

settings.register_profile("untimed", deadline=None)  # no test asserts a time
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost", action="store_true", help="print what each test file costs")


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module) and not without_jax(collector.path):
        import tests.jax_setup  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sort_into_lanes(items)  # before -m selects among them


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: a collection of garbage that looked at it
    would take half a second."""
    set_aside()
    gc.enable()


@pytest.fixture(scope="module")
def few_objects() -> None:
    """For modules that collect garbage in many tests, which look at new objects alone."""
    gc.freeze()


_memory = Memory()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    _memory.drop()


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected
    config.addinivalue_line("markers", "real_time: a coroutine that runs on a real event loop")
    if config.getoption("cost"):
        config.pluginmanager.register(Cost())


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # once, not in each worker of pytest-xdist
        forget_unused()
