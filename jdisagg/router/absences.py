"""Predicts when a worker of a role returns after a restart, from the durations of earlier absences.
Does no I/O; times are arguments.

A worker is absent from the time when the router removed it, or when it deregistered, until a worker
registers under its name."""

from collections import deque
from statistics import median

KEPT = 16
FIRST_GUESS_SECONDS = 10.0  # estimate until a worker has returned: a restart with compiled programs
LEAST_SECONDS, MOST_SECONDS = 1.0, 60.0
FORGOTTEN_SECONDS = 3600.0  # a worker that is absent for this long was removed on purpose


class Absences:
    """The workers that are absent, and the durations of past absences."""

    def __init__(self) -> None:
        self._away: dict[str, tuple[str, float]] = {}
        self._past: deque[float] = deque(maxlen=KEPT)

    def left(self, worker: str, role: str, now: float) -> None:
        self._away = {
            name: (which, since)
            for name, (which, since) in self._away.items()
            if now - since < FORGOTTEN_SECONDS
        }
        self._away[worker] = role, now

    def came(self, worker: str, now: float) -> None:
        _, since = self._away.pop(worker, ("", now))
        if since < now:
            self._past.append(now - since)

    def away_seconds(self, role: str, now: float) -> float | None:
        """Returns the seconds since the last worker of `role` left, or None if none is absent."""
        return min(self._away_seconds(role, now), default=None)

    def expected_seconds(self, role: str, now: float) -> float:
        """Returns the predicted seconds until the first worker of `role` returns. If an absence
        already exceeds the typical duration, its prediction is half of the absence so far."""
        typical = median(self._past) if self._past else FIRST_GUESS_SECONDS
        left = min(
            [
                typical - away if away < typical else away / 2
                for away in self._away_seconds(role, now)
            ],
            default=typical,
        )
        return min(MOST_SECONDS, max(LEAST_SECONDS, left))

    def _away_seconds(self, role: str, now: float) -> list[float]:
        return [now - since for which, since in self._away.values() if which == role]
