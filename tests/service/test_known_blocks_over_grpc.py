"""A router and four workers over real gRPC, their meshes fake: the next turn of a conversation goes
to the workers that keep it, for they told the router so."""

import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.config import InstanceConfig, LimitsConfig, ServiceConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.dispatch.membership import Membership, WorkerPorts, cluster_ports
from jdisagg.dispatch.placer import PlacerSettings
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.ids import random_id
from jdisagg.layout.axes import Layout
from jdisagg.messages.kept_blocks import KeptScheme
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.request import Request
from jdisagg.router.cluster_state import OWN
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.scheduler.residency import BlockNames
from jdisagg.service.internal.registry import RegistryClient, registry_service
from jdisagg.service.internal.remote_ports import RemoteWorker
from jdisagg.service.internal.worker_service import decode_service, peer_service, prefill_service
from jdisagg.service.server import GrpcServer
from jdisagg.timeouts import MembershipTimeouts
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.prefill_worker import PrefillWorker
from tests import time_scale
from tests.fakes.cluster import Collected, ToyText, toy_request
from tests.fakes.fake_executor import Costs, FakeChannel, FakeExecutor, toy_limits
from tests.fakes.toy_model import expected_tokens
from tests.service.doors import eventually

NAMES = BlockNames(b"secret", "toy", 8)
SCHEME = KeptScheme("toy", 8, 8)
CONTEXT = 256
PATIENCE = time_scale.seconds(30)
COSTS = Costs(prefill_token=1e-5, decode_step=1e-3, pull=1e-3, other=1e-5)
MODEL = ModelCard("toy", "toy", 89, CONTEXT, "float32", 64, geometry=geometry("llama-3.1-8b"))
SLOW = replace(accelerator("h100"), peak_flops=1e12)  # so that a cached prefix saves much time
SERVICE = ServiceConfig(port=0, drain_seconds=0.0)
# a busy machine's heartbeats may come late; nothing here is about silence
TIMES = MembershipTimeouts(heartbeat_seconds=0.02, suspect_seconds=60.0, gone_seconds=90.0)


@dataclass
class Live:
    known: KnownBlocks
    membership: Membership
    path: RequestPath
    workers: dict[str, PrefillWorker | DecodeWorker] = field(default_factory=dict)

    async def ask(self, request: Request) -> Collected:
        collected = Collected()
        async for event in self.path.stream(request):
            collected.add(event)
        for child in range(request.sampling.n):
            assert tuple(collected.tokens[child]) == expected_tokens(request, child, CONTEXT)[0]
        return collected

    async def idle(self) -> None:
        """Returns when each worker has said, in words chosen after this call, that it holds
        nothing: then ties fall to those with 0, and not to who reported its end first."""
        table, rows = self.path.placer.accounts.state.table, range(len(self.workers))
        for _ in range(2):  # what arrives first may have been on its way already
            before = table["heard_at"][rows].copy()
            await eventually(
                lambda before=before: (table["heard_at"][rows] > before).all(), PATIENCE
            )

        def is_idle() -> bool:
            busy = sum(table[name][rows].sum() for name in (*OWN, "running", "waiting"))
            return busy == 0 and (table["free_pages"][rows] == table["total_pages"][rows]).all()

        await eventually(is_idle, PATIENCE)

    def placed(self) -> tuple[str, str, str]:
        """The last decision: kind, prefill worker, decode worker."""
        latest = self.path.routing().decisions[0]
        return latest.kind, latest.prefill, latest.decode


@contextlib.asynccontextmanager
async def live(tells: bool = True) -> AsyncIterator[Live]:
    """Two prefill and two decode workers that keep KV, and a router that hears of it or not."""
    clock, channel, limits = MonotonicClock(), FakeChannel(), LimitsConfig()
    config, known = InstanceConfig(growth_tokens=8), KnownBlocks(NAMES.secret)
    remotes: list[RemoteWorker] = []

    def remote(address: str, boot_id: int | None = None) -> RemoteWorker:
        remotes.append(RemoteWorker(address, boot_id=boot_id))
        return remotes[-1]

    def open_ports(card: WorkerCard) -> WorkerPorts:
        worker = remote(card.address, card.boot_id)
        if card.role is WorkerRole.PREFILL:
            return WorkerPorts(prefill=worker.prefill, close=worker.close)
        return WorkerPorts(decode=worker.decode, close=worker.close)

    membership = Membership(clock, open_ports, TIMES, known=known)
    path = RequestPath(
        cluster_ports(membership),
        lambda request: ToyText(request.sampling.stop),
        limits,
        clock,
        PlacerSettings(affinity=known),
    )
    cluster = Live(known, membership, path)
    async with contextlib.AsyncExitStack() as stack:
        router = GrpcServer((registry_service(membership),), SERVICE)
        address = f"127.0.0.1:{await router.start()}"
        stack.push_async_callback(router.drain)
        for name in ("prefill0", "prefill1", "decode0", "decode1"):
            mesh = FakeExecutor(
                toy_limits(
                    page_size=4,
                    pages_per_rank=120,
                    context_tokens=CONTEXT,
                    granule_tokens=4,
                    chunk_buckets=(16, 32),
                ),
                channel,
                costs=COSTS,
            )
            context = WorkerContext(name, clock, random_id, names=NAMES)
            if name.startswith("p"):
                worker = PrefillWorker(context, mesh, config, limits)
                role, services = WorkerRole.PREFILL, (prefill_service(worker), peer_service(worker))
            else:
                worker = DecodeWorker(
                    context, mesh, config, limits, lambda source: remote(source.address).peer
                )
                role, services = WorkerRole.DECODE, (decode_service(worker),)
            await worker.start()
            stack.push_async_callback(worker.stop)
            server = GrpcServer(services, SERVICE, worker.boot_id)
            at = f"127.0.0.1:{await server.start()}"
            stack.push_async_callback(server.drain)
            client = RegistryClient(
                (address,),
                WorkerCard(
                    name, worker.boot_id, role, at, Layout(), MODEL, hardware=SLOW, kept=SCHEME
                ),
                worker.status,
                timeouts=TIMES,
                kept=worker.kept_news if tells else lambda mark: None,
            )
            assert worker.kept_scheme == SCHEME
            client.start()
            stack.push_async_callback(client.leave)
            cluster.workers[name] = worker
            # in this order, so that ties fall to those with 0
            await eventually(lambda name=name: name in path.placer.accounts.state, PATIENCE)
        try:
            yield cluster
        finally:
            for one in remotes:
                await one.aclose()


def first_turn(number: int) -> Request:
    return toy_request(number, prompt_tokens=40, max_tokens=8)


def next_turn(number: int, answer: Collected) -> Request:
    prompt = (*first_turn(number).prompt_token_ids, *answer.tokens[0], 1, 2, 3)
    return replace(first_turn(number), request_id=f"next{number}", prompt_token_ids=prompt)


async def first_turns(cluster: Live) -> tuple[Collected, Collected]:
    """Of two conversations, each on workers of its own."""
    await cluster.idle()
    one = await cluster.ask(first_turn(0))
    assert cluster.placed() == ("seconds", "prefill0", "decode0")
    await cluster.idle()
    bar = cluster.path.placer.accounts.bar
    for name in ("prefill0", "decode0"):
        bar(name, math.inf)
    other = await cluster.ask(first_turn(1))
    for name in ("prefill0", "decode0"):
        bar(name, 0.0)
    assert cluster.placed() == ("seconds", "prefill1", "decode1")
    return one, other


@pytest.mark.parametrize("tells", [True, False])
async def test_a_conversation_goes_on_where_it_is_kept_if_the_router_was_told_so(
    tells: bool,
) -> None:
    async with live(tells) as cluster:
        _, answer = await first_turns(cluster)
        if not tells:
            await cluster.idle()
            again = await cluster.ask(next_turn(1, answer))
            assert cluster.placed() == ("seconds", "prefill0", "decode0")
            assert again.usage is not None and again.usage.cached_tokens == 0
            return
        names = cluster.workers
        await eventually(lambda: all(cluster.known.blocks(name) for name in names), PATIENCE)
        for number, kept_at in ((1, "1"), (0, "0"), (1, "1")):
            worker = cluster.workers[f"prefill{kept_at}"]
            before = worker.counters["prefix_hit_tokens"]
            await cluster.idle()
            if number:
                again = await cluster.ask(next_turn(1, answer))
                assert again.usage is not None and again.usage.cached_tokens >= 40
                assert worker.counters["prefix_hit_tokens"] >= before + 40
                assert cluster.placed() == ("prefix", "prefill1", "decode1")
            else:
                await cluster.ask(first_turn(0))
                assert cluster.placed() == ("prefix", "prefill0", "decode0")


async def test_what_is_reset_or_gone_is_known_no_longer() -> None:
    async with live() as cluster:
        await first_turns(cluster)
        known, names = cluster.known, sorted(cluster.workers)
        await eventually(lambda: all(known.blocks(name) for name in names), PATIENCE)
        card = next(card for card in cluster.membership.cards() if card.name == "decode1")
        cluster.membership.deregister(card.name, card.boot_id)
        assert known.blocks("decode1") == 0
        # the worker lives, hears that it is not known, and tells all that it has
        await eventually(lambda: known.blocks("decode1") > 0, PATIENCE)
        assert await cluster.path.reset_cache() > 0
        await eventually(lambda: len(known) == 0, PATIENCE)
        one, _ = await first_turns(cluster)
        assert one.usage is not None and one.usage.cached_tokens == 0
        await eventually(lambda: all(known.blocks(name) for name in names), PATIENCE)
