"""State of one streamed client request, which takes several calls if its stream breaks.

The state has the received tokens, the time of the next retry, and the message that a retry sends.
If the connection breaks during the stream, or the server shuts down, the client sends the request
again with the id, seed and prompt of the first call, together with the received tokens. The stream
then continues at the next token. Retries stop `resume_seconds` after the stream broke. A
duplicated or missing token is an error. This module makes no calls itself."""

import math
import secrets
import time
import uuid
from dataclasses import replace

import grpc

from jdisagg.errors import (
    DeadlineExceededError,
    JdisaggError,
    OverloadedError,
    ShutDownError,
    UnavailableError,
)
from jdisagg.request import MAX_N, MAX_SEED, AcceptedChild, FinishReason, Resumption, StreamEvent
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import wire, wire_generation
from jdisagg.service.grpc.wire_generation import ClientRequest
from jdisagg.service.internal.connection import status_of
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS

# The server ends a request at its deadline and reports the reason. The gRPC deadline of the call is
# a little later. It ends the call only if the server does not.
TIMES = DEFAULT_TIMEOUTS.client
# Parts of gRPC's error details: no connection was made; this process cancelled the call or closed
# its channel.
NOT_CONNECTED = ("failed to connect", "connections to all backends failing")
GIVEN_UP_HERE = ("Locally cancelled by application!", "Channel closed!")


class ResumableStream:
    """State of a request's stream.

    Every retry must have the id and seed of the first call. If the request has none, random ones
    are therefore chosen once. Raises InvalidRequestError if Protobuf cannot represent the request.
    """

    def __init__(self, asked: ClientRequest, resume_seconds: float) -> None:
        options = asked.options
        if options.get("seed") is None:
            options = {**options, "seed": secrets.randbelow(MAX_SEED)}
        self._asked = replace(
            asked,
            request_id=asked.request_id or uuid.uuid4().hex,
            life=secrets.randbits(64),
            options=options,
        )
        self._resume_seconds = resume_seconds
        self._started_at = time.monotonic()
        self._broken_at: float | None = None  # until the next message
        self._number = 0
        self._tries = 0
        self._received = False
        self._tokens: dict[int, list[int]] = {}
        self._ends: dict[int, FinishReason] = {}
        # Raises InvalidRequestError early, in the caller's frame, if the request cannot be sent.
        wire_generation.client_request_to_proto(self._asked)

    @property
    def complete(self) -> bool:
        """Whether all n answers have finished. An error of the call after that is ignored."""
        return len(self._ends) == self._children()

    @property
    def resuming(self) -> bool:
        return self._number > 0

    def request(self) -> pb.GenerateRequest:
        asked = self._asked
        if self._number:
            self._check_deadline()
            asked = replace(
                asked, deadline_seconds=self._remaining_seconds(), resumption=self._resumption()
            )
        return wire_generation.client_request_to_proto(asked)

    def call_seconds(self) -> float | None:
        """Returns the gRPC deadline of the next call in seconds, or None for no deadline. The
        latter applies if the request has no deadline, or an invalid one, which the server then
        rejects with the field's name."""
        asked = self._asked.deadline_seconds
        sensible = isinstance(asked, int | float) and 0 < asked < 1e9
        remaining = self._remaining_seconds()
        return (
            max(0.0, remaining) + TIMES.slack_seconds
            if sensible and remaining is not None
            else None
        )

    def connect_seconds(self, most: float) -> float:
        if not self._number:
            return most
        remaining = self._remaining_seconds()
        return min(
            most, max(0.1, self._left_seconds()), most if remaining is None else max(0.1, remaining)
        )

    def take(self, message: pb.GenerateResponse) -> StreamEvent:
        event = wire_generation.event_from_proto(message)
        tokens = self._tokens.setdefault(event.child, [])
        if event.token_ids and event.first_index != len(tokens):
            raise JdisaggError(
                f"stream of child {event.child}: received token {event.first_index}, expected"
                f" {len(tokens)}"
            )
        tokens += event.token_ids
        if event.finish_reason is not None:
            self._ends[event.child] = event.finish_reason
        self._received, self._broken_at, self._tries = True, None, 0
        return event

    def pause_after(self, error: grpc.RpcError | UnavailableError) -> float:
        """If no retry is allowed, raises the error as a jdisagg error."""
        typed = typed_error(error) if isinstance(error, grpc.RpcError) else error
        if self._broken_at is None:
            self._broken_at = time.monotonic()
        if not self._may_resume(error, typed):
            raise typed from None
        self._check_deadline()
        self._number += 1
        self._tries += 1
        return min(TIMES.retry.seconds(self._tries), max(0.0, self._left_seconds()))

    def _may_resume(self, error: grpc.RpcError | UnavailableError, typed: JdisaggError) -> bool:
        if self._left_seconds() <= 0:
            return False
        if not isinstance(error, grpc.RpcError):
            return self.resuming  # a lost stream is retried, even if its server is unreachable
        if lost(error):
            return self.resuming or not never_sent(error)
        if isinstance(typed, ShutDownError):
            return True
        invited = isinstance(typed, UnavailableError) and typed.retry_after_seconds is not None
        return (self._received or self.resuming) and (
            invited or (self.resuming and isinstance(typed, OverloadedError))
        )

    def _resumption(self) -> Resumption:
        children = (
            AcceptedChild(tuple(self._tokens.get(child, ())), self._ends.get(child))
            for child in range(self._children())
        )
        return Resumption(self._number, tuple(children))

    def _children(self) -> int:
        count = self._asked.options.get("n")
        return count if isinstance(count, int) and 1 <= count <= MAX_N else 1

    def _check_deadline(self) -> None:
        remaining = self._remaining_seconds()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceededError(
                f"request {self._asked.request_id!r}: its deadline passed while the connection was"
                " broken; send it again with a longer deadline"
            ) from None

    def _left_seconds(self) -> float:
        waited = 0.0 if self._broken_at is None else time.monotonic() - self._broken_at
        return self._resume_seconds - waited

    def _remaining_seconds(self) -> float | None:
        seconds = self._asked.deadline_seconds
        if seconds is None or not isinstance(seconds, int | float) or not math.isfinite(seconds):
            return None
        return seconds - (time.monotonic() - self._started_at)


def typed_error(error: grpc.RpcError) -> JdisaggError:
    return wire.error_from_status(status_of(error))


def lost(error: grpc.RpcError) -> bool:
    """Returns whether a call failed because of its connection. Returns False for an error that a
    jdisagg server returned, and for a call that this process cancelled.

    A stopping server may drop a call that has just arrived. gRPC reports this as CANCELLED, as for
    a call that this process cancelled. The details of the two differ."""
    status = status_of(error)
    gone = status.code == "UNAVAILABLE" or (
        status.code == "CANCELLED" and status.details not in GIVEN_UP_HERE
    )
    return gone and wire.ERROR_KEY not in dict(status.metadata)


def never_sent(error: grpc.RpcError) -> bool:
    details = status_of(error).details
    return lost(error) and any(text in details for text in NOT_CONNECTED)
