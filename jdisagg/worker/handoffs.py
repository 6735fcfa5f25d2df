"""The hand-offs that a decode worker is receiving: one task each, begun, aborted and reported here.

Greets each peer once before the first hand-off. An aborted hand-off is told to its sender, so that it frees at once; when the
message is lost, the sender's lease does it. Knows no batches: what came is reported to `done` or `failed`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from jdisagg.dispatch.ports import FirstToken, HandoffSource, PeerHello, PeerPort
from jdisagg.errors import HandoffError, JdisaggError, UnavailableError
from jdisagg.scheduler.commands import MeshLimits
from jdisagg.scheduler.sequences import Group
from jdisagg.telemetry import Counters
from jdisagg.worker.peer_hello import check_hello
from jdisagg.worker.receiver import Receiver
from jdisagg.worker.step_loop import StepLoop

ABORT_SECONDS = 5.0


@dataclass(slots=True)
class _Running:
    receiver: Receiver
    task: "asyncio.Task[None]"


class Handoffs:
    """Receives for one mesh. `lease_seconds` bounds each pull."""

    def __init__(
        self, loop: StepLoop, peers: Mapping[str, PeerPort], hello: PeerHello, limits: MeshLimits, lease_seconds: float, counters: Counters
    ) -> None:
        self._loop = loop
        self._peers = peers
        self._hello = hello
        self._limits = limits
        self._lease_seconds = lease_seconds
        self._counters = counters
        self._greeted: set[str] = set()
        self._running: dict[int, _Running] = {}
        self._farewells: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def pulling(self) -> bool:
        return any(running.receiver.pulling for running in self._running.values())

    def begin(
        self,
        group: Group,
        source: HandoffSource,
        pages: tuple[int, ...],
        done: Callable[[tuple[FirstToken, ...], int], None],
        failed: Callable[[JdisaggError], None],
    ) -> None:
        """Starts receiving into `pages`; ends in exactly one call of `done` or `failed`, unless it is aborted."""
        peer = self._peers.get(source.worker)
        if peer is None:
            failed(HandoffError(f"prefill worker {source.worker!r} is not known here; known: {', '.join(self._peers) or 'none'}"))
            return
        receiver = Receiver(
            loop=self._loop,
            peer=peer,
            source=source,
            attempt=group.attempt,
            rank=group.rank,
            pages=pages,
            page_size=self._limits.page_size,
            layer_groups=self._limits.layer_groups,
            cached_tokens=0,
            pull_seconds=self._lease_seconds,
            counters=self._counters,
        )
        task = asyncio.get_running_loop().create_task(self._receive(group.key, receiver, done, failed))
        self._running[group.key] = _Running(receiver, task)

    def abort(self, key: int, reason: str) -> None:
        """Nothing is inserted from now on; the sender is told. Idempotent."""
        running = self._running.pop(key, None)
        if running is None:
            return
        running.receiver.close()
        running.task.cancel()
        self._say_farewell(running.receiver, reason)

    async def stop(self) -> None:
        for key in list(self._running):
            self.abort(key, "the receiver stops")
        await asyncio.gather(*self._farewells, return_exceptions=True)

    async def _receive(
        self,
        key: int,
        receiver: Receiver,
        done: Callable[[tuple[FirstToken, ...], int], None],
        failed: Callable[[JdisaggError], None],
    ) -> None:
        try:
            await self._greet(receiver.source.worker, receiver.peer)
            received = await receiver.receive()
            self._running.pop(key, None)
            done(received.firsts, received.bytes_moved)
        except Exception as error:
            self._counters.add("handoffs_failed")
            self._running.pop(key, None)
            receiver.close()
            self._say_farewell(receiver, str(error))
            failed(error if isinstance(error, JdisaggError) else UnavailableError(f"hand-off failed: {type(error).__name__}: {error}"))

    async def _greet(self, name: str, peer: PeerPort) -> None:
        if name not in self._greeted:
            check_hello(self._hello, await peer.hello(self._hello))
            self._greeted.add(name)

    def _say_farewell(self, receiver: Receiver, reason: str) -> None:
        async def abort() -> None:
            try:
                async with asyncio.timeout(ABORT_SECONDS):
                    await receiver.peer.abort(receiver.source.handoff_id, reason)
            except (JdisaggError, TimeoutError):
                self._counters.add("aborts_lost")

        self._spawn(abort())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)
