"""The request path: all stages of one request, from admission to its end.

    admit       refuse with OverloadedError and a retry-after if too many requests wait, or if the
                first token would be too late (router/admission.py)
    place       choose the workers with the least predicted time from a snapshot of all workers
                (dispatch/placer.py, router/placement.py); while all are busy, requests wait in
                fair order (dispatch/admission_queue.py)
    attempt     reserve pages, prefill while the KV is received, decode; replace a failed prefill
                worker, migrate a running sequence (dispatch/attempt.py)
    accept      accept each token once and in order; detokenize, find stop strings and ends
                (dispatch/request_run.py)
    retry       children that were preempted, or whose worker failed, continue in another attempt:
                prompt and accepted tokens are prefilled, the stream continues at the next index
    end         the last event carries usage and timings; everything is freed on both sides

A preemption is not a failure: another attempt always follows. Each child may fail
`limits.max_attempts` times, and failed workers are avoided while there are others. While no worker
can be reached, a request waits until its deadline, because workers are restarted within seconds.
If the workers are overloaded, a new request is refused. A request that was placed before waits
until its deadline.

Closing the generator cancels the request: the attempts' tasks are cancelled, which frees their
reservations and hand-offs. All state of a request is in its `RequestRun`. The path imports neither
JAX nor gRPC: its ports are the workers themselves or remote stubs. The path reads the time from its
clock, and the event loop's clock ends its waits. Both must therefore use the same virtual clock in
a simulation."""

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from jdisagg.clock import Clock, unended
from jdisagg.config import LimitsConfig
from jdisagg.dispatch.attempt import Attempt
from jdisagg.dispatch.ids import random_id
from jdisagg.dispatch.placer import PlacementHandle, PlacementRequest, Placer, PlacerSettings
from jdisagg.dispatch.public_text import public
from jdisagg.dispatch.request_context import ClusterPorts, RequestContext
from jdisagg.dispatch.request_run import NewTextStream, RequestRun
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    JdisaggError,
    OverloadedError,
    UnavailableError,
)
from jdisagg.messages.ports import (
    DecodePort,
    PrefillPort,
    SessionAction,
    SessionCall,
    SessionReport,
)
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.prompt.images import PromptImage
from jdisagg.request import Request, StreamEvent
from jdisagg.router.accounts import Accounts
from jdisagg.router.admission import Drain, admit
from jdisagg.router.cluster_state import ClusterState
from jdisagg.telemetry import Counters

_log = logging.getLogger(__name__)


class RequestPath:
    """Streams requests through a cluster of workers.

    Args:
        new_text: Function that creates the detokenizer of one child (parallel sample) of a request.
    """

    def __init__(
        self,
        cluster: ClusterPorts,
        new_text: NewTextStream,
        limits: LimitsConfig,
        clock: Clock,
        settings: PlacerSettings | None = None,
        new_id: Callable[[], int] = random_id,
    ) -> None:
        self.counters = Counters()
        self.placer = Placer(
            cluster.accounts or Accounts(ClusterState(), settle_seconds=0.0),
            settings or PlacerSettings(),
            clock,
            self.counters,
            limits.timeouts,
            None if cluster.accounts else self._ask_workers,
        )
        self._context = RequestContext(cluster, self.placer, limits, clock, new_id, self.counters)
        self._new_text = new_text
        self._running = 0
        self._waiting: Counter[str] = Counter()  # requests without first token, by tenant
        self._priorities: Counter[int] = Counter()  # the same requests by priority
        self._draining = False
        self._runs: dict[tuple[str, str], RequestRun] = {}  # by tenant and id
        self._quiet = asyncio.Event()
        self._first_tokens = Drain()
        self._open = asyncio.Event()  # whether attempts may start
        self._open.set()
        self._drains = False  # whether attempts of placed requests may still start

    @property
    def cluster(self) -> ClusterPorts:
        return self._context.cluster

    def read_images_with(self, pixels: Callable[[PromptImage], Awaitable[bytes]]) -> None:
        self._context = replace(self._context, pixels=pixels)

    @contextlib.asynccontextmanager
    async def paused(self, drain_seconds: float | None) -> AsyncGenerator[None, None]:
        """Returns a context in which no attempt starts. If `drain_seconds` is set, first waits
        until placed requests have ended. Raises DeadlineExceededError if this takes longer than
        `drain_seconds`."""
        self._open.clear()
        try:
            if drain_seconds is not None:
                self._drains = True
                await self._ended(drain_seconds)
                self._drains = False
            yield
        finally:
            self._drains = False
            self._open.set()

    async def _ended(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while any(run.placements for run in self._runs.values()):
                    self._quiet.clear()
                    await self._quiet.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                f"running requests did not end within {seconds:g} s; allow more time, or choose"
                " another mode than drain"
            ) from None

    async def stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        """Yields the events of all children, in order for each child. Closing the generator cancels
        the request. Raises a JdisaggError if the request fails."""
        context = self._context
        self._admit(request)
        run = RequestRun(
            self._identified(request),
            self._new_text,
            context.clock,
            context.limits.default_deadline_seconds,
        )
        run.missing = self.placer.missing
        waits, key = True, (request.tenant, request.request_id)
        self._runs[key] = run
        try:
            if run.resumed:
                await run.resume()
            for children in run.groups(run.open_children):
                self._start(run, children)
            while run.has_more:
                event = await run.next_event()
                if waits:
                    waits = False
                    self._first_token(run)
                if event.finish_reason is not None:
                    self._child_ended(run, event)
                yield event
        finally:
            try:
                await run.close(2 * context.limits.timeouts.request.close_seconds)
            finally:  # also if `close` was cancelled; its clean-up calls continue
                if self._runs.get(key) is run:
                    del self._runs[key]
                self._leave(request, waits)

    def _identified(self, request: Request) -> Request:
        """A stream without a life gets one of its own. Otherwise workers would take its attempts
        for late ones of an earlier request with the same id, and refuse them."""
        if request.life or request.resumption is not None:
            return request
        return replace(request, life=self._context.new_id())

    async def suspend(self, tenant: str, request_id: str) -> None:
        """Suspends a running request. Its attempts end, which frees its decode slots and KV pages.
        Its full blocks of KV stay in the workers' caches until others need the room. Idempotent.

        Raises:
            InvalidRequestError: No such request is running at this router.
        """
        run = self._running_request(tenant, request_id)
        self.counters.add("requests_suspended")
        if run.awake.is_set():
            ending = run.suspend()
            for children in run.groups(run.open_children):
                self._start(run, children)
            await unended(ending, self._context.limits.timeouts.request.close_seconds)

    def resume(self, tenant: str, request_id: str) -> None:
        """Continues a suspended request at its next token. Raises the same error as `suspend`."""
        run = self._running_request(tenant, request_id)
        self.counters.add("requests_resumed")
        run.awake.set()

    def _running_request(self, tenant: str, request_id: str) -> RequestRun:
        run = self._runs.get((tenant, request_id))
        if run is None:
            raise InvalidRequestError(
                f"no request with request_id {request_id!r} is running here; suspend or resume a"
                " request while its stream is open, at the server that streams it"
            )
        return run

    def end(self, tenant: str, request_id: str, error: JdisaggError) -> None:
        """Ends a request with `error`, if it is running here."""
        if (run := self._runs.get((tenant, request_id))) is not None:
            run.fail(error)

    def _start(self, run: RequestRun, children: tuple[int, ...], wait_seconds: float = 0.0) -> None:
        preempted = functools.partial(self._preempted, run)
        attempt = Attempt(self._context, run, children, preempted)
        run.attempts[attempt] = asyncio.create_task(self._attempt(run, attempt, wait_seconds))

    async def _attempt(self, run: RequestRun, attempt: Attempt, wait_seconds: float) -> None:
        error: Exception | None = None
        placed, unfit = False, run.unfit
        try:
            if wait_seconds:
                await self._context.clock.sleep(wait_seconds)
            await run.awake.wait()
            while not (self._open.is_set() or (self._drains and run.placements)):
                await self._open.wait()
            began, unfit = self._context.clock.now(), run.unfit
            placement = await self._place(run, attempt)
            placed = True
            run.placed(placement, self._context.clock.now() - began)
            try:
                await attempt.run(placement)
            finally:
                placement.end(attempt.failed)
        except Exception as problem:
            error = problem
        run.attempts.pop(attempt, None)
        left = [index for index in attempt.open if run.children[index].finish is None]
        if not left or run.closed:
            return
        if error is None:
            error = UnavailableError("a worker ended a stream without a reason")
        if placed:
            run.as_planned = False
            if isinstance(error, UnavailableError):
                run.cause = error
        try:
            # other attempts may have been refused by the same workers meanwhile
            elsewhere = bool(attempt.refused - unfit)
            wait_seconds = self._seconds_before_retry(run, error, left, attempt, elsewhere)
        except Exception as last:
            placement = run.first_placement if run.first_token_at is None else None
            if placement is not None and isinstance(last, OverloadedError):
                placement.refused()
            run.fail(self._public(run, last))
            return
        run.failed |= {(worker, self.placer.life(worker)) for worker in attempt.failed}
        run.unfit |= attempt.refused
        for children in run.groups(left):
            self._start(run, children, wait_seconds)

    async def _place(self, run: RequestRun, attempt: Attempt) -> PlacementHandle:
        state = self.placer.accounts.state
        blind = state.without_images() if run.request.images else frozenset[str]()
        run.unfit |= blind
        run.placing += 1
        try:
            placement = await self.placer.place(
                PlacementRequest(
                    run.request,
                    attempt.children,
                    run.arrived_at,
                    run.deadline,
                    run.avoid(self.placer.life),
                    run.under_way,
                    run.unfit,
                )
            )
        finally:
            run.placing -= 1
        chosen = placement.decision
        if blind and blind & chosen.workers:
            placement.end(set())
            raise InvalidRequestError(
                "images: no workers read images of this model: it has no vision encoder that is"
                " served, or its checkpoint lacks the encoder's weights; send text only"
            )
        return placement

    def _preempted(self, run: RequestRun, child: int) -> None:
        run.as_planned = False
        run.preemptions += 1
        self.counters.add("preemptions")
        if run.children[child].finish is None and not run.closed:
            self._start(run, (child,))

    def _seconds_before_retry(
        self,
        run: RequestRun,
        error: Exception,
        children: list[int],
        attempt: Attempt,
        elsewhere: bool,
    ) -> float:
        """Failures are counted per child, because one crashed worker may end many attempts. If
        workers can return, an attempt that no worker has received is not counted, so that only the
        deadline limits such attempts. `elsewhere`: whether the attempt was refused by a worker
        that was not known to be unfit when it was placed, so that others may accept it."""
        limits = self._context.limits
        retry = limits.timeouts.request.retry
        if isinstance(error, DeadlineExceededError):
            raise run.too_late() from error
        if isinstance(error, OverloadedError) and (run.resumed or run.placements > 1):
            self.counters.add("waits_for_overloaded_workers")
            return min(error.retry_after_seconds or retry.most_seconds, retry.most_seconds)
        if not isinstance(error, UnavailableError) and not elsewhere:
            raise error
        if self.placer.waits and not attempt.received and not elsewhere:
            run.unreached += 1
            self.counters.add("attempts_unreached")
            return retry.seconds(run.unreached)
        run.unreached = 0
        for child in children:
            run.failures[child] = run.failures.get(child, 0) + 1
        self.counters.add("attempts_failed")
        failures = max(run.failures[child] for child in children)
        if failures >= limits.max_attempts:
            raise error if elsewhere else _more_useful(run.cause, error)
        return 0.0 if elsewhere else retry.seconds(failures)

    def _public(self, run: RequestRun, error: Exception) -> Exception:
        if not isinstance(error, UnavailableError):
            return error
        cluster = self._context.cluster
        names = {*cluster.prefill, *cluster.decode}
        shown = public(error, {name: cluster.address(name) for name in names})
        if shown is not error:
            _log.warning("request %s failed: %s", run.request.request_id, error.message)
        return shown

    # ---- admission

    def _admit(self, request: Request) -> None:
        if self._draining:
            raise UnavailableError(
                "the server is shutting down and accepts no new requests; try another",
                retry_after_seconds=1.0,
            )
        tenants = len(self._waiting.keys() | {request.tenant})
        limit, own = self._context.limits.max_waiting_requests, self._waiting[request.tenant]
        self._first_tokens.busy(self._context.clock.now())
        try:
            lower = sum(
                [count for one, count in self._priorities.items() if one < request.priority]
            )
            seconds = self._first_tokens.seconds_each()
            admit(self._waiting.total(), limit, seconds, own, tenants, lower)
        except OverloadedError as error:
            if self.placer.waits and (missing := self.placer.missing()):
                error.retry_after_seconds = missing.retry_after_seconds
            raise
        self._running += 1
        self._waiting[request.tenant] += 1
        self._priorities[request.priority] += 1
        self.counters.add("requests_started")

    def _leave(self, request: Request, waits: bool) -> None:
        if waits:
            self._waits_no_more(request)
        self._running -= 1
        self.counters.add("requests_ended")
        self._quiet.set()

    def _waits_no_more(self, request: Request) -> None:
        self._waiting[request.tenant] -= 1
        self._priorities[request.priority] -= 1
        if not self._waiting[request.tenant]:
            del self._waiting[request.tenant]
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        if not self._waiting:
            self._first_tokens.idle(self._context.clock.now())

    def _first_token(self, run: RequestRun) -> None:
        now = run.first_token_at or run.arrived_at
        self._first_tokens.served(1.0, self._context.clock.now())
        self._waits_no_more(run.request)
        if run.first_placement and run.as_planned:
            run.first_placement.measured_ttft(now - run.arrived_at)

    def _child_ended(self, run: RequestRun, event: StreamEvent) -> None:
        self.placer.ended(run.request, len(run.children[event.child].accepted))
        timings, placement = event.timings, run.first_placement
        if timings and placement and run.as_planned and run.output_tokens > len(run.children):
            placement.measured_tpot(timings.tpot_seconds)

    # ---- status

    async def status(self) -> tuple[WorkerStatus, ...]:
        """Returns the statuses of all workers. Workers that do not answer are left out."""
        cluster = self._context.cluster
        if cluster.statuses is not None:
            return cluster.statuses()
        seconds = self._context.limits.timeouts.request.status_seconds
        ports = [*cluster.prefill.values(), *cluster.decode.values()]
        answers = await asyncio.gather(*(_status(port, seconds) for port in ports))
        return tuple(answer for answer in answers if answer is not None)

    def routing(self) -> RoutingStatus:
        return self.placer.status()

    async def reset_cache(self) -> int:
        """Clears the prefix cache of every worker. Returns the number of blocks removed.

        Raises:
            UnavailableError: A worker did not answer, so its blocks may remain cached.
        """
        cluster, seconds = self._context.cluster, self._context.limits.timeouts.request
        ports = {**cluster.prefill, **cluster.decode}
        try:
            async with asyncio.timeout(seconds.status_seconds):
                return sum(await asyncio.gather(*(port.reset_cache() for port in ports.values())))
        except TimeoutError:
            raise UnavailableError(
                f"not all of {', '.join(ports)} answered within {seconds.status_seconds:g} s, and"
                " their cached blocks may still be used; try again"
            ) from None

    async def session(self, call: SessionCall) -> tuple[SessionReport, ...]:
        """Shows, restores or drops the KV of a session on all workers. Returns the reports of those
        that know the session.

        Raises:
            UnavailableError: A worker did not answer, so it may still have KV that is to be
                dropped; or no worker that knows the session answered.
        """
        ports = {**self.cluster.prefill, **self.cluster.decode}
        asked = [_asked(port, call) for port in ports.values()]
        replies = dict(zip(ports, await asyncio.gather(*asked), strict=True))
        reports = tuple([one for one in replies.values() if isinstance(one, SessionReport)])
        silent = [name for name, one in replies.items() if isinstance(one, Exception)]
        if silent and (not reports or call.action is SessionAction.DROP):
            raise UnavailableError(
                f"session {call.session!r}: {', '.join(silent)} did not answer within"
                f" {call.deadline_seconds:g} s, and may have its KV; try again"
            )
        return reports

    async def drain(self) -> None:
        self._draining = True
        while self._running:
            self._quiet.clear()
            await self._quiet.wait()

    async def _ask_workers(self) -> None:
        accounts, now = self.placer.accounts, self._context.clock.now()
        reported = {status.name: status for status in await self.status()}
        for name in [name for name in accounts.state if name not in reported]:
            description = accounts.state.description(name)
            accounts.forget(name)
            accounts.state.describe(name, description)
        for status in reported.values():
            accounts.heard(status, now)


def _more_useful(cause: UnavailableError | None, error: Exception) -> Exception:
    """Returns the worker's own error `cause`, because it is more useful than the error that no
    worker is left."""
    if cause is None or cause is error or not isinstance(error, JdisaggError):
        return cause or error
    if cause.retry_after_seconds is None:
        cause.retry_after_seconds = error.retry_after_seconds
    return cause


async def _asked(
    port: PrefillPort | DecodePort, call: SessionCall
) -> SessionReport | None | Exception:
    try:
        async with asyncio.timeout(call.deadline_seconds):
            return await port.session(call)
    except (UnavailableError, DeadlineExceededError, TimeoutError) as error:
        return error


async def _status(port: PrefillPort | DecodePort, seconds: float) -> WorkerStatus | None:
    try:
        async with asyncio.timeout(seconds):
            return await port.status()
    except (UnavailableError, TimeoutError):
        return None
