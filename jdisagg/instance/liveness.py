"""When silence means death: a watch that counts only silence that it was awake to hear.

A process that was itself held up (a long collection, a stopped container) would find every other
silent when it wakes; so each look counts at most twice the time between looks. Pure: time is an
argument."""

from jdisagg.timeouts import DEFAULT_TIMEOUTS


class SilenceWatch:
    """`heard` on every message, `look` every `look_seconds`."""

    def __init__(
        self, now: float, look_seconds: float = DEFAULT_TIMEOUTS.instance.look_seconds
    ) -> None:
        self._look_seconds = look_seconds
        self._looked = now
        self.silent_seconds = 0.0

    def heard(self) -> None:
        self.silent_seconds = 0.0

    def look(self, now: float) -> float:
        """The seconds of silence so far."""
        self.silent_seconds += min(now - self._looked, 2 * self._look_seconds)
        self._looked = now
        return self.silent_seconds
