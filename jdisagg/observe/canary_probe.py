"""Sends a canary: a small request that tests the KV transfer of one pair of workers.

A canary belongs to a separate tenant. The probe calls the ports of the two workers directly,
because the request path would choose the workers itself."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from jdisagg.dispatch.request_context import quietly
from jdisagg.errors import HandoffError, UnavailableError, first_error
from jdisagg.messages.ports import (
    Child,
    DecodePort,
    GenerateCall,
    HandoffSource,
    PrefillCall,
    PrefillPort,
    ReserveCall,
    SpanEnd,
    close_stream,
)
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.observe.canary import Pair
from jdisagg.request import Request, SamplingParams
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS

CANARY_TENANT = "jdisagg-canary"
PROMPT_TOKENS = 16
NEW_TOKENS = 2  # the second one is decoded from transferred KV


def pairs_of(statuses: Sequence[WorkerStatus]) -> tuple[Pair, ...]:
    serving = [status for status in statuses if status.serving]
    prefills = [status.name for status in serving if status.role is WorkerRole.PREFILL]
    pairs = [
        Pair(prefill, status.name)
        for status in serving
        if status.role is WorkerRole.DECODE
        for prefill in prefills
    ]
    return tuple(
        pairs + [Pair("", status.name) for status in serving if status.role is WorkerRole.MIXED]
    )


class PortProbe:
    """Sends canaries through the ports (interfaces) of workers.

    Args:
        address: Function that returns the address of a prefill worker's `PeerPort`, as in
            `HandoffSource`.
    """

    def __init__(
        self,
        prefill: Mapping[str, PrefillPort],
        decode: Mapping[str, DecodePort],
        new_id: Callable[[], int],
        deadline_seconds: float = 5.0,
        address: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._new_id = new_id
        self._deadline_seconds = deadline_seconds
        self._address = address

    async def __call__(self, pair: Pair) -> None:
        """Sends a canary over a pair and waits for its `NEW_TOKENS` tokens.

        Raises:
            UnavailableError: One of the workers has left.
            HandoffError: The KV transfer failed, or the stream ended too early.
            JdisaggError: Another error of one of the workers.
        """
        decode = self._decode.get(pair.decode)
        prefill = self._prefill.get(pair.prefill) if pair.prefill else None
        if decode is None or (pair.prefill and prefill is None):
            raise UnavailableError(f"pair {pair} is no longer there")
        request = _request(f"canary-{self._new_id():x}")
        reservation = await decode.reserve(
            ReserveCall(request, 1, (Child(0),), self._deadline_seconds)
        )
        weights = reservation.weights
        source = (
            HandoffSource(
                pair.prefill, self._new_id(), self._address(pair.prefill), weights=weights
            )
            if pair.prefill
            else None
        )
        generate = self._generate(
            decode, GenerateCall(reservation.reservation_id, 1, self._deadline_seconds, source)
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(generate)
                if prefill is not None and source is not None:
                    call = PrefillCall(
                        request,
                        1,
                        (Child(0),),
                        source.handoff_id,
                        pair.decode,
                        0,
                        self._deadline_seconds,
                        weights=weights,
                    )
                    tasks.create_task(_compute(prefill, call))
        except BaseExceptionGroup as group:
            if prefill is not None and source is not None:
                await quietly(
                    prefill.cancel_prefill(source.handoff_id),
                    DEFAULT_TIMEOUTS.request.close_seconds,
                )
            raise first_error(group) from group
        finally:
            await quietly(
                decode.cancel(reservation.reservation_id), DEFAULT_TIMEOUTS.request.close_seconds
            )

    async def _generate(self, decode: DecodePort, call: GenerateCall) -> None:
        spans = decode.generate(call)
        ended = False
        try:
            async for span in spans:
                # The worker would wait for another prefill worker, but only this pair is tested.
                if span.lost is not None:
                    raise HandoffError(span.lost.reason)
                ended = ended or span.end in (SpanEnd.LENGTH, SpanEnd.STOP)
        finally:
            await close_stream(spans)
        if not ended:
            raise HandoffError("the canary's stream stopped before its last token")


def _request(request_id: str) -> Request:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return Request(
        request_id, tuple(range(1, PROMPT_TOKENS + 1)), sampling, tenant=CANARY_TENANT, priority=0
    )


async def _compute(prefill: PrefillPort, call: PrefillCall) -> None:
    await prefill.prefill(call)
