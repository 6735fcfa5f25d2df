"""Connections through which a worker calls other workers, opened when they are first needed."""

import asyncio

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError
from jdisagg.messages.ports import HandoffSource, PeerPort
from jdisagg.service.internal.connection import Credentials
from jdisagg.service.internal.remote_ports import RemoteWorker
from jdisagg.settings.timeouts import CallTimeouts


class PeerPorts:
    """A worker keeps its address after a restart, and the connection stays usable. A connection
    that was not used for `timeouts.peer_idle_seconds` is closed, because the other worker may no
    longer exist."""

    def __init__(self, credentials: Credentials, clock: Clock, timeouts: CallTimeouts) -> None:
        self._credentials = credentials
        self._timeouts = timeouts
        self._clock = clock
        self._workers: dict[str, RemoteWorker] = {}
        self._used: dict[str, float] = {}

    def find(self, source: HandoffSource) -> PeerPort:
        if not source.address:
            raise HandoffError(
                f"worker {source.worker!r}: its address is not known; is the router of this"
                " version?"
            )
        now = self._clock.now()
        self._used[source.address] = now
        for address in [
            address
            for address, used in self._used.items()
            if now - used > self._timeouts.peer_idle_seconds
        ]:
            del self._used[address]
            self._workers.pop(address).close()
        if source.address not in self._workers:
            self._workers[source.address] = RemoteWorker(
                source.address, self._credentials, timeouts=self._timeouts
            )
        return self._workers[source.address].peer

    async def close(self) -> None:
        await asyncio.gather(*(worker.aclose() for worker in self._workers.values()))
