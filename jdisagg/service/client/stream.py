"""One request of a client over as many calls as it takes: what it already has, when it asks again,
what it asks then.

When the connection breaks in mid-stream, or the server shuts down, the same request (id, seed,
prompt) is asked again together with the tokens that have come, and the stream goes on at the next
one. Bounded by `resume_seconds` since the last thing that came. Each token is passed on once: what
comes twice, or leaves a gap, is an error. Knows messages and gRPC's errors; makes no calls itself.
"""

import math
import secrets
import time
import uuid
from dataclasses import replace
from typing import cast

import grpc

from jdisagg.errors import (
    DeadlineExceededError,
    JdisaggError,
    OverloadedError,
    ShutDownError,
    UnavailableError,
)
from jdisagg.messages.spans import WireStatus
from jdisagg.request import MAX_N, MAX_SEED, AcceptedChild, FinishReason, Resumption, StreamEvent
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import wire, wire_generation
from jdisagg.service.grpc.wire_generation import ClientRequest
from jdisagg.timeouts import DEFAULT_TIMEOUTS

# The server ends a request at its deadline and says why; the call's own deadline is the net below.
TIMES = DEFAULT_TIMEOUTS.client
# What gRPC says of a call that was cancelled, or whose channel was closed, on this side.
GIVEN_UP_HERE = ("Locally cancelled by application!", "Channel closed!")


class ResumableStream:
    """`asked` gets an id and a seed of its own where it has none: the second time they must be
    those of the first."""

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
        self._received_at = self._started_at
        self._number = 0
        self._tries = 0
        self._received = False
        self._tokens: dict[int, list[int]] = {}
        self._ends: dict[int, FinishReason] = {}
        # Raises, where the caller sees it, what cannot be sent at all.
        wire_generation.client_request_to_proto(self._asked)

    @property
    def complete(self) -> bool:
        """All children have ended: how the call ends tells nothing more."""
        return len(self._ends) == self._children()

    @property
    def resuming(self) -> bool:
        return self._number > 0

    def request(self) -> pb.GenerateRequest:
        """What the next call asks."""
        asked = self._asked
        if self._number:
            self._check_deadline()
            asked = replace(
                asked, deadline_seconds=self._remaining_seconds(), resumption=self._resumption()
            )
        return wire_generation.client_request_to_proto(asked)

    def call_seconds(self) -> float | None:
        """The deadline of the next call. A request's that makes no sense goes to the server, which
        refuses it by name."""
        asked = self._asked.deadline_seconds
        sensible = isinstance(asked, int | float) and 0 < asked < 1e9
        remaining = self._remaining_seconds()
        return (
            max(0.0, remaining) + TIMES.slack_seconds
            if sensible and remaining is not None
            else None
        )

    def connect_seconds(self, most: float) -> float:
        """How long the next call may wait for a connection."""
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
                f"stream of child {event.child}: token {event.first_index} came where {len(tokens)}"
                " was due"
            )
        tokens += event.token_ids
        if event.finish_reason is not None:
            self._ends[event.child] = event.finish_reason
        self._received, self._received_at, self._tries = True, time.monotonic(), 0
        return event

    def pause_after(self, error: grpc.RpcError | UnavailableError) -> float:
        """Seconds to wait before the request is asked again. Raises the typed error where it is not
        to be."""
        typed = typed_error(error) if isinstance(error, grpc.RpcError) else error
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
            return self.resuming  # nobody answered where the stream had been
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
                " broken"
            ) from None

    def _left_seconds(self) -> float:
        return self._received_at + self._resume_seconds - time.monotonic()

    def _remaining_seconds(self) -> float | None:
        seconds = self._asked.deadline_seconds
        if seconds is None or not isinstance(seconds, int | float) or not math.isfinite(seconds):
            return None
        return seconds - (time.monotonic() - self._started_at)


def status_of(error: grpc.RpcError) -> WireStatus:
    # Every error that a call raises is a grpc.Call (or AioRpcError) too, but the type does not say
    # so.
    call = cast(grpc.Call, error)
    metadata = tuple(
        (key, value) for key, value in call.trailing_metadata() or () if isinstance(value, str)
    )
    return WireStatus(call.code().name, call.details() or "", metadata)


def typed_error(error: grpc.RpcError) -> JdisaggError:
    return wire.error_from_status(status_of(error))


def lost(error: grpc.RpcError) -> bool:
    """Whether the connection failed, and not a jdisagg server that answered. A server that ends
    just as a call comes to it drops the call, which is CANCELLED then; so is what this side gave up
    itself, in gRPC's own words."""
    status = status_of(error)
    gone = status.code == "UNAVAILABLE" or (
        status.code == "CANCELLED" and status.details not in GIVEN_UP_HERE
    )
    return gone and wire.ERROR_KEY not in dict(status.metadata)


def never_sent(error: grpc.RpcError) -> bool:
    return lost(error) and "failed to connect" in status_of(error).details
