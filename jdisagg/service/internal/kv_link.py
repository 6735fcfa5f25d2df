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
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from jdisagg.errors import InvalidRequestError, JdisaggError, UnavailableError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvEnvelope, KvMessage, KvPlanePort
from jdisagg.service.guard import Service
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import NO_CREDENTIALS, Connection, Credentials
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, TransferTimeouts
from jdisagg.telemetry import Counters
from jdisagg.transfer.kv_link import KvReceiver

QUEUE_MESSAGES = 8192
BATCH_MESSAGES = 256

Argument = TypeVar("Argument")

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
        self._credentials = credentials
        self._queue_messages = queue_messages
        self._loop = asyncio.get_running_loop()
        self._receiver: KvReceiver | None = None
        self._lock = threading.Lock()
        self._waiting: dict[KvEnd, deque[KvMessage]] = {}
        self._lines: dict[KvEnd, _Line] = {}
        self._closed = False

    def deliver_to(self, receiver: KvReceiver) -> None:
        """Messages that arrive before this call are dropped."""
        self._receiver = receiver

    def service(self, tokens: tuple[str, ...] = ()) -> Service:
        return rpc.service(KvPlanePort, _Incoming(self), tokens, lasting=("send",))

    def send(self, end: KvEnd, message: KvMessage) -> None:
        with self._lock:
            full = self._closed or len(self._waiting.get(end, ())) >= self._queue_messages
            if not full:
                self._waiting.setdefault(end, deque()).append(message)
        if full:
            self._on_loop(self._lost, 1)
        else:
            self._on_loop(self._stir, end)

    @property
    def closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        """Closes all connections and drops waiting messages. Idempotent."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        lines = list(self._lines.values())
        self._lines.clear()
        for line in lines:
            line.task.cancel()
        await asyncio.gather(*(line.task for line in lines), return_exceptions=True)

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

    def next_batch(self, end: KvEnd) -> list[KvMessage]:
        with self._lock:
            waiting = self._waiting.get(end, ())
            return (
                [waiting.popleft() for _ in range(min(len(waiting), BATCH_MESSAGES))]
                if waiting
                else []
            )

    def forget(self, end: KvEnd, line: "_Line") -> None:
        """If messages were queued in the meantime, opens a new connection for them."""
        if self._lines.get(end) is not line:
            return
        del self._lines[end]
        with self._lock:
            late = bool(self._waiting.get(end))
            if not late:
                self._waiting.pop(end, None)
        if late and not self._closed:
            self._stir(end)

    def give_up(self, end: KvEnd, messages: int) -> None:
        with self._lock:
            messages += len(self._waiting.pop(end, ()))
        self._lost(messages)
        log.warning("%s does not answer on the KV plane: %d messages lost", end.control, messages)

    def _stir(self, end: KvEnd) -> None:
        if self._closed:
            return
        line = self._lines.get(end)
        if line is None:
            line = self._lines[end] = _Line(self, end, Connection(end.control, self._credentials))
        line.stirred.set()

    def _lost(self, messages: int) -> None:
        self.counters.add("kv_messages_lost", messages)

    def _on_loop(self, function: Callable[[Argument], None], argument: Argument) -> None:
        # The event loop may already be closed at shutdown. The message is then dropped.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, argument)


class _Line:
    def __init__(self, link: GrpcKvLink, end: KvEnd, connection: Connection) -> None:
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
                    return
                self.stirred.clear()
                while messages := self._link.next_batch(self._end):
                    if not await self._send(messages):
                        self._link.give_up(self._end, len(messages))
                        return
                    self._link.counters.add("kv_messages_sent", len(messages))
        finally:
            self._link.forget(self._end, self)
            await self._connection.aclose()

    async def _send(self, messages: list[KvMessage]) -> bool:
        envelope = KvEnvelope(self._link.end, self._end.boot_id, tuple(messages))
        until = asyncio.get_running_loop().time() + self._link.timeouts.link_try_seconds
        while True:
            try:
                await self._port.send(envelope)
                return True
            except JdisaggError as error:
                if (
                    not isinstance(error, UnavailableError)
                    or asyncio.get_running_loop().time() > until
                ):
                    log.debug("KV plane: %s: %s", self._end.control, error)
                    return False
            await asyncio.sleep(self._link.timeouts.link_pause_seconds)


class _Incoming:
    def __init__(self, link: GrpcKvLink) -> None:
        self._link = link

    async def send(self, envelope: KvEnvelope) -> None:
        self._link.take(envelope)
