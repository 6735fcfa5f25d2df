"""What is read when somebody scrapes: statuses of workers, counters of whoever counts, compilations of meshes.

A counter `leases_expired` of worker `decode-0` becomes `jdisagg_leases_expired_total{owner="decode-0"}` by rule, so that a new
counter is exported without a line here; `_SPLIT` lists the names that are one metric split by a label. A worker that does not
answer in time is down (`jdisagg_worker_up` 0) and exports nothing else of its status.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.errors import JdisaggError
from jdisagg.observe.canary import Canary
from jdisagg.telemetry import Counters, Labels

StatusOf = Callable[[], Awaitable[WorkerStatus]]
StatusesOf = Callable[[], Awaitable[Sequence[WorkerStatus]]]
Compilations = Callable[[], int]

# Counter -> (metric, its label), in one table that can be read.
_SPLIT: dict[str, tuple[str, tuple[str, str]]] = {
    "handoffs_completed": ("handoffs", ("result", "completed")),
    "handoffs_failed": ("handoffs", ("result", "failed")),
    "handoffs_aborted": ("handoffs", ("result", "aborted")),
    "pulls_failed": ("pull_failures", ("cause", "failed")),
    "pulls_timed_out": ("pull_failures", ("cause", "timed_out")),
}
_GAUGES = {
    "worker_running": "Sequences in a batch, or prompts being prefilled.",
    "worker_waiting": "Requests in the worker's queue.",
    "worker_slots": "Sequences that fit at once.",
    "worker_handoffs": "Hand-offs under way.",
    "worker_draining": "1 while the worker takes no new requests.",
    "worker_loading_seconds": "How long a worker that serves will still load programs.",
}


@dataclass(frozen=True, slots=True)
class Reading:
    owner: str
    counts: tuple[tuple[str, Labels, int], ...]
    up: bool | None
    statuses: tuple[WorkerStatus, ...]
    compilations: int | None


@dataclass(frozen=True, slots=True)
class Watched:
    """`status` is one worker's; `statuses` those of workers that come and go."""

    owner: str
    counters: Counters | None = None
    status: StatusOf | None = None
    statuses: StatusesOf | None = None
    compilations: Compilations | None = None

    async def read(self, seconds: float) -> Reading:
        up, statuses = None, tuple[WorkerStatus, ...]()
        try:
            async with asyncio.timeout(seconds):
                if self.status is not None:
                    up = False
                    statuses = (await self.status(),)
                    up = True
                elif self.statuses is not None:
                    statuses = tuple(await self.statuses())
        except (JdisaggError, TimeoutError):
            pass
        counts = () if self.counters is None else tuple((name, labels, value) for (name, labels), value in self.counters.labelled().items())
        return Reading(self.owner, counts, up, statuses, self.compilations() if self.compilations else None)


class Snapshots(Collector):
    """The latest readings as metrics. Families of one name are gathered from all owners, as the format wants it."""

    def __init__(self, process: str) -> None:
        self.readings: Sequence[Reading] = ()
        self._process = process

    def describe(self) -> list[Metric]:
        """Nothing beforehand: the names are those that are counted."""
        return []

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("jdisagg_process_info", "1; names the process.", labels=["process"])
        info.add_metric([self._process], 1)
        yield info
        yield from _counters(self.readings)
        yield from _statuses(self.readings)
        compilations = CounterMetricFamily("jdisagg_compilations", "Programs compiled; stands still in steady state.", labels=["worker"])
        for reading in self.readings:
            if reading.compilations is not None:
                compilations.add_metric([reading.owner], reading.compilations)
        yield compilations


def _counters(readings: Sequence[Reading]) -> Iterator[Metric]:
    samples: dict[str, list[tuple[dict[str, str], int]]] = {}
    for reading in readings:
        for name, labels, value in reading.counts:
            metric, extra = _SPLIT.get(name, (name, None))
            named = {"owner": reading.owner, **dict(labels), **({extra[0]: extra[1]} if extra else {})}
            samples.setdefault(f"jdisagg_{metric}", []).append((named, value))
    for metric, members in samples.items():
        # Label names must be equal within a family: what one sample lacks is empty, which Prometheus reads as absent.
        labels = sorted({label for named, _ in members for label in named})
        family = CounterMetricFamily(metric, f"Counted by its owner as {metric.removeprefix('jdisagg_')}.", labels=labels)
        for named, value in members:
            family.add_metric([named.get(label, "") for label in labels], value)
        yield family


def _statuses(readings: Sequence[Reading]) -> Iterator[Metric]:
    up = GaugeMetricFamily("jdisagg_worker_up", "1 where the worker answered.", labels=["worker"])
    gauges = {name: GaugeMetricFamily(f"jdisagg_{name}", text, labels=["worker", "role"]) for name, text in _GAUGES.items()}
    pages = GaugeMetricFamily("jdisagg_pages", "KV pages by state.", labels=["worker", "role", "rank", "state"])
    preemptions = CounterMetricFamily("jdisagg_worker_preemptions", "Sequences whose pages were taken.", labels=["worker", "role"])
    for reading in readings:
        if reading.up is not None:
            up.add_metric([reading.owner], int(reading.up))
        for status in reading.statuses:
            labels = [status.name, status.role.value]
            values = (status.running, status.waiting, status.slots, status.handoffs, status.draining, status.loading_seconds)
            for name, value in zip(_GAUGES, values, strict=True):
                gauges[name].add_metric(labels, float(value))
            preemptions.add_metric(labels, status.preemptions)
            for rank, state, count in pages_by_state(status):
                pages.add_metric([*labels, str(rank), state], count)
    yield from (up, *gauges.values(), pages, preemptions)


class CanaryAges(Collector):
    """Readiness, and how long ago KV last made each pair's trip."""

    def __init__(self, canary: Canary, now: Callable[[], float]) -> None:
        self._canary = canary
        self._now = now

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        now = self._now()
        ready = self._canary.readiness(now).ready
        yield GaugeMetricFamily("jdisagg_ready", "1 while KV has made the trip from prefill to decode lately.", value=int(ready))
        labels = ["prefill", "decode"]
        ages = GaugeMetricFamily("jdisagg_canary_age_seconds", "Since the pair last handed KV over; absent before it did.", labels=labels)
        for pair in self._canary.pairs:
            age = self._canary.age_seconds(pair, now)
            if age is not None:
                ages.add_metric([pair.prefill, pair.decode], age)
        yield ages


def pages_by_state(status: WorkerStatus) -> Iterator[tuple[int, str, int]]:
    """(rank, state, pages): "reserved" are held for KV that has not all come, "used" hold what is computed with; with "free" they
    are all pages."""
    reserved_by_rank = status.reserved_pages or (0,) * len(status.free_pages)
    for rank, (free, total, reserved) in enumerate(zip(status.free_pages, status.total_pages, reserved_by_rank, strict=True)):
        yield rank, "free", free
        yield rank, "reserved", reserved
        yield rank, "used", total - free - reserved
