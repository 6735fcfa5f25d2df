"""Observing a process from its start to its end; ports that come and go."""

import asyncio

import pytest

from jdisagg.config import ObserveConfig, ServiceConfig
from jdisagg.dispatch.membership import WorkerPorts
from jdisagg.errors import ConfigError, UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import HandoffSource, PeerPort
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.node.cluster_plan import free_ports
from jdisagg.observe import wrap
from jdisagg.observe.canary import Canary, Pair
from jdisagg.observe.counter_texts import TEXTS
from jdisagg.observe.observer import Observer
from jdisagg.observe.process import check_ports, observing
from jdisagg.observe.wrap import request_log
from jdisagg.service.server import GenerationServer
from jdisagg.telemetry import Counters
from tests.fakes.cluster import Cluster
from tests.fakes.virtual_time import VirtualClock, run_virtually
from tests.observe.samples import at, get, parse
from tests.service.doors import FakePath, make_frontend
from tools.reference import ROOT, counter_rows


async def test_metrics_are_there_from_start_to_end() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    async with observing("decode-0", ObserveConfig(metrics_port=port)) as observer:
        assert observer is not None
        samples = parse(await asyncio.to_thread(get, port))
        assert at(samples, "process_info", process="decode-0") == 1
    with pytest.raises(OSError):
        await asyncio.to_thread(get, port)


async def test_a_process_that_is_asked_for_nothing_is_not_observed() -> None:
    async with observing("p", ObserveConfig()) as observer:
        assert observer is None
        port = object()
        assert wrap.prefill("p", port, observer) is port  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", [{"metrics_port": -1}, {"metrics_host": ""}, {"log_format": "xml"}]
)
def test_what_cannot_be_is_refused_at_once(field: dict) -> None:
    with pytest.raises(ConfigError):
        ObserveConfig(**field)


def test_metrics_ports_that_do_not_exist_are_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match="--metrics_port=65534: .* the last of them 65536,"):
        check_ports(ObserveConfig(metrics_port=65534), 3)


def test_a_metrics_port_that_another_api_has_is_refused_before_one_of_them_listens() -> None:
    with pytest.raises(ConfigError, match="--metrics_port=8000 is also the port of another API"):
        check_ports(ObserveConfig(metrics_port=8000), service=ServiceConfig(http_port=8000))


async def test_readiness_and_the_age_of_canaries_are_exported() -> None:
    now, canary, observer = 100.0, Canary(10.0), Observer("router")
    canary.know([Pair("p0", "d0"), Pair("p1", "d0")])
    observer.metrics.watch_canary(canary, lambda: now)
    assert at(parse(await observer.metrics.scrape()), "ready") == 0
    canary.succeeded(Pair("p0", "d0"), 95.0)
    samples = parse(await observer.metrics.scrape())
    assert at(samples, "ready") == 1
    assert at(samples, "canary_age_seconds", prefill="p0", decode="d0") == 5
    assert (
        "jdisagg_canary_age_seconds",
        frozenset({("prefill", "p1"), ("decode", "d0")}),
    ) not in samples


def test_a_router_exports_the_workers_that_are_there_and_observes_ports_as_they_open() -> None:
    async def main() -> None:
        observer = Observer("router", now=VirtualClock().now)
        async with Cluster() as cluster:
            card = ModelCard("m", "toy", 97, 128, "float32", 1)
            workers = {"prefill0": WorkerRole.PREFILL, "decode0": WorkerRole.DECODE}
            ports = {
                "prefill0": WorkerPorts(prefill=cluster.prefill),
                "decode0": WorkerPorts(decode=cluster.decode),
            }
            opened = wrap.ports(lambda card: ports[card.name], observer)
            cards = {
                name: WorkerCard(name, 1, role, "host:1", Layout(), card)
                for name, role in workers.items()
            }
            prefill, decode = opened(cards["prefill0"]).prefill, opened(cards["decode0"]).decode
            assert prefill is not None and decode is not None
            assert opened(cards["decode0"]).prefill is None
            statuses = [await port.status() for port in (prefill, decode)]
            assert [status.name for status in statuses] == ["prefill0", "decode0"]
            observer.metrics.watch_cluster(cluster.path.status)
            samples = parse(await observer.metrics.scrape())
            for name, role in workers.items():
                labels = {"worker": name, "role": role.value}
                assert at(samples, "router_pages", rank="0", state="free", **labels) == 64
                assert at(samples, "router_worker_waiting", **labels) == 0

    run_virtually(main)


def test_peers_are_observed_as_they_are_resolved() -> None:
    async def main() -> None:
        observer = Observer("d", now=VirtualClock().now)

        async with Cluster() as cluster:

            def resolve(source: HandoffSource) -> PeerPort:
                assert source.address == "host:1"
                return cluster.prefill

            peer = wrap.peers("decode0", resolve, observer)(HandoffSource("prefill0", 1, "host:1"))
            # goes through to the worker, which knows no such hand-off
            await peer.abort(1, "nothing there")

    run_virtually(main)


def test_every_counter_has_a_meaning_and_exists_from_the_start() -> None:
    counted = {name.strip("`") for name, *_ in counter_rows()}
    known = {name for texts in TEXTS.values() for name in texts}
    assert counted <= known
    source = "".join(
        path.read_text()
        for path in (ROOT / "jdisagg").rglob("*.py")
        if path.name != "counter_texts.py"
    )
    assert all(f'"{name}"' in source for name in known - counted), "no longer counted"

    async def main() -> None:
        metrics = Observer("worker").metrics
        counters = Counters()

        async def status() -> WorkerStatus:
            raise UnavailableError("later")

        metrics.watch_counters("path", counters)
        metrics.watch_worker("decode-0", status, Counters())
        samples = parse(await metrics.scrape())
        assert at(samples, "placements_total", owner="path") == 0
        assert at(samples, "handoffs_total", owner="decode-0", result="failed") == 0
        assert at(samples, "pull_failures_total", owner="decode-0", cause="timed_out") == 0
        counters.add("placements", reason="load")
        samples = parse(await metrics.scrape())
        assert at(samples, "placements_total", owner="path", reason="load") == 1
        assert b"HELP jdisagg_leases_expired_total Reservations of KV" in await metrics.scrape()

    asyncio.run(main())


async def test_a_server_that_takes_requests_exports_that_it_is_ready() -> None:
    observer = Observer("serve")
    log = request_log(False, observer, lambda: 0)
    server = GenerationServer(
        make_frontend(FakePath()), ServiceConfig(port=0, http_port=0), log=log
    )
    observer.metrics.watch_ready(lambda: server.ready)
    assert at(parse(await observer.metrics.scrape()), "ready") == 0
    await server.start()
    try:
        samples = parse(await observer.metrics.scrape())
        assert at(samples, "ready") == 1
        for name in ("generated_tokens_total", "time_to_first_token_seconds_count"):
            assert at(samples, f"{name}") == 0
        assert at(samples, "requests_finished_total", result="stop") == 0
    finally:
        server.force()
        await server.drain()
