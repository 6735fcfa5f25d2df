"""One stream per process with the spans of all sequences that it started on a worker. Connections
use it in place of `DecodePort.reserve` and `DecodePort.generate`."""

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
    """News of one reservation since the last batch. `ended` or `error` is final."""

    reservation_id: int
    spans: tuple[Span, ...] = ()
    ended: bool = False
    error: WireStatus | None = None


class SpanBatch(Message, frozen=True):
    """One message of a session. The first is empty and reports that the session is open."""

    reservations: tuple[ReservationSpans, ...] = ()


class SpanSessionPort(Protocol):
    """Sessions named by random numbers of their callers. A session ends with its stream, which
    cancels everything that it reserved and started."""

    async def reserve_in(self, session_id: int, call: ReserveCall) -> Reservation:
        """Like `DecodePort.reserve`. The reservation belongs to the session."""
        ...

    async def start(self, session_id: int, call: GenerateCall) -> None:
        """Like `DecodePort.generate`. Spans and errors arrive on the session's stream."""
        ...

    def spans(self, session_id: int) -> AsyncIterator[SpanBatch]: ...
