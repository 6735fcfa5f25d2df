"""Clients of the generation service, sync and async: text, token ids or chat in, `StreamEvent`s
out, our typed errors raised.

    with Client("localhost:8700") as client:
        for event in client.generate("Once upon a time", max_tokens=75, temperature=0):
            print(event.text, end="")

Needs gRPC, neither JAX nor the router. A call waits for the server to be reachable for
`connect_seconds`. When the connection of a stream breaks, or the server shuts down, the client asks
again, for `resume_seconds`, and the stream goes on at the next token: the caller sees one stream,
each token once. A `target` may name several servers ("ipv4:10.0.0.1:8700,10.0.0.2:8700"; over TLS
gRPC then has no name to look for in their certificates: give `Credentials` a `server_name` that all
of them bear). Any other call that may have reached the server is never sent twice.

`AsyncClient` is the client. `Client` runs the same coroutines over gRPC's blocking calls, where
they never suspend."""

import asyncio
import contextlib
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from dataclasses import replace
from typing import Any, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from jdisagg.chat.messages import ChatMessage, ChatTool, ToolCall
from jdisagg.dispatch.frontend import ModelInfo
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.errors import InvalidRequestError, UnavailableError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import StreamEvent
from jdisagg.service.client.chat import Messages
from jdisagg.service.client.completion import Choice, Collector, Completion
from jdisagg.service.client.request import GenerateOptions, asked, tokenize_request
from jdisagg.service.client.stream import ResumableStream, lost, never_sent, typed_error
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import generation_pb2_grpc, wire, wire_generation
from jdisagg.service.internal.connection import (
    NO_CREDENTIALS,
    RECONNECT_OPTIONS,
    Credentials,
    check_target,
    open_channel,
)
from jdisagg.trace_context import outgoing

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "ChatTool",
    "Choice",
    "Client",
    "Completion",
    "Credentials",
    "GenerateOptions",
    "ToolCall",
]

MAX_MESSAGE_BYTES = 16 << 20

Reply = TypeVar("Reply")
Options = list[tuple[str, int | str]]


class AsyncClient:
    """A client for asyncio; use it on one event loop.

    Args:
        target: host:port of the server, or any target of gRPC's.
        connect_seconds: how long a call waits for the server to be reachable.
        timeout_seconds: bounds every call but `generate` and `complete`, which have
            `deadline_seconds`.
        resume_seconds: how long a broken stream is asked for again.
        max_message_bytes: the largest message that is accepted.
        token: bearer token; replaces that of `credentials`.
        credentials: for TLS.

    Raises:
        ConfigError: `target` is no address.
    """

    def __init__(
        self,
        target: str,
        *,
        connect_seconds: float = 10.0,
        timeout_seconds: float = 60.0,
        resume_seconds: float = 30.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        token: str = "",
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        check_target(target)
        self._target = target
        self._connect_seconds = connect_seconds
        self._timeout_seconds = timeout_seconds
        self._resume_seconds = resume_seconds
        self._connected = False
        self._closed = False
        credentials = replace(credentials, token=token) if token else credentials
        self._metadata = credentials.metadata()
        self._tls = credentials.tls
        self._calls = self._open(credentials, _channel_options(max_message_bytes, credentials))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._calls.channel)

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[StreamEvent, None]:
        """Streams one request. Closing the iterator cancels it.

        Args:
            prompt: the text to go on with; or give `token_ids` or `messages`.
            **options: see `GenerateOptions`.

        Returns:
            The events of all children, each child's in order; the last one bears usage and
            timings.

        Raises:
            InvalidRequestError: what was given cannot be sent, or the server refuses it.
            OverloadedError: the server has too much to do; `retry_after_seconds` says when to ask
                again.
            DeadlineExceededError: `deadline_seconds` passed.
            UnauthenticatedError: the server asks for another token.
            UnavailableError: no server answers, for longer than the stream may be broken.
            JdisaggError: any other failure.
        """
        _check_open(self._closed, self._target)
        return self._events(ResumableStream(asked(prompt, options), self._resume_seconds))

    async def complete(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """`generate`, read to its end.

        Args:
            prompt, **options: as `generate`.

        Returns:
            All choices, usage and timings.

        Raises:
            JdisaggError: as `generate`.
        """
        collector = Collector()
        async with contextlib.aclosing(self.generate(prompt, **options)) as events:
            async for event in events:
                collector.add(event)
        return collector.completion()

    async def tokenize(
        self, prompt: str | None = None, *, messages: Messages | None = None
    ) -> tuple[int, ...]:
        """The token ids that the server makes of a prompt.

        Args:
            prompt: a text; or
            messages: a chat, which goes through the model's template.

        Raises:
            JdisaggError: as `generate`.
        """
        request = tokenize_request(prompt, messages)
        return tuple((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids.

        Raises:
            JdisaggError: as `generate`.
        """
        request = wire_generation.detokenize_to_proto(token_ids, skip_special_tokens)
        return (await self._unary(self._stub.Detokenize, request)).text

    async def model(self) -> ModelInfo:
        """What the server serves.

        Raises:
            JdisaggError: as `generate`.
        """
        reply = await self._unary(self._stub.GetModel, pb.GetModelRequest())
        return wire_generation.model_from_proto(reply)

    async def status(self) -> tuple[WorkerStatus, ...]:
        """What each worker reports of itself.

        Raises:
            JdisaggError: as `generate`.
        """
        reply = await self._unary(self._stub.GetStatus, pb.GetStatusRequest())
        return tuple(map(wire.worker_status_from_proto, reply.workers))

    async def routing(self) -> RoutingStatus:
        """The router's last decisions with their reasons, and its account of what it sent where.

        Raises:
            JdisaggError: as `generate`.
        """
        reply = await self._unary(self._stub.GetStatus, pb.GetStatusRequest())
        return wire_generation.routing_from_proto(reply)

    async def reset_cache(self) -> int:
        """Lets workers forget the KV that they keep for later requests; returns how many blocks.

        Raises:
            UnauthenticatedError: the token belongs to a tenant.
            UnavailableError: a worker does not answer; what it keeps may still be used.
        """
        return (await self._unary(self._stub.ResetCache, pb.ResetCacheRequest())).blocks

    async def suspend(
        self, request_id: str, *, keep_seconds: float | None = None, tenant: str = ""
    ) -> None:
        """Lets a request rest whose stream is open: its slots and pages are free for others, and
        its stream says nothing until `resume`. Its deadline is not moved. May be called again.

        Args:
            request_id: the one that the request was given, or that its first event bears.
            keep_seconds: for how long its KV is kept in host memory, as far as there is room; then
                it is computed anew when the request goes on. None: as long as its deadline allows.
            tenant: as the request says.

        Raises:
            InvalidRequestError: the server streams no such request.
            UnavailableError: a worker does not answer; ask again.
        """
        request = pb.SuspendRequest(request_id=request_id, tenant=tenant, keep_seconds=keep_seconds)
        await self._unary(self._stub.Suspend, request)

    async def resume(self, request_id: str, *, tenant: str = "") -> None:
        """Lets a suspended request go on, at its next token.

        Args:
            request_id, tenant: as `suspend`.

        Raises:
            JdisaggError: as `suspend`.
        """
        request = pb.ResumeRequest(request_id=request_id, tenant=tenant)
        await self._unary(self._stub.Resume, request)

    async def close(self) -> None:
        """Ends what runs; nothing more can be asked. Idempotent."""
        self._closed = True
        await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open(self, credentials: Credentials, options: Options) -> "_Calls":
        return _AsyncioCalls(open_channel(self._target, credentials, options))

    async def _events(self, stream: ResumableStream) -> AsyncGenerator[StreamEvent, None]:
        again = True
        while not stream.complete:
            call = None
            try:
                await self._connect(stream.connect_seconds(self._connect_seconds))
                call = self._stub.Generate(
                    stream.request(),
                    timeout=stream.call_seconds(),
                    metadata=(*self._metadata, *outgoing()),
                )
                async for message in self._calls.messages(call):
                    yield stream.take(message)
                return
            except grpc.RpcError as error:
                self._connected = not lost(error)
                if stream.complete:
                    return
                if again and not stream.resuming and never_sent(error):
                    again = False
                    continue
                pause_seconds = stream.pause_after(error)
            except _Unreachable as error:
                pause_seconds = stream.pause_after(error)
            finally:
                if call is not None:
                    call.cancel()
            await self._calls.sleep(pause_seconds)

    async def _unary(self, method: Callable[..., Reply], request: Message) -> Reply:
        for again in (True, False):
            await self._connect(self._connect_seconds)
            try:
                call = method(
                    request, timeout=self._timeout_seconds, metadata=(*self._metadata, *outgoing())
                )
                return await self._calls.reply(cast(Awaitable[Reply], call))
            except grpc.RpcError as error:
                self._connected = not lost(error)
                if not (again and never_sent(error)):
                    raise typed_error(error) from None
        raise AssertionError("the second attempt returns or raises")

    async def _connect(self, seconds: float) -> None:
        _check_open(self._closed, self._target)
        if not self._connected and not await self._calls.ready(seconds):
            raise _unreachable(self._target, seconds, self._tls)
        self._connected = True


class Client:
    """The same, blocking. Threads may share one; each stream belongs to the thread that reads it.

    Args:
        As `AsyncClient`.

    Raises:
        ConfigError: `target` is no address.
    """

    def __init__(
        self,
        target: str,
        *,
        connect_seconds: float = 10.0,
        timeout_seconds: float = 60.0,
        resume_seconds: float = 30.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        token: str = "",
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._client = _BlockingClient(
            target,
            connect_seconds=connect_seconds,
            timeout_seconds=timeout_seconds,
            resume_seconds=resume_seconds,
            max_message_bytes=max_message_bytes,
            token=token,
            credentials=credentials,
        )

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[StreamEvent, None, None]:
        """As `AsyncClient.generate`."""
        return _each(self._client.generate(prompt, **options))

    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """As `AsyncClient.complete`."""
        return _result(self._client.complete(prompt, **options))

    def tokenize(
        self, prompt: str | None = None, *, messages: Messages | None = None
    ) -> tuple[int, ...]:
        """As `AsyncClient.tokenize`."""
        return _result(self._client.tokenize(prompt, messages=messages))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """As `AsyncClient.detokenize`."""
        return _result(self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    def model(self) -> ModelInfo:
        """As `AsyncClient.model`."""
        return _result(self._client.model())

    def status(self) -> tuple[WorkerStatus, ...]:
        """As `AsyncClient.status`."""
        return _result(self._client.status())

    def routing(self) -> RoutingStatus:
        """As `AsyncClient.routing`."""
        return _result(self._client.routing())

    def reset_cache(self) -> int:
        """As `AsyncClient.reset_cache`."""
        return _result(self._client.reset_cache())

    def suspend(
        self, request_id: str, *, keep_seconds: float | None = None, tenant: str = ""
    ) -> None:
        """As `AsyncClient.suspend`."""
        _result(self._client.suspend(request_id, keep_seconds=keep_seconds, tenant=tenant))

    def resume(self, request_id: str, *, tenant: str = "") -> None:
        """As `AsyncClient.resume`."""
        _result(self._client.resume(request_id, tenant=tenant))

    def close(self) -> None:
        """Ends what runs; nothing more can be asked. Idempotent."""
        _result(self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _BlockingClient(AsyncClient):
    """Its coroutines block where the other's would suspend."""

    def _open(self, credentials: Credentials, options: Options) -> "_Calls":
        if credentials.tls:
            return _BlockingCalls(grpc.secure_channel(self._target, credentials.channel(), options))
        return _BlockingCalls(grpc.insecure_channel(self._target, options))


def _result(coroutine: Coroutine[Any, Any, Reply]) -> Reply:
    """Of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a blocking call does not suspend")


def _each(events: AsyncGenerator[StreamEvent, None]) -> Generator[StreamEvent, None, None]:
    try:
        while True:
            try:
                event = _result(events.__anext__())
            except StopAsyncIteration:
                return
            yield event
    finally:
        _result(events.aclose())


class _AsyncioCalls:
    """What a client does with a channel: wait until it is `ready` (False: it was not, in time), and
    read the reply or the messages of a call that was begun."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def ready(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.channel.channel_ready(), seconds)
        except TimeoutError:
            return False
        return True

    async def reply(self, call: Awaitable[Reply]) -> Reply:
        return await call

    def messages(self, call: object) -> AsyncIterator[pb.GenerateResponse]:
        return aiter(
            cast("grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]", call)
        )

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self.channel.close()


class _BlockingCalls:
    """gRPC's blocking stubs return the reply itself, and iterate without `async`."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    async def ready(self, seconds: float) -> bool:
        ready = grpc.channel_ready_future(self.channel)
        try:
            ready.result(timeout=seconds)
        except grpc.FutureTimeoutError:
            ready.cancel()
            return False
        return True

    async def reply(self, call: Awaitable[Reply]) -> Reply:
        return cast(Reply, call)

    async def messages(self, call: object) -> AsyncIterator[pb.GenerateResponse]:
        for message in cast(Iterator[pb.GenerateResponse], call):
            yield message

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        self.channel.close()


_Calls = _AsyncioCalls | _BlockingCalls


def _channel_options(max_message_bytes: int, credentials: Credentials) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # A server that vanished is found out by unanswered pings.
        ("grpc.keepalive_time_ms", 3_000),
        ("grpc.keepalive_timeout_ms", 3_000),
        ("grpc.http2.ping_timeout_ms", 3_000),
        *RECONNECT_OPTIONS,
        *credentials.options(),
    ]


def _check_open(closed: bool, target: str) -> None:
    if closed:
        raise InvalidRequestError(
            f"this client of {target} is closed; make a new one, or ask before its close() or the"
            " end of its with"
        )


class _Unreachable(UnavailableError):
    """No server answered in time."""


def _unreachable(target: str, seconds: float, tls: bool) -> _Unreachable:
    """gRPC tells neither that the other side speaks TLS, or does not, nor that a certificate is not
    believed."""
    remedy = (
        "if it speaks TLS, say which authority to believe (credentials; --authority of launch.ask)"
    )
    if tls:
        remedy = (
            "does it speak TLS, with a certificate for this host that the given authority signed,"
            " and does it believe ours?"
        )
    return _Unreachable(
        f"no server answered at {target} within {seconds:g} s; is it running (python -m"
        f" launch.serve)? {remedy}"
    )
