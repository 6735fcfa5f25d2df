"""Messages from the receiver of a hand-off to its sender: acknowledgements, heartbeats, aborts.

They are sent in the background. A lost acknowledgement is repeated after the next answered
heartbeat, because a migration waits for it. An abort is repeated until it was received, or for as
long as the sender's lease lasts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

from jdisagg.clock import limit
from jdisagg.errors import JdisaggError
from jdisagg.messages.ports import HandoffSource, PeerMessage, PeerPort
from jdisagg.telemetry import Counters
from jdisagg.timeouts import HandoffTimeouts
from jdisagg.worker.peers import PeerLink


class SideCalls:
    """Sends messages in the background until stopped."""

    def __init__(self, counters: Counters, timeouts: HandoffTimeouts) -> None:
        self._counters = counters
        self._timeouts = timeouts
        self._tasks: set[asyncio.Task[object]] = set()
        self._stopping = asyncio.Event()

    def send(self, message: Callable[[], Awaitable[None]]) -> None:
        """Sends a message once."""
        self._run(self._send(message))

    def send_until_received(self, message: Callable[[], Awaitable[None]]) -> None:
        """Sends a message again while it fails, a limited number of times."""
        self._run(self._send_again(message))

    async def stop(self) -> None:
        """Returns when all calls have ended, without further attempts."""
        self._stopping.set()
        while self._tasks:  # an ending call may start another
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_again(self, message: Callable[[], Awaitable[None]]) -> None:
        for _ in range(self._timeouts.abort_tries):
            if await self._send(message):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.abort_pause_seconds):
                    await self._stopping.wait()
                    return

    async def _send(self, message: Callable[[], Awaitable[None]]) -> bool:
        try:
            with limit(self._timeouts.call_seconds):
                await message()
        except (JdisaggError, TimeoutError):
            self._counters.add("messages_to_senders_lost")
            return False
        return True

    def _run(self, call: Coroutine[None, None, object]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class SenderLine:
    """The sender of one hand-off.

    Attributes:
        link: Connection to the sender, set after its hello.
    """

    def __init__(
        self, peer: PeerPort, source: HandoffSource, attempt: int, calls: SideCalls
    ) -> None:
        self.peer = peer
        self.source = source
        self.link = PeerLink()
        self._attempt = attempt
        self._calls = calls
        self._unsent: list[int] = []
        self._sending = False

    @property
    def name(self) -> str:
        """Name in errors."""
        return f"hand-off {self.source.handoff_id}"

    def offers(self) -> AsyncIterator[PeerMessage]:
        return self.peer.offers(self.source.handoff_id, self._attempt)

    def acknowledge(self, offer_id: int) -> None:
        """Acknowledges a block. One message is in flight at a time; later acknowledgements are sent
        together in the next one."""
        self._unsent.append(offer_id)
        self._send_next()

    def acknowledge_all(self, offer_ids: tuple[int, ...]) -> None:
        """Repeats all acknowledgements at the end: a migrated sequence waits for them, and so does
        a hand-off without offers."""
        self._calls.send(lambda: self.peer.acknowledge(self.source.handoff_id, offer_ids))

    async def heartbeat(self) -> None:
        """Renews the sender's lease. Raises if the sender does not answer."""
        await self.peer.acknowledge(self.source.handoff_id, ())
        if self._unsent:
            self._send_next()

    def give_up(self, reason: str) -> None:
        peer, handoff_id = self.peer, self.source.handoff_id
        self._calls.send_until_received(lambda: peer.abort(handoff_id, reason))

    def _send_next(self) -> None:
        if not self._sending:
            self._sending = True
            self._calls.send(self._acknowledge)

    async def _acknowledge(self) -> None:
        ids, self._unsent = self._unsent, []
        try:
            await self.peer.acknowledge(self.source.handoff_id, tuple(ids))
        except BaseException:
            self._unsent = [*ids, *self._unsent]
            self._sending = False
            raise
        self._sending = bool(self._unsent)
        if self._sending:
            self._calls.send(self._acknowledge)
