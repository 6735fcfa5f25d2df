"""The cost of a test run, under `--cost`: processor seconds (ended children included) by test file,
highest first, and the memory of each worker. Processor seconds on a busy machine compare to wall
time on an idle one."""

import os
from collections import defaultdict
from collections.abc import Generator

import psutil
import pytest

SHOWN = 40
Report = Generator[None, pytest.TestReport, pytest.TestReport]


def cpu_seconds() -> float:
    """Seconds of this process and its ended children."""
    return sum(os.times()[:4])


class Cost:
    """Measures in the process that runs the tests and sums in the one that reports."""

    def __init__(self) -> None:
        self._last = cpu_seconds()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: defaultdict[str, float] = defaultdict(float)
        self._peak: dict[str, tuple[float, str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Report:
        """Measures setup, call and teardown separately."""
        report = yield
        now = cpu_seconds()
        memory = psutil.Process().memory_info().rss / 2**30
        report.user_properties += [("cpu", now - self._last), ("memory", memory)]
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found: dict[str, float] = dict(report.user_properties)  # type: ignore[arg-type]
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += found["cpu"]
        self._tests[report.nodeid] += found["cpu"]
        worker = getattr(report, "worker_id", "main")
        self._peak[worker] = max(self._peak.get(worker, (0.0, "")), (found["memory"], file))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section(f"{sum(self._seconds.values()):.0f} processor seconds")
        for costs in (self._seconds, self._tests):
            most = sorted(costs.items(), key=lambda item: item[1], reverse=True)
            for name, seconds in most[:SHOWN]:
                write(f"{seconds:8.1f} s  {name}")
            write("")
        for worker, (memory, file) in sorted(self._peak.items()):
            write(f"{worker}: at most {memory:.2f} GiB, in {file}")
