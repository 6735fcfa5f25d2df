"""Simulates the host memory of a mesh: which KV blocks it holds, and when copies end.

Each dp rank copies over the links between its devices and the host. Copies in one direction run one
after the other; the two directions are independent, and the mesh computes meanwhile."""

from dataclasses import dataclass

from jdisagg.costs.hardware import Link


@dataclass(frozen=True, slots=True)
class HostLink:
    """The links between host memory and one dp rank of `devices` devices. `bytes_per_token`: KV
    bytes of one token, summed over the devices of the rank."""

    link: Link
    devices: int
    bytes_per_token: float

    def seconds(self, tokens: int) -> float:
        speed = self.link.bytes_per_second * self.link.efficiency * self.devices
        return self.link.latency_seconds + tokens * self.bytes_per_token / speed


class HostMemory:
    """Tracks which KV blocks of one mesh, with `ranks` dp ranks, are in host memory, and until when
    copies to and from host memory run."""

    def __init__(self, link: HostLink, ranks: int) -> None:
        self._link = link
        self._tokens: dict[int, int] = {}  # by offer
        self._out = [0.0] * ranks
        self._back = [0.0] * ranks

    def __len__(self) -> int:
        return len(self._tokens)

    def copied_out(self, offer_id: int, rank: int, tokens: int, now: float) -> float:
        self._tokens[offer_id] = tokens
        self._out[rank] = max(now, self._out[rank]) + self._link.seconds(tokens)
        return self._out[rank]

    def copied_back(self, offer_id: int, rank: int, now: float) -> float | None:
        """Returns None if the block is not in host memory."""
        tokens = self._tokens.get(offer_id)
        if tokens is None:
            return None
        self._back[rank] = max(now, self._back[rank]) + self._link.seconds(tokens)
        return self._back[rank]

    def release(self, offer_ids: tuple[int, ...]) -> None:
        for offer_id in offer_ids:
            self._tokens.pop(offer_id, None)
