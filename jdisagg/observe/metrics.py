"""Prometheus metrics of one process: what is measured as it happens, and what is read from its owners when somebody asks.

Each process has one `Metrics` with a registry of its own, so that many clusters fit into one test process. Histograms and
counters of events are fed by the wrappers of this room, once per span or command, never per token. Counters, worker statuses and
compilations are read at the scrape (`sources.py`), on the event loop that owns them. Names are `jdisagg_<what>_<unit>`; labels
come from small fixed sets (worker, codec, cause), never from requests.
"""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from jdisagg.dispatch.roles import AdviceReport
from jdisagg.observe.canary import Canary
from jdisagg.observe.elastic import AdviceGauges
from jdisagg.observe.sources import CanaryAges, Compilations, Snapshots, StatusesOf, StatusOf, Watched
from jdisagg.telemetry import Counters

STATUS_SECONDS = 2.0

# 1 ms to 60 s, about 1.5 times apart: a percentile read from them is off by at most a quarter.
SECONDS_BUCKETS = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0),
)
RATIO_BUCKETS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Metrics:
    """All metrics of the process `process`. `scrape` gives the text that Prometheus reads."""

    def __init__(self, process: str) -> None:
        self.registry = CollectorRegistry()
        self._watched: list[Watched] = []
        self._snapshots = Snapshots(process)
        self.ttft = self._seconds("time_to_first_token", "From the request's arrival to its first token.")
        self.tpot = self._seconds("time_per_output_token", "Mean time per output token after the first, one value a request.")
        self.tbt = self._seconds("time_between_tokens", "Each gap between two deliveries of tokens to one child's stream.")
        self.handoff_gap = self._seconds("handoff_gap", "From the first to the second token.")
        self.queue = self._seconds("queue", "Waited for pages and for a place in a prefill batch, per request.")
        self.request = self._seconds("request", "Whole requests, however they ended.", "result")
        self.requests = self._counter("requests_finished", "Requests by how they ended.", "result")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that finished.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens delivered to clients.")
        self.retries = self._counter("retries", "Further attempts at a request, by what ended the one before.", "cause")
        self.call_failures = self._counter("call_failures", "Calls of workers that raised.", "worker", "call", "error")
        self.kv_bytes = self._counter("kv_bytes", "KV bytes received, by link and codec.", "source", "destination", "codec")
        self.pulls = self._counter("pulls", "Pulls of blocks, by how they ended.", "source", "destination", "result")
        self.pull_seconds = self._seconds("pull", "From posting a pull to the block's arrival.", "source", "destination")
        self.exposed = self._seconds("exposed_transfer", "What of a hand-off remained after the prefill's last operation.", "destination")
        self.prediction_error = self._seconds("prediction_error", "How far the router's prediction of a request was off.", "what")
        self.prediction_ratio = Histogram(
            "jdisagg_actual_over_predicted_ratio",
            "What a request took, in parts of what the router predicted: first token (ttft), time per output token (tpot).",
            ("what",),
            registry=self.registry,
            buckets=RATIO_BUCKETS,
        )
        self.step_seconds = self._seconds("step", "Commands on a mesh, from the end of the one before.", "worker", "command")
        self.registry.register(self._snapshots)

    def measured(self, what: str, predicted: float, actual: float) -> None:
        """A request's "ttft" or "tpot", in seconds."""
        self.prediction_error.labels(what).observe(abs(actual - predicted))
        if predicted > 0:
            self.prediction_ratio.labels(what).observe(actual / predicted)

    def watch_counters(self, owner: str, counters: Counters) -> None:
        """Exports what `owner` counts, under whatever names it counts it."""
        self._watched.append(Watched(owner, counters))

    def watch_worker(self, name: str, status: StatusOf, counters: Counters | None = None, compilations: Compilations | None = None) -> None:
        """Exports a worker's status, and what it counts."""
        self._watched.append(Watched(name, counters, status, compilations=compilations))

    def watch_cluster(self, statuses: StatusesOf) -> None:
        """Exports the statuses of workers that come and go, as a router knows them. Not together with `watch_worker` of the same."""
        self._watched.append(Watched("cluster", statuses=statuses))

    def watch_canary(self, canary: Canary, now: Callable[[], float]) -> None:
        self.registry.register(CanaryAges(canary, now))

    def watch_advice(self, advice: Callable[[], AdviceReport]) -> None:
        self.registry.register(AdviceGauges(advice))

    def unwatch(self, name: str) -> None:
        """A worker that has left. Idempotent."""
        self._watched = [watched for watched in self._watched if watched.owner != name]

    async def scrape(self) -> bytes:
        """Asks all owners, each within STATUS_SECONDS, and writes everything down. Runs on the event loop that the owners live on."""
        readings = await asyncio.gather(*(watched.read(STATUS_SECONDS) for watched in list(self._watched)))
        self._snapshots.readings = readings
        return generate_latest(self.registry)

    def _seconds(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(f"jdisagg_{name}_seconds", help_text, labels, registry=self.registry, buckets=SECONDS_BUCKETS)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"jdisagg_{name}", help_text, labels, registry=self.registry)
