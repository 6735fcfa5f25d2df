"""Counters by name. Each component owns its counters, and reporters read them.

There is no global registry. Each worker or request path receives its own `Counters`, so that tests
and clusters in one process keep them apart. Names are `noun_verb` in the past tense
(`leases_expired`), and values only grow. Labels may split a name (`retries`, cause="checksum").
They come from small fixed sets, never from requests. Reading by name returns the sum over labels.
"""

from collections.abc import Mapping

Labels = tuple[tuple[str, str], ...]


class Counters:
    """Monotonic counters. The first `add` creates a name."""

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
        """Returns the sum of each name."""
        return dict(self._values)

    def labelled(self) -> Mapping[tuple[str, Labels], int]:
        """Returns the values by name and labels. Unlabelled counts have empty labels. The values of
        a name sum to its value in `snapshot`."""
        split = dict(self._labelled)
        for name, total in self._values.items():
            rest = total - sum(
                value for (other, _), value in self._labelled.items() if other == name
            )
            if rest or not any(other == name for other, _ in self._labelled):
                split[(name, ())] = rest
        return split
