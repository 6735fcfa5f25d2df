"""When silence means death: the times of an instance, and a watch that counts only silence that it
was awake to hear.

A process that was itself held up (a long collection, a stopped container) would find every other
silent when it wakes; so each look counts at most twice the time between looks. Pure: time is an
argument."""

from dataclasses import dataclass

LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class InstanceTiming:
    """`silence_seconds` holds once the instance runs; while processes load and compile,
    `starting_silence_seconds`."""

    beat_seconds: float = 0.5
    silence_seconds: float = 2.0
    starting_silence_seconds: float = 600.0


class SilenceWatch:
    """`heard` on every message, `look` every LOOK_SECONDS."""

    def __init__(self, now: float) -> None:
        self._looked = now
        self.silent_seconds = 0.0

    def heard(self) -> None:
        self.silent_seconds = 0.0

    def look(self, now: float) -> float:
        """The seconds of silence so far."""
        self.silent_seconds += min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        return self.silent_seconds
