"""Conversations in the form in which clients send them, and their conversion for chat templates.

Chat templates expect the form of OpenAI's messages and tools, with the arguments of earlier calls
as objects instead of JSON text. This module rejects invalid conversations with an error that names
the field. The model's template may reject further conversations. The arguments of tool calls in the
history are never rejected, because they are text that the model generated."""

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from jdisagg.chat.call_arguments import arguments_object
from jdisagg.chat.images import ChatImage
from jdisagg.errors import InvalidRequestError
from jdisagg.request import at_most

MAX_TOOLS = 512
MAX_MESSAGES = 16_384
_ROLE = re.compile(r"[\w.-]{1,64}", re.ASCII)
_TOOL_NAME = re.compile(r"[\w.:/-]{1,256}", re.ASCII)

Json = dict[str, object]
Content = str | tuple[str | ChatImage, ...] | None


class ToolChoice(enum.Enum):
    """Whether the model may call tools.

    REQUIRED: it must call a tool, which a grammar enforces (`jdisagg.chat.forced_calls`)."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the assistant. `arguments` is the text that the model generated, which should
    be a JSON object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        content: The text, a tuple of parts (texts and images), or None.
        tool_call_id: In a message of role "tool", id of the tool call whose result it contains.
        name: Name of the author, for templates that use names.
    """

    role: str
    content: Content
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """The content as one text, without images. Parts are joined by newlines, as in vLLM."""
        content = self.content
        if isinstance(content, tuple):
            return "\n".join([part for part in content if isinstance(part, str)])
        return content or ""


@dataclass(frozen=True, slots=True)
class ChatTool:
    """A function that the model may call.

    Attributes:
        returns: Description of the result, for chat templates that include this in the prompt.
        strict: Whether a forced call must follow the whole schema.
        enforced: Schema for forced calls without the patterns that no grammar can enforce, or None
            if it equals `parameters`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    returns: Mapping[str, object] | None = None
    strict: bool = False
    enforced: Mapping[str, object] | None = None

    @property
    def shown(self) -> Json:
        function: Json = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        if self.returns is not None:
            function["return"] = self.returns
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be rendered by the model's chat template.

    Attributes:
        add_generation_prompt: Whether the rendered text ends with the beginning of the assistant's
            answer.
        continue_final_message: Whether the rendered text ends within the last message, which the
            model then continues.
        tool_name: Name of the tool that the model must call, or "" for any tool.
    """

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[ChatTool, ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    parallel_tool_calls: bool = True
    tool_name: str = ""

    @property
    def callable_tools(self) -> dict[str, Mapping[str, object]]:
        if self.tool_choice is ToolChoice.NONE:
            return {}
        return {tool.name: tool.parameters or {} for tool in self.tools}


def check_chat(prompt: ChatPrompt) -> None:
    """Validates a chat as far as possible without the model and the router's limits. Raises
    InvalidRequestError, which names the invalid field."""
    if not prompt.messages:
        raise InvalidRequestError("chat messages are empty; send at least one")
    for index, message in enumerate(prompt.messages):
        _check_message(f"messages[{index}]", message)
    if prompt.continue_final_message and prompt.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: the text ends"
            " either within the last message or with the beginning of an answer; set one"
        )
    _check_tools(prompt)


def _check_message(where: str, message: ChatMessage) -> None:
    if not _ROLE.fullmatch(message.role):
        raise InvalidRequestError(
            f"{where}.role must be 1 to 64 letters, digits and _-., such as user, got"
            f" {message.role[:64]!r}"
        )
    for name in ("tool_calls", "reasoning"):
        if getattr(message, name) and message.role != "assistant":
            raise InvalidRequestError(
                f"{where}.{name} is only for the role assistant, got {message.role!r}; omit it"
            )


def _check_tools(prompt: ChatPrompt) -> None:
    at_most("tools", len(prompt.tools), MAX_TOOLS)
    for index, tool in enumerate(prompt.tools):
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequestError(
                f"tools[{index}].function.name must be 1 to 256 letters, digits and _-.:/, got"
                f" {tool.name[:64]!r}; rename it"
            )
    if len(prompt.callable_tools) < len(prompt.tools) and prompt.callable_tools:
        raise InvalidRequestError("tools name a function twice; give each a unique name")
    if prompt.tool_choice is ToolChoice.REQUIRED and not prompt.tools:
        raise InvalidRequestError("tool_choice requires a call, but there are no tools; send some")
    if prompt.tool_name and prompt.tool_name not in prompt.callable_tools:
        raise InvalidRequestError(
            f"tool_choice names {prompt.tool_name[:64]!r}, which is not one of the tools; send the"
            " name of a tool"
        )


def shown_messages(messages: Sequence[ChatMessage]) -> list[Json]:
    return [_shown(message) for message in messages]


def _shown(message: ChatMessage) -> Json:
    content: object = message.content
    if isinstance(content, tuple):
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in content
        ]
    shown: Json = {"role": message.role, "content": content}
    if message.reasoning:
        shown["reasoning_content"] = shown["reasoning"] = message.reasoning
        if not (message.content and message.tool_calls):  # gpt-oss's template refuses this
            shown["thinking"] = message.reasoning
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.name:
        shown["name"] = message.name
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_object(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return shown


def texts_of(prompt: ChatPrompt) -> list[tuple[str, str]]:
    texts: list[tuple[str, str]] = []
    for index, message in enumerate(prompt.messages):
        where = f"messages[{index}]"
        parts = message.content if isinstance(message.content, tuple) else (message.text,)
        texts += [(f"{where}.content", part) for part in parts if isinstance(part, str)]
        texts += [
            (f"{where}.{name}", value)
            for name in ("reasoning", "tool_call_id", "name")
            if (value := getattr(message, name))
        ]
        for at, call in enumerate(message.tool_calls):
            texts += [
                (f"{where}.tool_calls[{at}].function.name", call.name),
                (f"{where}.tool_calls[{at}].function.arguments", call.arguments),
                (f"{where}.tool_calls[{at}].id", call.id),
            ]
    texts += [
        (f"tools[{at}].function.description", tool.description)
        for at, tool in enumerate(prompt.tools)
    ]
    return texts


def images_of(prompt: ChatPrompt) -> list[tuple[str, ChatImage]]:
    return [
        (f"messages[{index}].content[{at}]", part)
        for index, message in enumerate(prompt.messages)
        if isinstance(message.content, tuple)
        for at, part in enumerate(message.content)
        if isinstance(part, ChatImage)
    ]


def json_bytes(name: str, value: object) -> int:
    """Raises InvalidRequestError, which begins with `name`, if JSON cannot represent the value."""
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{name} must be a JSON object: {error}; give plain values"
        ) from None
