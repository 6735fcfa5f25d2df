"""When things happened to one request, and the `Timings` that follow. Knows instants, not clocks."""

from dataclasses import dataclass, field

from jdisagg.request import Timings


@dataclass(slots=True)
class _Tokens:
    first_at: float
    latest_at: float
    second_at: float | None = None
    count: int = 0


@dataclass(slots=True)
class Stopwatch:
    """Instants on one local clock. `queue_seconds` is what was spent waiting at the router, for pages and for a place in a prefill
    batch. `first_token_at`: of any child; also where it was the end of an answer that is empty."""

    started_at: float
    first_token_at: float | None = None
    queue_seconds: float = 0.0
    kv_bytes_moved: int = 0
    exposed_transfer_seconds: float = 0.0
    preemptions: int = 0
    _children: dict[int, _Tokens] = field(default_factory=dict)

    def tokens(self, child: int, count: int, now: float) -> None:
        """`count` tokens of `child` came, beside the one that may have ended it."""
        if self.first_token_at is None:
            self.first_token_at = now
        if not count:
            return
        seen = self._children.setdefault(child, _Tokens(now, now))
        if seen.second_at is None and seen.count + count > 1:
            seen.second_at = now
        seen.latest_at = now
        seen.count += count

    def timings(self, now: float) -> Timings:
        first = self.first_token_at
        followers = sum(seen.count - 1 for seen in self._children.values())
        decoding = sum(seen.latest_at - seen.first_at for seen in self._children.values())
        gaps = [seen.second_at - seen.first_at for seen in self._children.values() if seen.second_at is not None]
        return Timings(
            queue_seconds=self.queue_seconds,
            ttft_seconds=0.0 if first is None else first - self.started_at,
            tpot_seconds=decoding / followers if followers else 0.0,
            handoff_gap_seconds=max(gaps, default=0.0),
            total_seconds=now - self.started_at,
            kv_bytes_moved=self.kv_bytes_moved,
            preemptions=self.preemptions,
            exposed_transfer_seconds=self.exposed_transfer_seconds,
        )
