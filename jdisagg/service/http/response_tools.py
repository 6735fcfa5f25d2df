"""Converts the tools of a /v1/responses request to functions of a chat.

A function in a namespace (a tool of an MCP server) gets a name that joins both. A custom tool,
whose input is any text, becomes a function with one text argument. A hosted tool, which OpenAI's
servers run, is left out, and a header of the reply lists it. If all tools are hosted, the request
is refused."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jdisagg.chat.call_arguments import arguments_object
from jdisagg.chat.messages import MAX_TOOLS, ChatTool
from jdisagg.service.http.chat import OfferedTools, chat_tool, joined_name, without_hosted
from jdisagg.service.http.fields import TEXT, Fields, begins

# Prefixes of the types of hosted tools, which OpenAI's servers run.
_HOSTED = (
    *("web_search", "file_search", "tool_search", "code_interpreter", "image_generation"),
    *("mcp", "computer", "programmatic_tool"),
)
_USUAL = {"description": None, "parameters": None, "strict": False}
_INPUT = "input"
_TEXT_INPUT = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


class SentTool(NamedTuple):
    """A tool with the name and namespace that the client sent. `custom` is whether its input is
    plain text."""

    name: str
    namespace: str = ""
    custom: bool = False

    def input_of(self, arguments: str) -> str:
        """Returns the input of a call of a custom tool. `arguments` is the JSON text that the model
        generated. If it has no valid input, it is returned unchanged."""
        given = arguments_object(arguments).get(_INPUT)
        return given if isinstance(given, str) else arguments


class ResponseTools(NamedTuple):
    """The tools of a request.

    Attributes:
        sent: The client's tool by the name in the chat, for each tool that has another name there
            or is not a function.
    """

    tools: tuple[ChatTool, ...]
    sent: Mapping[str, SentTool]


def response_tools(fields: Fields, added: Sequence[Fields] = ()) -> ResponseTools:
    """Reads the field `tools`. Raises InvalidRequestError, which names the invalid field. `added`
    are tools that items of the conversation add. Those with the name of another are left out."""
    given = fields.parts("tools", MAX_TOOLS) or []
    found = [pair for one in without_hosted(fields, given, _HOSTED) for pair in _tools(one, "")]
    names = {tool.name for tool, _ in found}
    for one in added:
        if not (one.read("type", TEXT) or "").startswith(_HOSTED):
            found += [pair for pair in _tools(one, "") if pair[0].name not in names]
            names = {tool.name for tool, _ in found}
    sent = {tool.name: named for tool, named in found if named != SentTool(tool.name)}
    return ResponseTools(tuple(tool for tool, _ in found), sent)


def shown_tools(fields: Fields) -> list[dict[str, object]]:
    shown: list[dict[str, object]] = []
    for tool in fields.parts("tools") or ():
        part = tool.part("function") if tool.has("function") else tool
        given: dict[str, object] = {name: part.raw(name) for name in part.names}
        if (tool.read("type", TEXT) or "function") == "function":
            given = {"type": "function", **_USUAL, **given}
        shown.append(given)
    return shown


def shown_choice(fields: Fields, offered: OfferedTools) -> object:
    if not (fields.has("tool_choice") and begins(fields.raw("tool_choice"), b"{")):
        return offered.choice.value
    return fields.raw("tool_choice")


def text_arguments(text: str) -> str:
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def _tools(tool: Fields, namespace: str) -> Iterator[tuple[ChatTool, SentTool]]:
    kind = tool.read("type", TEXT)
    if kind == "namespace" and not namespace:
        space = tool.given("name", TEXT)
        for one in tool.parts("tools", MAX_TOOLS) or ():
            yield from _tools(one, space)
    elif kind == "custom":
        name = tool.given("name", TEXT)
        made = ChatTool(joined_name(namespace, name), _description(tool), _TEXT_INPUT)
        yield made, SentTool(name, namespace, custom=True)
    else:
        made = chat_tool(tool, nested=False, namespace=namespace)
        yield made, SentTool(made.name[len(joined_name(namespace, "")) :], namespace)


def _description(tool: Fields) -> str:
    form = tool.part("format")
    definition = form.read("definition", TEXT)
    syntax = form.read("syntax", TEXT) or "lark"
    shown = definition and f"The input follows this grammar ({syntax}):\n{definition}"
    return "\n\n".join(filter(None, (tool.read("description", TEXT), shown)))
