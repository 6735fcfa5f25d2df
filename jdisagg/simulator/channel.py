"""Simulates KV transfers: the published KV blocks, and the duration of pulls that share links.

For each kind of link, a worker has one outgoing and one incoming `Way`. The bandwidth of a `Way` is
the sum over the links of the worker's devices, and concurrent pulls share it equally. A pull's rate
is the lesser of its shares at the sender and at the receiver, and at most the bandwidth of one dp
rank's links.

Invariant: the sum of the rates of the pulls of a `Way` never exceeds its bandwidth."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from jdisagg.costs.hardware import Link


@dataclass(slots=True, eq=False)
class Way:
    """All links of one kind (such as NVLink) of one worker, in one direction.

    Attributes:
        slowed: Factor on the bandwidth. It is below 1 during an injected fault.
    """

    bytes_per_second: float
    flows: "dict[_Flow, None]" = field(default_factory=dict)
    moved_bytes: float = 0.0
    slowed: float = 1.0

    @property
    def share(self) -> float:
        return self.bytes_per_second * self.slowed / max(1, len(self.flows))


@dataclass(slots=True, eq=False)
class _Flow:
    ways: tuple[Way, ...]
    left_bytes: float
    most: float
    at: float
    done: Callable[[], None]
    rate: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def fair_rate(self) -> float:
        slowest = min([way.slowed for way in self.ways])
        return min(self.most * slowest, *[way.share for way in self.ways])


@dataclass(slots=True)
class SimulatedOffer:
    """A published block: the KV of `tokens` tokens, which worker `owner` computes from time
    `begins_at` to `ready_at`."""

    owner: str
    tokens: int
    begins_at: float
    ready_at: float


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """A worker as an endpoint of transfers.

    Attributes:
      lanes: Number of devices of one dp rank, over which the KV of a sequence is sharded; 0 means
        all devices.
    """

    place: str
    links: int
    lanes: int = 0


class SimulatedChannel:
    """Holds the published KV blocks and simulates their pulls over shared links.

    Attributes:
      stalled: Names of workers whose pulls never end, because of an injected fault.
    """

    def __init__(self, link: Callable[[str, str], Link], overlap: int = 2) -> None:
        self.offered: dict[int, SimulatedOffer] = {}
        self.ends: dict[str, ChannelEnd] = {}
        self.gone: set[str] = set()
        self.stalled: set[str] = set()
        self._link = link
        self._overlap = overlap
        self._ways: dict[tuple[str, str, bool], Way] = {}
        self._slowed: dict[str, float] = {}
        self._links: dict[tuple[str, str], tuple[Link, tuple[Way, ...], float]] = {}

    def lose(self, owner: str) -> None:
        self.gone.add(owner)
        self.offered = {
            offer_id: offered
            for offer_id, offered in self.offered.items()
            if offered.owner != owner
        }

    def slow(self, worker: str, factor: float) -> None:
        self._slowed[worker] = factor
        for (name, _, _), way in self._ways.items():
            if name == worker:
                way.slowed = factor
                self._share_again((way,))

    def moved_bytes(self, worker: str) -> float:
        return sum(
            way.moved_bytes
            for (name, _, outward), way in self._ways.items()
            if name == worker and outward
        )

    def pull(
        self, offered: SimulatedOffer, receiver: str, size_bytes: float, done: Callable[[], None]
    ) -> None:
        """Calls `done` when the whole block has arrived, or never if one of the workers is in
        `stalled`."""
        loop = asyncio.get_running_loop()
        if offered.owner in self.stalled or receiver in self.stalled:
            return
        link, ways, most = self._between(offered.owner, receiver)
        now, ready_at = loop.time(), offered.ready_at
        tail = size_bytes / self._overlap
        head_at = offered.begins_at + (ready_at - offered.begins_at) / self._overlap

        def arrived() -> None:
            loop.call_later(link.latency_seconds, done)

        if self._overlap == 1 or now >= ready_at:
            loop.call_at(max(now, ready_at), self._flow, ways, most, size_bytes, arrived)
            return

        def then_tail() -> None:
            if loop.time() >= ready_at:
                self._flow(ways, most, tail, arrived)
            else:
                loop.call_at(ready_at, self._flow, ways, most, tail, arrived)

        loop.call_at(max(now, head_at), self._flow, ways, most, size_bytes - tail, then_tail)

    def _flow(
        self, ways: tuple[Way, ...], most: float, size_bytes: float, done: Callable[[], None]
    ) -> None:
        flow = _Flow(ways, size_bytes, most, asyncio.get_running_loop().time(), done)
        for way in ways:
            way.flows[flow] = None
            way.moved_bytes += size_bytes
        self._share_again(ways)

    def _share_again(self, ways: tuple[Way, ...]) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for flow in dict.fromkeys(flow for way in ways for flow in way.flows):
            rate = flow.fair_rate()
            if rate == flow.rate:
                continue
            flow.left_bytes = max(0.0, flow.left_bytes - flow.rate * (now - flow.at))
            flow.at, flow.rate = now, rate
            if flow.timer is not None:
                flow.timer.cancel()
            flow.timer = (
                loop.call_at(now + flow.left_bytes / rate, self._end, flow) if rate > 0 else None
            )

    def _end(self, flow: _Flow) -> None:
        for way in flow.ways:
            del way.flows[flow]
        flow.timer = None
        self._share_again(flow.ways)
        flow.done()

    def _between(self, sender: str, receiver: str) -> tuple[Link, tuple[Way, ...], float]:
        known = self._links.get((sender, receiver))
        if known is None:
            ends = self.ends[sender], self.ends[receiver]
            link = self._link(ends[0].place, ends[1].place)
            most = (
                link.bytes_per_second
                * link.efficiency
                * min(end.lanes or end.links for end in ends)
            )
            ways = self._way(sender, link, True), self._way(receiver, link, False)
            known = self._links[sender, receiver] = link, ways, most
        return known

    def _way(self, worker: str, link: Link, outward: bool) -> Way:
        key = (worker, link.name, outward)
        if key not in self._ways:
            width = link.bytes_per_second * link.efficiency * self.ends[worker].links
            self._ways[key] = Way(width, slowed=self._slowed.get(worker, 1.0))
        return self._ways[key]
