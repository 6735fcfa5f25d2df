"""An embedded cluster with a second decode mesh, to which sequences move and which can crash."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from jdisagg.assembly import Crash, Crashable, Worker
from jdisagg.config import EngineConfig
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.speeds import ASSUMED
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.token_stream import Detokenizer
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.engine.replica import LoadModel
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.request import Request
from jdisagg.router.cluster_state import Description
from tests import time_scale
from tests.end_to_end.clusters import MOST_ROUNDS, Running, assert_all_free
from tests.fakes.cluster import Collected
from tests.shapes import PATIENT

SECOND = "second"


# With known hardware: the first measured hand-offs, for which programs compile, would keep requests
# away from a mesh for minutes.
DESCRIBED = Description(kind=replace(ASSUMED, hardware=accelerator("h100")))


class TwoDecoders(EmbeddedCluster):
    """The second decode mesh is on the last device and has pages of another size. After its crash
    no call reaches it and none of its calls arrives, whatever it still does."""

    def __init__(
        self, config: EngineConfig, load: LoadModel, detokenizer: Detokenizer, devices: list
    ) -> None:
        self._load = load, devices[-1:]
        self.crash = Crash()
        super().__init__(config, load, detokenizer, devices[:-1])
        self.describe({worker.name: DESCRIBED for worker in self._workers})

    def _between(self, worker: Worker, caller: Worker | None) -> list[object]:
        ends = {worker.name, caller.name} if caller else {worker.name}
        return [Crashable(self.crash)] if SECOND in ends else []

    def _make_ports(self) -> ClusterPorts:
        super()._make_ports()
        load, devices = self._load
        config = replace(self.config.decode, layout=Layout(), page_size=8, pages_per_rank=34)
        replica = self.build(SECOND, WorkerRole.DECODE, load, devices, config)
        self._second_mesh = replica.executor
        assert self.prefill
        replica.executor.expect(self.prefill.executor.card)
        first, second = self._workers[1], self.add(replica)
        assert first.role.decodes and second.role.decodes
        self.first, self.second = first, second
        return self.local.cluster_ports()

    def constrain(self, grammars: GrammarCompiler | None) -> None:
        super().constrain(grammars)
        self._second_mesh.constrain(grammars)

    async def move_some(self, *, both_ways: bool = False) -> None:
        """Until cancelled."""
        while True:
            for worker in (self.first, self.second) if both_ways else (self.first,):
                for key in list(worker._state.groups):
                    worker.migrate_out(key)
            await asyncio.sleep(0.005)

    @property
    def moved(self) -> int:
        return sum(one.counters["sequences_moved"] for one in (self.first, self.second))

    async def die_when_busy(self, tokens: int) -> None:
        """The second one dies as soon as several sequences with so many tokens run there."""
        while True:
            every = [child for of_rank in self.second._state.running for child in of_rank]
            if sum(len(child.generated) >= tokens for child in every) >= 2:
                return self.crash.dead.set()
            await asyncio.sleep(0.001)


# For hand-offs while programs compile; what a dead worker held of others is free afterwards.
LEASES = replace(PATIENT, handoff_lease_seconds=10.0)


async def until_all_free(run: Running) -> None:
    """What a dead worker held of the others is free when its lease has ended."""
    async with asyncio.timeout(time_scale.seconds(60)):
        while True:
            try:
                return await assert_all_free(run.cluster)
            except AssertionError:
                continue


async def rounds_to_death(
    run: Running, asked: Callable[[Running], list[Request]], tokens: int = 0
) -> list[list[Collected]]:
    """All requests at once, again and again, until the second decode worker has died under several
    sequences with so many tokens. Returns all rounds."""
    assert isinstance(run.cluster, TwoDecoders)
    dying, rounds = asyncio.create_task(run.cluster.die_when_busy(tokens)), []
    while not dying.done():
        assert len(rounds) < MOST_ROUNDS, "nobody ran where the worker was to die"
        rounds.append(await run.complete_all(asked(run)))
    return rounds


async def storm(
    run: Running,
    asked: Callable[[Running], list[Request]],
    streams: Callable[[list[Collected]], list[object]],
    expected: list[object],
) -> TwoDecoders:
    """All requests at once, again and again: until sequences were preempted and moved, and until
    the second decode worker has died. The streams are the expected ones each time."""
    cluster = run.cluster
    assert isinstance(cluster, TwoDecoders)
    moving = asyncio.create_task(cluster.move_some())
    done, _ = await run.complete_preempted(
        asked(run), enough=lambda: cluster.first.counters["sequences_moved"] > 0
    )
    assert streams(done) == expected
    rounds = await rounds_to_death(run, asked)
    moving.cancel()
    assert [streams(done) for done in rounds] == [expected] * len(rounds)
    await until_all_free(run)
    return cluster
