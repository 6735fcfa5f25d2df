"""The request path: the life of one request, in a coroutine that reads top to bottom.

    refuse early        too many wait, or its first token would come too late: OverloadedError with a hint (router/admission.py)
    wait                while all workers have enough to do, in fair order (dispatch/placing.py, router/fairness.py)
    place               the pair of least predicted seconds, from a snapshot of the workers (router/placement.py)
    reserve             the decode worker sets pages aside for prompt and growth, before any prefill (dispatch/leg.py)
    prefill | hand off  at the same time: the prefill worker computes and offers, the decode worker pulls and inserts
    first token         to the client straight from the prefill's reply; the transfer is not on its way
    decode              spans of tokens; each child's text, stop strings and end (dispatch/child_stream.py)
    preempted           that child goes again: prompt and accepted tokens are prefilled, the stream goes on at the next index
    a source failed     another prefill worker computes, and sends what the decode worker has not got yet (dispatch/sources.py)
    a sequence moves    another decode worker takes it over with its KV, and its spans follow the old one's (dispatch/move.py)
    a worker failed     as if preempted, a bounded number of times, elsewhere if there is an elsewhere
    the end             usage and timings ride on the last event; everything is freed on both sides

A child that its first token ends is not waited for. Closing the generator cancels: the legs' tasks are cancelled, which
closes their reservations and hand-offs. The path keeps no state of a request outside its `Journey`, and knows neither JAX nor
gRPC: its ports may be the workers themselves or their wire. It reads time from its clock and bounds waits by the event
loop's time, which run alike (a virtual clock comes with an event loop of its own).
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping

from jdisagg.clock import Clock
from jdisagg.config import LimitsConfig, RoutingConfig
from jdisagg.dispatch.child_stream import NewTextStream
from jdisagg.dispatch.journey import Journey
from jdisagg.dispatch.placing import Placing
from jdisagg.dispatch.ports import DecodePort, PrefillPort, WorkerStatus
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.dispatch.trip import Cluster
from jdisagg.errors import InvalidRequestError, UnavailableError
from jdisagg.request import Request, StreamEvent
from jdisagg.router.accounts import Accounts
from jdisagg.router.admission import admit
from jdisagg.router.cluster_state import ClusterState
from jdisagg.telemetry import Counters

STATUS_SECONDS = 5.0


def random_id() -> int:
    """A fresh 64-bit number: hand-offs and offers are named by these."""
    return secrets.randbits(63)


class RequestPath:
    """Streams requests through a cluster of workers. `new_text` opens a child's detokenizer.

    The mappings may be live, as workers come and go. `address` says where a worker listens, for its peers (empty: they know it by name),
    `boot_id` which start of it that is; `statuses` what the workers last said of themselves; without it they are asked. `accounts`: the
    snapshot that somebody keeps up to date (a roster); without it the workers' statuses are taken before each placement.
    """

    def __init__(
        self,
        prefill_workers: Mapping[str, PrefillPort],
        decode_workers: Mapping[str, DecodePort],
        new_text: NewTextStream,
        limits: LimitsConfig,
        clock: Clock,
        new_id: Callable[[], int] = random_id,
        address: Callable[[str], str] = lambda name: "",
        boot_id: Callable[[str], int] = lambda name: 0,
        statuses: Callable[[], tuple[WorkerStatus, ...]] | None = None,
        accounts: Accounts | None = None,
        routing: RoutingConfig | None = None,
    ) -> None:
        self.counters = Counters()
        self.placing = Placing(
            accounts or Accounts(ClusterState(), settle_seconds=0.0),
            routing or RoutingConfig(),
            clock,
            self.counters,
            None if accounts else self._ask_workers,
        )
        self._cluster = Cluster(prefill_workers, decode_workers, address, boot_id)
        self._last_statuses = statuses
        self._new_text = new_text
        self._limits = limits
        self._clock = clock
        self._new_id = new_id
        self._running: set[tuple[str, str]] = set()
        self._waiting: Counter[str] = Counter()  # for their first token, by tenant
        self._draining = False
        self._quiet = asyncio.Event()
        self._seconds_per_request = 0.0
        self._last_first_token_at: float | None = None

    async def stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        """Events of all children, in order for each. Raises typed errors; closing the generator cancels the request."""
        self._enter(request)
        journey = Journey(
            request,
            self._cluster,
            self._new_text,
            self._limits,
            self._clock,
            self._new_id,
            self.placing,
            lambda now: self._first_token(request, now),
            self.counters,
        )
        try:
            await journey.begin()
            while journey.unfinished:
                event = journey.take(await journey.next_fact())
                if event is not None:
                    yield event
        finally:
            try:
                await journey.close()
            finally:  # also where that was cut short: what it began to free goes on
                self._leave(request, journey)

    async def status(self) -> tuple[WorkerStatus, ...]:
        """A snapshot of all workers that answer."""
        if self._last_statuses is not None:
            return self._last_statuses()
        ports = [*self._cluster.prefill.values(), *self._cluster.decode.values()]
        answers = await asyncio.gather(*(_status(port) for port in ports))
        return tuple(answer for answer in answers if answer is not None)

    def routing(self) -> RoutingStatus:
        """The router's last decisions, and its own account of the workers."""
        return self.placing.status()

    async def _ask_workers(self) -> None:
        """The snapshot from what all workers say now; those that do not answer are not there."""
        accounts, now = self.placing.accounts, self._clock.now()
        said = {status.name: status for status in await self.status()}
        for name in [name for name in accounts.state if name not in said]:
            description = accounts.state.description(name)
            accounts.forget(name)
            accounts.state.describe(name, description)
        for status in said.values():
            accounts.heard(status, now)

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones have ended."""
        self._draining = True
        while self._running:
            self._quiet.clear()
            await self._quiet.wait()

    def _enter(self, request: Request) -> None:
        if self._draining:
            raise UnavailableError("the server is shutting down and takes no new requests; try another", retry_after_seconds=1.0)
        if (request.tenant, request.request_id) in self._running:
            raise InvalidRequestError(f"request_id {request.request_id!r} is running already; give each request its own")
        tenants = len(self._waiting.keys() | {request.tenant})
        limit, own = self._limits.max_waiting_requests, self._waiting[request.tenant]
        admit(self._waiting.total(), limit, self._seconds_per_request, own, tenants)
        self._running.add((request.tenant, request.request_id))
        self._waiting[request.tenant] += 1
        self.counters.add("requests_started")

    def _leave(self, request: Request, journey: Journey) -> None:
        if not journey.saw_token:
            self._waits_no_more(request)
        self._running.discard((request.tenant, request.request_id))
        self.counters.add("requests_ended")
        self._quiet.set()

    def _waits_no_more(self, request: Request) -> None:
        self._waiting[request.tenant] -= 1
        if not self._waiting[request.tenant]:
            del self._waiting[request.tenant]

    def _first_token(self, request: Request, now: float) -> None:
        self._waits_no_more(request)
        if self._last_first_token_at is not None:
            self._seconds_per_request += 0.1 * (now - self._last_first_token_at - self._seconds_per_request)
        self._last_first_token_at = now


async def _status(port: PrefillPort | DecodePort) -> WorkerStatus | None:
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            return await port.status()
    except (UnavailableError, TimeoutError):
        return None
