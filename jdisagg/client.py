"""Clients of the generation service, sync and async: text, token ids or chat in, `StreamEvent`s out, our typed errors raised.

    with Client("localhost:8700") as client:
        for event in client.generate("Once upon a time", max_tokens=75, temperature=0):
            print(event.text, end="")

Needs gRPC, neither JAX nor the router. A call waits for the server to be reachable for `connect_seconds`. When the connection of a
stream breaks, or the server shuts down, the client asks again, for `resume_seconds`, and the stream goes on at the next token: the caller
sees one stream, each token once. A `target` may name several servers ("ipv4:10.0.0.1:8700,10.0.0.2:8700"; over TLS gRPC then has no name to
look for in their certificates: give `Credentials` a `server_name` that all of them bear). Any other call that may have reached the
server is never sent twice.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message

from jdisagg.dispatch.frontend import ChatMessage, ModelInfo
from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.errors import InvalidRequestError, JdisaggError, UnavailableError
from jdisagg.request import FinishReason, StreamEvent, Timings, TokenLogprobs, Usage
from jdisagg.service import generation_pb2 as pb
from jdisagg.service import generation_pb2_grpc, wire, wire_generation
from jdisagg.service.client_request import GenerateOptions, Messages, asked, tokenize_request
from jdisagg.service.client_stream import ResumableStream, lost, never_sent, typed_error
from jdisagg.service.connection import NO_CREDENTIALS, RECONNECT_OPTIONS, Credentials, check_target, open_channel

__all__ = ["AsyncClient", "ChatMessage", "Choice", "Client", "Completion", "Credentials", "GenerateOptions"]

MAX_MESSAGE_BYTES = 16 << 20

Reply = TypeVar("Reply")


@dataclass(slots=True)
class Choice:
    """All of one child of a request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer; `text` is that of the first of `choices`."""

    choices: tuple[Choice, ...]
    usage: Usage | None
    timings: Timings | None

    @property
    def text(self) -> str:
        return self.choices[0].text


class _Collector:
    """Puts events together; a token that is missing or comes twice is an error, never a wrong answer."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}
        self._usage: Usage | None = None
        self._timings: Timings | None = None

    def add(self, event: StreamEvent) -> None:
        choice = self._choices.setdefault(event.child, Choice())
        if event.token_ids and event.first_index != len(choice.token_ids):
            raise JdisaggError(f"stream of child {event.child}: token {event.first_index} came where {len(choice.token_ids)} was due")
        choice.text += event.text
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        choice.finish_reason = event.finish_reason or choice.finish_reason
        self._usage, self._timings = event.usage or self._usage, event.timings or self._timings

    def completion(self) -> Completion:
        if not self._choices:
            raise JdisaggError("the stream ended without an event; see the server's log")
        return Completion(tuple(self._choices[child] for child in sorted(self._choices)), self._usage, self._timings)


class Client:
    """Blocking. Threads may share one; each stream belongs to the thread that reads it."""

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
        """`timeout_seconds` bounds every call but `generate`, which has `deadline_seconds`. `token`: that of `credentials`."""
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
        options = _channel_options(max_message_bytes, credentials)
        if credentials.tls:
            self._channel = grpc.secure_channel(target, credentials.channel(), options)
        else:
            self._channel = grpc.insecure_channel(target, options)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generator[StreamEvent, None, None]:
        """Streams one request: exactly one of `prompt`, `token_ids`, `messages`. Closing the iterator cancels the request."""
        _check_open(self._closed, self._target)
        return self._events(ResumableStream(asked(prompt, options), self._resume_seconds))

    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """`generate`, read to its end."""
        collector = _Collector()
        for event in self.generate(prompt, **options):
            collector.add(event)
        return collector.completion()

    def tokenize(self, prompt: str | None = None, *, messages: Messages | None = None) -> tuple[int, ...]:
        reply: pb.TokenizeResponse = self._unary(self._stub.Tokenize, tokenize_request(prompt, messages))
        return tuple(reply.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        reply: pb.DetokenizeResponse = self._unary(
            self._stub.Detokenize, wire_generation.detokenize_to_proto(token_ids, skip_special_tokens)
        )
        return reply.text

    def model(self) -> ModelInfo:
        return wire_generation.model_from_proto(self._unary(self._stub.GetModel, pb.GetModelRequest()))

    def status(self) -> tuple[WorkerStatus, ...]:
        reply: pb.GetStatusResponse = self._unary(self._stub.GetStatus, pb.GetStatusRequest())
        return tuple(map(wire.worker_status_from_proto, reply.workers))

    def routing(self) -> RoutingStatus:
        """The router's last decisions with their reasons, and its account of what it sent to whom."""
        return wire_generation.routing_from_proto(self._unary(self._stub.GetStatus, pb.GetStatusRequest()))

    def close(self) -> None:
        """Ends what runs; nothing more can be asked. Idempotent."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _events(self, stream: ResumableStream) -> Generator[StreamEvent, None, None]:
        again = True
        while not stream.complete:
            call = None
            try:
                self._connect(stream.connect_seconds(self._connect_seconds))
                call = self._stub.Generate(stream.request(), timeout=stream.call_seconds(), metadata=self._metadata)
                for message in call:
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
            time.sleep(pause_seconds)

    def _unary(self, method: Callable[..., Reply], request: Message) -> Reply:
        for again in (True, False):
            self._connect(self._connect_seconds)
            try:
                return method(request, timeout=self._timeout_seconds, metadata=self._metadata)
            except grpc.RpcError as error:
                self._connected = not lost(error)
                if not (again and never_sent(error)):
                    raise typed_error(error) from None
        raise AssertionError("the second attempt returns or raises")

    def _connect(self, seconds: float) -> None:
        _check_open(self._closed, self._target)
        if self._connected:
            return
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(timeout=seconds)
        except grpc.FutureTimeoutError:
            ready.cancel()
            raise _unreachable(self._target, seconds, self._tls) from None
        self._connected = True


class AsyncClient:
    """The same for asyncio; use it on one event loop."""

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
        """`timeout_seconds` bounds every call but `generate`, which has `deadline_seconds`. `token`: that of `credentials`.
        Call it where the loop runs."""
        self._target = target
        self._connect_seconds = connect_seconds
        self._timeout_seconds = timeout_seconds
        self._resume_seconds = resume_seconds
        self._connected = False
        self._closed = False
        credentials = replace(credentials, token=token) if token else credentials
        self._metadata = credentials.metadata()
        self._tls = credentials.tls
        self._channel = open_channel(target, credentials, _channel_options(max_message_bytes, credentials))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncGenerator[StreamEvent, None]:
        """Streams one request: exactly one of `prompt`, `token_ids`, `messages`. Closing the iterator cancels the request."""
        _check_open(self._closed, self._target)
        return self._events(ResumableStream(asked(prompt, options), self._resume_seconds))

    async def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """`generate`, read to its end."""
        collector = _Collector()
        async with contextlib.aclosing(self.generate(prompt, **options)) as events:
            async for event in events:
                collector.add(event)
        return collector.completion()

    async def tokenize(self, prompt: str | None = None, *, messages: Messages | None = None) -> tuple[int, ...]:
        reply: pb.TokenizeResponse = await self._unary(self._stub.Tokenize, tokenize_request(prompt, messages))
        return tuple(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        reply: pb.DetokenizeResponse = await self._unary(
            self._stub.Detokenize, wire_generation.detokenize_to_proto(token_ids, skip_special_tokens)
        )
        return reply.text

    async def model(self) -> ModelInfo:
        return wire_generation.model_from_proto(await self._unary(self._stub.GetModel, pb.GetModelRequest()))

    async def status(self) -> tuple[WorkerStatus, ...]:
        reply: pb.GetStatusResponse = await self._unary(self._stub.GetStatus, pb.GetStatusRequest())
        return tuple(map(wire.worker_status_from_proto, reply.workers))

    async def routing(self) -> RoutingStatus:
        """As the other client's."""
        return wire_generation.routing_from_proto(await self._unary(self._stub.GetStatus, pb.GetStatusRequest()))

    async def close(self) -> None:
        """As the other client's."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _events(self, stream: ResumableStream) -> AsyncGenerator[StreamEvent, None]:
        again = True
        while not stream.complete:
            call = None
            try:
                await self._connect(stream.connect_seconds(self._connect_seconds))
                call = self._stub.Generate(stream.request(), timeout=stream.call_seconds(), metadata=self._metadata)
                async for message in call:
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
            await asyncio.sleep(pause_seconds)

    async def _unary(self, method: Callable[..., Awaitable[Reply]], request: Message) -> Reply:
        for again in (True, False):
            await self._connect(self._connect_seconds)
            try:
                return await method(request, timeout=self._timeout_seconds, metadata=self._metadata)
            except grpc.RpcError as error:
                self._connected = not lost(error)
                if not (again and never_sent(error)):
                    raise typed_error(error) from None
        raise AssertionError("the second attempt returns or raises")

    async def _connect(self, seconds: float) -> None:
        _check_open(self._closed, self._target)
        if self._connected:
            return
        try:
            await asyncio.wait_for(self._channel.channel_ready(), seconds)
        except TimeoutError:
            raise _unreachable(self._target, seconds, self._tls) from None
        self._connected = True


def _channel_options(max_message_bytes: int, credentials: Credentials) -> list[tuple[str, int | str]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # A server that vanished without a word is found out by unanswered pings.
        ("grpc.keepalive_time_ms", 3_000),
        ("grpc.keepalive_timeout_ms", 3_000),
        ("grpc.http2.ping_timeout_ms", 3_000),
        *RECONNECT_OPTIONS,
        *credentials.options(),
    ]


def _check_open(closed: bool, target: str) -> None:
    if closed:
        raise InvalidRequestError(f"this client of {target} is closed; make a new one, or ask before its close() or the end of its with")


class _Unreachable(UnavailableError):
    """Nobody answered in time."""


def _unreachable(target: str, seconds: float, tls: bool) -> _Unreachable:
    """gRPC tells neither that the other side speaks TLS, or does not, nor that a certificate is not believed."""
    papers = "if it speaks TLS, say whom to believe (credentials; --authority of launch.ask)"
    if tls:
        papers = "does it speak TLS, with a certificate for this host that the given authority signed, and does it believe ours?"
    return _Unreachable(f"no server answered at {target} within {seconds:g} s; is it running (python -m launch.serve)? {papers}")
