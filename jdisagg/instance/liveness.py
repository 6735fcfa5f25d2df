"""Measures how long another process has been silent while this process was running.

After a long garbage collection or a stopped container every other process would seem silent. Each
`look` therefore adds at most twice the planned time between looks. Pure: time is an argument."""

from jdisagg.timeouts import DEFAULT_TIMEOUTS


class SilenceWatch:
    """Silence of one process. Call `heard` on every message, `look` every `look_seconds`."""

    def __init__(
        self, now: float, look_seconds: float = DEFAULT_TIMEOUTS.instance.look_seconds
    ) -> None:
        self._look_seconds = look_seconds
        self._looked = now
        self.silent_seconds = 0.0

    def heard(self) -> None:
        self.silent_seconds = 0.0

    def look(self, now: float) -> float:
        """Returns the seconds of silence so far."""
        self.silent_seconds += min(now - self._looked, 2 * self._look_seconds)
        self._looked = now
        return self.silent_seconds
