"""Decides when silence means death. It counts only silence while this process itself was running.

A process that was held up (a long collection, a stopped container) would find every other process
silent when it resumes, so each look counts at most twice the time between looks. Pure: time is an
argument."""

from jdisagg.timeouts import DEFAULT_TIMEOUTS


class SilenceWatch:
    """Call `heard` on every message and `look` every `look_seconds`."""

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
