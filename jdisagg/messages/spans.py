"""Sessions, which bundle the tokens of many sequences in one stream. A session is one stream from a
decode worker to a calling process. It carries the spans (batches of tokens) of all sequences that
the calling process started. Over gRPC, sessions replace `DecodePort.reserve` and
`DecodePort.generate`, because one stream per sequence would cost more."""

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
    """New spans of one reservation since the last batch. `ended` or `error` marks the last spans of
    the reservation."""

    reservation_id: int
    spans: tuple[Span, ...] = ()
    ended: bool = False
    error: WireStatus | None = None


class SpanBatch(Message, frozen=True):
    """One message of a session's stream. An empty first batch reports that the session is open."""

    reservations: tuple[ReservationSpans, ...] = ()


class SpanSessionPort(Protocol):
    """Calls to open and use sessions on a decode worker. The caller chooses a random id for each
    session. When a session's stream ends, all reservations and sequences of the session are
    cancelled."""

    async def reserve_in(self, session_id: int, call: ReserveCall) -> Reservation:
        """Reserves pages like `DecodePort.reserve`. The reservation belongs to the session."""
        ...

    async def start(self, session_id: int, call: GenerateCall) -> None:
        """Starts decoding like `DecodePort.generate`. Spans and errors arrive on the session's
        stream."""
        ...

    def spans(self, session_id: int) -> AsyncIterator[SpanBatch]: ...
