"""Estimates whether restoring cached KV is faster than the alternative: recomputing the tokens, or
receiving their KV from a prefill worker. The cached KV is in host memory, on disk or on another
worker.

The time of a restore is estimated by a `MovePrice`. As long as all measured restores had similar
lengths, any length is assumed to take the same time, so that longer restores are tried. Does no
I/O."""

from typing import Literal

PROBE = 32  # one in this many restores that seem too slow is tried anyway
WEIGHT = 0.2  # weight of the latest measurement in the mean seconds per token
DECAY = 0.9  # factor by which each restore reduces the weight of earlier ones

Instead = Literal["compute", "receive"]
"""The alternative to a restore: computing the tokens, or receiving KV from a prefill worker."""


class MovePrice:
    """Estimates the time of a copy or transfer (a move) as a latency plus a time per unit of size
    (tokens or bytes). Both are fitted to the measured moves by least squares. Recent moves have
    more weight."""

    def __init__(self) -> None:
        # decayed sums over moves: count, size, seconds, size squared, size x seconds
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, size: int, seconds: float) -> None:
        self._count = DECAY * self._count + 1.0
        self._x = DECAY * self._x + size
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + size * size
        self._xy = DECAY * self._xy + size * seconds

    @property
    def alike(self) -> bool:
        """Whether all moves had similar sizes, so that the time per unit is unknown."""
        spread = self._count * self._xx - self._x * self._x
        return spread <= 1e-6 * self._x * self._x

    @property
    def per_unit(self) -> float:
        return self._y / self._x

    def line(self) -> tuple[float, float] | None:
        """Returns (latency in seconds, seconds per unit), or None before the first move. If all
        moves had similar sizes, the time per unit is 0."""
        if not self._count:
            return None
        if self.alike:
            return self._y / self._count, 0.0
        spread = self._count * self._xx - self._x * self._x
        slope = max(0.0, (self._count * self._xy - self._x * self._y) / spread)
        floor = (self._y - slope * self._x) / self._count
        return (floor, slope) if floor >= 0 else (0.0, self._y / self._x)


class Prices:
    """The measured times of restores from one source, and of their alternatives.

    Args:
        always: Whether every restore counts as worthwhile. A prompt then waits for a restore
            without a time limit.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._declined = 0
        self._spared: dict[Instead, float] = {}  # seconds per token
        self._moves = MovePrice()

    def computed_in(self, tokens: int, seconds: float, instead: Instead = "compute") -> None:
        if tokens > 0:
            now = seconds / tokens
            before = self._spared.get(instead, now)
            self._spared[instead] = before + WEIGHT * (now - before)

    def moved_in(self, tokens: int, seconds: float) -> None:
        if tokens >= 1:
            self._moves.add(tokens, seconds)

    def seconds(self, tokens: int) -> float | None:
        line = self._moves.line()
        return None if line is None else line[0] + line[1] * tokens

    def worth(self, moved_tokens: int, computed_tokens: int, instead: Instead = "compute") -> bool:
        """Returns whether a restore is expected to be faster than the alternative `instead`. Also
        returns True while a time is not measured, and for one in `PROBE` restores that are expected
        to be slower, so that the times of restores stay up to date."""
        patience = self.patience_seconds(computed_tokens, instead)
        if moved_tokens < 1 or patience == 0:
            return False
        seconds = self.seconds(moved_tokens)
        if patience is None or seconds is None or seconds < patience:
            return True
        self._declined += 1
        return self._declined % PROBE == 0

    def saving(
        self, moved_tokens: int, computed_tokens: int, instead: Instead = "compute"
    ) -> float:
        """Returns the expected seconds that a restore saves, by which the sources of a worker can
        be compared. A restore without measurement is assumed to take no time. If `patience_seconds`
        returns None, the result is `computed_tokens`, which ranks sources by length."""
        patience = self.patience_seconds(computed_tokens, instead)
        if patience is None:
            return computed_tokens
        return patience - (self.seconds(moved_tokens) or 0.0)

    def patience_seconds(self, computed_tokens: int, instead: Instead = "compute") -> float | None:
        """Returns the longest time in seconds that a prompt waits for a restore of
        `computed_tokens` tokens. It is the expected time of the alternative `instead` for the same
        tokens. Returns None, which means no limit, if the alternative is not measured yet or if
        `always` is set."""
        spared = self._spared.get(instead)
        return None if self._always or spared is None else computed_tokens * spared
