"""The endpoint through which a process sends and receives bulk data, such as weights.

It consists of a control link, a gRPC server and a channel for the data, on a thread with an event
loop of its own. It is used by trainers that offer weights, and by a worker's process while the
worker reads weights from another process."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.ids import random_id
from jdisagg.errors import ConfigError
from jdisagg.node.cluster_plan import free_ports
from jdisagg.service.guard import Service
from jdisagg.service.internal.kv_link import GrpcKvLink
from jdisagg.service.server import GrpcServer, cluster_credentials, read_tokens
from jdisagg.settings.address import EVERY_INTERFACE, host_port, is_local
from jdisagg.transfer.negotiated_channel import Memories, NegotiatedChannel

TRANSPORTS = 4  # connections of the transfer engine, the same in all processes
T = TypeVar("T")


def called_address(service: ServiceConfig) -> str:
    """Raises ConfigError if the host means every interface, such as 0.0.0.0."""
    if service.called_host in EVERY_INTERFACE:
        raise ConfigError(
            f"--host={service.host} means every interface, and other workers cannot call it; add"
            " --advertise_host with the address or name at which they call this one"
        )
    return host_port(service.called_host, service.port)


def kv_interface(service: ServiceConfig) -> str:
    """Returns the address of the network interface that sends and receives KV. `advertise_host` is
    used only if an interface of this machine has it, because it may be a translated address."""
    called = service.called_host
    return service.kv_host or (called if is_local(called) else service.host)


class KvEndpoint:
    """The endpoint of this process for bulk transfers. It serves from construction to `close`, on a
    thread of its own.

    Args:
        service: Address, TLS, cluster token and KV channel. Port 0 means any free port.
        memories: Memory that other processes can read. None allocates it according to
            `service.kv_channel`.

    Attributes:
        channel: Channel that transfers the data. Use it on the endpoint's thread.
        end: Control address and boot id of this process for transfers.
    """

    channel: NegotiatedChannel

    def __init__(
        self,
        service: ServiceConfig,
        services: Sequence[Service] = (),
        memories: Memories | None = None,
    ) -> None:
        port = service.port or free_ports(service.host, 1)[0]
        self._service = service = replace(service, port=port, drain_seconds=0.0)
        self._interface = kv_interface(service)
        if memories is None:
            memories = Memories.of_worker(service.kv_channel, self._interface)
        self._memories, self._services = memories, tuple(services)
        self.end = memories.end(called_address(service), random_id())
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="kv-endpoint", daemon=True)
        self._thread.start()
        self._started.result()

    def start(self, work: Coroutine[None, None, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """`call` does not run if the endpoint is closed by then."""
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, call)

    def close(self) -> None:
        """Stops the server, the channel and the thread, and waits until they have stopped. If
        called on the endpoint's thread, returns without waiting. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        service, tokens = self._service, read_tokens(self._service.cluster_token_file)
        link = GrpcKvLink(self.end, cluster_credentials(service))
        self.channel = NegotiatedChannel(
            MonotonicClock(),
            self.end,
            link,
            host=self._interface,
            transports=TRANSPORTS,
            memories=self._memories,
        )
        link.deliver_to(self.channel)
        server = GrpcServer((link.service(tokens), *self._services), service, self.end.boot_id)
        try:
            await server.start()
            self._started.set_result(None)
            await self._ended.wait()
            server.force()
            await server.drain()
        finally:
            await asyncio.to_thread(self.channel.close)
            await link.close()
