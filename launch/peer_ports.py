"""Ports of the workers that KV comes from: one for each address, made when it is first asked for."""

import asyncio

from jdisagg.clock import Clock
from jdisagg.dispatch.ports import HandoffSource, PeerPort
from jdisagg.errors import HandoffError
from jdisagg.service.connection import Credentials
from jdisagg.service.remote_ports import RemoteWorker

PORT_IDLE_SECONDS = 3600.0  # longer than any hand-off


class PeerPorts:
    """A restarted worker is greeted through the same port. Those that nothing came from for long are closed, for their workers may be gone
    for good."""

    def __init__(self, credentials: Credentials, clock: Clock) -> None:
        self._credentials = credentials
        self._clock = clock
        self._workers: dict[str, RemoteWorker] = {}
        self._used: dict[str, float] = {}

    def find(self, source: HandoffSource) -> PeerPort:
        if not source.address:
            raise HandoffError(f"worker {source.worker!r}: its address is not known; is the router of this version?")
        now = self._clock.now()
        self._used[source.address] = now
        for address in [address for address, used in self._used.items() if now - used > PORT_IDLE_SECONDS]:
            del self._used[address]
            self._workers.pop(address).close()
        if source.address not in self._workers:
            self._workers[source.address] = RemoteWorker(source.address, self._credentials)
        return self._workers[source.address].peer

    async def close(self) -> None:
        await asyncio.gather(*(worker.aclose() for worker in self._workers.values()))
