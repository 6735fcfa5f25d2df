"""Converts the arguments of a client's call to a `ClientRequest`.

Before anything is sent, an argument of a wrong type raises an error that names the argument. This
module checks only that the arguments can be sent. The server validates the values. Chat messages
and tools may be jdisagg's classes, or mappings in the form of OpenAI's API. They are sent as the
JSON body of the HTTP API, which the server reads by the rules of that API."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from jdisagg.chat.images import ChatImage
from jdisagg.chat.messages import ChatMessage, ChatTool
from jdisagg.dispatch.prompts import TokenPrompt
from jdisagg.errors import InvalidRequestError
from jdisagg.request import SamplingOptions
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import wire_generation
from jdisagg.service.grpc.wire_generation import ChatBody, ClientRequest

Given = Mapping[str, object]
Messages = Sequence[ChatMessage | Given]
Tools = Sequence[ChatTool | Given]

# Options of chats that have the same name as a field of the HTTP API.
_PASSED_ON = (
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
    "tool_choice",
    "parallel_tool_calls",
)


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of `generate` and `complete`, in addition to the sampling options. An
    option that is missing or None has its default.

    Attributes:
        token_ids, messages: The prompt as token ids or as a chat, instead of a text.
        continue_final_message: Whether the model continues the last message of the chat instead of
            starting a new one.
    """

    token_ids: Sequence[int] | None
    messages: Messages | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, object] | None
    documents: Sequence[Mapping[str, object]] | None
    tools: Tools | None
    tool_choice: str | Mapping[str, object] | None
    parallel_tool_calls: bool | None
    request_id: str | None
    deadline_seconds: float | None
    tenant: str | None
    cache_salt: str | None
    priority: int | None
    model: str | None


_REQUEST_OPTIONS = frozenset(GenerateOptions.__annotations__) - frozenset(
    SamplingOptions.__annotations__
)
_OF_CHATS = ("continue_final_message", "chat_template_kwargs", "documents", "tools")


def asked(prompt: str | None, options: GenerateOptions) -> ClientRequest:
    """Raises InvalidRequestError for an argument that cannot be sent."""
    sampling = {name: value for name, value in options.items() if name not in _REQUEST_OPTIONS}
    given = _prompt(prompt, options.get("token_ids"), options.get("messages"), options)
    if not isinstance(given, ChatBody) and any(options.get(name) for name in _OF_CHATS):
        raise InvalidRequestError(f"{', '.join(_OF_CHATS)} are for chats; give messages")
    return ClientRequest(
        prompt=given,
        options=cast(SamplingOptions, sampling),
        request_id=_text("request_id", options.get("request_id") or ""),
        deadline_seconds=options.get("deadline_seconds"),
        tenant=_text("tenant", options.get("tenant") or ""),
        priority=options.get("priority") or 0,
        cache_salt=_text("cache_salt", options.get("cache_salt") or ""),
        model=_text("model", options.get("model") or ""),
    )


def tokenize_request(prompt: str | None, messages: Messages | None) -> pb.TokenizeRequest:
    made = _prompt(prompt, None, messages, GenerateOptions())
    assert not isinstance(made, TokenPrompt)
    return wire_generation.tokenize_to_proto(made)


def _prompt(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Messages | None,
    options: GenerateOptions,
) -> str | TokenPrompt | ChatBody:
    if (prompt is not None) + (token_ids is not None) + (messages is not None) != 1:
        raise InvalidRequestError("give exactly one of prompt, token_ids, messages")
    if token_ids is not None:
        return TokenPrompt(
            _items("token_ids", token_ids, "give a sequence of integers; for text, pass prompt=")
        )
    if messages is not None:
        return _chat(messages, options)
    return _text("prompt", prompt, "for ids, pass token_ids=, for a chat messages=")


def _items(name: str, given: Any, remedy: str = "give a sequence") -> tuple[Any, ...]:
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        raise InvalidRequestError(
            f"{name} must be a sequence of values, got {type(given).__name__}; {remedy}"
        )
    return tuple(given)


def _chat(messages: Messages, options: GenerateOptions) -> ChatBody:
    given = _items("messages", messages, "give a sequence of messages; for text, pass prompt=")
    tools = _items("tools", options.get("tools") or ())
    body: dict[str, object] = {
        "messages": [
            _json(f"messages[{at}]", _openai_message(one)) for at, one in enumerate(given)
        ],
        "tools": [
            _json(f"tools[{at}]", one.shown if isinstance(one, ChatTool) else one)
            for at, one in enumerate(tools)
        ],
    }
    for name in _PASSED_ON:
        if (value := options.get(name)) is not None:
            body[name] = _json(name, value)
    return ChatBody(msgspec.json.encode(body).decode())


def _openai_message(message: ChatMessage | Given) -> Given:
    if not isinstance(message, ChatMessage):
        return message
    content = message.content
    return {
        "role": message.role,
        "content": list(map(_openai_part, content)) if isinstance(content, tuple) else content,
        "reasoning_content": message.reasoning,
        "tool_calls": [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }


def _openai_part(part: object) -> object:
    if not isinstance(part, ChatImage):
        return part
    return {"type": "image_url", "image_url": {"url": part.url}}


def _json(name: str, value: object) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except UnicodeEncodeError as error:
        raise _half_pair(name, error) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} cannot be sent: {error}; give JSON values") from None


def _text(name: str, value: object, remedy: str = "give a str") -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be text, got {type(value).__name__}; {remedy}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _half_pair(name, error) from None
    return value


def _half_pair(name: str, error: UnicodeEncodeError) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} cannot be sent: {error.object[error.start]!r}, its character {error.start}, is"
        " half of a surrogate pair; decode the source with errors='replace'"
    )
