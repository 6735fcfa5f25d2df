"""Leaves patterns that no grammar can enforce out of the schemas of a request.

Pydantic and Zod write patterns with look-around, which llguidance does not compile. The rest of the
schema is enforced, and the reply's header with ignored fields names the patterns. With `strict`
such a pattern is refused. The prompt shows the client's own schemas. Patterns are compiled in a
thread, because this may delay streams."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace

from jdisagg.chat.messages import ChatPrompt, ChatTool, ToolChoice
from jdisagg.errors import InvalidRequestError
from jdisagg.grammar.schema_forms import SchemaError, read_schema, schema_for_llguidance
from jdisagg.request import Grammar, GrammarKind
from jdisagg.service.http.fields import Fields
from jdisagg.service.http.grammar import grammar_name, is_strict
from jdisagg.service.http.requests import Asked

_NOT_PLAIN = re.compile(r"[^\w.\[\]$-]", re.ASCII)


async def without_patterns(fields: Fields, asked: Asked) -> Asked:
    """Returns the request without the patterns that cannot be enforced. Raises InvalidRequestError
    for a schema that cannot be enforced without them, or that the client wants to be strict."""
    grammar, chat, left_out = asked.options.get("grammar"), asked.prompts[0], list[str]()
    if isinstance(chat, ChatPrompt) and chat.tool_choice is ToolChoice.REQUIRED:
        tools = await asyncio.to_thread(_tools, chat, left_out)
        asked = replace(asked, prompts=(replace(chat, tools=tools),))
    elif isinstance(grammar, Grammar) and '"pattern' in grammar.text and not is_strict(fields):
        made = await asyncio.to_thread(_grammar, grammar, grammar_name(fields), left_out)
        asked.options["grammar"] = made
    fields.leave_out(*(_NOT_PLAIN.sub("?", name) for name in left_out))
    return asked


def _grammar(grammar: Grammar, name: str, left_out: list[str]) -> Grammar:
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return grammar
    try:
        made = _enforced(read_schema(grammar.text), left_out, f"{name}.")
    except (ValueError, RecursionError):  # the compiler refuses it
        return grammar
    return Grammar(grammar.kind, json.dumps(made, default=float)) if made else grammar


def _tools(chat: ChatPrompt, left_out: list[str]) -> tuple[ChatTool, ...]:
    tools: list[ChatTool] = []
    for tool in chat.tools:
        if chat.tool_name in ("", tool.name):
            schema = {"type": "object", **(tool.parameters or {})}
            made = _enforced(schema, None if tool.strict else left_out, f"tools.{tool.name}.")
            tool = replace(tool, enforced=made)
        tools.append(tool)
    return tuple(tools)


def _enforced(schema: object, left_out: list[str] | None, path: str) -> Mapping[str, object] | None:
    before = len(left_out or ())
    try:
        made = isinstance(schema, Mapping) and schema_for_llguidance(schema, left_out, path)
    except SchemaError as error:
        raise InvalidRequestError(str(error)) from None
    except RecursionError:
        return None
    return made if made and len(left_out or ()) > before else None
