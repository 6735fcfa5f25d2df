"""Defines the moments of a hand-off at which a chaos test can hold a worker process, and kill or
stop it there.

`watch_workers` wraps the port methods of the worker classes, and `Moments.watch_pull` the pulls of
a channel. An order names a moment. The next hand-off that reaches this moment reports it and is
held, until it is released or its time is over. Other hand-offs of the process continue. A moment
without an order costs nothing.

    reserved      decode: pages are held, the reply not yet sent        pulling        decode: a block is on its way
    computing     prefill: the call has come                            part inserted  prefill: an acknowledgement has come, not the last
    offered       prefill: the first block is announced                 all inserted   prefill: the last one has come, nothing freed yet
    decoding      decode: tokens beyond the first are about to leave    migrating      decode: a running sequence is offered to another
"""  # noqa: E501

import asyncio
import enum
import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.soak.faults import AroundPull
from jdisagg.messages.ports import (
    HandoffEnd,
    Offer,
    PeerMessage,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    Span,
)
from jdisagg.transfer.channel import Pull, PullTarget


class Moment(enum.Enum):
    RESERVED = "reserved"
    COMPUTING = "computing"
    OFFERED = "offered"
    PULLING = "pulling"
    PART_INSERTED = "part inserted"
    ALL_INSERTED = "all inserted"
    DECODING = "decoding"
    MIGRATING = "migrating"


@dataclass(frozen=True)
class Order:
    """Holds the next hand-off that reaches `moment`, for at most `seconds`."""

    number: int
    moment: Moment
    seconds: float


@dataclass
class _Held:
    order: Order
    until: float
    let_go: threading.Event = field(default_factory=threading.Event)


class Moments:
    """The orders of one process. `report(order, other)` is called when a hand-off reaches an
    order's moment; `other` is the worker on the other side, or "" if it is unknown there.
    Thread-safe."""

    def __init__(self, report: Callable[[Order, str], None]) -> None:
        self._report = report
        self._orders: dict[Moment, Order] = {}
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()

    def order(self, order: Order) -> None:
        with self._lock:
            self._orders[order.moment] = order

    def let_go(self, number: int) -> None:
        """Releases a held hand-off, or withdraws an order whose moment was not reached.
        Idempotent."""
        with self._lock:
            self._orders = {
                moment: order for moment, order in self._orders.items() if order.number != number
            }
            held = self._held.pop(number, None)
        if held is not None:
            held.let_go.set()

    async def reach(self, moment: Moment, other: str = "") -> None:
        held = self._take(moment, other)
        while held is not None and not held.let_go.is_set() and time.monotonic() < held.until:
            await asyncio.sleep(0.005)

    def watch_pull(self, target: PullTarget, pull: Pull) -> Pull:
        held = self._take(Moment.PULLING, target.peer.partition("#")[0])
        return pull if held is None else _HeldPull(pull, held)

    def _take(self, moment: Moment, other: str) -> _Held | None:
        with self._lock:
            order = self._orders.pop(moment, None)
            if order is None:
                return None
            held = self._held[order.number] = _Held(order, time.monotonic() + order.seconds)
        self._report(order, other)
        return held


class _HeldPull(AroundPull):
    def __init__(self, inner: Pull, held: _Held) -> None:
        super().__init__(inner)
        self._hold = held

    def is_ready(self) -> bool:
        return (
            self._hold.let_go.is_set() or time.monotonic() >= self._hold.until
        ) and self._inner.is_ready()


def watch_workers(moments: Moments) -> None:
    """Wraps methods of the worker classes for the life of this process, so that the code that
    assembles workers needs no change."""

    from jdisagg.worker.outgoing_kv import OutgoingKv
    from jdisagg.worker.worker import Worker

    destinations: dict[int, str] = {}
    totals: dict[int, int] = {}
    acknowledged: dict[int, set[int]] = {}

    async def reserved(call: ReserveCall, reservation: Reservation) -> None:
        await moments.reach(Moment.RESERVED)

    async def computing(call: PrefillCall) -> None:
        destinations[call.handoff_id] = call.destination
        await moments.reach(Moment.COMPUTING, call.destination)

    async def forget(call: PrefillCall, reply: PrefillReply) -> None:
        while len(destinations) > 4096:
            for known in (destinations, totals, acknowledged):
                known.pop(next(iter(destinations)), None)

    async def offered(handoff_id: int, attempt: int, message: PeerMessage) -> None:
        other = destinations.get(handoff_id)
        if isinstance(message, HandoffEnd):
            totals[handoff_id] = message.offers
        elif isinstance(message, Offer):
            await moments.reach(Moment.MIGRATING if other is None else Moment.OFFERED, other or "")

    async def inserted(handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        if offer_ids and handoff_id in destinations:
            got = acknowledged.setdefault(handoff_id, set())
            got.update(offer_ids)
            last = len(got) == totals.get(handoff_id)
            await moments.reach(
                Moment.ALL_INSERTED if last else Moment.PART_INSERTED, destinations[handoff_id]
            )

    async def decoding(call: object, span: Span) -> None:
        if span.first_index > 0 and span.token_ids:
            await moments.reach(Moment.DECODING)

    after(Worker, "reserve", reserved)
    before(Worker, "prefill", computing)
    after(Worker, "prefill", forget)
    each(OutgoingKv, "offers", offered)
    one_by_one(OutgoingKv, "acknowledge", inserted)
    each(Worker, "generate", decoding)


def before(owner: type, name: str, what: Callable[..., Awaitable[None]]) -> None:
    """Calls `what(*arguments)` before each call of an async method."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    async def method(self: object, *arguments: object) -> object:
        await what(*arguments)
        return await inner(self, *arguments)

    setattr(owner, name, method)


def one_by_one(owner: type, name: str, what: Callable[..., Awaitable[None]]) -> None:
    """Like `before`, for a method with arguments (id, blocks), with one call per block. A fast
    receiver reports several blocks together, and no moment would lie between them."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    async def method(self: object, number: int, blocks: tuple[int, ...]) -> None:
        for part in [(block,) for block in blocks] or [()]:  # none: it only says that it lives
            await what(number, part)
            await inner(self, number, part)

    setattr(owner, name, method)


def after(owner: type, name: str, what: Callable[..., Awaitable[None]]) -> None:
    """Calls `what(*arguments, result)` after each successful call of an async method."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    async def method(self: object, *arguments: object) -> object:
        result = await inner(self, *arguments)
        await what(*arguments, result)
        return result

    setattr(owner, name, method)


def each(owner: type, name: str, what: Callable[..., Awaitable[None]]) -> None:
    """Calls `what(*arguments, item)` before each item of an async iterator."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    async def method(self: object, *arguments: object) -> AsyncIterator[object]:
        items = inner(self, *arguments)
        try:
            async for item in items:
                await what(*arguments, item)
                yield item
        finally:
            with suppress(AttributeError):
                await items.aclose()

    setattr(owner, name, method)
