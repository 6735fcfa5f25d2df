"""Input of the elastic controller: the latencies of requests and the utilization of the pools (the
workers of one role) in a sliding window.

The utilization of a prefill worker is the share of time with work. For a decode worker it is the
fraction of pages in use or of slots in use, whichever is larger. Sequences whose KV has not arrived
do not count as load of the decode pool, because a shortage of prefill workers increases their
number.

Does no I/O: times are arguments and the result (`View`) is plain data."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.predictor import quantile
from jdisagg.settings.declared import Positive, Settings

_NINE_OF_TEN = "0.9 asks for nine of ten requests"


@dataclass(frozen=True, slots=True)
class SloTarget(Settings):
    """Objective of latencies.

    Attributes:
        ttft_seconds: Time within which a request gets its first token.
        tpot_seconds: Mean time between its further tokens.
        quantile: Share of all requests that should meet both.
    """

    section: ClassVar[str] = "elastic.slo"
    ttft_seconds: Positive = 2.0
    tpot_seconds: Positive = 0.2
    quantile: Annotated[float, Meta(gt=0, lt=1, description=_NINE_OF_TEN)] = 0.9


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that ended at time `at`.

    Attributes:
        ttft_seconds: Seconds to the first token, or infinity if the request was refused or got no
            token.
        queue_seconds: Part of `ttft_seconds` that the request spent waiting: at the router, for
            pages, and for a prefill batch.
    """

    at: float
    ttft_seconds: float
    tpot_seconds: float | None = None
    queue_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolView:
    """Measurements of one role's workers in the window.

    Attributes:
        use: Mean utilization, in [0, 1].
        peak_use: High quantile of the sampled utilization, in [0, 1].
        busy: Mean number of busy workers.
        peak_busy: High quantile of the sampled number of busy workers.
        waiting_growth: Number of requests by which those that wait grew in the window; negative if
            they became fewer.
    """

    taking: tuple[WorkerStatus, ...]
    use: float = 0.0
    peak_use: float = 0.0
    busy: float = 0.0
    peak_busy: float = 0.0
    waiting: float = 0.0
    waiting_growth: float = 0.0
    batch: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """The observations from which the controller decides. The attainments are the shares of
    requests that met the TTFT or TPOT objective. `ttft_without_queue` is the share of requests that
    would have met the TTFT objective without queueing. All shares are 1 if there were no requests.
    The latency quantiles are in seconds, and 0 if there were no requests."""

    now: float
    requests: int
    requests_per_second: float
    ttft_attainment: float
    ttft_without_queue: float
    tpot_attainment: float
    ttft_quantile: float
    tpot_quantile: float
    prefill: PoolView
    decode: PoolView


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    use: float
    busy: float
    waiting: int
    batch: float


class SloWindow:
    """Stores the requests that ended, and the samples of workers, in the last `window_seconds`."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._outcomes: deque[EndedRequest] = deque()
        self._samples: dict[WorkerRole, deque[_Sample]] = {
            WorkerRole.PREFILL: deque(),
            WorkerRole.DECODE: deque(),
        }
        self._latest: tuple[WorkerStatus, ...] = ()
        self._since: float | None = None

    def outcome(self, outcome: EndedRequest) -> None:
        """Adds a request that ended. Requests must be added in order of their end times `at`."""
        self._outcomes.append(outcome)

    def sample(self, now: float, statuses: Iterable[WorkerStatus], held: int = 0) -> None:
        """Adds a sample of the workers' statuses. Must be called at about equal intervals. Mixed
        workers are ignored, because they never change their role. `held` is the number of requests
        that wait at the router. They count as waiting for prefill workers while all of these are
        busy, and otherwise as waiting for decode workers."""
        self._latest = tuple(statuses)
        self._since = now if self._since is None else self._since
        busy = all(map(use_of, _taking(self._latest, WorkerRole.PREFILL)))
        waits_for = WorkerRole.PREFILL if busy else WorkerRole.DECODE
        for role, samples in self._samples.items():
            workers = _taking(self._latest, role)
            if workers:
                used = sum(map(use_of, workers))
                ranks = sum(max(1, len(worker.total_pages)) for worker in workers)
                waiting = sum(worker.waiting for worker in workers) + (
                    held if role is waits_for else 0
                )
                batch = sum(map(_at_work, workers)) / ranks
                samples.append(_Sample(now, used / len(workers), used, waiting, batch))
        self._forget(now - self._window_seconds)

    def clear(self) -> None:
        self._outcomes.clear()
        for samples in self._samples.values():
            samples.clear()
        self._since = None

    def view(self, now: float, slo: SloTarget) -> View:
        self._forget(now - self._window_seconds)
        outcomes = self._outcomes
        waits = [outcome.ttft_seconds for outcome in outcomes]
        paces = [outcome.tpot_seconds for outcome in outcomes if outcome.tpot_seconds is not None]
        # A refusal is caused by the queue and gives no information about the prefill time.
        alone = [
            one.ttft_seconds - one.queue_seconds if math.isfinite(one.ttft_seconds) else 0.0
            for one in outcomes
        ]
        seen_seconds = (
            min(self._window_seconds, now - self._since) if self._since is not None else 0.0
        )
        return View(
            now=now,
            requests=len(outcomes),
            requests_per_second=len(outcomes) / seen_seconds if seen_seconds > 0 else 0.0,
            ttft_attainment=_share_within(waits, slo.ttft_seconds),
            ttft_without_queue=_share_within(alone, slo.ttft_seconds),
            tpot_attainment=_share_within(paces, slo.tpot_seconds),
            ttft_quantile=quantile(waits, slo.quantile),
            tpot_quantile=quantile(paces, slo.quantile),
            prefill=self._pool(WorkerRole.PREFILL, slo.quantile),
            decode=self._pool(WorkerRole.DECODE, slo.quantile),
        )

    def _pool(self, role: WorkerRole, at: float) -> PoolView:
        taking, samples = _taking(self._latest, role), self._samples[role]
        if not samples:
            return PoolView(taking)
        count = len(samples)
        return PoolView(
            taking,
            use=sum(sample.use for sample in samples) / count,
            peak_use=quantile([sample.use for sample in samples], at),
            busy=sum(sample.busy for sample in samples) / count,
            peak_busy=quantile([sample.busy for sample in samples], at),
            waiting=sum(sample.waiting for sample in samples) / count,
            waiting_growth=_growth([sample.waiting for sample in samples]),
            batch=sum(sample.batch for sample in samples) / count,
        )

    def _forget(self, before: float) -> None:
        for entries in (self._outcomes, *self._samples.values()):
            while entries and entries[0].at < before:
                entries.popleft()


def _growth(values: Sequence[float]) -> float:
    """Returns the growth over all values, from the means of their first and of their last third."""
    third = len(values) // 3
    if not third:
        return 0.0
    return 1.5 * (sum(values[-third:]) - sum(values[:third])) / third


def use_of(worker: WorkerStatus) -> float:
    if worker.role is WorkerRole.PREFILL:
        return 1.0 if worker.running or worker.waiting else 0.0
    total = sum(worker.total_pages)
    busy = total - sum(worker.free_pages) - sum(worker.reserved_pages)
    fullest = max(
        busy / total if total else 0.0, _at_work(worker) / worker.slots if worker.slots else 0.0
    )
    return min(1.0, max(0.0, fullest))


def _at_work(worker: WorkerStatus) -> int:
    return max(0, worker.running - worker.handoffs)


def _share_within(values: Sequence[float], limit: float) -> float:
    return sum(value <= limit for value in values) / len(values) if values else 1.0


def _taking(workers: Iterable[WorkerStatus], role: WorkerRole) -> tuple[WorkerStatus, ...]:
    return tuple(worker for worker in workers if worker.role is role and worker.serving)
