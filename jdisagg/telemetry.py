"""Named counters of events. Each component owns its counters.

There is no global registry. Each worker or request path receives its own `Counters`, so that
several clusters or tests in one process do not mix their counts. Names are `noun_verb` in the past
tense (`leases_expired`), and values only grow. The possible values of a label are a small fixed
set, and never come from requests. Reading a counter by name returns the sum over its labels."""

from collections.abc import Mapping

Labels = tuple[tuple[str, str], ...]


class Counters:
    """The counters of one component, by name. Counters only grow. The first `add` for a name
    creates its counter."""

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
        return dict(self._values)

    def labelled(self) -> Mapping[tuple[str, Labels], int]:
        """Returns the values by name and labels. A count without labels has the empty tuple as its
        labels."""
        split = dict(self._labelled)
        for name, total in self._values.items():
            rest = total - sum(
                value for (other, _), value in self._labelled.items() if other == name
            )
            if rest or not any(other == name for other, _ in self._labelled):
                split[(name, ())] = rest
        return split
