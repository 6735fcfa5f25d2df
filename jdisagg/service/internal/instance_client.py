"""A follower's end of its stream to the leader, over gRPC. Implements
`instance.follower.LeaderLink`. Knows no JAX."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from jdisagg.errors import UnavailableError
from jdisagg.messages.instance import FollowerMessage, LeaderMessage
from jdisagg.messages.packed import Unpacker, pack
from jdisagg.service.internal.connection import (
    NO_CREDENTIALS,
    Credentials,
    open_channel,
    protocol_metadata,
)
from jdisagg.service.internal.instance_server import MESSAGE_BYTES, METHOD, SERVICE
from jdisagg.timeouts import DEFAULT_TIMEOUTS

unpack_leader = Unpacker[LeaderMessage](LeaderMessage)


class LeaderConnection:
    """Create it on the event loop that uses it. The stream opens with the first message.

    Args:
        address: The leader's address, host:port.
        credentials: TLS settings.
        connect_seconds: Time limit for the leader to answer.
    """

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
