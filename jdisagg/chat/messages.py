"""A conversation as clients send it, and as a chat template is shown it.

Templates expect the shape of OpenAI's messages and tools, with the arguments of earlier calls as
objects and not as JSON text. What is no conversation is refused here by name; whether the model's
template takes it, the template says."""

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from jdisagg.errors import InvalidRequestError
from jdisagg.request import at_most

ROLES = ("system", "user", "assistant", "tool")
MAX_TOOLS = 512
_TOOL_NAME = re.compile(r"[\w.:/-]{1,256}", re.ASCII)

Json = dict[str, object]


class ToolChoice(enum.Enum):
    """Whether the model may call tools. `NONE`: it is shown none. `REQUIRED`: it must, by a grammar
    (`jdisagg.chat.forced_calls`)."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made: `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What one side said.

    Args:
      role: One of `ROLES`.
      content: Its words.
      reasoning: What the assistant thought before them.
      tool_calls: What the assistant called.
      tool_call_id: Of a tool's message, the call that it answers.
      name: Who says it, where the template knows names.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ChatTool:
    """A function that the model may call. `parameters`: a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None

    @property
    def shown(self) -> Json:
        """As templates show it to the model."""
        function: Json = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, as the model's chat template writes it down.

    Args:
      add_generation_prompt: The text ends with the beginning of the assistant's answer.
      continue_final_message: The text ends within the last message, which the model goes on with.
      arguments: What the template may ask for beside the messages, such as enable_thinking.
      tools: What the model may call.
      tool_choice: Whether it does.
      tool_name: Where it must call one: which; empty: any.
      parallel_tool_calls: Whether an answer may have more than one call.
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
        """By name, the schemas of what the model may call here."""
        if self.tool_choice is ToolChoice.NONE:
            return {}
        return {tool.name: tool.parameters or {} for tool in self.tools}


def check_chat(prompt: ChatPrompt) -> None:
    """What needs no model and no limits. Raises InvalidRequestError naming the field."""
    if not prompt.messages:
        raise InvalidRequestError("chat messages are empty; send at least one")
    for index, message in enumerate(prompt.messages):
        _check_message(f"messages[{index}]", message)
    if prompt.continue_final_message and prompt.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: the text ends"
            " within the last message, or with the beginning of an answer; set one"
        )
    _check_tools(prompt)


def _check_message(where: str, message: ChatMessage) -> None:
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {message.role[:64]!r}"
        )
    for name in ("tool_calls", "reasoning"):
        if getattr(message, name) and message.role != "assistant":
            raise InvalidRequestError(
                f"{where}.{name} is the assistant's alone, got the role {message.role!r}; leave"
                " it out"
            )
    for index, call in enumerate(message.tool_calls):
        called_arguments(f"{where}.tool_calls[{index}].function.arguments", call)


def _check_tools(prompt: ChatPrompt) -> None:
    at_most("tools", len(prompt.tools), MAX_TOOLS)
    for index, tool in enumerate(prompt.tools):
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequestError(
                f"tools[{index}].function.name must be 1 to 256 letters, digits and _-.:/, got"
                f" {tool.name[:64]!r}; rename it"
            )
    if len(prompt.callable_tools) < len(prompt.tools) and prompt.callable_tools:
        raise InvalidRequestError("tools name a function twice; give each a name of its own")
    if prompt.tool_choice is ToolChoice.REQUIRED and not prompt.tools:
        raise InvalidRequestError(
            "tool_choice: a call is required and there are no tools; send some"
        )
    if prompt.tool_name and prompt.tool_name not in prompt.callable_tools:
        raise InvalidRequestError(
            f"tool_choice names {prompt.tool_name[:64]!r}, which is none of the tools; send one of"
            " their names"
        )


def called_arguments(where: str, call: ToolCall) -> Json:
    """Of a call in the conversation, as an object; {} of no text. Raises InvalidRequestError."""
    try:
        return msgspec.json.decode(call.arguments, type=Json) if call.arguments.strip() else {}
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        raise InvalidRequestError(
            f"{where} must be the text of a JSON object, got {call.arguments[:80]!r}; send what"
            " was answered"
        ) from None


def shown_messages(messages: Sequence[ChatMessage]) -> list[Json]:
    """As templates show them to the model; what a message does not have it does not bear."""
    return [_shown(message) for message in messages]


def _shown(message: ChatMessage) -> Json:
    shown: Json = {"role": message.role, "content": message.content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
        if not message.content:  # gpt-oss has this name for it, and refuses it beside words
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
                "function": {"name": call.name, "arguments": called_arguments(call.name, call)},
            }
            for call in message.tool_calls
        ]
    return shown


def texts_of(prompt: ChatPrompt) -> list[tuple[str, str]]:
    """Each text that a client wrote, with its field."""
    texts: list[tuple[str, str]] = []
    for index, message in enumerate(prompt.messages):
        where = f"messages[{index}]"
        texts.append((f"{where}.content", message.content))
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


def json_bytes(name: str, value: object) -> int:
    """How much JSON it is. Raises InvalidRequestError for what is none."""
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{name} must be a JSON object: {error}; give plain values"
        ) from None
