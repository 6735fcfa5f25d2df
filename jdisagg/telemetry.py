"""Counters: plain numbers by name, owned by whoever counts, read by whoever reports.

No global registry: a worker or a path is given its `Counters`, so that tests and a cluster of many workers in one process
keep them apart. Names are `noun_verb` in the past tense (`leases_expired`); values only grow.
"""

from collections.abc import Mapping


class Counters:
    """Monotonic counters. A name comes into being at its first `add`."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        assert amount >= 0, f"counter {name} only grows, got {amount}"
        self._values[name] = self._values.get(name, 0) + amount

    def __getitem__(self, name: str) -> int:
        return self._values.get(name, 0)

    def snapshot(self) -> Mapping[str, int]:
        return dict(self._values)
