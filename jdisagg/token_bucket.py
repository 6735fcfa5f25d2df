"""Token buckets, which limit a rate and compute when a client may retry. The caller passes the
current time."""

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0


def retry_after(seconds: float) -> float:
    """Clamps a waiting time to a range that is reasonable for clients."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


class Bucket:
    """A token bucket. Its level starts at `full`, rises by `rate` per second up to `full`, and may
    become negative."""

    def __init__(self, full: float, now: float) -> None:
        self._held = full
        self._at = now

    def wait_seconds(self, amount: float, rate: float, full: float, now: float) -> float:
        """Returns the seconds until `amount` is available, or until the bucket is full if `amount`
        exceeds its size. 0 means now. Other values are clamped to a range that is reasonable for
        clients."""
        self._held, self._at = min(full, self._held + (now - self._at) * rate), now
        missing = min(amount, full) - self._held
        return retry_after(missing / rate) if missing > 0 else 0.0

    def take(self, amount: float) -> None:
        self._held -= amount

    def give_back(self, amount: float, full: float) -> None:
        self._held = min(full, self._held + amount)
