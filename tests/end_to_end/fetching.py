"""A cluster whose prefill worker fetches from its decode worker."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster
from jdisagg.messages.ports import HandoffSource, PeerPort, PrefillCall, PrefillPort, PrefillReply
from jdisagg.messages.ports_middleware import through
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.worker.worker import Worker


class AllHinted:
    """Says of each prompt of a second turn that the decode worker keeps all of it."""

    def __init__(self, ids: Callable[[], int]) -> None:
        self._ids = ids

    async def prefill(
        self, proceed: Callable[[PrefillCall], Awaitable[PrefillReply]], call: PrefillCall
    ) -> PrefillReply:
        if call.request.request_id.startswith("second"):
            source, known = HandoffSource(DECODE, self._ids()), len(call.request.prompt_token_ids)
            call = msgspec.structs.replace(call, peer=source, peer_tokens=known)
        return await proceed(call)


def fetches_from(worker: Worker, other: PeerPort) -> None:
    """Lets `worker` fetch every block that `other` keeps, whatever it costs."""
    worker._context = replace(worker._context, tiers=TierRoom(always=True))
    worker._sources = worker._find_sources(lambda _: other)


class Returning(EmbeddedCluster):
    """Its prefill worker may fetch from its decode worker."""

    def _make_ports(self) -> ClusterPorts:
        ports = super()._make_ports()
        self.worker, decode = self._workers
        assert not self.worker.role.decodes
        fetches_from(self.worker, decode)
        hinted = through(PrefillPort, self.worker, AllHinted(self.local.new_id))
        return ClusterPorts({PREFILL: hinted}, ports.decode)
