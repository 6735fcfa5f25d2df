"""Streams over HTTP that a client may resume at another router.

To make a stream resumable, the client sends the fields `resumption` (with a random number `life`),
`request_id` and `seed`. Each event of the stream then has an SSE id, which contains the event's
tokens. If the stream breaks, the client sends the request again to any router, with the ids of all
events that it has received. The stream then continues at the next token."""

import re
from dataclasses import dataclass

from jdisagg.errors import InvalidRequestError
from jdisagg.request import MAX_N, AcceptedChild, FinishReason, Resumption, StreamEvent
from jdisagg.service.http.bodies import ResumptionFields
from jdisagg.service.http.fields import Fields

MAX_LIFE = 2**63 - 1
# Form of an SSE id: child, index of the event's first token, tokens, finish reason.
_ID = re.compile(r"(\d{1,3}):(\d{1,10}):((?:\d{1,10}(?:,\d{1,10})*)?):([a-z_]*)")
_ENDS = {reason.value: reason for reason in FinishReason}


@dataclass(frozen=True, slots=True)
class Resumed:
    """A stream whose events have ids. `children`: tokens of each answer that the client has already
    received."""

    life: int
    number: int
    children: tuple[AcceptedChild, ...]

    @property
    def resumption(self) -> Resumption | None:
        return Resumption(self.number, self.children) if self.number else None

    @property
    def complete(self) -> bool:
        return all(child.finish_reason is not None for child in self.children)

    @property
    def begun(self) -> set[int]:
        return {
            index
            for index, child in enumerate(self.children)
            if child.token_ids or child.finish_reason is not None
        }


def resumed_from(
    fields: Fields, given: ResumptionFields | None, children: int | None
) -> Resumed | None:
    """Raises InvalidRequestError if the field is invalid, or a field that it needs is missing."""
    if given is None:
        return None
    life, number, ids = given.life, given.number, given.event_ids or []
    if not 0 <= life <= MAX_LIFE or not 0 <= number <= MAX_LIFE:
        raise InvalidRequestError(
            f"resumption.life and resumption.number must be in [0, {MAX_LIFE}], got {life} and"
            f" {number}"
        )
    for name in ("request_id", "seed", "stream"):
        if not fields.has(name):
            raise InvalidRequestError(
                f"resumption needs {name}: all calls of a stream must have the same; set {name}"
            )
    if ids and not number:
        raise InvalidRequestError("resumption.event_ids needs resumption.number; count the calls")
    count = children if children is not None and 1 <= children <= MAX_N else 1
    return Resumed(life, number, _children([ids] if isinstance(ids, str) else ids, count))


def event_id(event: StreamEvent) -> bytes:
    tokens = ",".join(map(str, event.token_ids))
    end = event.finish_reason.value if event.finish_reason is not None else ""
    return b"id: %d:%d:%b:%b\n" % (event.child, event.first_index, tokens.encode(), end.encode())


def _children(ids: list[str], count: int) -> tuple[AcceptedChild, ...]:
    tokens: list[list[int]] = [[] for _ in range(count)]
    ends: list[FinishReason | None] = [None] * count
    for one in ids:
        found = _ID.fullmatch(one)
        if found is None or int(found[1]) >= count or (found[4] and found[4] not in _ENDS):
            raise InvalidRequestError(
                f"resumption.event_ids contains {one[:80]!r}, which is not the id of an event of"
                " this stream; send the ids as they came"
            )
        child, first = int(found[1]), int(found[2])
        if found[3] and first != len(tokens[child]):
            raise InvalidRequestError(
                f"resumption.event_ids: token {first} of answer {child} comes where"
                f" {len(tokens[child])} is due; send the ids of all events in order"
            )
        tokens[child] += map(int, found[3].split(",")) if found[3] else ()
        ends[child] = _ENDS.get(found[4], ends[child])
    return tuple(AcceptedChild(tuple(some), end) for some, end in zip(tokens, ends, strict=True))
