"""Metrics that are read at the scrape: worker statuses, counters, compilations, readiness, and the
elastic controller's advice.

A counter `leases_expired` of worker `decode-0` becomes
`jdisagg_leases_expired_total{owner="decode-0"}` by rule, so a new counter is exported without a
change here. `_SPLIT` lists counters that are one metric split by a label, and `_TOLD_ELSEWHERE`
those that another metric already has. A worker that does not answer in time is down
(`jdisagg_worker_up` 0), and the rest of its status is not exported. A router's metrics about its
workers have their own names (`jdisagg_router_worker_*`), so that sums over all processes count
nothing twice."""

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

# Counter -> (metric, its label).
_SPLIT: dict[str, tuple[str, tuple[str, str]]] = {
    "handoffs_completed": ("handoffs", ("result", "completed")),
    "handoffs_failed": ("handoffs", ("result", "failed")),
    "handoffs_aborted": ("handoffs", ("result", "aborted")),
    "pulls_failed": ("pull_failures", ("cause", "failed")),
    "pulls_timed_out": ("pull_failures", ("cause", "timed_out")),
}
# Already exported as requests_finished, placements and kv_bytes.
_TOLD_ELSEWHERE = ("requests_started", "requests_ended", "kv_bytes_received")


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read from one owner. `up` is whether a worker of this process answered, or None if
    the owner has no status of its own."""

    owner: str
    counts: tuple[tuple[str, Labels, int], ...]
    up: bool | None
    statuses: tuple[WorkerStatus, ...]
    compilations: int | None


@dataclass(frozen=True, slots=True)
class Watched:
    """An owner to read. `status` is for one worker, `statuses` for workers that come and go."""

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
    """Yields metric families. Each family has the samples of all owners, as the format requires."""
    yield from _counters(readings)
    compilations = CounterMetricFamily(
        "jdisagg_compilations", "Compiled programs. Constant in steady state.", labels=["worker"]
    )
    up = GaugeMetricFamily("jdisagg_worker_up", "1 if the worker answered.", labels=["worker"])
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
        # All samples of a family need the same label names. A missing label is empty, which
        # Prometheus treats as absent.
        labels = sorted({label for named, _ in members for label in named})
        family = CounterMetricFamily(
            metric, f"Counter {metric.removeprefix('jdisagg_')} of its owner.", labels=labels
        )
        for named, value in members:
            family.add_metric([named.get(label, "") for label in labels], value)
        yield family


def _statuses(prefix: str, statuses: Sequence[WorkerStatus]) -> list[Metric]:
    labels = ["worker", "role"]
    gauges: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
        ("running", "Running sequences, or prompts in prefill.", lambda s: s.running),
        ("waiting", "Requests in the worker's queue.", lambda s: s.waiting),
        ("slots", "Maximum number of running sequences.", lambda s: s.slots),
        ("handoffs", "Hand-offs in progress.", lambda s: s.handoffs),
        ("draining", "1 while the worker takes no new requests.", lambda s: float(s.draining)),
        (
            "loading_seconds",
            "Estimated seconds until a serving worker has loaded all programs.",
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
        f"{prefix}worker_preemptions", "Preempted sequences.", labels=labels
    )
    tiers = [*labels, "tier"]
    blocks = GaugeMetricFamily(f"{prefix}kept_blocks", "Prefix-cache blocks.", labels=tiers)
    held = GaugeMetricFamily(f"{prefix}kept_bytes", "Size of these blocks.", labels=tiers)
    room = GaugeMetricFamily(
        f"{prefix}kept_room_bytes", "Capacity of the prefix cache.", labels=tiers
    )
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
        "jdisagg_router_waiting", "Requests waiting at the router for workers.", value=waiting
    )


def build_families(process: str, model: str, version: str, jax: str) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "jdisagg_process_info", "Always 1; the label has the process's name.", labels=["process"]
    )
    info.add_metric([process], 1)
    yield info
    build = GaugeMetricFamily(
        "jdisagg_build_info",
        "Always 1; labels have the versions and the served model.",
        labels=["version", "jax", "python", "model_name"],
    )
    build.add_metric([version, jax, platform.python_version(), model], 1)
    yield build


def canary_families(canary: Canary, now: float) -> Iterator[Metric]:
    """Yields readiness and the age of each pair's last KV transfer."""
    yield GaugeMetricFamily(
        "jdisagg_ready",
        "1 if KV was recently transferred from prefill to decode.",
        value=int(canary.readiness(now).ready),
    )
    ages = GaugeMetricFamily(
        "jdisagg_canary_age_seconds",
        "Seconds since the pair's last KV transfer. Absent before the first one.",
        labels=["prefill", "decode"],
    )
    for pair in canary.pairs:
        age = canary.age_seconds(pair, now)
        if age is not None:
            ages.add_metric([pair.prefill, pair.decode], age)
    yield ages


def advice_families(advice: AdviceReport) -> Iterator[Metric]:
    """Yields the elastic controller's advice, for an external autoscaler that reads Prometheus."""
    by_role = (
        (
            "advised",
            "Advised number of workers of a role.",
            {"prefill": advice.prefill, "decode": advice.decode},
        ),
        (
            "taking",
            "Workers of a role that accept new requests.",
            {"prefill": advice.prefill_now, "decode": advice.decode_now},
        ),
        (
            "needed",
            "The controller's estimate of the workers that the load needs.",
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
        "Share of requests in the window that met the objective.",
        labels=["objective"],
    )
    attained.add_metric(["ttft"], advice.ttft_attainment)
    attained.add_metric(["tpot"], advice.tpot_attainment)
    yield attained


def pages_by_state(status: WorkerStatus) -> Iterator[tuple[int, str, int]]:
    """Yields (rank, state, pages). "reserved" pages wait for KV that has not fully arrived, "used"
    pages are in use, and with "free" they add up to all pages."""
    reserved_by_rank = status.reserved_pages or (0,) * len(status.free_pages)
    for rank, (free, total, reserved) in enumerate(
        zip(status.free_pages, status.total_pages, reserved_by_rank, strict=True)
    ):
        yield rank, "free", free
        yield rank, "reserved", reserved
        yield rank, "used", total - free - reserved
