"""A conversation that a caller gave to a client: our own classes, or mappings as OpenAI's API
writes them. A wrong kind of value is refused by name before anything is sent."""

from collections.abc import Mapping, Sequence

from jdisagg.chat.messages import ChatMessage, ChatTool, ToolCall, ToolChoice
from jdisagg.errors import InvalidRequestError

Given = Mapping[str, object]
Messages = Sequence[ChatMessage | Given]
Tools = Sequence[ChatTool | Given]

_NEEDED = {"role", "content"}
_MESSAGE = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def chat_message(index: int, given: ChatMessage | Given) -> ChatMessage:
    """Raises InvalidRequestError naming the field and the kind of its value."""
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
            text(f"{where}.role", given["role"]),
            _content(where, given.get("content") or "" if calls else given["content"]),
            reasoning=text(f"{where}.reasoning_content", given.get("reasoning_content") or ""),
            tool_calls=tuple(
                _call(f"{where}.tool_calls[{at}]", one) for at, one in enumerate(calls)
            ),
            tool_call_id=text(f"{where}.tool_call_id", given.get("tool_call_id") or ""),
            name=text(f"{where}.name", given.get("name") or ""),
        )
    text(f"{where}.role", given.role)
    _content(where, given.content)
    return given


def chat_tools(given: Tools) -> tuple[ChatTool, ...]:
    """Likewise."""
    return tuple(_tool(f"tools[{at}]", one) for at, one in enumerate(_items("tools", given)))


def tool_choice(given: str | Given) -> tuple[ToolChoice, str]:
    """The choice, and the name of the tool that is named. Likewise."""
    if isinstance(given, Mapping):
        function = _object("tool_choice.function", given, "function")
        return ToolChoice.REQUIRED, text("tool_choice.function.name", function.get("name"))
    try:
        return ToolChoice(given), ""
    except ValueError:
        choices = ", ".join(choice.value for choice in ToolChoice)
        raise InvalidRequestError(
            f"tool_choice must be one of {choices}, or a mapping that names a function, got"
            f" {given!r:.80}"
        ) from None


def text(name: str, value: object, remedy: str = "give a str") -> str:
    """What protobuf takes for text. Raises InvalidRequestError."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be text, got {type(value).__name__}; {remedy}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} cannot be sent: {value[error.start]!r}, its character {error.start}, is half"
            " of a surrogate pair and no text; decode what it came from with errors='replace'"
        ) from None
    return value


def _content(where: str, value: object) -> str:
    return text(f"{where}.content", value, "join its parts to one text, or leave the message out")


def _call(where: str, given: object) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    one, function = _object(where, given), _object(f"{where}.function", given, "function")
    return ToolCall(
        text(f"{where}.function.name", function.get("name")),
        text(f"{where}.function.arguments", function.get("arguments") or ""),
        text(f"{where}.id", one.get("id") or ""),
    )


def _tool(where: str, given: object) -> ChatTool:
    if isinstance(given, ChatTool):
        return given
    function = _object(f"{where}.function", given, "function")
    parameters = function.get("parameters")
    return ChatTool(
        text(f"{where}.function.name", function.get("name")),
        text(f"{where}.function.description", function.get("description") or ""),
        None if parameters is None else _object(f"{where}.function.parameters", parameters),
    )


def _object(where: str, given: object, field: str = "") -> Given:
    """`given`, or a field of it."""
    value = given
    if field:
        value = given.get(field) if isinstance(given, Mapping) else given
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"{where} must be a mapping, as OpenAI's API writes it, got {type(value).__name__}"
        )
    return value


def _items(name: str, given: object) -> Sequence[object]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InvalidRequestError(
            f"{name} must be several values, got {type(given).__name__}; give a sequence"
        )
    return given
