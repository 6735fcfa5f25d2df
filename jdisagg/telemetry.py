"""Counters: plain numbers by name, owned by whoever counts, read by whoever reports.

No global registry: a worker or a path is given its `Counters`, so that tests and a cluster of many
workers in one process keep them apart. Names are `noun_verb` in the past tense (`leases_expired`);
values only grow. A name may be split by labels (`retries`, cause="checksum"); labels come from
small fixed sets, never from requests. What is read by name is the sum."""

from collections.abc import Mapping

Labels = tuple[tuple[str, str], ...]


class Counters:
    """Monotonic counters. A name comes into being at its first `add`."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._labelled: dict[tuple[str, Labels], int] = {}

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        assert amount >= 0, f"counter {name} only grows, got {amount}"
        self._values[name] = self._values.get(name, 0) + amount
        if labels:
            pairs = labels.items()
            key = (name, tuple(sorted(pairs) if len(labels) > 1 else pairs))
            self._labelled[key] = self._labelled.get(key, 0) + amount

    def __getitem__(self, name: str) -> int:
        return self._values.get(name, 0)

    def snapshot(self) -> Mapping[str, int]:
        """Sums by name."""
        return dict(self._values)

    def labelled(self) -> Mapping[tuple[str, Labels], int]:
        """By name and labels; what was counted without labels stands under none. Adds up to
        `snapshot`."""
        split = dict(self._labelled)
        for name, total in self._values.items():
            rest = total - sum(
                value for (other, _), value in self._labelled.items() if other == name
            )
            if rest or not any(other == name for other, _ in self._labelled):
                split[(name, ())] = rest
        return split
