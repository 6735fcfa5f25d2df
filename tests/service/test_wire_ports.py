"""Ports behind the loopback say the same as the ports themselves, errors and early ends included."""

from collections.abc import AsyncIterator

import pytest

from jdisagg.dispatch.ports import (
    Child,
    FirstToken,
    GenerateCall,
    HandoffEnd,
    HandoffSource,
    Offer,
    PeerHello,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    Span,
    SpanEnd,
    WorkerStatus,
)
from jdisagg.errors import HandoffError, IncompatiblePeerError, OverloadedError
from jdisagg.request import Request, SamplingParams, TokenLogprobs
from jdisagg.service.wire_ports import WireDecodeLoopback, WirePeerLoopback, WirePrefillLoopback
from tests.service.doors import STATUS

REQUEST = Request("r", (1, 2, 3), SamplingParams(seed=7, n=2), stop_ids=(9,), deadline_seconds=4.5, tenant="t", priority=-1)
PREFILL = PrefillCall(REQUEST, 2, (Child(0), Child(1, (4, 5))), 77, "decode-0", 16, 3.5)
REPLY = PrefillReply((FirstToken(0, 5, TokenLogprobs(-0.1, ((5, -0.1),))), FirstToken(1, 0)), 0.25, 0.5)
SPANS = (
    Span(0, 0, (5,), (TokenLogprobs(-1.0),), kv_bytes_moved=640),
    Span(0, 1, (6, 9), end=SpanEnd.STOP),
    Span(1, 0, (), end=SpanEnd.PREEMPTED),
)
OFFERS = (Offer(0, 0, 0, 5, 8, 1), HandoffEnd(1, 5, (FirstToken(0, 5),)))
HELLO = PeerHello(1, "decode-0", "f00", "2x(k2x16,v2x16)", "float32", 2)


class Worker:
    """All three ports: notes what it was told, answers with the constants above."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.closed = 0

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        self.told.append(call)
        return REPLY

    async def cancel_prefill(self, handoff_id: int) -> None:
        self.told.append(handoff_id)

    async def reserve(self, call: ReserveCall) -> Reservation:
        self.told.append(call)
        if call.attempt > 1:
            raise OverloadedError("3 wait of at most 3", retry_after_seconds=0.5)
        return Reservation(5, "decode-0", 1, 30.0, 16)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        self.told.append(call)
        try:
            for span in SPANS:
                yield span
            raise HandoffError("offer 3 was withdrawn")
        finally:
            self.closed += 1

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        self.told.append((reservation_id, child))

    async def status(self) -> WorkerStatus:
        return STATUS

    async def hello(self, hello: PeerHello) -> PeerHello:
        if hello.kv_dtype != HELLO.kv_dtype:
            raise IncompatiblePeerError(f"kv_dtype {hello.kv_dtype} is not {HELLO.kv_dtype}")
        return hello

    async def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[Offer | HandoffEnd]:
        self.told.append((handoff_id, attempt))
        try:
            for offer in OFFERS:
                yield offer
        finally:
            self.closed += 1

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        self.told.append((handoff_id, offer_ids))

    async def abort(self, handoff_id: int, reason: str) -> None:
        self.told.append((handoff_id, reason))


async def test_the_prefill_port_round_trips() -> None:
    worker = Worker()
    port = WirePrefillLoopback(worker)
    assert await port.prefill(PREFILL) == REPLY
    await port.cancel_prefill(77)
    assert worker.told == [PREFILL, 77]
    assert await port.status() == STATUS


async def test_the_decode_port_round_trips_with_its_errors() -> None:
    worker = Worker()
    port = WireDecodeLoopback(worker)
    reserve = ReserveCall(REQUEST, 1, (Child(0),), 2.0)
    assert await port.reserve(reserve) == Reservation(5, "decode-0", 1, 30.0, 16)
    with pytest.raises(OverloadedError, match="3 wait") as caught:
        await port.reserve(ReserveCall(REQUEST, 2, (Child(0),), 2.0))
    assert caught.value.retry_after_seconds == 0.5
    call = GenerateCall(5, 1, 9.0, HandoffSource("prefill-0", 77))
    spans = []
    with pytest.raises(HandoffError, match="offer 3"):
        async for span in port.generate(call):
            spans.append(span)
    assert tuple(spans) == SPANS
    await port.cancel(5)
    await port.cancel(5, 0)
    assert worker.told[-3:] == [call, (5, None), (5, 0)]
    assert await port.status() == STATUS


async def test_the_peer_port_round_trips_with_its_errors() -> None:
    worker = Worker()
    port = WirePeerLoopback(worker)
    assert await port.hello(HELLO) == HELLO
    with pytest.raises(IncompatiblePeerError, match="bfloat16"):
        await port.hello(PeerHello(1, "decode-0", "f00", "", "bfloat16", 2))
    assert [offer async for offer in port.offers(77, 2)] == list(OFFERS)
    await port.acknowledge(77, (0, 1))
    await port.abort(77, "deadline")
    assert worker.told == [(77, 2), (77, (0, 1)), (77, "deadline")]


async def test_closing_a_stream_closes_the_inner_ports() -> None:
    worker = Worker()
    spans = WireDecodeLoopback(worker).generate(GenerateCall(5, 1, 9.0))
    offers = WirePeerLoopback(worker).offers(77, 1)
    await anext(spans)
    await anext(offers)
    await spans.aclose()
    await offers.aclose()
    assert worker.closed == 2
