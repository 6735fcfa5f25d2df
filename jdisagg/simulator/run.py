"""Simulates a workload on a fleet in virtual time. Requests take the live request path.

    pool = Pool(2, accelerator("h100"), replace(INSTANCE, layout=Layout(tp=4)))
    fleet = Fleet(geometry("llama-3.1-70b"), prefill=pool, decode=pool)
    result = simulate(fleet, workloads.poisson(4.0, 1000, workloads.Fixed(1024, 128)), seed=0)
    report.summarise(result.outcomes, report.SloLimits(ttft_seconds=1.0), result.usage)

Equal arguments give equal results."""

import asyncio
import contextlib
import functools
import gc
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jdisagg.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    JdisaggError,
    OverloadedError,
    UnavailableError,
    WorkloadError,
)
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.request import Request, SamplingParams, Timings
from jdisagg.router.decision import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.fleet import Fleet
from jdisagg.simulator.gaps import Gaps
from jdisagg.simulator.report import End, RequestOutcome, WorkerUsage
from jdisagg.simulator.timeline import NUMBER_BITS, gap_runs
from jdisagg.simulator.virtual_time import VirtualClock, run_virtually
from jdisagg.simulator.workloads import Arrival

# Thresholds of the garbage collector. With Python's defaults it takes a tenth of the time, though
# cycles are few.
COLLECT_AFTER = (500_000, 50, 50)

Hook = Callable[[SimulatedCluster], Awaitable[None]]
Enough = Callable[[RequestOutcome], bool]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a simulated workload.

    Attributes:
      outcomes: One outcome for each request, in the order of arrival.
      counters: Counters of the request path and the workers, summed over all processes. Prefix
        cache counters of decode workers have the prefix "decode_".
      pages_lost: Number of KV pages that were not free after the run; more than 0 is a leak.
      stopped: Whether `enough` or `begun` ended the run early. `outcomes` then has only the
        requests that had ended, and `pages_lost` is 0.
    """

    outcomes: tuple[RequestOutcome, ...]
    usage: tuple[WorkerUsage, ...]
    seconds: float
    steps: int
    counters: dict[str, int] = field(default_factory=dict)
    pages_lost: int = 0
    stopped: bool = False


def simulate(
    fleet: Fleet,
    arrivals: Iterable[Arrival],
    seed: int = 0,
    *,
    hooks: Sequence[Hook] = (),
    mortal: bool = False,
    events: RouterEvents = NO_ROUTER_EVENTS,
    progress: Progress | None = None,
    settle_seconds: float = 0.0,
    enough: Enough | None = None,
    begun: Enough | None = None,
    concurrency: int | None = None,
    gaps: bool = True,
    cluster: Callable[..., SimulatedCluster] = SimulatedCluster,
) -> Result:
    """Simulates a workload on a fleet, and blocks until every request has ended.

    Args:
      seed: Seed of the request ids. The workload is generated with another seed.
      events: Listener that receives every decision of the router, such as
        `observe/decision_log.py`.
      settle_seconds: Virtual seconds for which the run continues after the last request.
      enough: Called with each outcome, whose request id is the index of the arrival. Returns True
        to end the run.
      begun: Called when a request has its first token, with the request's outcome so far. Returns
        True to end the run.
      concurrency: Number of users of a closed loop. A user sends the next request when the user's
        previous request has ended, and arrival times are ignored. None means an open loop.
      cluster: Class of the simulated cluster; studies of other engines pass a subclass.

    Raises:
      WorkloadError: The workload is empty, or `concurrency` is below 1.
    """
    listed = sorted(arrivals, key=lambda item: item.at_seconds)
    if not listed:
        raise WorkloadError("the workload is empty; give at least one request")
    if concurrency is not None and concurrency < 1:
        raise WorkloadError(f"a closed loop must have 1 user or more, got {concurrency}")

    async def main() -> Result:
        served = cluster(fleet, VirtualClock(), seed, mortal, events)
        run = _Run(served, listed, progress)
        run.enough, run.begun, run.users, run.gaps = enough, begun, concurrency, gaps
        return await run.run(hooks, settle_seconds)

    threshold, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        return run_virtually(main, limit_seconds=math.inf)
    finally:
        gc.set_threshold(*threshold)
        if not frozen:  # else it would also unfreeze the caller's objects
            gc.unfreeze()


class _Run:
    def __init__(
        self, cluster: SimulatedCluster, arrivals: Sequence[Arrival], progress: Progress | None
    ) -> None:
        self.cluster = cluster
        self._fleet = cluster.fleet
        self._arrivals = arrivals
        self._progress = progress
        self._outcomes: list[RequestOutcome | None] = [None] * len(arrivals)
        self._left = len(arrivals)
        self._over: asyncio.Future[None] | None = None
        self.enough: Enough | None = None
        self.begun: Enough | None = None
        self.users: int | None = None
        self.gaps = True
        self._begun = 0  # index of the closed loop's next request

    async def run(self, hooks: Sequence[Hook], settle_seconds: float) -> Result:
        cluster, loop = self.cluster, asyncio.get_running_loop()
        await cluster.start()
        if not gc.get_freeze_count():
            gc.freeze()  # the workers live until the end; collection can skip them
        running = [asyncio.ensure_future(hook(cluster)) for hook in hooks]
        over = self._over = loop.create_future()
        if self.users is None:
            self._begin(0, loop.time())
        else:
            for _ in range(min(self.users, len(self._arrivals))):
                self._begin_next()
        while not over.done():
            await asyncio.wait(
                [over, *(hook for hook in running if not hook.done())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for hook in running:
                if hook.done():
                    hook.result()  # raises its error
        await over
        seconds = loop.time()
        outcomes = tuple(outcome for outcome in self._outcomes if outcome is not None)
        stopped = self._left > 0
        if stopped:  # ignores errors of interrupted requests
            loop.set_exception_handler(lambda loop, context: None)
        for hook in running:
            hook.cancel()
        if not stopped:
            await asyncio.sleep(settle_seconds)
        counters = Counter({**cluster.counters.snapshot(), **cluster.path.counters.snapshot()})
        for process in (*cluster.former, *cluster.processes.values()):
            counters.update(_counted(process.card.role, process.worker.counters.snapshot()))
        lost = 0
        for process in cluster.processes.values():
            if not cluster.local.is_dead(process.worker):
                # The pages of a failed mesh that was not restarted are not counted.
                with contextlib.suppress(UnavailableError):
                    status = process.worker.status_now()
                    lost += sum(status.total_pages) - sum(status.free_pages)
        steps = sum(
            process.mesh.steps_run for process in (*cluster.former, *cluster.processes.values())
        )
        usage = cluster.usage()
        await cluster.stop()
        lost = 0 if stopped else lost
        return Result(outcomes, usage, seconds, steps, dict(counters), lost, stopped)

    def _begin(self, first: int, started: float) -> None:
        loop = asyncio.get_running_loop()
        for number in range(first, len(self._arrivals)):
            arrival = self._arrivals[number]
            if started + arrival.at_seconds > loop.time():
                loop.call_at(started + arrival.at_seconds, self._begin, number, started)
                return
            self._start(number)

    def _begin_next(self) -> None:
        self._begun += 1
        self._start(self._begun - 1)

    def _start(self, number: int) -> None:
        client = self._client(number, self._arrivals[number])
        task = asyncio.get_running_loop().create_task(client)
        self.cluster.clients[task] = None
        task.add_done_callback(functools.partial(self._gone, number))

    def _gone(self, number: int, client: "asyncio.Task[None]") -> None:
        if self._outcomes[number] is None and client.cancelled():  # cancelled before its first turn
            arrival, now = self._arrivals[number], asyncio.get_running_loop().time()
            self._outcomes[number] = RequestOutcome(
                str(number),
                now,
                now,
                arrival.prompt_tokens,
                0,
                end="cancelled",
                tenant=arrival.tenant,
            )
            self._left -= 1
        self.cluster.clients.pop(client, None)
        self.cluster.book.forget(str(number))
        assert self._over is not None
        if self._over.done():
            return
        if not client.cancelled() and (error := client.exception()) is not None:
            self._over.set_exception(error)
        elif not self._left:
            self._over.set_result(None)
        elif self.users is not None and self._begun < len(self._arrivals):
            self._begin_next()

    async def _client(self, number: int, arrival: Arrival) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        first: float | None = None
        tokens: list[int] = []
        end: End = "finished"
        reason = ""
        timings, usage = Timings(), None
        try:
            if front := self._fleet.software.engine.front_seconds:
                await asyncio.sleep(front)
            async for event in self.cluster.front.stream(self._request(number, arrival)):
                if event.token_ids:
                    if first is None:
                        first = loop.time()
                        if self.begun is not None:
                            size = arrival.prompt_tokens
                            so_far = RequestOutcome(str(number), started, first, size, 1, first)
                            self._end_if(self.begun, so_far)
                    tokens += event.token_ids
                if event.timings is not None:
                    timings, usage = event.timings, event.usage
        except OverloadedError as error:
            end, reason = "refused", error.message
        except DeadlineExceededError as error:
            end, reason = "deadline", error.message
        except JdisaggError as error:
            end, reason = "failed", error.message
        except asyncio.CancelledError:
            end, reason = "cancelled", "the client went away"
        outcome = self._outcomes[number] = RequestOutcome(
            str(number),
            started,
            loop.time(),
            arrival.prompt_tokens,
            len(tokens),
            first,
            Gaps.of(gap_runs(self.cluster.timelines, tokens))
            if self.gaps and len(tokens) > 1
            else None,
            end,
            arrival.tenant,
            prefill=self._made_by(tokens[0]) if tokens else "",
            decode=self._made_by(tokens[-1]) if tokens else "",
            reason=reason,
            queue_seconds=timings.queue_seconds,
            cached_tokens=usage.cached_tokens if usage is not None else 0,
        )
        self._left -= 1
        if self.enough is not None and self._left:
            self._end_if(self.enough, outcome)
        if self._progress is not None:
            self._progress(len(self._arrivals) - self._left, len(self._arrivals))

    def _end_if(self, enough: Enough, outcome: RequestOutcome) -> None:
        if enough(outcome):
            self.enough = self.begun = None
            assert self._over is not None
            if not self._over.done():
                self._over.set_result(None)

    def _made_by(self, token: int) -> str:
        return self.cluster.timelines[token >> NUMBER_BITS].worker

    def _request(self, number: int, arrival: Arrival) -> Request:
        """The length is checked before the token ids are made, because a trace may have prompts
        that do not fit into memory."""
        context = self._fleet.context
        if arrival.prompt_tokens >= context:
            raise InvalidRequestError(
                f"prompt has {arrival.prompt_tokens} tokens; with one to generate the context holds"
                f" {context}: shorten it"
            )
        if self._fleet.prefix.reuse:
            self.cluster.book.add(str(number), arrival)
        prompt = (0,) * arrival.prompt_tokens
        sampling = _sampling(arrival.output_tokens)
        return Request(
            str(number),
            prompt,
            sampling,
            deadline_seconds=arrival.deadline,
            tenant=arrival.tenant,
            priority=arrival.priority,
            life=number + 1,
            hints=arrival.hints,
        )


def _counted(role: WorkerRole, counters: Mapping[str, int]) -> Mapping[str, int]:
    if role is not WorkerRole.DECODE:
        return counters
    return {
        f"decode_{name}" if name.startswith("prefix_") else name: count
        for name, count in counters.items()
    }


@functools.lru_cache(maxsize=1 << 14)
def _sampling(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
