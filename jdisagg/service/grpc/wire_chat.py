"""Conversions of chats (messages, tools and tool calls) to and from generation.proto.

The length of a repeated field is checked before its entries are read. Invalid input raises an
InvalidRequestError that names the field."""

from collections.abc import Mapping

import msgspec

from jdisagg.chat.images import ChatImage, stated_image
from jdisagg.chat.messages import (
    MAX_TOOLS,
    ChatMessage,
    ChatPrompt,
    ChatTool,
    Content,
    ToolCall,
    ToolChoice,
)
from jdisagg.errors import InvalidRequestError
from jdisagg.request import ToolCallDelta, at_most
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc.wire import build

MAX_MESSAGES = 16_384
MAX_PARTS = 16_384
SHOWN_CHARACTERS = 80

_CHOICE_TO_PROTO = {
    ToolChoice.AUTO: pb.TOOL_CHOICE_AUTO,
    ToolChoice.NONE: pb.TOOL_CHOICE_NONE,
    ToolChoice.REQUIRED: pb.TOOL_CHOICE_REQUIRED,
}
_CHOICE_FROM_PROTO: dict[int, ToolChoice] = {
    pb.TOOL_CHOICE_UNSPECIFIED: ToolChoice.AUTO,
    **{value: choice for choice, value in _CHOICE_TO_PROTO.items()},
}


def chat_to_proto(prompt: ChatPrompt) -> pb.ChatMessages:
    """Raises InvalidRequestError if protobuf cannot represent a value."""
    return build(
        pb.ChatMessages,
        messages=[
            _message_to_proto(f"messages[{index}]", message)
            for index, message in enumerate(prompt.messages)
        ],
        continue_final_message=prompt.continue_final_message,
        bare=not prompt.add_generation_prompt and not prompt.continue_final_message,
        arguments_json=_to_json("chat_template_kwargs", prompt.arguments),
        tools=[_tool_to_proto(index, tool) for index, tool in enumerate(prompt.tools)],
        tool_choice=_CHOICE_TO_PROTO[prompt.tool_choice],
        single_tool_call=not prompt.parallel_tool_calls,
        tool_name=prompt.tool_name,
    )


def chat_from_proto(message: pb.ChatMessages) -> ChatPrompt:
    """Raises InvalidRequestError, which names the invalid field."""
    at_most("messages", len(message.messages), MAX_MESSAGES)
    at_most("tools", len(message.tools), MAX_TOOLS)
    if message.tool_choice not in _CHOICE_FROM_PROTO:
        raise InvalidRequestError(
            f"tool_choice must be a known choice, got {message.tool_choice}; run the same version"
            " on both sides"
        )
    return ChatPrompt(
        tuple(_message_from_proto(f"messages[{i}]", m) for i, m in enumerate(message.messages)),
        add_generation_prompt=not message.bare and not message.continue_final_message,
        continue_final_message=message.continue_final_message,
        arguments=_from_json("arguments_json", message.arguments_json) or {},
        tools=tuple(_tool_from_proto(index, tool) for index, tool in enumerate(message.tools)),
        tool_choice=_CHOICE_FROM_PROTO[message.tool_choice],
        parallel_tool_calls=not message.single_tool_call,
        tool_name=message.tool_name,
    )


def call_delta_to_proto(call: ToolCallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(
        index=call.index, id=call.id, name=call.name, arguments_json=call.arguments
    )


def call_delta_from_proto(message: pb.ToolCallDelta) -> ToolCallDelta:
    return ToolCallDelta(message.index, message.id, message.name, message.arguments_json)


def _message_to_proto(where: str, message: ChatMessage) -> pb.ChatMessage:
    content = message.content
    parts = content if isinstance(content, tuple) else ()
    texts = [part for part in parts if not isinstance(part, ChatImage)]
    mixed = len(texts) < len(parts)
    return build(
        pb.ChatMessage,
        role=message.role,
        content=content if isinstance(content, str) else "",
        parts=() if mixed else texts,
        mixed_parts=[_part_to_proto(where, part) for part in parts] if mixed else (),
        null_content=content is None or content == (),
        reasoning=message.reasoning,
        tool_calls=[
            build(pb.ToolCall, id=call.id, name=call.name, arguments_json=call.arguments)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _part_to_proto(where: str, part: str | ChatImage) -> pb.ContentPart:
    if isinstance(part, str):
        return build(pb.ContentPart, text=part)
    image = build(pb.Image, data=part.content(where), media_type=part.mime)
    return pb.ContentPart(image=image)


def _content_from_proto(where: str, message: pb.ChatMessage) -> Content:
    at_most("parts", len(message.parts), MAX_PARTS)
    at_most("mixed_parts", len(message.mixed_parts), MAX_PARTS)
    content = None if message.null_content else message.content
    if (bool(message.content), bool(message.parts), bool(message.mixed_parts)).count(True) > 1:
        raise InvalidRequestError(
            "content, parts and mixed_parts exclude each other: set one of them"
        )
    if message.mixed_parts:
        return tuple(
            _part_from_proto(f"{where}.mixed_parts[{at}]", part)
            for at, part in enumerate(message.mixed_parts)
        )
    return tuple(message.parts) if message.parts else content


def _part_from_proto(where: str, part: pb.ContentPart) -> str | ChatImage:
    kind = part.WhichOneof("part")
    if kind is None:
        raise InvalidRequestError(f"{where} is empty: set one of text, image")
    if kind == "text":
        return part.text
    return stated_image(where, part.image.data, part.image.media_type)


def _message_from_proto(where: str, message: pb.ChatMessage) -> ChatMessage:
    at_most("tool_calls", len(message.tool_calls), MAX_MESSAGES)
    return ChatMessage(
        message.role,
        _content_from_proto(where, message),
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCall(call.name, call.arguments_json, call.id) for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _tool_to_proto(index: int, tool: ChatTool) -> pb.Tool:
    where = f"tools[{index}].function"
    return build(
        pb.Tool,
        name=tool.name,
        description=tool.description,
        parameters_json=_schema_to_json(f"{where}.parameters", tool.parameters),
        return_json=_schema_to_json(f"{where}.return", tool.returns),
    )


def _schema_to_json(name: str, schema: Mapping[str, object] | None) -> str:
    return "" if schema is None else _to_json(name, schema) or "{}"


def _tool_from_proto(index: int, tool: pb.Tool) -> ChatTool:
    schema = _from_json(f"tools[{index}].parameters_json", tool.parameters_json)
    returns = _from_json(f"tools[{index}].return_json", tool.return_json)
    return ChatTool(tool.name, tool.description, schema, returns)


def _to_json(name: str, value: Mapping[str, object]) -> str:
    try:
        return msgspec.json.encode(value).decode() if value else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{name} cannot be sent: {error}; give a mapping of JSON values"
        ) from None


def _from_json(name: str, text: str) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, object]) if text else None
    except (msgspec.MsgspecError, RecursionError) as error:
        shown = repr(text)
        shown = shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "..."
        raise InvalidRequestError(
            f"{name}={shown} must be a JSON object: {error}; send {{...}}"
        ) from None
