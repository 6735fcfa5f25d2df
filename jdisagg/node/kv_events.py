"""Publishes a worker's cached blocks over ZeroMQ, for routers of other projects.

A PUB socket sends each batch of events as three parts: topic, sequence number (8 bytes, big-endian)
and the batch in msgpack. A subscriber that missed batches sends the first missing number to the
ROUTER socket. The reply contains all stored batches from this number on, each with its number. At
the end it has the number -1 with an empty batch. A slow subscriber loses batches and does not delay
the worker. The sockets are used on the event loop only."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from jdisagg.errors import ConfigError
from jdisagg.scheduler.kept_log import KeptEvents, KVEventBatch
from jdisagg.worker.worker import Worker

if TYPE_CHECKING:
    import zmq

BATCHES_ON_RECORD = 10_000
QUEUED_BATCHES = 100_000  # for each subscriber
LAST_NUMBER = (-1).to_bytes(8, "big", signed=True)

log = logging.getLogger(__name__)


def _endpoint(value: int | bytes) -> str:
    assert isinstance(value, bytes)
    return value.rstrip(b"\0").decode()


class KvEventPublisher:
    """Publishes the events of one worker. Create it on the worker's event loop. `address`: ZeroMQ
    address to which the PUB socket binds, such as tcp://*:5557. Raises ConfigError if pyzmq is not
    installed, or an address cannot be bound."""

    def __init__(self, address: str, replay: str = "", topic: str = "") -> None:
        zmq = _zmq()
        self._loop = asyncio.get_running_loop()
        self._topic = topic.encode()
        self._number = 0
        self._record: deque[tuple[bytes, bytes]] = deque(maxlen=BATCHES_ON_RECORD)
        self._encode = msgspec.msgpack.Encoder().encode
        self._events: KeptEvents | None = None
        self._context = zmq.Context()
        # Applies to all sockets of the context. It is set for IPv6 addresses only, because with it
        # the address of an IPv4 socket would be reported as "::ffff:...".
        self._context.setsockopt(zmq.IPV6, "[" in address + replay)
        self._again: type[Exception] = zmq.Again
        self._no_block: int = zmq.NOBLOCK
        self._pub = self._bound(zmq.PUB, "prefix.events", address)
        self._router = self._bound(zmq.ROUTER, "prefix.events_replay", replay) if replay else None
        self.address = _endpoint(self._pub.getsockopt(zmq.LAST_ENDPOINT))
        self.replay = ""
        if self._router is not None:
            self.replay = _endpoint(self._router.getsockopt(zmq.LAST_ENDPOINT))
            readable = self._router.getsockopt(zmq.FD)
            assert isinstance(readable, int)
            self._readable = readable
            self._loop.add_reader(self._readable, self._answer)

    def watch(self, worker: Worker) -> None:
        """Starts to publish the changes of a worker's prefix cache. Has no effect if the worker has
        no prefix cache. The first event reports that the cache is empty."""

        def publish_soon() -> None:
            self._loop.call_soon(self._publish)

        self._events = worker.report_kept(publish_soon)
        if self._events is not None:
            self._events.cleared()

    def close(self) -> None:
        """Closes the sockets. Batches that are not sent yet are dropped."""
        self._events = None
        if self._router is not None:
            self._loop.remove_reader(self._readable)
            self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()

    def _bound(self, kind: int, name: str, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(QUEUED_BATCHES)
        try:
            socket.bind(address)
        except Exception as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{name}={address!r} cannot be bound: {error}") from error
        return socket

    def _publish(self) -> None:
        if self._events is None:
            return
        for batch in self._events.take(time.time()):
            self._send(batch)

    def _send(self, batch: KVEventBatch) -> None:
        number, data = self._number.to_bytes(8, "big"), self._encode(batch)
        self._number += 1
        self._record.append((number, data))
        self._pub.send_multipart((self._topic, number, data), self._no_block)

    def _answer(self) -> None:
        """Called when the socket's file descriptor becomes readable. ZeroMQ signals this only once
        for several requests. Each call therefore answers all waiting requests."""
        router = self._router
        while router is not None and not router.closed:
            try:
                identity, *parts = router.recv_multipart(self._no_block)
            except self._again:
                return
            if len(parts) != 2 or len(parts[1]) != 8:
                log.warning("KV events: a replay request must be an 8-byte sequence number")
                continue
            # The socket never blocks the worker. A subscriber that stops reading loses the rest.
            with contextlib.suppress(self._again):
                for number, data in (*self._record, (LAST_NUMBER, b"")):
                    if number >= parts[1]:
                        reply = (identity, b"", number, data)
                        router.send_multipart(reply, self._no_block)


def _zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise ConfigError(
            "prefix.events needs pyzmq; install it with pip install 'jdisagg[events]'"
        ) from None
    return zmq
