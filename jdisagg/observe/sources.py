"""Metrics that are read at the scrape: worker statuses, counters, compilations, readiness, and the
elastic controller's advice.

Names of metrics are derived from names of counters: `leases_expired` of worker `decode-0` becomes
`jdisagg_leases_expired_total{owner="decode-0"}`. If a worker does not answer in time, its status is
not exported, and `jdisagg_worker_up` is 0. A router's metrics about its workers have separate names
(`jdisagg_router_worker_*`), so that sums over all processes count no worker twice."""

import asyncio
import functools
import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from jdisagg.errors import JdisaggError
from jdisagg.messages.roles import AdviceReport
from jdisagg.messages.worker_status import KeptTier, WorkerStatus
from jdisagg.observe.canary import Canary
from jdisagg.observe.counter_texts import names_of, text_of
from jdisagg.telemetry import Counters, Labels

StatusOf = Callable[[], Awaitable[WorkerStatus]]
StatusesOf = Callable[[], Awaitable[Sequence[WorkerStatus]]]
Compilations = Callable[[], int]

# Counter -> (metric, value of its label).
_SPLIT: dict[str, tuple[str, tuple[str, str]]] = {
    "handoffs_completed": ("handoffs", ("result", "completed")),
    "handoffs_failed": ("handoffs", ("result", "failed")),
    "handoffs_aborted": ("handoffs", ("result", "aborted")),
    "pulls_failed": ("pull_failures", ("cause", "failed")),
    "pulls_timed_out": ("pull_failures", ("cause", "timed_out")),
}
# Counters already exported as requests_finished, placements and kv_bytes.
_TOLD_ELSEWHERE = ("requests_started", "requests_ended", "kv_bytes_received")


@dataclass(frozen=True, slots=True)
class Reading:
    """Values that were read at a scrape from one owner, such as a worker or a router.

    Attributes:
        up: Whether a worker answered. None if the owner is not a worker.
    """

    owner: str
    counts: tuple[tuple[str, Labels, int], ...]
    up: bool | None
    statuses: tuple[WorkerStatus, ...]
    compilations: int | None


@dataclass(frozen=True, slots=True)
class Watched:
    """An owner, such as a worker or a router, whose values are read at each scrape."""

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
        if self.counters is not None:
            counted = {name for name, _ in labelled}
            known = names_of(self.owner, self.status is not None)
            counts += tuple((name, (), 0) for name in known if name not in counted)
        compilations = self.compilations() if self.compilations else None
        return Reading(self.owner, counts, up, statuses, compilations)


def reading_families(readings: Sequence[Reading]) -> Iterator[Metric]:
    yield from _counters(readings)
    compilations = _family(
        CounterMetricFamily,
        "jdisagg_compilations",
        "Compiled programs. Constant in steady state.",
        ("worker",),
        [((one.owner,), one.compilations) for one in readings if one.compilations is not None],
    )
    up = _gauge(
        "jdisagg_worker_up",
        "1 if the worker answered.",
        ("worker",),
        [((reading.owner,), int(reading.up)) for reading in readings if reading.up is not None],
    )
    own = [status for reading in readings if reading.up for status in reading.statuses]
    seen = [status for reading in readings if reading.up is None for status in reading.statuses]
    families = [compilations, up, *_statuses("jdisagg_", own)]
    families += _statuses("jdisagg_router_", seen)
    yield from (family for family in families if family.samples)


def _counters(readings: Sequence[Reading]) -> Iterator[Metric]:
    samples: dict[str, list[tuple[dict[str, str], int]]] = {}
    texts: dict[str, str] = {}
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
            texts[f"jdisagg_{metric}"] = text_of(name)
    for metric, members in samples.items():
        # All samples of a family need equal label names. A missing label is set to "", which
        # Prometheus treats as absent.
        labels = sorted({label for named, _ in members for label in named})
        rows = [
            (tuple(named.get(label, "") for label in labels), count) for named, count in members
        ]
        yield _family(CounterMetricFamily, metric, texts[metric], labels, rows)


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    family = kind(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


_gauge = functools.partial(_family, GaugeMetricFamily)


def _statuses(prefix: str, statuses: Sequence[WorkerStatus]) -> list[Metric]:
    labels = ("worker", "role")
    gauges: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
        ("running", "Running sequences, or prompts in prefill.", lambda s: s.running),
        ("waiting", "Requests in the worker's queue.", lambda s: s.waiting),
        ("slots", "Maximum number of running sequences.", lambda s: s.slots),
        ("handoffs", "Hand-offs in progress.", lambda s: s.handoffs),
        ("draining", "1 while the worker takes no new requests.", lambda s: float(s.draining)),
        (
            "replaced_kernels",
            "Hand-written kernels that failed their check and were replaced by plain XLA.",
            lambda s: len(s.kernels),
        ),
        ("adapters", "LoRA adapters in the worker's slots.", lambda s: len(s.adapters)),
        ("adapter_slots", "Slots for LoRA adapters.", lambda s: s.adapter_slots),
        ("asleep", "Whether the worker has freed its weights and pages.", lambda s: int(s.asleep)),
    )
    places = [((status.name, status.role.value), status) for status in statuses]
    families = [
        _gauge(f"{prefix}worker_{name}", text, labels, [(at, value(one)) for at, one in places])
        for name, text, value in gauges
    ]
    pages = [
        ((*at, str(rank), state), count)
        for at, status in places
        for rank, state, count in pages_by_state(status)
    ]
    tiers = [((*at, tier.tier), tier) for at, status in places for tier in status.kept]
    kept: tuple[tuple[str, str, Callable[[KeptTier], float]], ...] = (
        ("kept_blocks", "Prefix-cache blocks.", lambda tier: tier.blocks),
        ("kept_bytes", "Size of these blocks.", lambda tier: tier.bytes),
        ("kept_room_bytes", "Capacity of the prefix cache.", lambda tier: tier.room_bytes),
    )
    return [
        *families,
        _gauge(f"{prefix}pages", "KV pages by state.", (*labels, "rank", "state"), pages),
        _family(
            CounterMetricFamily,
            f"{prefix}worker_preemptions",
            "Preempted sequences.",
            labels,
            [(at, status.preemptions) for at, status in places],
        ),
        *(
            _gauge(f"{prefix}{name}", text, (*labels, "tier"), [(at, of(one)) for at, one in tiers])
            for name, text, of in kept
        ),
    ]


def routing_families(waiting: int) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "jdisagg_router_waiting", "Requests waiting at the router for workers.", value=waiting
    )


def build_families(process: str, model: str, version: str, jax: str) -> Iterator[Metric]:
    yield _gauge(
        "jdisagg_process_info",
        "Always 1. The label is the process's name.",
        ("process",),
        [((process,), 1)],
    )
    yield _gauge(
        "jdisagg_build_info",
        "Always 1; labels have the versions and the served model.",
        ("version", "jax", "python", "model_name"),
        [((version, jax, platform.python_version(), model), 1)],
    )


def ready_families(ready: bool) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "jdisagg_ready",
        "1 if the server accepts requests; at a router: if KV reaches decode from prefill.",
        value=int(ready),
    )


def canary_families(canary: Canary, now: float) -> Iterator[Metric]:
    yield from ready_families(canary.readiness(now).ready)
    ages = [((pair.prefill, pair.decode), canary.age_seconds(pair, now)) for pair in canary.pairs]
    yield _gauge(
        "jdisagg_canary_age_seconds",
        "Seconds since the pair's last KV transfer. Absent before the first one.",
        ("prefill", "decode"),
        [(pair, age) for pair, age in ages if age is not None],
    )


def advice_families(advice: AdviceReport) -> Iterator[Metric]:
    by_role = (
        ("advised", "Advised number of workers of a role.", advice.prefill, advice.decode),
        (
            "taking",
            "Workers of a role that accept new requests.",
            advice.prefill_now,
            advice.decode_now,
        ),
        (
            "needed",
            "The controller's estimate of the workers that the load needs.",
            advice.prefill_need,
            advice.decode_need,
        ),
    )
    for name, text, prefill, decode in by_role:
        rows = [(("prefill",), prefill), (("decode",), decode)]
        yield _gauge(f"jdisagg_{name}_workers", text, ("role",), rows)
    yield _gauge(
        "jdisagg_slo_attainment",
        "Share of requests in the window that met the objective.",
        ("objective",),
        [(("ttft",), advice.ttft_attainment), (("tpot",), advice.tpot_attainment)],
    )


def pages_by_state(status: WorkerStatus) -> Iterator[tuple[int, str, int]]:
    """Yields (dp rank, state, number of KV pages) for each dp rank of a worker and each state.

    Pages in the state "reserved" are allocated for KV that has not fully arrived. The other states
    are "free" and "used". The three numbers of a rank add up to all its pages."""
    reserved_by_rank = status.reserved_pages or (0,) * len(status.free_pages)
    for rank, (free, total, reserved) in enumerate(
        zip(status.free_pages, status.total_pages, reserved_by_rank, strict=True)
    ):
        yield rank, "free", free
        yield rank, "reserved", reserved
        yield rank, "used", total - free - reserved
