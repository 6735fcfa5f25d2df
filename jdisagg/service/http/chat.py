"""Reads a chat in the form of OpenAI's API: messages, tools and tool calls.

This module checks only the types of the fields. The `Frontend` validates the chat."""

import contextlib
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from jdisagg.chat.images import ChatImage, image_of_url, stated_image
from jdisagg.chat.messages import ChatMessage, ChatPrompt, ChatTool, Content, ToolCall, ToolChoice
from jdisagg.errors import InvalidRequestError
from jdisagg.service.http.bodies import (
    Called,
    Function,
    MessageFields,
    Reasoning,
    Template,
    TemplateArguments,
)
from jdisagg.service.http.fields import (
    ANYTHING,
    TEXT,
    YES,
    FieldKind,
    Fields,
    Refused,
    begins,
    shown,
)

_CHOICES = {choice.value: choice for choice in ToolChoice}
_CHOICES["any"] = ToolChoice.REQUIRED  # the name in other APIs
_NAMED_KINDS = ("function", "tool")
_MODES = ("auto", "required")
_TextKind = Literal["text", "input_text", "output_text"]
# Types of text parts, with the field of each that contains its text.
_TEXT_FIELDS = {**dict.fromkeys(get_args(_TextKind), "text"), "refusal": "refusal"}
_IMAGE_KINDS = ("image_url", "input_image", "image")
_REFUSED_OF_IMAGES: Refused = {
    "file_id": ((), "the server keeps no files; send the image itself as a data: URL")
}
_THOUGHT_KINDS = ("thinking", "reasoning", "reasoning_text")
# Variables of chat templates that switch reasoning on and off, and the values of a client's field
# `thinking`.
_SWITCHES = ("enable_thinking", "thinking")
_THINKING = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
# OpenAI's newer name for the role system, and its older name for the role tool.
_ROLES = {"developer": "system", "function": "tool"}


def chat_prompt(fields: Fields) -> ChatPrompt:
    asked = fields.fill(Template)
    goes_on, answers = asked.continue_final_message, asked.add_generation_prompt
    reasoning = asked.reasoning or Reasoning()
    arguments = template_arguments(fields, asked.reasoning_effort or reasoning.effort)
    if asked.reasoning_effort and reasoning.effort is not None:
        fields.leave_out("reasoning.effort")
    if (thinks := reasoning.enabled) is not None:
        arguments = dict.fromkeys(_SWITCHES, thinks) | arguments
    if asked.documents is not None:
        arguments.setdefault("documents", asked.documents)
    tools = tuple(map(chat_tool, asked.tools))
    offered = chosen_tools(fields, tools, nested=True)
    return ChatPrompt(
        tuple(map(chat_message, asked.messages)),
        add_generation_prompt=not goes_on if answers is None else answers,
        continue_final_message=goes_on,
        arguments=arguments,
        tools=offered.tools,
        tool_choice=offered.choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        tool_name=offered.name,
    )


def template_arguments(
    fields: Fields, effort: str | None, adaptive: bool | None = None
) -> dict[str, object]:
    """Returns the variables of the chat template: the fields of `chat_template_kwargs`, and fields
    of the request that enable reasoning. `effort` is the reasoning effort that the client requests,
    or None. `adaptive` is whether `thinking` of the type adaptive enables reasoning, or None if the
    template decides."""
    asked = fields.fill(TemplateArguments)
    arguments = dict(asked.chat_template_kwargs)
    for given in (
        asked.enable_thinking,
        _thinking(fields, adaptive),
        False if effort == "none" else None,
    ):
        for name in _SWITCHES if isinstance(given, bool) else ():
            arguments.setdefault(name, given)
    if effort:
        arguments.setdefault("reasoning_effort", effort)
    return arguments


def _thinking(fields: Fields, adaptive: bool | None) -> bool | None:
    if not (fields.has("thinking") and begins(fields.raw("thinking"), b"{")):
        return fields.read("thinking", YES)
    if not (part := fields.part("thinking")).names:
        return None
    kind = part.given("type", TEXT)
    if kind not in _THINKING:
        raise InvalidRequestError(
            f"thinking.type must be {', '.join(_THINKING)}, got {kind[:80]!r}"
        )
    return adaptive if kind == "adaptive" else _THINKING[kind]


def chat_message(message: Fields) -> ChatMessage:
    """Reads one message. Text parts stay separate, because some chat templates render each part
    separately."""
    given = message.fill(MessageFields)
    content, thoughts = _content_of(message)
    for name in ("reasoning_content", "reasoning"):
        thoughts = thoughts or text_of(message, name)
    calls = list(map(_call, given.tool_calls))
    if (called := given.function_call) is not None:  # OpenAI's older field
        calls.append(ToolCall(called.name, called.arguments, ""))
    return ChatMessage(
        _ROLES.get(given.role, given.role),
        content,
        reasoning=thoughts,
        tool_calls=tuple(calls),
        tool_call_id=given.tool_call_id,
        name=given.name,
    )


def text_of(fields: Fields, name: str) -> str:
    """Reads a field that is a text or a list of text parts, which are joined by newlines."""
    content = _read_content(fields, name, (), images=False)[0]
    return ChatMessage("", content).text


def parts_of(fields: Fields, name: str) -> Content:
    """Reads a field that is a text or a list of content parts. If all parts are texts, they are
    joined by newlines."""
    content = _read_content(fields, name, ())[0]
    if isinstance(content, tuple) and any(isinstance(part, ChatImage) for part in content):
        return content
    return ChatMessage("", content).text


def _content_of(message: Fields) -> tuple[Content, str]:
    content, thoughts = _read_content(message, "content", _THOUGHT_KINDS)
    if content is None and (refusal := message.read("refusal", TEXT)):
        content = refusal
    return content, "\n".join(thoughts)


def _read_content(
    fields: Fields, name: str, of_thoughts: Collection[str], *, images: bool = True
) -> tuple[Content, list[str]]:
    with contextlib.suppress(InvalidRequestError):
        return fields.read(name, TEXT), []
    with contextlib.suppress(InvalidRequestError):
        return fields.read(name, _TEXT_PARTS), []
    parts: list[str | ChatImage] = []
    thoughts: list[str] = []
    for part in fields.parts(name, text_field="text") or []:
        kind = part.read("type", TEXT) or "text"
        if kind in of_thoughts:
            thoughts.append(part.given("thinking" if part.has("thinking") else "text", TEXT))
        elif images and kind in _IMAGE_KINDS:
            parts.append(image_part(part, kind))
        else:
            parts.append(_part(part, kind, images))
    return tuple(parts), thoughts


class _TextPart(msgspec.Struct):
    text: str
    type: _TextKind = "text"


_text_parts = msgspec.json.Decoder(list[_TextPart | str]).decode
# All parts are decoded at once, because there may be many. On an error they are read one by one, to
# find the invalid part.
_TEXT_PARTS = FieldKind(
    "parts of text",
    lambda raw: tuple([one if isinstance(one, str) else one.text for one in _text_parts(raw)]),
)


def image_part(part: Fields, kind: str) -> ChatImage:
    """Reads an image part: `image_url` of the chat API, `input_image` of the Responses API or
    `image` of Anthropic's API. The image file itself is not decoded."""
    part.ignore("detail", "uuid", "cache_control")
    if kind == "image":
        source = part.part("source")
        given = source.given("type", TEXT)
        if given == "url":
            return image_of_url(f"{source.path}url", source.given("url", TEXT))
        if given != "base64":
            raise InvalidRequestError(
                f"{source.path}type must be base64, got {given[:80]!r}; the server keeps no files:"
                " send the image itself"
            )
        mime = source.given("media_type", TEXT)
        return stated_image(part.path.rstrip("."), source.given("data", TEXT), mime)
    part.refuse(_REFUSED_OF_IMAGES)
    if part.has("image_url") and begins(part.raw("image_url"), b"{"):
        nested = part.part("image_url")
        nested.ignore("detail")
        return image_of_url(f"{nested.path}url", nested.given("url", TEXT))
    return image_of_url(f"{part.path}image_url", part.given("image_url", TEXT))


def _part(part: Fields, kind: str, images: bool) -> str:
    if kind not in _TEXT_FIELDS:
        kinds = "text or image_url" if images else "text"
        raise InvalidRequestError(
            f"content parts must have the type {kinds}, got {kind[:80]!r}; no other type is"
            " supported"
        )
    return part.given(_TEXT_FIELDS[kind], TEXT)


def _call(call: Fields) -> ToolCall:
    _check_kind(call)
    called = call.part("function").fill(Called)
    return ToolCall(called.name, called.arguments, call.read("id", TEXT) or "")


class OfferedTools(NamedTuple):
    """The tools that the model may call.

    Attributes:
        name: Name of the tool that the model must call, or "" if it may call any tool.
    """

    tools: tuple[ChatTool, ...]
    choice: ToolChoice
    name: str


def chosen_tools(fields: Fields, tools: tuple[ChatTool, ...], *, nested: bool) -> OfferedTools:
    """`nested` is True for the chat API, where the name of a function is in a nested object
    `function`."""
    chosen = fields.read("tool_choice", ANYTHING) if fields.has("tool_choice") else "auto"
    kind = chosen.get("type", "function") if isinstance(chosen, dict) else chosen
    if isinstance(kind, str) and kind in _CHOICES:
        return OfferedTools(tools, _CHOICES[kind], "")
    part = fields.part("tool_choice") if isinstance(chosen, dict) else Fields({})
    part.ignore("type")
    if kind in _NAMED_KINDS or (kind == "custom" and not nested):
        return OfferedTools(tools, ToolChoice.REQUIRED, _name(part, nested))
    if kind == "allowed_tools":
        return _allowed(part.part("allowed_tools") if nested else part, tools, nested)
    named = '"function": {"name": ...}' if nested else '"name": ...'
    raise InvalidRequestError(
        f"tool_choice={shown(fields.raw('tool_choice'))} is not supported; send one of"
        f' {", ".join(_CHOICES)}, {{"type": "function", {named}}} or one of the type allowed_tools'
    )


def _allowed(part: Fields, tools: tuple[ChatTool, ...], nested: bool) -> OfferedTools:
    mode = part.given("mode", TEXT)
    if mode not in _MODES:
        raise InvalidRequestError(
            f"{part.path}mode must be {' or '.join(_MODES)}, got {mode[:80]!r}"
        )
    names = {_name(one, nested) for one in part.parts("tools") or ()}
    if unknown := names - {tool.name for tool in tools}:
        raise InvalidRequestError(
            f"{part.path}tools names {min(unknown)[:64]!r}, which is not one of the tools; send"
            " names of the tools"
        )
    kept = tuple(tool for tool in tools if tool.name in names)
    return OfferedTools(kept, _CHOICES[mode], "")


def without_hosted(
    fields: Fields, tools: Sequence[Fields], hosted: tuple[str, ...]
) -> Sequence[Fields]:
    """Returns the tools without hosted tools, which the servers of OpenAI or Anthropic run.

    A header of the reply lists the omitted tools. If all tools are hosted, returns them unchanged.
    The code that reads them then refuses the request.

    Args:
        hosted: Prefixes of the types of hosted tools.
    """
    kinds = [tool.read("type", TEXT) or "" for tool in tools]
    kept = [tool for tool, kind in zip(tools, kinds, strict=True) if not kind.startswith(hosted)]
    if not kept:
        return tools
    fields.leave_out(*{f"tools.{kind}": None for kind in kinds if kind.startswith(hosted)})
    return kept


def joined_name(namespace: str, name: str) -> str:
    """Returns the name in the chat of a function in a namespace. If `namespace` is empty, returns
    `name`. Only the Responses API has namespaces."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def _name(tool: Fields, nested: bool) -> str:
    function = _function(tool, nested)
    return joined_name(function.read("namespace", TEXT) or "", function.given("name", TEXT))


def _function(tool: Fields, nested: bool) -> Fields:
    """Accepts a nested object `function` in both APIs, because clients mix the forms."""
    nested = tool.has("function") or (nested and not tool.has("name"))
    return tool.part("function") if nested else tool


def chat_tool(tool: Fields, *, nested: bool = True, namespace: str = "") -> ChatTool:
    """Reads one tool, which must be a function."""
    _check_kind(tool)
    given = _function(tool, nested).fill(Function)
    return ChatTool(
        joined_name(namespace, given.name),
        given.description,
        given.parameters,
        given.returns,
        strict=given.strict,
    )


def _check_kind(one: Fields) -> None:
    kind = one.read("type", TEXT) or "function"
    if kind != "function":
        raise InvalidRequestError(
            f"{one.path}type must be function, got {kind[:80]!r}; no other type is supported"
        )
