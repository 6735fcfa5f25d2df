"""Answers that must be tool calls (`tool_choice` "required"): the grammar that enforces the calls,
and the parser of the answer.

A forced answer is a JSON array of objects with a name and arguments, whatever the model's own
format for tool calls is. The arguments follow the schema of the tool. Between JSON tokens at most
one space is allowed, because some models otherwise generate white space without end."""

import json
from collections.abc import Mapping

from jdisagg.chat.answer import AnswerDelta
from jdisagg.chat.json_calls import MistralParser
from jdisagg.chat.messages import ChatPrompt, Json, ToolChoice
from jdisagg.errors import InvalidRequestError
from jdisagg.grammar.json_blanks import ONE_BLANK
from jdisagg.request import Grammar, GrammarKind


def forced_calls(prompt: ChatPrompt) -> Grammar | None:
    """Returns the grammar that forces the answer to be tool calls. Returns None if the prompt does
    not require a call. `prompt` must be validated. Raises InvalidRequestError if a schema is nested
    too deeply."""
    if prompt.tool_choice is not ToolChoice.REQUIRED:
        return None
    called = [tool for tool in prompt.tools if prompt.tool_name in ("", tool.name)]
    calls: list[Json] = []
    for index, tool in enumerate(called):
        where = f"#/items/anyOf/{index}/properties/arguments"
        try:
            schema = _placed({**(tool.enforced or tool.parameters or {})}, where)
        except RecursionError:
            raise InvalidRequestError(
                f"tools[{index}].function.parameters is nested too deeply; simplify it"
            ) from None
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": {"type": "object", **schema},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    answer: Json = {**ONE_BLANK, "type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if prompt.tool_name or not prompt.parallel_tool_calls:
        answer["maxItems"] = 1
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(answer, ensure_ascii=False))


class ForcedParser:
    """An `AnswerParser` for forced tool calls. It returns no content."""

    def __init__(self) -> None:
        self._calls = MistralParser()
        self._calls.push(MistralParser.CALL)

    def push(self, text: str) -> AnswerDelta:
        return AnswerDelta(calls=self._calls.push(text).calls)

    def finish(self) -> AnswerDelta:
        return AnswerDelta(calls=self._calls.finish().calls)


def _placed(schema: Json, where: str) -> Json:
    """Returns the schema of a tool as a part of the grammar's schema, with its references adapted
    to its path. Its id is left out, because several tools may have the same."""
    named = {name: schema[name] for name in ("$id", "id") if isinstance(schema.get(name), str)}
    known = str(next(iter(named.values()), "")).rstrip("#")
    return {
        name: _moved(value, where, known) for name, value in schema.items() if name not in named
    }


def _moved(schema: object, where: str, known: str) -> object:
    if isinstance(schema, list):
        return [_moved(one, where, known) for one in schema]
    if not isinstance(schema, Mapping) or isinstance(schema.get("$id"), str):
        return schema  # the references of a part with an id are relative to this part
    made = {name: _moved(value, where, known) for name, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str):
        path = reference.removeprefix(known)
        if path in ("", "#") or path.startswith("#/"):  # others name an anchor or a part's id
            made["$ref"] = where + path[1:]
    return made
