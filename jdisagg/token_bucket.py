"""Token buckets, which limit a rate and compute when a client may retry. The caller passes the
current time."""

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0


def retry_after(seconds: float) -> float:
    """Clamps a waiting time to a range that is reasonable for clients."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


class Bucket:
    """A token bucket. It starts full, refills by `rate` per second, and its level may become
    negative. Amounts may be taken before its rate and size are known."""

    def __init__(self, now: float) -> None:
        self._taken = 0.0  # what is missing until the bucket is full
        self._at = now

    def wait_seconds(self, amount: float, rate: float, full: float, now: float) -> float:
        """Returns the seconds until `amount` is available, or until the bucket is full if `amount`
        exceeds its size. 0 means now. Other values are clamped to a range that is reasonable for
        clients."""
        self._taken, self._at = max(0.0, self._taken - (now - self._at) * rate), now
        missing = min(amount, full) - (full - self._taken)
        return retry_after(missing / rate) if missing > 0 else 0.0

    def take(self, amount: float) -> None:
        """Takes an amount, or puts a negative one back."""
        self._taken = max(0.0, self._taken + amount)
