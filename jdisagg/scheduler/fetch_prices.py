"""Whether blocks that another worker keeps are better fetched than computed, and for how long a
prompt waits for them, by what was measured here.

Computing costs so much a token. A fetch costs a line, a share that is the same for any (both meshes
take it between their own commands) and so much a token: the least squares of what fetches took, of
which the latest count most. While nothing tells the two apart a fetch is taken to cost the same
whatever its length, so that longer ones are tried. What lies in front of a prompt passes while it
is fetched, and costs nothing. Pure."""

from jdisagg.scheduler.host_blocks import PROBE, WEIGHT

MOST_FETCHES = 4  # prompts of a worker
# Full ones that a holder has offered and that are not fetched.
MOST_CHUNKS = 4
MOST_CHUNKS_OF_DECODE = 1  # room that sequences might have
DECAY = 0.95  # of what was measured, at each measurement


class FetchPrices:
    """`always`: nothing is compared."""

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._declined = 0
        self._computed: float | None = None
        # decayed: how many, tokens, seconds, tokens squared, tokens x seconds
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def computed_in(self, tokens: int, seconds: float) -> None:
        """So many tokens of a prompt were computed."""
        if tokens > 0:
            now, before = seconds / tokens, self._computed
            self._computed = now if before is None else before + WEIGHT * (now - before)

    def fetched_in(self, tokens: int, seconds: float) -> None:
        """So many were fetched, or tried to be."""
        sums = self._count, self._x, self._y, self._xx, self._xy
        new = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
        self._count, self._x, self._y, self._xx, self._xy = (
            DECAY * before + one for before, one in zip(sums, new, strict=True)
        )

    def fetch_seconds(self, tokens: int) -> float | None:
        """That fetching so many takes; None: nobody knows."""
        if not self._count:
            return None
        spread = self._count * self._xx - self._x * self._x
        if spread <= 1e-6 * self._x * self._x:
            return self._y / self._count
        slope = max(0.0, (self._count * self._xy - self._x * self._y) / spread)
        first = (self._y - slope * self._x) / self._count
        return first + slope * tokens if first >= 0 else tokens * self._xy / self._xx

    def worth(self, tokens: int, ahead_tokens: int = 0) -> bool:
        """Whether so many tokens are better fetched than computed, behind `ahead_tokens` of other
        prompts. What nobody has measured yet, and now and then what seemed too dear, is tried."""
        if tokens < 1:
            return False
        patience, seconds = self.patience_seconds(tokens, ahead_tokens), self.fetch_seconds(tokens)
        if patience is None or seconds is None or seconds < patience:
            return True
        self._declined += 1
        return self._declined % PROBE == 0

    def patience_seconds(self, tokens: int, ahead_tokens: int = 0) -> float | None:
        """For how long a prompt waits for so many tokens: until they could be computed. None:
        nobody knows how long that is, or nothing is compared."""
        if self._always or self._computed is None:
            return None
        return (tokens + ahead_tokens) * self._computed
