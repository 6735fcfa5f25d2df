"""An embedded cluster with a second prefill mesh, on the last device, and prefill workers that
die."""

import asyncio

from jdisagg.assembly import Crash, Crashable, Worker
from jdisagg.config import EngineConfig
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.token_stream import Detokenizer
from jdisagg.engine.embedded import PREFILL, EmbeddedCluster
from jdisagg.engine.replica import LoadModel, Replica
from jdisagg.messages.step_commands import PrefillChunk, StepCommand
from jdisagg.messages.worker_status import WorkerRole

SECOND = "second"


class TwoPrefills(EmbeddedCluster):
    """The first prefill worker that issues its `fatal`th chunk with images dies: no call reaches it
    and none of its calls arrives, whatever it still does."""

    def __init__(
        self, config: EngineConfig, load: LoadModel, detokenizer: Detokenizer, devices: list
    ) -> None:
        self._load = load, devices[-1:]
        self.crashes = {name: Crash() for name in (PREFILL, SECOND)}
        self.fatal = 0
        super().__init__(config, load, detokenizer, devices[:-1])

    def _between(self, worker: Worker, caller: Worker | None) -> list[object]:
        ends = {worker.name, caller.name} if caller else {worker.name}
        crashes = [crash for name, crash in self.crashes.items() if name in ends]
        return [Crashable(*crashes)] if crashes else []

    def _make_ports(self) -> ClusterPorts:
        load, devices = self._load
        assert self.prefill
        second = self.build(SECOND, WorkerRole.PREFILL, load, devices)
        for name, replica in ((PREFILL, self.prefill), (SECOND, second)):
            self._watch_chunks(name, replica)
        super()._make_ports()
        self.add(second)
        return self.local.cluster_ports()

    def _watch_chunks(self, name: str, replica: Replica) -> None:
        run, chunks = replica.executor.run, 0

        def watched(command: StepCommand) -> asyncio.Future:
            nonlocal chunks
            if isinstance(command, PrefillChunk) and any(row.images for row in command.rows):
                chunks += 1
                if chunks == self.fatal:
                    self.fatal = 0
                    self.crashes[name].dead.set()
            return run(command)

        replica.executor.run = watched  # type: ignore[method-assign]

    @property
    def dead(self) -> list[str]:
        return [name for name, crash in self.crashes.items() if crash.dead.is_set()]
