"""The host memory of a simulated mesh: which blocks lie there, and when copies out and back end.

Each dp rank has the links of its devices to the host, one way out and one way back. Copies of one
way follow one another; they run beside the mesh's steps. What a block takes is its KV as the pages
hold it. Knows no prefixes: which blocks go and come is the live tier's matter
(`worker/host_tier.py`)."""

from dataclasses import dataclass

from jdisagg.costs.hardware import Link


@dataclass(frozen=True, slots=True)
class HostLink:
    """Of one dp rank: `devices` links of one kind, and the bytes of a token's KV on all of them
    together."""

    link: Link
    devices: int
    bytes_per_token: float

    def seconds(self, tokens: int) -> float:
        """Of copying so many tokens' KV, either way."""
        speed = self.link.bytes_per_second * self.link.efficiency * self.devices
        return self.link.latency_seconds + tokens * self.bytes_per_token / speed


class HostMemory:
    """Of one mesh with `ranks` dp ranks."""

    def __init__(self, link: HostLink, ranks: int) -> None:
        self._link = link
        self._tokens: dict[int, int] = {}  # by offer
        self._out = [0.0] * ranks
        self._back = [0.0] * ranks

    def __len__(self) -> int:
        """Pieces of blocks."""
        return len(self._tokens)

    def copied_out(self, offer_id: int, rank: int, tokens: int, now: float) -> float:
        """When a piece that leaves its pages from `now` on is here."""
        self._tokens[offer_id] = tokens
        self._out[rank] = max(now, self._out[rank]) + self._link.seconds(tokens)
        return self._out[rank]

    def copied_back(self, offer_id: int, rank: int, now: float) -> float | None:
        """When a piece is back on the device; None: it is not here."""
        tokens = self._tokens.get(offer_id)
        if tokens is None:
            return None
        self._back[rank] = max(now, self._back[rank]) + self._link.seconds(tokens)
        return self._back[rank]

    def release(self, offer_ids: tuple[int, ...]) -> None:
        for offer_id in offer_ids:
            self._tokens.pop(offer_id, None)
