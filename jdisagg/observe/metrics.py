"""Prometheus metrics of one process: what is measured as it happens, and what is read from its
owners when somebody asks.

Each process has one `Metrics` with a registry of its own, so that many clusters fit into one test
process. Histograms and counters of events come in groups (requests, transfers, mesh, predictions)
that exist from their first use on: a worker exports no empty histograms of requests. They are fed
by the wrappers of this room, once per span or command, never per token. Counters, worker statuses
and compilations are read at the scrape (`sources.py`), on the event loop that owns them, although
`prometheus_client` serves from threads of its own. Names are `jdisagg_<what>_<unit>`; labels come
from small fixed sets (worker, codec, cause), never from requests; everything of ours bears the
model's name."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector
from prometheus_client.exposition import generate_latest, start_http_server
from prometheus_client.registry import Collector

from jdisagg import __version__
from jdisagg.dispatch.router_events import NoRouterEvents
from jdisagg.errors import ConfigError
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
    routing_families,
)
from jdisagg.telemetry import Counters

prometheus_client.disable_created_metrics()

STATUS_SECONDS = 2.0
# How long a scrape may wait for the event loop, beyond what the workers may take.
LOOP_SECONDS = 5.0

# 1 ms to 20 min, up to 75 s about 1.5 times apart: a percentile read from them is off by at most a
# quarter.
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
    """Metrics that come into being together."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS_BUCKETS
    ) -> Histogram:
        return Histogram(f"jdisagg_{name}", text, labels, registry=self._registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jdisagg_{name}", text, labels, registry=self._registry)


class RequestMetrics(MetricGroup):
    """As clients see them, and as the router places them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token."
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "Mean time per output token after the first, one value a request.",
        )
        self.tbt = self._histogram(
            "time_between_tokens_seconds",
            "Each gap between two deliveries of tokens to one child's stream.",
        )
        self.handoff_gap = self._histogram(
            "handoff_gap_seconds", "From the first to the second token."
        )
        self.queue = self._histogram(
            "queue_seconds", "Waited for pages and for a place in a prefill batch, per request."
        )
        self.seconds = self._histogram(
            "request_seconds", "Whole requests, however they ended.", "result"
        )
        self.prompt_sizes = self._histogram(
            "request_prompt_tokens",
            "Prompt tokens of each request that finished.",
            buckets=TOKEN_BUCKETS,
        )
        self.generated_sizes = self._histogram(
            "request_generation_tokens",
            "Tokens generated for each request that finished.",
            buckets=TOKEN_BUCKETS,
        )
        self.finished = self._counter(
            "requests_finished", "Requests that were placed, by how they ended.", "result"
        )
        self.errors = self._counter(
            "request_errors",
            "Calls that ended with an error, refused ones included.",
            "code",
            "error",
        )
        self.resumptions = self._counter(
            "resumptions", "Streams that a client resumed after it lost a router or a connection."
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests that finished."
        )
        self.cached_tokens = self._counter(
            "cached_tokens",
            "Of prompt_tokens, those that were not computed, by where their KV was.",
            "tier",
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens delivered to clients.")
        self.retries = self._counter(
            "retries", "Further attempts at a request, by what ended the one before.", "cause"
        )
        self.call_failures = self._counter(
            "call_failures", "Calls of workers that raised.", "worker", "call", "error"
        )


class TransferMetrics(MetricGroup):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.kv_bytes = self._counter(
            "kv_bytes", "KV bytes received, by link and codec.", "source", "destination", "codec"
        )
        self.pulls = self._counter(
            "pulls", "Pulls of blocks, by how they ended.", "source", "destination", "result"
        )
        self.pull_seconds = self._histogram(
            "pull_seconds", "From posting a pull to the block's arrival.", "source", "destination"
        )
        self.exposed = self._histogram(
            "exposed_transfer_seconds",
            "What of a hand-off remained after the prefill's last operation.",
            "destination",
        )


class MeshMetrics(MetricGroup):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.step_seconds = self._histogram(
            "step_seconds",
            "Commands on a mesh, from the end of the one before.",
            "worker",
            "command",
        )


class TierMetrics(MetricGroup):
    """KV that stays, on its way between pages, host memory and disk."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.moved = self._counter(
            "kept_bytes_moved",
            "KV bytes written to host memory or disk, or read from there.",
            *("worker", "tier", "way"),
        )
        self.seconds = self._histogram(
            "kept_move_seconds",
            "From asking for a piece (of a file on disk: a block) to its arrival.",
            *("worker", "tier", "way"),
        )


class PredictionMetrics(MetricGroup):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.error = self._histogram(
            "prediction_error_seconds",
            "How far the router's prediction of a request was off.",
            "what",
        )
        self.ratio = self._histogram(
            "actual_over_predicted_ratio",
            "What a request took, in parts of what the router predicted: first token (ttft), time"
            " per output token (tpot).",
            "what",
            buckets=RATIO_BUCKETS,
        )


class Metrics(NoRouterEvents):
    """All metrics of the process `process`. `scrape` gives the text that Prometheus reads;
    `serve` opens a port for it. `model` may be named later."""

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
        """A request's "ttft" or "tpot", in seconds."""
        self.predictions.error.labels(what).observe(abs(actual - predicted))
        if predicted > 0:
            self.predictions.ratio.labels(what).observe(actual / predicted)

    def watch_counters(self, owner: str, counters: Counters) -> None:
        """Exports what `owner` counts, under whatever names it counts it."""
        self._watched.append(Watched(owner, counters))

    def watch_worker(
        self,
        name: str,
        status: StatusOf,
        counters: Counters | None = None,
        compilations: Compilations | None = None,
    ) -> None:
        """Exports a worker's status, and what it counts."""
        self._watched.append(Watched(name, counters, status, compilations=compilations))

    def watch_cluster(self, statuses: StatusesOf) -> None:
        """Exports the statuses of workers that come and go, as a router knows them: under names of
        the router's own, since the workers export themselves."""
        self._watched.append(Watched("cluster", statuses=statuses))

    def watch_waiting(self, waiting: Callable[[], int]) -> None:
        """Exports how many requests wait at the router for workers."""
        self._read_at_scrape.append(lambda: routing_families(waiting()))

    def watch_canary(self, canary: Canary, now: Callable[[], float]) -> None:
        self._read_at_scrape.append(lambda: canary_families(canary, now()))

    def watch_advice(self, advice: Callable[[], AdviceReport]) -> None:
        self._read_at_scrape.append(lambda: advice_families(advice()))

    def unwatch(self, name: str) -> None:
        """A worker that has left. Idempotent."""
        self._watched = [watched for watched in self._watched if watched.owner != name]

    async def scrape(self) -> bytes:
        """Asks all owners, each within STATUS_SECONDS, and writes everything down. Runs on the
        event loop that the owners live on."""
        families = await self._read()
        return generate_latest(_Families(lambda: families))

    def serve(self, port: int, host: str) -> Callable[[], None]:
        """Serves GET /metrics by prometheus_client's own server, from threads of its own; what is
        read from owners is read on the running loop.

        Returns:
          What closes the port.

        Raises:
          ConfigError: when the port cannot be listened on.
        """
        loop = asyncio.get_running_loop()

        def families() -> Iterable[Metric]:
            reading: Coroutine[None, None, list[Metric]] = self._read()
            asked = asyncio.run_coroutine_threadsafe(reading, loop)
            return asked.result(STATUS_SECONDS + LOOP_SECONDS)

        try:
            server, thread = start_http_server(port, host, _Families(families))
        except OSError as error:
            raise ConfigError(
                f"metrics cannot listen on {host}:{port}: {error}; choose another port"
            ) from error

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close

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


class _Families(CollectorRegistry):
    """A registry that is read anew each time."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        super().__init__()
        self.register(_Reading(read))


class _Reading(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing beforehand: the names are those that are read."""
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
