"""Token buckets, which limit a rate and compute when a client may retry. The caller passes the
current time."""

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0


def retry_after(seconds: float) -> float:
    """Clamps a waiting time to a range that is reasonable for clients."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


class Bucket:
    """A token bucket. It starts full and refills by `rate` per second. Its level may become
    negative. Amounts may be taken before the first call of `wait_seconds`, which gives rate and
    size."""

    def __init__(self, now: float) -> None:
        self._taken = 0.0  # amount that is missing until the bucket is full
        self._at = now

    def wait_seconds(self, amount: float, rate: float, full: float, now: float) -> float:
        """Returns the seconds until `amount` is available, or until the bucket is full if `amount`
        exceeds its size.

        Returns:
            0 if the amount is available now. Other values are clamped (`retry_after`), because
                clients receive them as retry times.
        """
        self._taken, self._at = max(0.0, self._taken - (now - self._at) * rate), now
        missing = min(amount, full) - (full - self._taken)
        return retry_after(missing / rate) if missing > 0 else 0.0

    def take(self, amount: float) -> None:
        """Takes an amount, or puts a negative one back."""
        self._taken = max(0.0, self._taken + amount)
