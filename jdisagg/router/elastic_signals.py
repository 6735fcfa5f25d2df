"""What the elastic controller looks at: how requests fared and how busy the pools were, over a
sliding window.

Requests are judged at quantiles, never by their mean: the question is which share of them met the
objective, and whether those that did not would have met it without their queue. A pool's use is
sampled: of a prefill worker the share of the time in which it had work, of a decode worker the
fuller of its pages and its slots. Pages and slots of sequences whose KV has not come yet are not
the decode pool's own load: while prefill is short they fill it up.

Pure bookkeeping: time is an argument, and what comes out (`View`) is plain data. Nothing here
decides."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.quantiles import quantile


@dataclass(frozen=True, slots=True)
class SloTarget:
    """A share of `quantile` of all requests is to have its first token within `ttft_seconds`, and
    at most `tpot_seconds` per further token."""

    ttft_seconds: float = 2.0
    tpot_seconds: float = 0.2
    quantile: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft_seconds", "tpot_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"slo.{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.quantile < 1:
            raise ConfigError(
                f"slo.quantile must lie between 0 and 1, got {self.quantile}; 0.9 asks for nine of"
                " ten requests"
            )


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One request that ended at `at`. `ttft_seconds` is infinite for one that was refused, or never
    had a token; `queue_seconds` of it were spent waiting at the router, for pages and for a place
    in a prefill batch. `tpot_seconds` None: there was no second token."""

    at: float
    ttft_seconds: float
    tpot_seconds: float | None = None
    queue_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolView:
    """One role over the window. `taking`: its workers that take new requests now; `use` in [0, 1],
    `peak_use` its quantile over the samples; `waiting`: mean number of requests in its queues, or
    held for it; `batch`: mean number of sequences that run on a dp rank."""

    taking: tuple[WorkerStatus, ...]
    use: float = 0.0
    peak_use: float = 0.0
    waiting: float = 0.0
    batch: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """What the controller decides from. Attainments are shares of the requests that meet the
    objective, 1 where there were none; `ttft_without_queue` is what the share would be had nobody
    queued. `ttft_quantile`, `tpot_quantile`: seconds, 0 where none."""

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
    waiting: int
    batch: float


class SloWindow:
    """Keeps outcomes and samples of the last `window_seconds`."""

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
        """In order of `at`."""
        self._outcomes.append(outcome)

    def sample(self, now: float, statuses: Iterable[WorkerStatus], held: int = 0) -> None:
        """What the workers say of themselves, at about equal intervals. Mixed workers are nobody's
        to switch, and not counted. `held`: requests that the router keeps back: while all prefill
        workers are busy for their sake, else for want of room to decode."""
        self._latest = tuple(statuses)
        self._since = now if self._since is None else self._since
        busy = all(map(use_of, _taking(self._latest, WorkerRole.PREFILL)))
        waits_for = WorkerRole.PREFILL if busy else WorkerRole.DECODE
        for role, samples in self._samples.items():
            workers = _taking(self._latest, role)
            if workers:
                use = sum(map(use_of, workers)) / len(workers)
                ranks = sum(max(1, len(worker.total_pages)) for worker in workers)
                waiting = sum(worker.waiting for worker in workers) + (
                    held if role is waits_for else 0
                )
                samples.append(_Sample(now, use, waiting, sum(map(_at_work, workers)) / ranks))
        self._forget(now - self._window_seconds)

    def clear(self) -> None:
        """What was seen says nothing any more: the pools are others now."""
        self._outcomes.clear()
        for samples in self._samples.values():
            samples.clear()
        self._since = None

    def view(self, now: float, slo: SloTarget) -> View:
        self._forget(now - self._window_seconds)
        outcomes = self._outcomes
        waits = [outcome.ttft_seconds for outcome in outcomes]
        paces = [outcome.tpot_seconds for outcome in outcomes if outcome.tpot_seconds is not None]
        # A refusal says nothing of how long the prefill itself would have taken: it is the queue's.
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
            waiting=sum(sample.waiting for sample in samples) / count,
            batch=sum(sample.batch for sample in samples) / count,
        )

    def _forget(self, before: float) -> None:
        for entries in (self._outcomes, *self._samples.values()):
            while entries and entries[0].at < before:
                entries.popleft()


def use_of(worker: WorkerStatus) -> float:
    """How much of a worker is in use now, in [0, 1]."""
    if worker.role is WorkerRole.PREFILL:
        return 1.0 if worker.running or worker.waiting else 0.0
    total = sum(worker.total_pages)
    busy = total - sum(worker.free_pages) - sum(worker.reserved_pages)
    fullest = max(
        busy / total if total else 0.0, _at_work(worker) / worker.slots if worker.slots else 0.0
    )
    return min(1.0, max(0.0, fullest))


def _at_work(worker: WorkerStatus) -> int:
    """Its sequences without those of hand-offs under way, which wait for a prefill worker."""
    return max(0, worker.running - worker.handoffs)


def _share_within(values: Sequence[float], limit: float) -> float:
    return sum(value <= limit for value in values) / len(values) if values else 1.0


def _taking(workers: Iterable[WorkerStatus], role: WorkerRole) -> tuple[WorkerStatus, ...]:
    return tuple(worker for worker in workers if worker.role is role and not worker.draining)
