"""Prometheus metrics of one process.

Each process has one `Metrics` with its own registry, so that several clusters can run in one test
process.

The wrappers of this package update metrics once per batch of tokens or per command, and not per
token.

Names are `jdisagg_<what>_<unit>`. Label values come from small fixed sets (worker, codec, cause),
and never from requests."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector
from prometheus_client.exposition import generate_latest, start_http_server
from prometheus_client.registry import Collector

from jdisagg import __version__
from jdisagg.messages.roles import AdviceReport
from jdisagg.observe.canary import Canary
from jdisagg.observe.sources import (
    Compilations,
    Reading,
    StatusesOf,
    StatusOf,
    Watched,
    advice_families,
    build_families,
    canary_families,
    reading_families,
    ready_families,
    routing_families,
)
from jdisagg.request import CachedTokens, FinishReason
from jdisagg.router.decision import NoRouterEvents
from jdisagg.settings.address import cannot_listen
from jdisagg.telemetry import Counters

prometheus_client.disable_created_metrics()

OTHER_METRICS_PORT = "choose another with --metrics_port"
STATUS_SECONDS = 2.0
# Time that a scrape may wait for the event loop, in addition to the time limit of the workers.
LOOP_SECONDS = 5.0

# From 1 ms to 20 min. Up to 75 s each bucket is about 1.5 times the previous one, so that the error
# of a percentile is at most 25 %.
SECONDS_BUCKETS = (
    *(round(m * 10.0**p, 4) for p in range(-3, 2) for m in (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)),
    *(120.0, 300.0, 600.0, 1200.0),
)
TOKEN_BUCKETS = tuple(float(1 << power) for power in range(21))
RATIO_BUCKETS = (
    *(0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95),
    *(1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
)


class MetricGroup:
    """Base class of groups of metrics that are created together, at the group's first use."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS_BUCKETS
    ) -> Histogram:
        return Histogram(f"jdisagg_{name}", text, labels, registry=self._registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jdisagg_{name}", text, labels, registry=self._registry)


class RequestMetrics(MetricGroup):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token."
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "Mean time per output token after the first, one value per request.",
        )
        self.tbt = self._histogram(
            "time_between_tokens_seconds",
            "Time between two consecutive token events of one stream.",
        )
        self.handoff_gap = self._histogram(
            "handoff_gap_seconds", "Time from the first to the second token."
        )
        self.queue = self._histogram(
            "queue_seconds", "Time per request spent waiting for KV pages and a prefill batch."
        )
        self.seconds = self._histogram(
            "request_seconds", "Duration of requests, by result.", "result"
        )
        self.prompt_sizes = self._histogram(
            "request_prompt_tokens", "Prompt tokens per finished request.", buckets=TOKEN_BUCKETS
        )
        self.generated_sizes = self._histogram(
            "request_generation_tokens",
            "Generated tokens per finished request.",
            buckets=TOKEN_BUCKETS,
        )
        self.finished = self._counter(
            "requests_finished", "Finished requests, by result.", "result"
        )
        self.errors = self._counter(
            "request_errors", "Client calls that failed, including refused ones.", "code", "error"
        )
        self.resumptions = self._counter(
            "resumptions", "Streams resumed by clients after a lost router or connection."
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.cached_tokens = self._counter(
            "cached_tokens",
            "Prompt tokens whose KV came from the prefix cache, by cache tier.",
            "tier",
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens delivered to clients.")
        self.retries = self._counter(
            "retries",
            "Repeated attempts at requests, by the cause of the previous failure.",
            "cause",
        )
        self.call_failures = self._counter(
            "call_failures", "Failed calls of workers.", "worker", "call", "error"
        )
        # These series exist from the start, with the value 0.
        for result in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED):
            self.finished.labels(result.value)
            self.seconds.labels(result.value)
        for tier in CachedTokens().by_tier():
            self.cached_tokens.labels(tier)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals since the start of the process. `kv_bytes` is the number of bytes of KV that meshes of
    this process have received. It is None if no mesh of this process receives KV."""

    prompt_tokens: float
    generated_tokens: float
    kv_bytes: float | None


class TransferMetrics(MetricGroup):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.kv_bytes = self._counter(
            "kv_bytes", "KV bytes received, by link and codec.", "source", "destination", "codec"
        )
        self.pulls = self._counter(
            "pulls", "Pulls of KV blocks, by result.", "source", "destination", "result"
        )
        self.pull_seconds = self._histogram(
            "pull_seconds", "Time from posting a pull to its arrival.", "source", "destination"
        )
        self.exposed = self._histogram(
            "exposed_transfer_seconds",
            "KV transfer time of a hand-off after the end of its prefill.",
            "destination",
        )


class MeshMetrics(MetricGroup):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.step_seconds = self._histogram(
            "step_seconds",
            "Duration of commands on a mesh, from the end of the previous command.",
            "worker",
            "command",
        )


class TierMetrics(MetricGroup):
    """Prefix-cache transfers between device pages, host memory and disk."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.moved = self._counter(
            "kept_bytes_moved",
            "Prefix-cache bytes written to or restored from host memory or disk.",
            *("worker", "tier", "way"),
        )
        self.seconds = self._histogram(
            "kept_move_seconds",
            "Duration of writing or restoring a piece (on disk: a block) of the prefix cache.",
            *("worker", "tier", "way"),
        )


class PredictionMetrics(MetricGroup):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.error = self._histogram(
            "prediction_error_seconds", "Absolute error of the router's predictions.", "what"
        )
        self.ratio = self._histogram(
            "actual_over_predicted_ratio",
            "Actual over predicted time: first token (ttft) or time per output token (tpot).",
            "what",
            buckets=RATIO_BUCKETS,
        )


class Metrics(NoRouterEvents):
    """All metrics of one process. `scrape` returns the metrics in Prometheus' text format, and
    `serve` opens a port that serves this text."""

    def __init__(self, process: str, model: str = "") -> None:
        self.model = model
        self._process = process
        self._registry = CollectorRegistry()
        self._watched: list[Watched] = []
        self._read_at_scrape: list[Callable[[], Iterable[Metric]]] = []

    @cached_property
    def requests(self) -> RequestMetrics:
        return RequestMetrics(self._registry)

    @cached_property
    def transfers(self) -> TransferMetrics:
        return TransferMetrics(self._registry)

    @cached_property
    def meshes(self) -> MeshMetrics:
        return MeshMetrics(self._registry)

    @cached_property
    def tiers(self) -> TierMetrics:
        return TierMetrics(self._registry)

    @cached_property
    def predictions(self) -> PredictionMetrics:
        return PredictionMetrics(self._registry)

    def measured(self, what: str, predicted: float, actual: float) -> None:
        """Records the error of the router's prediction for one request. `what` is "ttft" or "tpot".
        `predicted` and `actual` are in seconds."""
        self.predictions.error.labels(what).observe(abs(actual - predicted))
        if predicted > 0:
            self.predictions.ratio.labels(what).observe(actual / predicted)

    def watch_counters(self, owner: str, counters: Counters) -> None:
        self._watched.append(Watched(owner, counters))

    def watch_worker(
        self,
        name: str,
        status: StatusOf,
        counters: Counters | None = None,
        compilations: Compilations | None = None,
    ) -> None:
        self._watched.append(Watched(name, counters, status, compilations=compilations))

    def watch_cluster(self, statuses: StatusesOf) -> None:
        self._watched.append(Watched("cluster", statuses=statuses))

    def watch_waiting(self, waiting: Callable[[], int]) -> None:
        self._read_at_scrape.append(lambda: routing_families(waiting()))

    def watch_canary(self, canary: Canary, now: Callable[[], float]) -> None:
        self._read_at_scrape.append(lambda: canary_families(canary, now()))

    def watch_ready(self, ready: Callable[[], bool]) -> None:
        self._read_at_scrape.append(lambda: ready_families(ready()))

    def watch_advice(self, advice: Callable[[], AdviceReport]) -> None:
        self._read_at_scrape.append(lambda: advice_families(advice()))

    def unwatch(self, name: str) -> None:
        """Stops exporting the values of the owner `name`. Idempotent."""
        self._watched = [watched for watched in self._watched if watched.owner != name]

    async def scrape(self) -> bytes:
        """Reads the values of all owners, and returns all metrics in Prometheus' text format. Each
        owner has `STATUS_SECONDS` to answer. Call this method on the event loop of the owners."""
        families = await self._read()
        return generate_latest(_Families(lambda: families))

    def serve(self, port: int, host: str) -> Callable[[], None]:
        """Serves GET /metrics with prometheus_client's server, in its own threads. At a scrape,
        values are read on the event loop on which `serve` was called.

        Raises:
            ConfigError: The port cannot be bound.
        """
        loop = asyncio.get_running_loop()

        def families() -> Iterable[Metric]:
            reading: Coroutine[None, None, list[Metric]] = self._read()
            asked = asyncio.run_coroutine_threadsafe(reading, loop)
            return asked.result(STATUS_SECONDS + LOOP_SECONDS)

        try:
            server, thread = start_http_server(port, host, _Families(families))
        except OSError as error:
            raise cannot_listen(host, port, error, OTHER_METRICS_PORT) from error

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close

    def traffic(self) -> Traffic:
        requests = self.requests
        moved = _samples(self.transfers.kv_bytes)
        return Traffic(
            sum(_samples(requests.prompt_tokens)),
            sum(_samples(requests.generated_tokens)),
            sum(moved) if moved else None,
        )

    async def _read(self) -> list[Metric]:
        readings: Sequence[Reading] = await asyncio.gather(
            *(watched.read(STATUS_SECONDS) for watched in list(self._watched))
        )
        ours = [*self._registry.collect(), *reading_families(readings)]
        for read in self._read_at_scrape:
            ours += read()
        if self.model:
            ours = [_of_model(family, self.model) for family in ours]
        about = build_families(self._process, self.model, __version__, _version("jax"))
        return [*about, *ProcessCollector(registry=None).collect(), *ours]


def _samples(counter: Counter) -> list[float]:
    return [
        sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    ]


class _Families(CollectorRegistry):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        super().__init__()
        self.register(_Reading(read))


class _Reading(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Returns an empty list, because the metric names are determined at each scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        return self._read()


def _of_model(family: Metric, model: str) -> Metric:
    labelled = Metric(family.name, family.documentation, family.type)
    labelled.samples = [
        sample._replace(labels={**sample.labels, "model_name": model}) for sample in family.samples
    ]
    return labelled


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
