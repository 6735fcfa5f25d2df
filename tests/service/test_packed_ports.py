"""Ports behind their bytes say the same as the ports themselves, errors and early ends included."""

import pytest

from jdisagg.errors import HandoffError, IncompatiblePeerError, OverloadedError
from jdisagg.messages.ports import (
    Child,
    DecodePort,
    GenerateCall,
    HandoffSource,
    PeerHello,
    PeerPort,
    PrefillPort,
    Reservation,
    ReserveCall,
)
from tests.fakes.packed_ports import packed
from tests.service.doors import STATUS
from tests.service.port_worker import HELLO, OFFERS, PREFILL, REPLY, REQUEST, SPANS, Worker


async def test_the_prefill_port_round_trips() -> None:
    worker = Worker()
    port = packed(PrefillPort, worker)
    assert await port.prefill(PREFILL) == REPLY
    await port.cancel_prefill(77)
    assert worker.told == [PREFILL, 77]
    assert await port.status() == STATUS


async def test_the_decode_port_round_trips_with_its_errors() -> None:
    worker = Worker()
    port = packed(DecodePort, worker)
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
    port = packed(PeerPort, worker)
    assert await port.hello(HELLO) == HELLO
    with pytest.raises(IncompatiblePeerError, match="bfloat16"):
        await port.hello(PeerHello(1, "decode-0", "f00", "", "bfloat16", 2))
    assert [offer async for offer in port.offers(77, 2)] == list(OFFERS)
    await port.acknowledge(77, (0, 1))
    await port.abort(77, "deadline")
    assert worker.told == [(77, 2), (77, (0, 1)), (77, "deadline")]


async def test_closing_a_stream_closes_the_inner_ports() -> None:
    worker = Worker()
    spans = packed(DecodePort, worker).generate(GenerateCall(5, 1, 9.0))
    offers = packed(PeerPort, worker).offers(77, 1)
    await anext(spans)
    await anext(offers)
    await spans.aclose()
    await offers.aclose()
    assert worker.closed == 2
