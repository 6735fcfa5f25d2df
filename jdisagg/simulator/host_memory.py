"""Host memory of a simulated mesh: the blocks that it holds, and the end times of copies.

Each dp rank uses its devices' links to the host, with separate directions. Copies in one direction
run one after the other, in parallel to the mesh's steps. A block has the size of its KV in pages.
The live host tier (`worker/`) decides which blocks are copied."""

from dataclasses import dataclass

from jdisagg.costs.hardware import Link


@dataclass(frozen=True, slots=True)
class HostLink:
    """The host links of one dp rank: `devices` links of one kind. `bytes_per_token`: KV bytes of a
    token over all devices of the rank."""

    link: Link
    devices: int
    bytes_per_token: float

    def seconds(self, tokens: int) -> float:
        """Returns the seconds to copy the KV of `tokens` tokens in one direction."""
        speed = self.link.bytes_per_second * self.link.efficiency * self.devices
        return self.link.latency_seconds + tokens * self.bytes_per_token / speed


class HostMemory:
    """The host memory of one mesh with `ranks` dp ranks."""

    def __init__(self, link: HostLink, ranks: int) -> None:
        self._link = link
        self._tokens: dict[int, int] = {}  # by offer
        self._out = [0.0] * ranks
        self._back = [0.0] * ranks

    def __len__(self) -> int:
        return len(self._tokens)

    def copied_out(self, offer_id: int, rank: int, tokens: int, now: float) -> float:
        """Records a copy to the host that is requested at `now`; returns the copy's end time."""
        self._tokens[offer_id] = tokens
        self._out[rank] = max(now, self._out[rank]) + self._link.seconds(tokens)
        return self._out[rank]

    def copied_back(self, offer_id: int, rank: int, now: float) -> float | None:
        """Returns the end time of a copy to the device, or None if the host lacks the block."""
        tokens = self._tokens.get(offer_id)
        if tokens is None:
            return None
        self._back[rank] = max(now, self._back[rank]) + self._link.seconds(tokens)
        return self._back[rank]

    def release(self, offer_ids: tuple[int, ...]) -> None:
        for offer_id in offer_ids:
            self._tokens.pop(offer_id, None)
