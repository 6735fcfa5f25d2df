"""Token buckets, which limit a rate and give retry hints. The current time is an argument."""

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0


def retry_after(seconds: float) -> float:
    """Clamps a wait to a range that clients can follow."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


class Bucket:
    """A token bucket that starts at `full`, gains `rate` per second up to `full`, and may go into
    debt."""

    def __init__(self, full: float, now: float) -> None:
        self._held = full
        self._at = now

    def wait_seconds(self, amount: float, rate: float, full: float, now: float) -> float:
        """Returns the seconds until `amount` is available, clamped to a range for clients. If
        `amount` exceeds the bucket, until it is full. 0 means now."""
        self._held, self._at = min(full, self._held + (now - self._at) * rate), now
        missing = min(amount, full) - self._held
        return retry_after(missing / rate) if missing > 0 else 0.0

    def take(self, amount: float) -> None:
        self._held -= amount

    def give_back(self, amount: float, full: float) -> None:
        self._held = min(full, self._held + amount)
