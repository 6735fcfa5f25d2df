"""What is read when somebody scrapes: statuses of workers, counters of whoever counts, compilations
of meshes, readiness, the elastic controller's advice.

A counter `leases_expired` of worker `decode-0` becomes
`jdisagg_leases_expired_total{owner="decode-0"}` by rule, so that a new counter is exported without
a line here; `_SPLIT` lists the names that are one metric split by a label, and `_TOLD_ELSEWHERE`
those that another metric says already. A worker that does not answer in time is down
(`jdisagg_worker_up` 0) and exports nothing else of its status. What a router knows of its workers
has names of its own (`jdisagg_router_worker_*`): sums over all processes then count nothing twice.
"""

import asyncio
import platform
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from jdisagg.errors import JdisaggError
from jdisagg.messages.roles import AdviceReport
from jdisagg.messages.worker_status import WorkerStatus
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
# By requests_finished, placements and kv_bytes.
_TOLD_ELSEWHERE = ("requests_started", "requests_ended", "kv_bytes_received")


@dataclass(frozen=True, slots=True)
class Reading:
    """`up`: whether a worker of this process answered; None for who has no status of its own."""

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
        labelled = self.counters.labelled() if self.counters else {}
        counts = tuple((name, labels, value) for (name, labels), value in labelled.items())
        compilations = self.compilations() if self.compilations else None
        return Reading(self.owner, counts, up, statuses, compilations)


def reading_families(readings: Sequence[Reading]) -> Iterator[Metric]:
    """Families of one name are gathered from all owners, as the format wants it."""
    yield from _counters(readings)
    compilations = CounterMetricFamily(
        "jdisagg_compilations",
        "Programs compiled; stands still in steady state.",
        labels=["worker"],
    )
    up = GaugeMetricFamily("jdisagg_worker_up", "1 where the worker answered.", labels=["worker"])
    for reading in readings:
        if reading.compilations is not None:
            compilations.add_metric([reading.owner], reading.compilations)
        if reading.up is not None:
            up.add_metric([reading.owner], int(reading.up))
    own = [status for reading in readings if reading.up for status in reading.statuses]
    seen = [status for reading in readings if reading.up is None for status in reading.statuses]
    families = [compilations, up, *_statuses("jdisagg_", own)]
    families += _statuses("jdisagg_router_", seen)
    yield from (family for family in families if family.samples)


def _counters(readings: Sequence[Reading]) -> Iterator[Metric]:
    samples: dict[str, list[tuple[dict[str, str], int]]] = {}
    for reading in readings:
        for name, labels, value in reading.counts:
            if name in _TOLD_ELSEWHERE:
                continue
            metric, extra = _SPLIT.get(name, (name, None))
            named = {
                "owner": reading.owner,
                **dict(labels),
                **({extra[0]: extra[1]} if extra else {}),
            }
            samples.setdefault(f"jdisagg_{metric}", []).append((named, value))
    for metric, members in samples.items():
        # Label names must be equal within a family: what one sample lacks is empty, which
        # Prometheus reads as absent.
        labels = sorted({label for named, _ in members for label in named})
        family = CounterMetricFamily(
            metric, f"Counted by its owner as {metric.removeprefix('jdisagg_')}.", labels=labels
        )
        for named, value in members:
            family.add_metric([named.get(label, "") for label in labels], value)
        yield family


def _statuses(prefix: str, statuses: Sequence[WorkerStatus]) -> list[Metric]:
    labels = ["worker", "role"]
    gauges: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
        ("running", "Sequences in a batch, or prompts being prefilled.", lambda s: s.running),
        ("waiting", "Requests in the worker's queue.", lambda s: s.waiting),
        ("slots", "Sequences that fit at once.", lambda s: s.slots),
        ("handoffs", "Hand-offs under way.", lambda s: s.handoffs),
        ("draining", "1 while the worker takes no new requests.", lambda s: float(s.draining)),
        (
            "loading_seconds",
            "How long a worker that serves will still load programs.",
            lambda s: s.loading_seconds,
        ),
    )
    families: list[Metric] = []
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(f"{prefix}worker_{name}", text, labels=labels)
        for status in statuses:
            gauge.add_metric([status.name, status.role.value], value(status))
        families.append(gauge)
    pages = GaugeMetricFamily(
        f"{prefix}pages", "KV pages by state.", labels=[*labels, "rank", "state"]
    )
    preemptions = CounterMetricFamily(
        f"{prefix}worker_preemptions", "Sequences whose pages were taken.", labels=labels
    )
    tiers = [*labels, "tier"]
    blocks = GaugeMetricFamily(f"{prefix}kept_blocks", "Blocks of KV that stays.", labels=tiers)
    held = GaugeMetricFamily(f"{prefix}kept_bytes", "What these take.", labels=tiers)
    room = GaugeMetricFamily(f"{prefix}kept_room_bytes", "What there is for them.", labels=tiers)
    for status in statuses:
        for tier in status.kept:
            place = [status.name, status.role.value, tier.tier]
            blocks.add_metric(place, tier.blocks)
            held.add_metric(place, tier.bytes)
            room.add_metric(place, tier.room_bytes)
        preemptions.add_metric([status.name, status.role.value], status.preemptions)
        for rank, state, count in pages_by_state(status):
            pages.add_metric([status.name, status.role.value, str(rank), state], count)
    return [*families, pages, preemptions, blocks, held, room]


def routing_families(waiting: int) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "jdisagg_router_waiting", "Requests that wait at the router for workers.", value=waiting
    )


def build_families(process: str, model: str, version: str, jax: str) -> Iterator[Metric]:
    info = GaugeMetricFamily("jdisagg_process_info", "1; names the process.", labels=["process"])
    info.add_metric([process], 1)
    yield info
    build = GaugeMetricFamily(
        "jdisagg_build_info",
        "1; what runs, and which model it serves.",
        labels=["version", "jax", "python", "model_name"],
    )
    build.add_metric([version, jax, platform.python_version(), model], 1)
    yield build


def canary_families(canary: Canary, now: float) -> Iterator[Metric]:
    """Readiness, and how long ago KV last made each pair's trip."""
    yield GaugeMetricFamily(
        "jdisagg_ready",
        "1 while KV has made the trip from prefill to decode lately.",
        value=int(canary.readiness(now).ready),
    )
    ages = GaugeMetricFamily(
        "jdisagg_canary_age_seconds",
        "Since the pair last handed KV over; absent before it did.",
        labels=["prefill", "decode"],
    )
    for pair in canary.pairs:
        age = canary.age_seconds(pair, now)
        if age is not None:
            ages.add_metric([pair.prefill, pair.decode], age)
    yield ages


def advice_families(advice: AdviceReport) -> Iterator[Metric]:
    """The elastic controller's advice, for an external autoscaler that reads Prometheus."""
    by_role = (
        (
            "advised",
            "Workers of a role that there should be.",
            {"prefill": advice.prefill, "decode": advice.decode},
        ),
        (
            "taking",
            "Workers of a role that take new requests.",
            {"prefill": advice.prefill_now, "decode": advice.decode_now},
        ),
        (
            "needed",
            "The controller's estimate of what the load needs.",
            {"prefill": advice.prefill_need, "decode": advice.decode_need},
        ),
    )
    for name, text, values in by_role:
        family = GaugeMetricFamily(f"jdisagg_{name}_workers", text, labels=["role"])
        for role, value in values.items():
            family.add_metric([role], value)
        yield family
    attained = GaugeMetricFamily(
        "jdisagg_slo_attainment",
        "Share of the window's requests that met the objective.",
        labels=["objective"],
    )
    attained.add_metric(["ttft"], advice.ttft_attainment)
    attained.add_metric(["tpot"], advice.tpot_attainment)
    yield attained


def pages_by_state(status: WorkerStatus) -> Iterator[tuple[int, str, int]]:
    """(rank, state, pages): "reserved" are held for KV that has not all come, "used" hold what is
    computed with; with "free" they are all pages."""
    reserved_by_rank = status.reserved_pages or (0,) * len(status.free_pages)
    for rank, (free, total, reserved) in enumerate(
        zip(status.free_pages, status.total_pages, reserved_by_rank, strict=True)
    ):
        yield rank, "free", free
        yield rank, "reserved", reserved
        yield rank, "used", total - free - reserved
