"""How much may be used of something that comes back at a rate, and when whoever was refused should
ask again. Instants are arguments."""

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0


def retry_after(seconds: float) -> float:
    """A hint that a client can follow."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


class Bucket:
    """A token bucket: gains `rate` a second and never holds more than `full`, what it begins with;
    may be in debt."""

    def __init__(self, full: float, now: float) -> None:
        self._held = full
        self._at = now

    def wait_seconds(self, amount: float, rate: float, full: float, now: float) -> float:
        """A hint when so much can be taken, or where that is more than it ever holds, when it is
        full; 0: now."""
        self._held, self._at = min(full, self._held + (now - self._at) * rate), now
        missing = min(amount, full) - self._held
        return retry_after(missing / rate) if missing > 0 else 0.0

    def take(self, amount: float) -> None:
        self._held -= amount

    def give_back(self, amount: float, full: float) -> None:
        self._held = min(full, self._held + amount)
