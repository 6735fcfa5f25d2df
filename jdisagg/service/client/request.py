"""Converts the arguments of a client's call to a `ClientRequest`. For an argument of a wrong type,
raises an error that names the argument, before anything is sent.

Checks only that protobuf can represent the arguments. The server validates the values. Chat
messages and tools may be jdisagg's classes or mappings in the form of OpenAI's API."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from jdisagg.chat.messages import ChatMessage, ChatPrompt, ChatTool, ToolCall, ToolChoice
from jdisagg.dispatch.frontend import Prompt, TokenPrompt
from jdisagg.dispatch.options import SamplingOptions
from jdisagg.errors import InvalidRequestError
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import wire_generation
from jdisagg.service.grpc.wire_generation import ClientRequest

Given = Mapping[str, object]
Messages = Sequence[ChatMessage | Given]
Tools = Sequence[ChatTool | Given]

_NEEDED = {"role", "content"}
_MESSAGE = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of `generate` and `complete`, beside the sampling options. An option that
    is missing or None has its default.

    Attributes:
        token_ids, messages: The prompt as token ids or as a chat, instead of a text.
        continue_final_message: Whether the model continues the last message of the chat instead of
            starting a new one.
        chat_template_kwargs: Extra variables of the chat template.
        tools, tool_choice, parallel_tool_calls: Functions that the model may call.
        request_id, deadline_seconds, tenant, cache_salt, priority: Identity and limits of the
            request.
        model: Name of the model or of one of its adapters.
    """

    token_ids: Sequence[int] | None
    messages: Messages | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, object] | None
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
_OF_CHATS = ("continue_final_message", "chat_template_kwargs", "tools")


def asked(prompt: str | None, options: GenerateOptions) -> ClientRequest:
    """Builds the request. Raises InvalidRequestError with the field, its type and a remedy."""
    sampling = {name: value for name, value in options.items() if name not in _REQUEST_OPTIONS}
    given = _prompt(prompt, options.get("token_ids"), options.get("messages"))
    if isinstance(given, ChatPrompt):
        given = _with_options(given, options)
    elif any(options.get(name) for name in _OF_CHATS):
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


def _with_options(chat: ChatPrompt, options: GenerateOptions) -> ChatPrompt:
    goes_on = bool(options.get("continue_final_message"))
    choice, name = _tool_choice(options.get("tool_choice") or "auto")
    return replace(
        chat,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        arguments=options.get("chat_template_kwargs") or {},
        tools=_chat_tools(options.get("tools") or ()),
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=options.get("parallel_tool_calls") is not False,
    )


def tokenize_request(prompt: str | None, messages: Messages | None) -> pb.TokenizeRequest:
    """Builds a tokenize request. Raises InvalidRequestError with the field, its type and a
    remedy."""
    made = _prompt(prompt, None, messages)
    assert not isinstance(made, TokenPrompt)
    return wire_generation.tokenize_to_proto(made)


def _prompt(
    prompt: str | None, token_ids: Sequence[int] | None, messages: Messages | None
) -> Prompt:
    if (prompt is not None) + (token_ids is not None) + (messages is not None) != 1:
        raise InvalidRequestError("give exactly one of prompt, token_ids, messages")
    if token_ids is not None:
        return TokenPrompt(
            _items("token_ids", token_ids, "give a sequence of integers; for text, pass prompt=")
        )
    if messages is not None:
        given = _items("messages", messages, "give a sequence of messages; for text, pass prompt=")
        return ChatPrompt(
            tuple(_chat_message(index, message) for index, message in enumerate(given))
        )
    return _text("prompt", prompt, "for ids, pass token_ids=, for a chat messages=")


def _items(name: str, given: Any, remedy: str = "give a sequence") -> tuple[Any, ...]:
    """Returns the items of any iterable, such as a NumPy array. Raises for text and mappings."""
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        raise InvalidRequestError(
            f"{name} must be a sequence of values, got {type(given).__name__}; {remedy}"
        )
    return tuple(given)


def _chat_message(index: int, given: ChatMessage | Given) -> ChatMessage:
    """Converts a chat message. Raises InvalidRequestError with the field and its type."""
    where = f"messages[{index}]"
    if not isinstance(given, ChatMessage):
        needed = {"role"} if isinstance(given, Mapping) and given.get("tool_calls") else _NEEDED
        if not isinstance(given, Mapping) or not needed <= set(given) <= set(_MESSAGE):
            raise InvalidRequestError(
                "a chat message has a role and a content, perhaps some of"
                f" {', '.join(_MESSAGE[2:])}, and nothing else, got {given!r:.200}"
            )
        calls = _items(f"{where}.tool_calls", given.get("tool_calls") or ())
        given = ChatMessage(
            _text(f"{where}.role", given["role"]),
            _content(where, given.get("content") or "" if calls else given["content"]),
            reasoning=_text(f"{where}.reasoning_content", given.get("reasoning_content") or ""),
            tool_calls=tuple(
                _call(f"{where}.tool_calls[{at}]", one) for at, one in enumerate(calls)
            ),
            tool_call_id=_text(f"{where}.tool_call_id", given.get("tool_call_id") or ""),
            name=_text(f"{where}.name", given.get("name") or ""),
        )
    _text(f"{where}.role", given.role)
    _content(where, given.content)
    return given


def _chat_tools(given: Tools) -> tuple[ChatTool, ...]:
    return tuple(_tool(f"tools[{at}]", one) for at, one in enumerate(_items("tools", given)))


def _tool_choice(given: str | Given) -> tuple[ToolChoice, str]:
    """Returns the tool choice and the name of the tool that the model must call ("" for any
    tool)."""
    if isinstance(given, Mapping):
        function = _object("tool_choice.function", given, "function")
        return ToolChoice.REQUIRED, _text("tool_choice.function.name", function.get("name"))
    try:
        return ToolChoice(given), ""
    except ValueError:
        choices = ", ".join(choice.value for choice in ToolChoice)
        raise InvalidRequestError(
            f"tool_choice must be one of {choices}, or a mapping that names a function, got"
            f" {given!r:.80}"
        ) from None


def _text(name: str, value: object, remedy: str = "give a str") -> str:
    """Returns `value` if protobuf accepts it as text. Raises InvalidRequestError otherwise."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be text, got {type(value).__name__}; {remedy}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} cannot be sent: {value[error.start]!r}, its character {error.start}, is half"
            " of a surrogate pair; decode the source with errors='replace'"
        ) from None
    return value


def _content(where: str, value: object) -> str:
    return _text(f"{where}.content", value, "join its parts into one text, or omit the message")


def _call(where: str, given: object) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    one, function = _object(where, given), _object(f"{where}.function", given, "function")
    return ToolCall(
        _text(f"{where}.function.name", function.get("name")),
        _text(f"{where}.function.arguments", function.get("arguments") or ""),
        _text(f"{where}.id", one.get("id") or ""),
    )


def _tool(where: str, given: object) -> ChatTool:
    if isinstance(given, ChatTool):
        return given
    function = _object(f"{where}.function", given, "function")
    parameters = function.get("parameters")
    return ChatTool(
        _text(f"{where}.function.name", function.get("name")),
        _text(f"{where}.function.description", function.get("description") or ""),
        None if parameters is None else _object(f"{where}.function.parameters", parameters),
    )


def _object(where: str, given: object, field: str = "") -> Given:
    """Returns `given` as a JSON object. If `field` is given, returns the object in that field of
    `given`."""
    value = given
    if field:
        value = given.get(field) if isinstance(given, Mapping) else given
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"{where} must be a mapping in the form of OpenAI's API, got {type(value).__name__}"
        )
    return value
