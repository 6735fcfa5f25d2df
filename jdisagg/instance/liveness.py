"""Measures the time since the last message of another process, without periods in which this
process itself was paused.

After a long garbage collection or a pause of the container, every other process would seem silent.
Each call of `look` therefore adds at most twice the planned time between calls."""

from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS


class SilenceWatch:
    """Measures the time since the last message of one process. Call `heard` at every message, and
    `look` every `look_seconds`."""

    def __init__(
        self, now: float, look_seconds: float = DEFAULT_TIMEOUTS.instance.look_seconds
    ) -> None:
        self._look_seconds = look_seconds
        self._looked = now
        self.silent_seconds = 0.0

    def heard(self) -> None:
        self.silent_seconds = 0.0

    def look(self, now: float) -> float:
        self.silent_seconds += min(now - self._looked, 2 * self._look_seconds)
        self._looked = now
        return self.silent_seconds
