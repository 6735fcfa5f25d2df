"""When a router says that it is ready: the router as it runs, over real gRPC, with toy workers that
register with it."""

import asyncio
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.client import AsyncClient
from jdisagg.config import ServiceConfig
from jdisagg.errors import OverloadedError
from jdisagg.messages.ports import Reservation, ReserveCall
from jdisagg.node.cluster_plan import free_ports
from jdisagg.node.router import Router, RouterConfig
from jdisagg.observe.canary_probe import CANARY_TENANT
from jdisagg.worker.worker import Worker
from tests.launch.registered import registered
from tests.service.doors import byte_tokenizer, eventually
from tests.service.http_doors import parse
from tests.service.served_cluster import Served, served


@contextlib.asynccontextmanager
async def routed(workers: Served) -> AsyncIterator[tuple[str, int]]:
    """A router over these workers, until it is signalled; what it listens on, and its HTTP port."""
    port, http_port = free_ports("127.0.0.1", 2)
    service = ServiceConfig(port=port, http_port=http_port, served_model_name="org/mine")
    running = asyncio.create_task(
        Router(RouterConfig(service=service), byte_tokenizer(), "toy").run()
    )
    address = f"127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(lambda: running)
        stack.callback(os.kill, os.getpid(), signal.SIGTERM)  # which the router has taken over
        await stack.enter_async_context(registered(workers.cluster, workers.addresses, address))
        yield address, http_port


async def healthy(http_port: int) -> bool:
    """What the HTTP door says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = parse(await reader.read())
    writer.close()
    assert answer.status in (200, 503)
    return answer.status == 200


async def serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        call = health_pb2.HealthCheckRequest(service="jdisagg.v1.GenerationService")
        reply = await health_pb2_grpc.HealthStub(channel).Check(call)
    return reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_router_whose_workers_are_too_busy_for_a_canary_is_ready_by_what_its_clients_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    canaries, reserve = 0, Worker.reserve

    async def full_for_canaries(worker: Worker, call: ReserveCall) -> Reservation:
        nonlocal canaries
        if call.request.tenant == CANARY_TENANT:
            canaries += 1
            raise OverloadedError("others are in front")
        return await reserve(worker, call)

    monkeypatch.setattr(Worker, "reserve", full_for_canaries)
    async with (
        served() as workers,
        routed(workers) as (address, http_port),
        AsyncClient(address) as client,
    ):
        await eventually(lambda: canaries > 0)
        assert not await serving(address), "nothing has shown yet that KV moves"
        assert not await healthy(http_port)
        answer = await client.complete(token_ids=[1, 2, 3], max_tokens=8, ignore_eos=True)
        assert len(answer.choices[0].token_ids) == 8
        assert (await client.model()).name == "org/mine", "the workers' checkpoint has another"
        async with asyncio.timeout(20):
            while not (await serving(address) and await healthy(http_port)):
                await asyncio.sleep(0.05)


class FullDisk(io.TextIOBase):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_router_whose_output_is_on_a_full_disk_still_watches_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as workers, routed(workers) as (address, _):
        monkeypatch.setattr(sys, "stdout", FullDisk())
        async with asyncio.timeout(20):
            while not await serving(address):
                await asyncio.sleep(0.05)
