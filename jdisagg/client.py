"""Clients of the generation service, sync and async: text, token ids or chat in, `StreamEvent`s out, our typed errors raised.

    with Client("localhost:8700") as client:
        for event in client.generate("Once upon a time", max_tokens=75, temperature=0):
            print(event.text, end="")

Needs gRPC, neither JAX nor the router. A call waits for the server to be reachable for `connect_seconds`; a request that may
have reached it is never sent twice.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar, Unpack, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from jdisagg.dispatch.frontend import ChatMessage, ChatPrompt, ModelInfo, Prompt, SamplingOptions, TokenPrompt
from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.errors import InvalidRequestError, JdisaggError, UnavailableError
from jdisagg.request import FinishReason, StreamEvent, Timings, TokenLogprobs, Usage
from jdisagg.service import generation_pb2 as pb
from jdisagg.service import generation_pb2_grpc, wire, wire_generation

__all__ = ["AsyncClient", "ChatMessage", "Choice", "Client", "Completion", "GenerateOptions"]

MAX_MESSAGE_BYTES = 16 << 20
# The server ends a request at its deadline and says why; the call's own deadline is the net below.
DEADLINE_SLACK_SECONDS = 5.0

Reply = TypeVar("Reply")
Messages = Sequence[ChatMessage | Mapping[str, str]]


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


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of `generate` and `complete`: instead of a text prompt `token_ids` or `messages`, what identifies and
    bounds the request, and the sampling options. Absent or None is the default."""

    token_ids: Sequence[int] | None
    messages: Messages | None
    request_id: str | None
    deadline_seconds: float | None
    tenant: str | None
    priority: int | None


class Client:
    """Blocking. Threads may share one; each stream belongs to the thread that reads it."""

    def __init__(
        self, target: str, *, connect_seconds: float = 10.0, timeout_seconds: float = 60.0, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        """`timeout_seconds` bounds every call but `generate`, which has `deadline_seconds`."""
        self._target = target
        self._connect_seconds = connect_seconds
        self._timeout_seconds = timeout_seconds
        self._connected = False
        self._channel = grpc.insecure_channel(target, _channel_options(max_message_bytes))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generator[StreamEvent, None, None]:
        """Streams one request: exactly one of `prompt`, `token_ids`, `messages`. Closing the iterator cancels the request."""
        return self._events(_generate_request(prompt, options), _call_seconds(options.get("deadline_seconds")))

    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """`generate`, read to its end."""
        collector = _Collector()
        for event in self.generate(prompt, **options):
            collector.add(event)
        return collector.completion()

    def tokenize(self, prompt: str | None = None, *, messages: Messages | None = None) -> tuple[int, ...]:
        reply: pb.TokenizeResponse = self._unary(self._stub.Tokenize, _tokenize_request(prompt, messages))
        return tuple(reply.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        reply: pb.DetokenizeResponse = self._unary(self._stub.Detokenize, _detokenize_request(token_ids, skip_special_tokens))
        return reply.text

    def model(self) -> ModelInfo:
        return wire_generation.model_from_proto(self._unary(self._stub.GetModel, pb.GetModelRequest()))

    def status(self) -> tuple[WorkerStatus, ...]:
        reply: pb.GetStatusResponse = self._unary(self._stub.GetStatus, pb.GetStatusRequest())
        return tuple(map(wire.worker_status_from_proto, reply.workers))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _events(self, request: pb.GenerateRequest, timeout_seconds: float | None) -> Generator[StreamEvent, None, None]:
        for again in (True, False):
            self._connect()
            call = self._stub.Generate(request, timeout=timeout_seconds)
            try:
                for message in call:
                    yield wire_generation.event_from_proto(message)
                return
            except grpc.RpcError as error:
                self._connected = not _lost(error)
                if not (again and _never_sent(error)):
                    raise _typed(error) from None
            finally:
                call.cancel()

    def _unary(self, method: Callable[..., Reply], request: Message) -> Reply:
        for again in (True, False):
            self._connect()
            try:
                return method(request, timeout=self._timeout_seconds)
            except grpc.RpcError as error:
                self._connected = not _lost(error)
                if not (again and _never_sent(error)):
                    raise _typed(error) from None
        raise AssertionError("the second attempt returns or raises")

    def _connect(self) -> None:
        if self._connected:
            return
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(timeout=self._connect_seconds)
        except grpc.FutureTimeoutError:
            ready.cancel()
            raise _unreachable(self._target, self._connect_seconds) from None
        self._connected = True


class AsyncClient:
    """The same for asyncio; use it on one event loop."""

    def __init__(
        self, target: str, *, connect_seconds: float = 10.0, timeout_seconds: float = 60.0, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        """`timeout_seconds` bounds every call but `generate`, which has `deadline_seconds`. Call it where the loop runs."""
        self._target = target
        self._connect_seconds = connect_seconds
        self._timeout_seconds = timeout_seconds
        self._connected = False
        self._channel = grpc.aio.insecure_channel(target, _channel_options(max_message_bytes))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncGenerator[StreamEvent, None]:
        """Streams one request: exactly one of `prompt`, `token_ids`, `messages`. Closing the iterator cancels the request."""
        return self._events(_generate_request(prompt, options), _call_seconds(options.get("deadline_seconds")))

    async def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """`generate`, read to its end."""
        collector = _Collector()
        async with contextlib.aclosing(self.generate(prompt, **options)) as events:
            async for event in events:
                collector.add(event)
        return collector.completion()

    async def tokenize(self, prompt: str | None = None, *, messages: Messages | None = None) -> tuple[int, ...]:
        reply: pb.TokenizeResponse = await self._unary(self._stub.Tokenize, _tokenize_request(prompt, messages))
        return tuple(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        reply: pb.DetokenizeResponse = await self._unary(self._stub.Detokenize, _detokenize_request(token_ids, skip_special_tokens))
        return reply.text

    async def model(self) -> ModelInfo:
        return wire_generation.model_from_proto(await self._unary(self._stub.GetModel, pb.GetModelRequest()))

    async def status(self) -> tuple[WorkerStatus, ...]:
        reply: pb.GetStatusResponse = await self._unary(self._stub.GetStatus, pb.GetStatusRequest())
        return tuple(map(wire.worker_status_from_proto, reply.workers))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _events(self, request: pb.GenerateRequest, timeout_seconds: float | None) -> AsyncGenerator[StreamEvent, None]:
        for again in (True, False):
            await self._connect()
            call = self._stub.Generate(request, timeout=timeout_seconds)
            try:
                async for message in call:
                    yield wire_generation.event_from_proto(message)
                return
            except grpc.RpcError as error:
                self._connected = not _lost(error)
                if not (again and _never_sent(error)):
                    raise _typed(error) from None
            finally:
                call.cancel()

    async def _unary(self, method: Callable[..., Awaitable[Reply]], request: Message) -> Reply:
        for again in (True, False):
            await self._connect()
            try:
                return await method(request, timeout=self._timeout_seconds)
            except grpc.RpcError as error:
                self._connected = not _lost(error)
                if not (again and _never_sent(error)):
                    raise _typed(error) from None
        raise AssertionError("the second attempt returns or raises")

    async def _connect(self) -> None:
        if self._connected:
            return
        try:
            await asyncio.wait_for(self._channel.channel_ready(), self._connect_seconds)
        except TimeoutError:
            raise _unreachable(self._target, self._connect_seconds) from None
        self._connected = True


def _generate_request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    sampling = {name: value for name, value in options.items() if name not in _REQUEST_OPTIONS}
    asked = wire_generation.ClientRequest(
        prompt=_prompt(prompt, options.get("token_ids"), options.get("messages")),
        options=cast(SamplingOptions, sampling),
        request_id=options.get("request_id") or "",
        deadline_seconds=options.get("deadline_seconds"),
        tenant=options.get("tenant") or "",
        priority=options.get("priority") or 0,
    )
    return wire_generation.client_request_to_proto(asked)


_REQUEST_OPTIONS = frozenset(GenerateOptions.__annotations__) - frozenset(SamplingOptions.__annotations__)


def _tokenize_request(prompt: str | None, messages: Messages | None) -> pb.TokenizeRequest:
    made = _prompt(prompt, None, messages)
    assert not isinstance(made, TokenPrompt)
    return wire_generation.tokenize_to_proto(made)


def _detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    return wire_generation.detokenize_to_proto(token_ids, skip_special_tokens)


def _prompt(prompt: str | None, token_ids: Sequence[int] | None, messages: Messages | None) -> Prompt:
    if (prompt is not None) + (token_ids is not None) + (messages is not None) != 1:
        raise InvalidRequestError("give exactly one of prompt, token_ids, messages")
    if token_ids is not None:
        return TokenPrompt(tuple(token_ids))
    if messages is not None:
        return ChatPrompt(tuple(map(_message, messages)))
    assert prompt is not None
    return prompt


def _message(message: ChatMessage | Mapping[str, str]) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise InvalidRequestError(f"a chat message has a role and a content and nothing else, got {message!r:.200}")
    return ChatMessage(message["role"], message["content"])


def _call_seconds(deadline_seconds: float | None) -> float | None:
    # A deadline that makes no sense goes to the server, which refuses it by name.
    sensible = isinstance(deadline_seconds, int | float) and 0 < deadline_seconds < 1e9
    return deadline_seconds + DEADLINE_SLACK_SECONDS if deadline_seconds is not None and sensible else None


def _channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # A server that vanished without a word is found out by unanswered pings.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def _status(error: grpc.RpcError) -> wire.WireStatus:
    # Every error that a call raises is a grpc.Call (or AioRpcError) too, but the type does not say so.
    call = cast(grpc.Call, error)
    metadata = tuple((key, value) for key, value in call.trailing_metadata() or () if isinstance(value, str))
    return wire.WireStatus(call.code().name, call.details() or "", metadata)


def _typed(error: grpc.RpcError) -> JdisaggError:
    return wire.error_from_status(_status(error))


def _lost(error: grpc.RpcError) -> bool:
    """Whether the connection failed, and not a jdisagg server that answered."""
    status = _status(error)
    return status.code == "UNAVAILABLE" and wire.ERROR_KEY not in dict(status.metadata)


def _never_sent(error: grpc.RpcError) -> bool:
    return _lost(error) and "failed to connect" in _status(error).details


def _unreachable(target: str, seconds: float) -> UnavailableError:
    return UnavailableError(f"no server answered at {target} within {seconds:g} s; is it running (python -m launch.serve)?")
