"""The gRPC services of a worker process, for routers and other workers.

The guard checks bearer tokens and boot ids and handles errors. This module rejects token ids that
are not in the vocabulary, because they would crash the mesh with all its sequences. The router
checks token ids too, but it has no vocabulary until a worker has registered."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from jdisagg.errors import InvalidRequestError
from jdisagg.messages.ports import DecodePort, PeerPort, PrefillCall, PrefillPort, ReserveCall
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.spans import SpanSessionPort
from jdisagg.messages.weights import WeightsPort
from jdisagg.request import foreign_token
from jdisagg.service.guard import Service
from jdisagg.service.internal import rpc
from jdisagg.service.internal.span_sessions import SpanSessions

ANY_ID = 2**31

Call = TypeVar("Call", PrefillCall, ReserveCall)
Reply = TypeVar("Reply")


def prefill_service(
    port: PrefillPort, tokens: tuple[str, ...] = (), vocabulary: int = ANY_ID
) -> Service:
    """Calls with token ids of `vocabulary` or more are refused with InvalidRequestError."""
    return rpc.service(PrefillPort, through(PrefillPort, port, _KnownIds(vocabulary)), tokens)


def decode_service(
    port: DecodePort, tokens: tuple[str, ...] = (), vocabulary: int = ANY_ID
) -> Service:
    """Returns the gRPC service for a decode port.

    All tokens for one calling process are sent in one stream (a session). Calls with token ids of
    `vocabulary` or more are refused with InvalidRequestError."""
    checked = through(DecodePort, port, _KnownIds(vocabulary))
    sessions = SpanSessions(checked)
    return rpc.service(
        DecodePort,
        through(DecodePort, checked, _CancelledInSessions(sessions)),
        tokens,
        lasting=("spans",),
        beside=rpc.handlers(SpanSessionPort, sessions),
    )


def peer_service(port: PeerPort, tokens: tuple[str, ...] = ()) -> Service:
    return rpc.service(PeerPort, port, tokens)


def weights_service(port: WeightsPort, tokens: tuple[str, ...] = ()) -> Service:
    return rpc.service(WeightsPort, port, tokens)


class _KnownIds:
    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    async def prefill(self, proceed: Callable[[Call], Awaitable[Reply]], call: Call) -> Reply:
        request = call.request
        accepted = (
            (f"accepted tokens of child {child.index}", child.accepted) for child in call.children
        )
        biased = tuple(token_id for token_id, _ in request.sampling.logit_bias)
        for name, ids in (("prompt", request.prompt_token_ids), ("logit_bias", biased), *accepted):
            if (at := foreign_token(ids, self._vocabulary)) is not None:
                raise InvalidRequestError(
                    f"{name} holds {ids[at]}, which is not a token id of the model; ids are 0 to"
                    f" {self._vocabulary - 1}"
                )
        return await proceed(call)

    reserve = prefill


class _CancelledInSessions:
    def __init__(self, sessions: SpanSessions) -> None:
        self._sessions = sessions

    async def cancel(
        self,
        _: Callable[[int, int | None, bool], Awaitable[None]],
        reservation_id: int,
        child: int | None = None,
        awaited: bool = False,
    ) -> None:
        await self._sessions.cancel(reservation_id, child, awaited)
