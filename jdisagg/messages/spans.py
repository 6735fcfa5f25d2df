"""The spans of all sequences that one process started on a worker, as one stream: what goes over a
connection in place of `DecodePort.reserve` and `DecodePort.generate`."""

from collections.abc import AsyncIterator
from typing import Protocol

from jdisagg.messages.ports import GenerateCall, Reservation, ReserveCall, Span
from jdisagg.plain import Message


class WireStatus(Message, frozen=True):
    """A gRPC status: the code's name, its message, its trailing metadata."""

    code: str
    details: str
    metadata: tuple[tuple[str, str], ...] = ()


class ReservationSpans(Message, frozen=True):
    """What came of one reservation since the last batch. Nothing follows once it has `ended`, or
    where there is an `error`."""

    reservation_id: int
    spans: tuple[Span, ...] = ()
    ended: bool = False
    error: WireStatus | None = None


class SpanBatch(Message, frozen=True):
    """The first of a session is empty: the session is open."""

    reservations: tuple[ReservationSpans, ...] = ()


class SpanSessionPort(Protocol):
    """Sessions are named by random numbers of their callers. A session lives as long as its
    stream: then all that it reserved and started is cancelled."""

    async def reserve_in(self, session_id: int, call: ReserveCall) -> Reservation:
        """As `DecodePort.reserve`; the reservation belongs to the session."""
        ...

    async def start(self, session_id: int, call: GenerateCall) -> None:
        """As `DecodePort.generate`; the spans, and an error too, go to the session's stream."""
        ...

    def spans(self, session_id: int) -> AsyncIterator[SpanBatch]: ...
