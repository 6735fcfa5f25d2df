"""Sends the control messages of KV transfers to other processes over gRPC. Implements `KvLink`.

`send` may be called from any thread and never blocks. Each destination has a bounded queue of
messages. They are sent in order, and one call sends many waiting messages. If a destination does
not answer, the link retries for a short time. It then drops and counts the waiting messages. A
transfer whose messages were dropped ends at its deadline. Messages that were sent to an earlier
process at this address are refused. A message may arrive twice if the reply to its call was lost.
"""

import asyncio
import contextlib
import logging
from collections import deque

from jdisagg.errors import InvalidRequestError, JdisaggError, UnavailableError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvEnvelope, KvMessage, KvPlanePort, KvReceiver
from jdisagg.service.guard import Service
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import NO_CREDENTIALS, Connection, Credentials
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, TransferTimeouts
from jdisagg.telemetry import Counters

QUEUE_MESSAGES = 8192
BATCH_MESSAGES = 256

log = logging.getLogger(__name__)


class GrpcKvLink:
    """Sends and receives control messages of KV transfers.

    `counters` has kv_messages_sent, kv_messages_received, kv_messages_lost and
    kv_messages_misdirected. `queue_messages`: number of messages that may wait per destination.
    Further messages are dropped."""

    def __init__(
        self,
        end: KvEnd,
        credentials: Credentials = NO_CREDENTIALS,
        queue_messages: int = QUEUE_MESSAGES,
        timeouts: TransferTimeouts = DEFAULT_TIMEOUTS.transfer,
    ) -> None:
        self.end = end
        self.timeouts = timeouts
        self.counters = Counters()
        self.closed = False
        self.lines: dict[KvEnd, _Line] = {}
        self._credentials = credentials
        self._queue_messages = queue_messages
        self._loop = asyncio.get_running_loop()
        self._receiver: KvReceiver | None = None

    def deliver_to(self, receiver: KvReceiver) -> None:
        """Messages that arrive before this call are dropped."""
        self._receiver = receiver

    def service(self, tokens: tuple[str, ...] = ()) -> Service:
        return rpc.service(KvPlanePort, _Incoming(self), tokens, lasting=("send",))

    def send(self, end: KvEnd, message: KvMessage) -> None:
        # The event loop may already be closed at shutdown. The message is then dropped.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue, end, message)

    async def close(self) -> None:
        """Closes all connections and drops waiting messages. Idempotent."""
        self.closed = True
        tasks = [line.task for line in self.lines.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def take(self, envelope: KvEnvelope) -> None:
        """Delivers the messages that another process sent in one call. Raises InvalidRequestError
        if the sender meant an earlier process at this address, before a restart."""
        theirs, ours = envelope.receiver_boot_id, self.end.boot_id
        if theirs != ours:
            self.counters.add("kv_messages_misdirected", len(envelope.messages))
            raise InvalidRequestError(
                f"the messages are for boot {theirs:x} of this process, but it was restarted as"
                f" boot {ours:x}"
            )
        self.counters.add("kv_messages_received", len(envelope.messages))
        if self._receiver is not None:
            for message in envelope.messages:
                self._receiver.handle(envelope.sender, message)

    def _queue(self, end: KvEnd, message: KvMessage) -> None:
        line = self.lines.get(end)
        if line is None and not self.closed:
            line = self.lines[end] = _Line(self, end, Connection(end.control, self._credentials))
        if line is None or len(line.waiting) >= self._queue_messages:
            self.counters.add("kv_messages_lost")
        else:
            line.waiting.append(message)
            line.stirred.set()


class _Line:
    """The messages to one destination. It ends after some time without messages, or if the
    destination does not answer. The next message begins another."""

    def __init__(self, link: GrpcKvLink, end: KvEnd, connection: Connection) -> None:
        self.waiting: deque[KvMessage] = deque()
        self.stirred = asyncio.Event()
        self._link = link
        self._end = end
        self._connection = connection
        self._port = rpc.client(
            KvPlanePort, connection, call_seconds=link.timeouts.link_send_seconds
        )
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            # `wait_for` may lose a cancellation that coincides with the event `stirred`.
            while not self._link.closed:
                try:
                    await asyncio.wait_for(
                        self.stirred.wait(), self._link.timeouts.link_idle_seconds
                    )
                except TimeoutError:
                    if not self.waiting:
                        return
                self.stirred.clear()
                if not await self._send_waiting():
                    return
        finally:
            self._link.lines.pop(self._end, None)
            await self._connection.aclose()

    async def _send_waiting(self) -> bool:
        counters = self._link.counters
        while self.waiting:
            batch = [self.waiting.popleft() for _ in range(min(len(self.waiting), BATCH_MESSAGES))]
            if not await self._send(batch):
                lost = len(batch) + len(self.waiting)
                counters.add("kv_messages_lost", lost)
                control = self._end.control
                log.warning("%s does not answer on the KV plane: %d messages lost", control, lost)
                return False
            counters.add("kv_messages_sent", len(batch))
        return True

    async def _send(self, messages: list[KvMessage]) -> bool:
        envelope = KvEnvelope(self._link.end, self._end.boot_id, tuple(messages))
        until = asyncio.get_running_loop().time() + self._link.timeouts.link_try_seconds
        while True:
            try:
                await self._port.send(envelope)
                return True
            except JdisaggError as error:
                late = asyncio.get_running_loop().time() > until
                if late or not isinstance(error, UnavailableError):
                    log.debug("KV plane: %s: %s", self._end.control, error)
                    return False
            await asyncio.sleep(self._link.timeouts.link_pause_seconds)


class _Incoming:
    def __init__(self, link: GrpcKvLink) -> None:
        self._link = link

    async def send(self, envelope: KvEnvelope) -> None:
        self._link.take(envelope)
