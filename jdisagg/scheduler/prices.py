"""Estimates how long restoring KV from one source takes, compared with computing the same tokens.

Computing takes a measured number of seconds per token. A restore takes a fixed time plus a time per
token. Both are the least-squares line through the measured restores, and recent restores have more
weight. As long as all measured restores have similar lengths, every length is assumed to take the
same time, so that longer restores are tried. Each source of KV has its own prices. Pure."""

PROBE = 32  # one in this many restores that look too expensive is tried anyway
WEIGHT = 0.2  # of the latest measurement in the mean seconds per computed token
DECAY = 0.9  # factor on the weight of all earlier restores, at each new one


class Prices:
    """The measured costs of one source.

    Args:
        always: Whether every restore is worthwhile and a prompt waits for its end, without
            comparison.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._declined = 0
        self._computed: float | None = None
        # decayed sums over restores: count, tokens, seconds, tokens squared, tokens x seconds
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def computed_in(self, tokens: int, seconds: float) -> None:
        """Records that computing `tokens` tokens of a prompt took `seconds`."""
        if tokens > 0:
            now, before = seconds / tokens, self._computed
            self._computed = now if before is None else before + WEIGHT * (now - before)

    def moved_in(self, tokens: int, seconds: float) -> None:
        """Records a complete or failed restore of `tokens` tokens. Ignores restores of no token."""
        if tokens < 1:
            return
        sums = self._count, self._x, self._y, self._xx, self._xy
        new = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
        self._count, self._x, self._y, self._xx, self._xy = (
            DECAY * before + one for before, one in zip(sums, new, strict=True)
        )

    def seconds(self, tokens: int) -> float | None:
        """Returns the estimated duration of a restore, or None before the first measurement."""
        if not self._count:
            return None
        spread = self._count * self._xx - self._x * self._x
        if spread <= 1e-6 * self._x * self._x:
            return self._y / self._count
        slope = max(0.0, (self._count * self._xy - self._x * self._y) / spread)
        floor = (self._y - slope * self._x) / self._count
        return floor + slope * tokens if floor >= 0 else tokens * self._y / self._x

    def worth(self, moved_tokens: int, computed_tokens: int) -> bool:
        """Returns whether a restore is expected to end sooner than computing. Returns True while
        there are no measurements, and once in `PROBE` calls for restores that look too expensive.

        Args:
            moved_tokens: Tokens that the source has to move.
            computed_tokens: Tokens that the mesh would compute meanwhile.
        """
        if moved_tokens < 1:
            return False
        patience, seconds = self.patience_seconds(computed_tokens), self.seconds(moved_tokens)
        if patience is None or seconds is None or seconds < patience:
            return True
        self._declined += 1
        return self._declined % PROBE == 0

    def saving(self, moved_tokens: int, computed_tokens: int) -> float:
        """Returns the seconds that a restore saves, for comparison with other sources of the same
        worker. An unmeasured restore is assumed to take no time. If `patience_seconds` returns
        None, the result is the number of tokens."""
        patience = self.patience_seconds(computed_tokens)
        if patience is None:
            return computed_tokens
        return patience - (self.seconds(moved_tokens) or 0.0)

    def patience_seconds(self, computed_tokens: int) -> float | None:
        """Returns how long a prompt waits for a restore: the time of computing the same tokens.
        Returns None for no limit, if that time is unmeasured or with `always`."""
        if self._always or self._computed is None:
            return None
        return computed_tokens * self._computed
