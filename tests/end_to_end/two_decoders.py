"""An embedded cluster with a second decode mesh, which sequences move to, and which can die."""

import asyncio
from dataclasses import replace

from jdisagg.config import EngineConfig
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.token_stream import Detokenizer
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster
from jdisagg.engine.instance import LoadModel
from jdisagg.executor.mesh_executor import MeshRole
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.ids import random_id
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import DecodePort, PeerPort
from jdisagg.messages.ports_middleware import through
from jdisagg.simulator.crashable import Crash, Crashable
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.mesh_worker import WorkerContext

SECOND = "second"


class TwoDecoders(EmbeddedCluster):
    """The second decode mesh is on the last device and has pages of its own size. Once it has
    crashed nobody reaches it and it reaches nobody, whatever it still does."""

    def __init__(
        self, config: EngineConfig, load: LoadModel, detokenizer: Detokenizer, devices: list
    ) -> None:
        self._load = load, devices[-1:]
        self.crash = Crash()
        super().__init__(config, load, detokenizer, devices[:-1])

    def _make_ports(self) -> ClusterPorts:
        ports, (load, devices) = super()._make_ports(), self._load
        config = replace(self.config.decode, layout=Layout(), page_size=8, pages_per_rank=64)
        role = MeshRole(prefill=False, decode=True)
        instance = self._instance(SECOND, config, load(config.layout, devices), role)
        self._second_mesh = instance.executor
        assert self.prefill
        instance.executor.expect(self.prefill.executor.card)
        prefill, first = self._workers
        assert isinstance(first, DecodeWorker)
        self.first = first
        mortal = Crashable(self.crash)
        self.second = DecodeWorker(
            WorkerContext(SECOND, self.clock, random_id),
            self._mesh(SECOND, instance),
            config,
            self.config.limits,
            {
                PREFILL: through(PeerPort, prefill, mortal),  # type: ignore[arg-type]
                DECODE: through(PeerPort, first, mortal),  # type: ignore[arg-type]
            },
            self.config.mode,
        )
        self._workers.append(self.second)
        second = through(DecodePort, self.second, mortal)
        return ClusterPorts(ports.prefill, {**ports.decode, SECOND: second})

    def constrain(self, grammars: GrammarCompiler | None) -> None:
        super().constrain(grammars)
        self._second_mesh.constrain(grammars)

    async def move_some(self) -> None:
        """Until cancelled."""
        while True:
            for key in list(self.first._state.groups):
                self.first.migrate_out(key)
            await asyncio.sleep(0.005)

    async def die_when_busy(self) -> int:
        """The second one dies as soon as several sequences run there; how many did."""
        while (running := sum(map(len, self.second._state.running))) < 2:
            await asyncio.sleep(0.001)
        self.crash.dead.set()
        return running
