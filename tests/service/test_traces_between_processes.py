"""W3C trace context over gRPC: what router and workers do for a request is its client's trace."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from jdisagg.client import AsyncClient
from jdisagg.errors import JdisaggError
from jdisagg.messages.trace_context import incoming, outgoing, within
from jdisagg.observe import wrap
from jdisagg.service.internal.remote_ports import RemoteWorker
from tests.fakes.cluster import toy_request
from tests.observe.spans import TracedObserver, trace_of
from tests.service.served_cluster import served

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


async def test_router_and_workers_add_to_the_trace_that_their_client_began() -> None:
    observers = {name: TracedObserver(name) for name in ("router", "prefill0", "decode0")}
    async with served(observers) as cluster:
        router = cluster.router()
        whole = wrap.path(router.path, observers["router"])
        request = toy_request(1, prompt_tokens=20)
        with within(incoming(CLIENT)):
            assert [event async for event in whole.stream(request)]
        await asyncio.sleep(0.1)
        await router.close()
    shown = {
        name: {event["name"] for event in trace_of(observer, "r1")}
        for name, observer in observers.items()
    }
    assert {"request", "reserve", "prefill", "hand-off to first span"} <= shown["router"]
    assert "prefill chunk" in shown["prefill0"]
    assert {"offer", "pull", "insert", "verified", "admit"} <= shown["decode0"]


class Ear(grpc.aio.ServerInterceptor):
    """Notes the metadata of every call, by the last part of its method."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, str]]] = []

    async def intercept_service(self, continuation, details):
        method = details.method.rpartition("/")[2]
        self.heard.append((method, dict(details.invocation_metadata)))
        return await continuation(details)

    def of(self, method: str) -> list[dict[str, str]]:
        return [metadata for name, metadata in self.heard if name == method]


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[Ear, str]]:
    ear = Ear()
    server = grpc.aio.server(interceptors=(ear,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield ear, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_call_carries_the_context_that_it_was_made_in() -> None:
    async with listening() as (ear, address):
        worker = RemoteWorker(address)
        with within(incoming(CLIENT)):
            assert dict(outgoing())["traceparent"] == CLIENT["traceparent"]
            with contextlib.suppress(Exception):
                await worker.prefill.status()
        with contextlib.suppress(Exception):
            await worker.prefill.status()
        await worker.aclose()
    inside, outside = ear.of("status")
    assert inside["traceparent"] == CLIENT["traceparent"] and "traceparent" not in outside


async def test_a_client_sends_the_trace_that_its_caller_is_in() -> None:
    async with listening() as (ear, address), AsyncClient(address) as client:
        with within(incoming(CLIENT)), contextlib.suppress(JdisaggError):
            await client.model()
        with contextlib.suppress(JdisaggError):
            await client.model()
    inside, outside = ear.of("GetModel")
    assert inside["traceparent"] == CLIENT["traceparent"] and "traceparent" not in outside
