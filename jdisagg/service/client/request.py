"""What a caller gave to a client, made a `ClientRequest`: a wrong kind of value is refused by name
before anything is sent.

What a value may be, the server judges; here is what protobuf could not hold, or would take for
something else."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from jdisagg.chat.messages import ChatPrompt
from jdisagg.dispatch.frontend import Prompt, TokenPrompt
from jdisagg.dispatch.options import SamplingOptions
from jdisagg.errors import InvalidRequestError
from jdisagg.service.client.chat import Messages, Tools, chat_message, chat_tools, text, tool_choice
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import wire_generation
from jdisagg.service.grpc.wire_generation import ClientRequest

Item = TypeVar("Item")


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of `generate` and `complete`: instead of a text prompt `token_ids` or
    `messages` (the model goes on with the last one where `continue_final_message` says so; its chat
    template sees `chat_template_kwargs`; it may call `tools`), what identifies and bounds the
    request, and the sampling options. Absent or None is the default."""

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


_REQUEST_OPTIONS = frozenset(GenerateOptions.__annotations__) - frozenset(
    SamplingOptions.__annotations__
)
_OF_CHATS = ("continue_final_message", "chat_template_kwargs", "tools")


def asked(prompt: str | None, options: GenerateOptions) -> ClientRequest:
    """Raises InvalidRequestError naming the field, the kind of its value and what to give."""
    sampling = {name: value for name, value in options.items() if name not in _REQUEST_OPTIONS}
    given = _prompt(prompt, options.get("token_ids"), options.get("messages"))
    if isinstance(given, ChatPrompt):
        given = _with_options(given, options)
    elif any(options.get(name) for name in _OF_CHATS):
        raise InvalidRequestError(f"{', '.join(_OF_CHATS)} are for chats; give messages")
    return ClientRequest(
        prompt=given,
        options=cast(SamplingOptions, sampling),
        request_id=text("request_id", options.get("request_id") or ""),
        deadline_seconds=options.get("deadline_seconds"),
        tenant=text("tenant", options.get("tenant") or ""),
        priority=options.get("priority") or 0,
        cache_salt=text("cache_salt", options.get("cache_salt") or ""),
    )


def _with_options(chat: ChatPrompt, options: GenerateOptions) -> ChatPrompt:
    goes_on = bool(options.get("continue_final_message"))
    choice, name = tool_choice(options.get("tool_choice") or "auto")
    return replace(
        chat,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        arguments=options.get("chat_template_kwargs") or {},
        tools=chat_tools(options.get("tools") or ()),
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=options.get("parallel_tool_calls") is not False,
    )


def tokenize_request(prompt: str | None, messages: Messages | None) -> pb.TokenizeRequest:
    """As `asked`."""
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
            tuple(chat_message(index, message) for index, message in enumerate(given))
        )
    return text("prompt", prompt, "for ids, pass token_ids=, for a chat messages=")


def _items(name: str, given: Sequence[Item], remedy: str) -> tuple[Item, ...]:
    """Not every sequence: text is one, too. And not only sequences: an array of NumPy's is none,
    and will do."""
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        raise InvalidRequestError(
            f"{name} must be several values, got {type(given).__name__}; {remedy}"
        )
    return tuple(given)
