"""A worker that notes its calls and answers with constants: all three ports."""

from collections.abc import AsyncIterator

from jdisagg.errors import HandoffError, IncompatiblePeerError, OverloadedError
from jdisagg.messages.ports import (
    Child,
    FirstToken,
    GenerateCall,
    HandoffEnd,
    Offer,
    PeerHello,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    SessionCall,
    SessionReport,
    Span,
    SpanEnd,
)
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import Request, SamplingParams, TokenLogprobs
from tests.service.doors import STATUS

REQUEST = Request(
    "r",
    (1, 2, 3),
    SamplingParams(seed=7, n=2),
    stop_ids=(9,),
    deadline_seconds=4.5,
    tenant="t",
    priority=-1,
)
PREFILL = PrefillCall(REQUEST, 2, (Child(0), Child(1, (4, 5))), 77, "decode-0", 16, 3.5)
REPLY = PrefillReply(
    (FirstToken(0, 5, TokenLogprobs(-0.1, ((5, -0.1),))), FirstToken(1, 0)), 0.25, 0.5
)
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

    async def reset_cache(self) -> int:
        self.told.append("reset_cache")
        return 3

    async def session(self, call: SessionCall) -> SessionReport | None:
        self.told.append(call)
        return None

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

    async def resume_source(self, call: ResumeCall) -> int | None:
        self.told.append(call)
        return None

    async def cancel(
        self, reservation_id: int, child: int | None = None, awaited: bool = False
    ) -> None:
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
