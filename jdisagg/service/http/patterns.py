"""Leaves patterns that no grammar can enforce out of the schemas of a request.

Pydantic and Zod write patterns with look-around, which llguidance does not compile. The rest of the
schema is enforced, and the reply's header with ignored fields names the patterns. With `strict`
such a pattern is refused. The prompt shows the client's own schemas. This module works in a thread,
because compiling patterns may delay streams."""

import asyncio
import json
import re
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
    try:
        if isinstance(chat, ChatPrompt) and chat.tool_choice is ToolChoice.REQUIRED:
            tools = await asyncio.to_thread(_tools, chat, left_out)
            asked = replace(asked, prompts=(replace(chat, tools=tools),))
        elif isinstance(grammar, Grammar) and '"pattern' in grammar.text and not is_strict(fields):
            asked.options["grammar"] = await asyncio.to_thread(
                _grammar, grammar, grammar_name(fields), left_out
            )
    except SchemaError as error:
        raise InvalidRequestError(str(error)) from None
    fields.leave_out(*(_NOT_PLAIN.sub("?", name) for name in left_out))
    return asked


def _grammar(grammar: Grammar, name: str, left_out: list[str]) -> Grammar:
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            schema = read_schema(grammar.text)
            made = isinstance(schema, dict) and schema_for_llguidance(schema, left_out, f"{name}.")
            return Grammar(grammar.kind, json.dumps(made)) if left_out else grammar
    except SchemaError:
        raise
    except (ValueError, RecursionError):  # the compiler refuses it
        left_out.clear()
    return grammar


def _tools(chat: ChatPrompt, left_out: list[str]) -> tuple[ChatTool, ...]:
    return tuple(
        replace(tool, enforced=_enforced(tool, left_out))
        if chat.tool_name in ("", tool.name)
        else tool
        for tool in chat.tools
    )


def _enforced(tool: ChatTool, left_out: list[str]) -> dict[str, object] | None:
    schema = {"type": "object", **(tool.parameters or {})}
    some = None if tool.strict else list[str]()
    try:
        made = schema_for_llguidance(schema, some, f"tools.{tool.name}.")
    except RecursionError:
        return None  # refused where the grammar is made
    left_out += some or ()
    return made if some else None
