"""The server as an operator sees it: health, reflection, its port, and its end."""

import asyncio
import pathlib
import signal
import sys
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from jdisagg.client import AsyncClient
from jdisagg.config import ServiceConfig
from jdisagg.errors import ConfigError, UnavailableError
from jdisagg.service.grpc import generation_pb2, generation_pb2_grpc
from jdisagg.service.server import GenerationServer
from tests.service.doors import FakePath, eventually, make_frontend
from tests.service.http_doors import HttpDoor, http_door, parse, request

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ROOT = pathlib.Path(__file__).resolve().parents[2]


async def health(target: str, service: str = "jdisagg.v1.GenerationService") -> int:
    async with grpc.aio.insecure_channel(target) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service)
        )
    return reply.status


async def test_a_running_server_is_healthy_and_its_port_is_taken(door: HttpDoor) -> None:
    assert await health(door.target) == await health(door.target, "") == SERVING
    second = GenerationServer(make_frontend(FakePath()), ServiceConfig(port=door.grpc_port))
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{door.grpc_port}"):
        await second.start()


async def test_reflection_describes_the_service(door: HttpDoor) -> None:
    def look() -> tuple[list[str], list[str]]:
        with grpc.insecure_channel(door.target) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol("jdisagg.v1.GenerationService")
            return list(database.get_services()), [method.name for method in file.service[0].method]

    services, methods = await asyncio.to_thread(look)
    assert {"jdisagg.v1.GenerationService", "grpc.health.v1.Health"} <= set(services)
    assert methods == [
        *("Generate", "Tokenize", "Detokenize", "GetModel", "GetStatus", "Suspend", "Resume")
    ]


async def test_what_outlasts_the_drain_is_cut_with_a_typed_error() -> None:
    path = FakePath()
    path.gate.clear()
    async with (
        http_door(path, ServiceConfig(drain_seconds=0.1)) as one,
        AsyncClient(one.target, resume_seconds=0.0) as client,
    ):
        events = client.generate("x", request_id="long")
        await anext(events)
        draining = asyncio.ensure_future(one.server.drain())
        with pytest.raises(UnavailableError, match="shut down before the request had ended"):
            await anext(events)
        assert path.closed == ["long"]
        await draining


@pytest.mark.parametrize("over", ["http", "grpc"])
async def test_no_port_closes_before_the_requests_of_all_ports_have_ended(over: str) -> None:
    """Workers report to the gRPC port, also for requests over HTTP, and a probe of one port must
    not restart a server that drains the other."""
    async with http_door(service=ServiceConfig(drain_seconds=3600)) as door:
        door.path.gate.clear()
        asked: dict[str, Any] = {"prompt": "x", "max_tokens": 3}
        client = AsyncClient(door.target)
        running = asyncio.create_task(
            door.ask("/v1/completions", asked) if over == "http" else client.complete(**asked)
        )
        await eventually(lambda: door.path.made_events == 1)
        draining = asyncio.create_task(door.server.drain())
        await eventually(lambda: not door.server.ready)
        for _ in range(20):
            assert await health(door.target) == NOT_SERVING
            probed = [(await door.ask(path)).status for path in ("/livez", "/readyz", "/health")]
            assert probed == [200, 503, 503]
        refused = await door.ask("/v1/completions", asked)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        await door.server.set_ready(True)
        assert (await door.ask("/readyz")).status == 503 and not door.server.ready
        door.path.gate.set()
        await running
        await draining
        for port in (door.port, door.grpc_port):
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", port)
        await client.close()


async def test_a_server_that_waits_for_workers_is_alive_and_not_ready(door: HttpDoor) -> None:
    await door.server.set_ready(False)
    assert [(await door.ask(path)).status for path in ("/livez", "/readyz")] == [200, 503]
    await door.server.set_ready(True)


async def test_a_drain_ends_after_a_slow_reader_has_its_whole_reply() -> None:
    async with http_door(service=ServiceConfig(drain_seconds=3600)) as door:
        door.path.filler = "." * 50_000
        reader, writer = await door.connect()
        writer.write(request("/v1/completions", {"prompt": "x", "max_tokens": 400}))
        await eventually(lambda: door.path.closed != [])
        draining = asyncio.create_task(door.server.drain())
        await asyncio.sleep(1.5)  # more than a shutdown waits for a connection that is to close
        assert not draining.done()
        reply = parse(await reader.read())
        assert len(reply.fields["choices"][0]["text"]) == 400 * 50_001
        await draining
        writer.close()


async def test_a_drain_lets_suspended_requests_resume() -> None:
    async with http_door(service=ServiceConfig(drain_seconds=3600)) as door:
        door.path.gate.clear()
        async with grpc.aio.insecure_channel(door.target) as channel, door.client() as client:
            running = asyncio.create_task(
                client.completions.create(
                    model="tiny", prompt="x", max_tokens=3, extra_body={"request_id": "held"}
                )
            )
            await eventually(lambda: door.path.made_events == 1)
            draining = asyncio.create_task(door.server.drain())
            await eventually(lambda: not door.server.ready)
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await stub.Resume(generation_pb2.ResumeRequest(request_id="held"))
            assert door.path.suspended == [("", "held", False)]
            door.path.gate.set()
            await running
        await draining


@pytest.mark.ci
async def test_sigterm_lets_running_streams_end_and_refuses_new_ones() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.service.drain_server",
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        port, frozen = map(int, (await asyncio.wait_for(process.stdout.readline(), 60)).split())
        assert frozen > 10_000, "what a server keeps for good is not collected again and again"
        target = f"127.0.0.1:{port}"
        async with AsyncClient(target) as client:
            events = client.generate("x", max_tokens=30, request_id="running")
            received = [await anext(events)]
            process.send_signal(signal.SIGTERM)
            states: list[int] = []

            async def stopped() -> None:
                while NOT_SERVING not in states:
                    states.append(await health(target))

            await asyncio.wait_for(stopped(), 20)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async with grpc.aio.insecure_channel(target) as channel:
                    stub = generation_pb2_grpc.GenerationServiceStub(channel)
                    await stub.GetStatus(generation_pb2.GetStatusRequest())
            assert "shutting down" in str(refused.value.details())
            assert dict(refused.value.trailing_metadata() or ())["retry-after"]
            async with AsyncClient(target, connect_seconds=0.2) as late:
                with pytest.raises(UnavailableError, match="no server answered .* shutting down"):
                    await late.complete("too late")
            process.stdin.write(b"go on\n")
            received += [event async for event in events]
        assert [event.first_index for event in received] == list(range(30))
        rest = await asyncio.wait_for(process.stdout.read(), 20)
        assert rest == b"drained ['running']\n"
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_client_of_two_servers_leaves_the_one_that_drains_and_its_stream_goes_on() -> None:
    ways = [FakePath(), FakePath()]
    servers = [GenerationServer(make_frontend(way), ServiceConfig(port=0)) for way in ways]
    targets = [f"127.0.0.1:{await server.start()}" for server in servers]
    target = f"ipv4:{','.join(targets)}"
    async with AsyncClient(target) as client:
        while not all(way.requests for way in ways):
            await client.complete("both", max_tokens=1)
        ways[0].gate.clear()
        streams = [client.generate("long", max_tokens=5) for _ in range(2)]  # one at each
        begun = [await anext(stream) for stream in streams]
        drained = asyncio.ensure_future(servers[0].drain())
        while await health(targets[0], "") == SERVING:
            pass
        for way in ways:
            way.requests.clear()
        for _ in range(8):
            await client.complete("one", max_tokens=1)
        assert (len(ways[0].requests), len(ways[1].requests)) == (0, 8)
        ways[0].gate.set()
        for first, stream in zip(begun, streams, strict=True):
            indices = [first.first_index, *[event.first_index async for event in stream]]
            assert indices == list(range(5))
        await asyncio.wait_for(drained, 30)
    await servers[1].drain()


async def test_a_drain_without_work_ends_at_once() -> None:
    server = GenerationServer(make_frontend(FakePath()), ServiceConfig(port=0, drain_seconds=3600))
    await server.start()
    await asyncio.wait_for(server.drain(), 30)
    await server.drain()
