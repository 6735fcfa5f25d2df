"""Sessions: one stream from a worker to a calling process, with the spans of all sequences that
this process started. Connections use sessions in place of `DecodePort.reserve` and
`DecodePort.generate`."""

from collections.abc import AsyncIterator
from typing import Protocol

from jdisagg.messages.ports import GenerateCall, Reservation, ReserveCall, Span
from jdisagg.plain import Message


class WireStatus(Message, frozen=True):
    """A gRPC status: name of the code, message and trailing metadata."""

    code: str
    details: str
    metadata: tuple[tuple[str, str], ...] = ()


class ReservationSpans(Message, frozen=True):
    """Spans of one reservation since the last batch. After `ended` or `error` no more follow."""

    reservation_id: int
    spans: tuple[Span, ...] = ()
    ended: bool = False
    error: WireStatus | None = None


class SpanBatch(Message, frozen=True):
    """One message of a session's stream. An empty first batch reports that the session is open."""

    reservations: tuple[ReservationSpans, ...] = ()


class SpanSessionPort(Protocol):
    """Sessions on a worker. The caller draws each session's random id. The end of a session's
    stream cancels all of its reservations and sequences."""

    async def reserve_in(self, session_id: int, call: ReserveCall) -> Reservation:
        """Like `DecodePort.reserve`. The reservation belongs to the session."""
        ...

    async def start(self, session_id: int, call: GenerateCall) -> None:
        """Like `DecodePort.generate`. Spans and errors arrive on the session's stream."""
        ...

    def spans(self, session_id: int) -> AsyncIterator[SpanBatch]: ...
