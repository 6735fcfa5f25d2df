"""Sync and async clients of the generation service. The input is text, token ids or a chat. The
output is a stream of `StreamEvent`s. `Administration` changes a server over its HTTP API.

    with Client("localhost:8700") as client:
        for event in client.generate("Once upon a time", max_tokens=75, temperature=0):
            print(event.text, end="")

Needs gRPC, but neither JAX nor the router. A call waits up to `connect_seconds` for the server to
become reachable. If the connection of a stream breaks, or the server shuts down, the client repeats
the request for up to `resume_seconds` and the stream continues at the next token. The caller gets
one stream with each token once. All other calls are sent again only if the first call certainly did
not reach the server.

A `target` may name several servers ("ipv4:10.0.0.1:8700,10.0.0.2:8700"). Over TLS, such a target
has no host name that gRPC could verify. Then give `Credentials` a `server_name` that the
certificates of all servers contain."""

import asyncio
import contextlib
import functools
import json
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
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from jdisagg.chat.images import ChatImage
from jdisagg.chat.messages import ChatMessage, ChatTool, ToolCall
from jdisagg.dispatch.prompts import ModelInfo
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.errors import InvalidRequestError, UnavailableError
from jdisagg.messages.trace_context import outgoing
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import StreamEvent
from jdisagg.service.client.administration import Administration
from jdisagg.service.client.completion import Choice, Collector, Completion
from jdisagg.service.client.request import GenerateOptions, Messages, asked, tokenize_request
from jdisagg.service.client.stream import ResumableStream, lost, never_sent, typed_error
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import generation_pb2_grpc, wire_generation
from jdisagg.service.internal.connection import (
    NO_CREDENTIALS,
    RECONNECT_OPTIONS,
    Credentials,
    channel_of,
    open_channel,
)

__all__ = [
    "Administration",
    "AsyncClient",
    "ChatImage",
    "ChatMessage",
    "ChatTool",
    "Choice",
    "Client",
    "Completion",
    "Credentials",
    "GenerateOptions",
    "ToolCall",
]

MAX_MESSAGE_BYTES = 32 << 20

Arguments = ParamSpec("Arguments")
Reply = TypeVar("Reply")
# A draining server reports NOT_SERVING to gRPC's health checks. The client then calls another one.
SERVICE_CONFIG = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)
Options = list[tuple[str, int | str]]


class AsyncClient:
    """A client for asyncio. Use it on one event loop.

    Args:
        target: host:port of the server, or any gRPC target.
        connect_seconds: Time for which each call waits for the server to become reachable.
        timeout_seconds: Time limit of every call except `generate` and `complete`, which have
            `deadline_seconds`.
        resume_seconds: Time for which the client tries to resume a broken stream.
        token: Bearer token. Replaces the token of `credentials`.

    Raises:
        ConfigError: `target` is not an address.
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
        """Runs one request and streams its events. Closing the iterator cancels the request.

        Args:
            prompt: Text to continue. For other inputs give `token_ids` or `messages` instead.
            **options: Options of `GenerateOptions`.

        Returns:
            The events of all children (the n answers of the request). The events of one child are
                in order. The last event of the stream has usage and timings.

        Raises:
            InvalidRequestError: An argument cannot be sent, or the server rejects it.
            OverloadedError: The server is overloaded. Try again after `retry_after_seconds`.
            DeadlineExceededError: `deadline_seconds` passed.
            UnauthenticatedError: The server does not accept the token.
            UnavailableError: No server answered within `connect_seconds` or `resume_seconds`.
            JdisaggError: Any other failure.
        """
        _check_open(self._closed, self._target)
        return self._events(ResumableStream(asked(prompt, options), self._resume_seconds))

    async def complete(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Runs one request to its end and returns the whole answer."""
        collector = Collector()
        async with contextlib.aclosing(self.generate(prompt, **options)) as events:
            async for event in events:
                collector.add(event)
        return collector.completion()

    async def tokenize(
        self, prompt: str | None = None, *, messages: Messages | None = None
    ) -> tuple[int, ...]:
        """Returns the token ids that the server computes for a prompt.

        Args:
            messages: Chat to tokenize instead of `prompt`. The model's chat template is applied
                first.
        """
        request = tokenize_request(prompt, messages)
        return tuple((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Returns the text of token ids."""
        request = wire_generation.detokenize_to_proto(token_ids, skip_special_tokens)
        return (await self._unary(self._stub.Detokenize, request)).text

    async def model(self) -> ModelInfo:
        """Returns the served model's properties."""
        reply = await self._unary(self._stub.GetModel, pb.GetModelRequest())
        return wire_generation.model_from_proto(reply)

    async def status(self) -> tuple[WorkerStatus, ...]:
        """Returns the status that each worker reports."""
        reply = await self._unary(self._stub.GetStatus, pb.GetStatusRequest())
        return wire_generation.status_from_proto(reply)[0]

    async def routing(self) -> RoutingStatus:
        """Returns the router's latest placement decisions with their reasons, and the load that the
        router sent to each worker."""
        reply = await self._unary(self._stub.GetStatus, pb.GetStatusRequest())
        return wire_generation.status_from_proto(reply)[1]

    async def suspend(self, request_id: str, *, tenant: str = "") -> None:
        """Suspends a request whose stream is open.

        The request's decode slots and KV pages become free for other requests, and its stream
        pauses until `resume`, which recomputes the KV that is no longer in the prefix cache. The
        request's deadline does not change. A repeated call has no effect.

        Args:
            request_id: Id given with the request, or reported by its first event.

        Raises:
            InvalidRequestError: The server does not stream a request with this id.
        """
        request = pb.SuspendRequest(request_id=request_id, tenant=tenant)
        await self._unary(self._stub.Suspend, request)

    async def resume(self, request_id: str, *, tenant: str = "") -> None:
        """Resumes a suspended request at its next token."""
        request = pb.ResumeRequest(request_id=request_id, tenant=tenant)
        await self._unary(self._stub.Resume, request)

    async def close(self) -> None:
        """Cancels running calls and closes the connection. Idempotent."""
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
                metadata = (*self._metadata, *outgoing())
                call = method(request, timeout=self._timeout_seconds, metadata=metadata)
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


def _result(coroutine: Coroutine[Any, Any, Reply]) -> Reply:
    """Runs a coroutine that never suspends, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a blocking call does not suspend")


def _blocking(
    method: Callable[Concatenate[AsyncClient, Arguments], Coroutine[Any, Any, Reply]],
) -> "Callable[Concatenate[Client, Arguments], Reply]":
    @functools.wraps(method)
    def blocking(self: "Client", *args: Arguments.args, **named: Arguments.kwargs) -> Reply:
        return _result(method(self._client, *args, **named))

    return blocking


class Client:
    """The blocking form of `AsyncClient`, with the same arguments and methods.

    Threads may share one client. Each stream belongs to the thread that reads it.

    Raises:
        ConfigError: `target` is not an address.
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
        """Runs one request and streams its events. See `AsyncClient.generate`."""
        return _each(self._client.generate(prompt, **options))

    complete = _blocking(AsyncClient.complete)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    model = _blocking(AsyncClient.model)
    status = _blocking(AsyncClient.status)
    routing = _blocking(AsyncClient.routing)
    suspend = _blocking(AsyncClient.suspend)
    resume = _blocking(AsyncClient.resume)
    close = _blocking(AsyncClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _BlockingClient(AsyncClient):
    """An `AsyncClient` whose coroutines block instead of suspending."""

    def _open(self, credentials: Credentials, options: Options) -> "_Calls":
        makers = grpc.secure_channel, grpc.insecure_channel
        return _BlockingCalls(channel_of(*makers, self._target, credentials, options))


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
        # Pings detect a server whose host or network failed without closing the connection.
        ("grpc.keepalive_time_ms", 3_000),
        ("grpc.keepalive_timeout_ms", 3_000),
        ("grpc.http2.ping_timeout_ms", 3_000),
        # Of several servers, calls go only to those that are not draining.
        ("grpc.service_config", SERVICE_CONFIG),
        *RECONNECT_OPTIONS,
        *credentials.options(),
    ]


def _check_open(closed: bool, target: str) -> None:
    if closed:
        raise InvalidRequestError(
            f"this client of {target} is closed; make a new one, or make the call before close()"
            " or the end of the with block"
        )


class _Unreachable(UnavailableError):
    pass


def _unreachable(target: str, seconds: float, tls: bool) -> _Unreachable:
    """With TLS, the message names TLS as a possible cause, because gRPC reports neither a TLS
    mismatch nor a rejected certificate."""
    remedy = (
        "If it uses TLS, give its CA certificate (credentials, or --authority=FILE of jdisagg ask)."
    )
    if tls:
        remedy = (
            "Check that it uses TLS, that the given CA signed its certificate for this host, and"
            " that it accepts the client's certificate."
        )
    return _Unreachable(
        f"no server answered at {target} within {seconds:g} s; is it running (jdisagg serve), or"
        " shutting down?"
        f" {remedy}"
    )
