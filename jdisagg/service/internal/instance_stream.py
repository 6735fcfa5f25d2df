"""The gRPC streams between the processes of an instance that spans several hosts: the leader's
server and a follower's connection.

An instance is one model replica. Its leader process sends commands to its follower processes. Each
follower opens a `Follow` stream and joins the instance. The leader's port serves nothing else. A
client without the instance's secret is refused after one message. A stream without a join message
is closed after a time limit. This module does not use JAX."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from jdisagg.errors import InvalidRequestError, JdisaggError, UnavailableError
from jdisagg.instance.followers import Followers, FollowerSession
from jdisagg.messages.instance import FollowerMessage, Join, LeaderMessage
from jdisagg.messages.packed import Unpacker, check_protocol, pack
from jdisagg.service.grpc import wire
from jdisagg.service.grpc_life import bind, new_server
from jdisagg.service.internal.connection import (
    NO_CREDENTIALS,
    PROTOCOL_KEY,
    Credentials,
    open_channel,
    protocol_metadata,
)
from jdisagg.settings.address import host_port
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, InstanceTimeouts

unpack_follower = Unpacker[FollowerMessage](FollowerMessage)
unpack_leader = Unpacker[LeaderMessage](LeaderMessage)

# A prefill command of a long prompt has tens of thousands of tokens, and requests with penalties
# send their history too.
MESSAGE_BYTES = 256 << 20

SERVICE, METHOD = "jdisagg.InstanceLeader", "Follow"

log = logging.getLogger(__name__)


class _Servicer:
    def __init__(self, followers: Followers, timeouts: InstanceTimeouts) -> None:
        self._followers = followers
        self._timeouts = timeouts

    async def Follow(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        try:
            # The processes of an instance run the same programs, and hence the same version.
            theirs = dict(context.invocation_metadata() or ()).get(PROTOCOL_KEY)
            check_protocol(theirs, SERVICE, same=True)
            async with asyncio.timeout(self._timeouts.join_seconds):
                first = await anext(request_iterator, None)
            message = None if first is None else unpack_follower(first)
            if not isinstance(message, Join):
                raise InvalidRequestError(
                    "instance: the first message of a follower must be Join; check the port"
                )
            session = self._followers.join(message)
        except (JdisaggError, TimeoutError) as error:
            known = (
                error
                if isinstance(error, JdisaggError)
                else InvalidRequestError(
                    f"instance: no Join within {self._timeouts.join_seconds:g} s"
                )
            )
            status = wire.error_to_status(known)
            await context.abort(grpc.StatusCode[status.code], status.details, status.metadata)
        listener = asyncio.ensure_future(_listen(session, request_iterator))
        try:
            async for outgoing in session.outgoing():
                yield outgoing
            # The follower closes the stream first. If the stream ended while the follower writes,
            # gRPC would report an error to the follower.
            await asyncio.wait({listener}, timeout=self._timeouts.hang_up_seconds)
        finally:
            listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listener
            session.ended("its stream broke")


async def _listen(session: FollowerSession, messages: AsyncIterator[bytes]) -> None:
    try:
        async for message in messages:
            session.received(unpack_follower(message))
        session.ended("its stream ended")
    except asyncio.CancelledError:
        raise
    except Exception as error:
        session.ended(f"its stream broke: {error or type(error).__name__}")


class InstanceServer:
    """The leader's server for the `Follow` streams. Start it before followers receive its address,
    and stop it last."""

    def __init__(
        self,
        followers: Followers,
        credentials: grpc.ServerCredentials | None = None,
        timeouts: InstanceTimeouts = DEFAULT_TIMEOUTS.instance,
    ) -> None:
        self._credentials = credentials
        self._grace_seconds = timeouts.hang_up_seconds
        self._server = new_server(
            (
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_send_message_length", MESSAGE_BYTES),
            )
        )
        follow = grpc.stream_stream_rpc_method_handler(_Servicer(followers, timeouts).Follow)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: follow}),)
        )

    async def start(self, host: str = "127.0.0.1", port: int = 0, called: str = "") -> str:
        """Binds the port and starts to serve. Returns the address (host:port) that followers call.
        `called`: host that followers call, or empty if it is `host`. Raises ConfigError if the
        address cannot be bound."""
        bound = bind(
            self._server, host, port, self._credentials, "choose another address for the instance"
        )
        await self._server.start()
        return host_port(called or host, bound)

    async def stop(self) -> None:
        await self._server.stop(grace=self._grace_seconds)


class LeaderConnection:
    """A follower's connection to the leader. Implements `instance.follower.LeaderLink`.

    Create it on the event loop that uses it. The `Follow` stream opens with the first message.
    `connect_seconds`: time limit for the leader to answer."""

    def __init__(
        self,
        address: str,
        credentials: Credentials = NO_CREDENTIALS,
        connect_seconds: float = DEFAULT_TIMEOUTS.instance.connect_seconds,
    ) -> None:
        self._connect_seconds = connect_seconds
        self._address = address
        limits = (
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
        )
        self._channel = open_channel(address, credentials, (*limits, *credentials.options()))
        self._outgoing: asyncio.Queue[FollowerMessage | None] = asyncio.Queue()

    def send(self, message: FollowerMessage) -> None:
        self._outgoing.put_nowait(message)

    async def received(self) -> AsyncIterator[LeaderMessage]:
        try:
            async with asyncio.timeout(self._connect_seconds):
                await self._channel.channel_ready()
        except TimeoutError:
            raise UnavailableError(
                f"the leader at {self._address} did not answer within {self._connect_seconds} s;"
                " restart the instance"
            ) from None
        try:
            follow = self._channel.stream_stream(f"/{SERVICE}/{METHOD}", pack)
            call = follow(self._messages(), metadata=(protocol_metadata(),))
            async for message in call:
                yield unpack_leader(message)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            raise UnavailableError(
                f"the instance failed: the leader's stream broke ({code}: {error.details()});"
                " restart it"
            ) from error

    async def close(self) -> None:
        self._outgoing.put_nowait(None)
        await self._channel.close()

    async def _messages(self) -> AsyncIterator[FollowerMessage]:
        while (message := await self._outgoing.get()) is not None:
            yield message
