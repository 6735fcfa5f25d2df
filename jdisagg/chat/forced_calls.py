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
            schema = _moved(tool.enforced or tool.parameters or {}, where)
        except RecursionError:
            raise InvalidRequestError(
                f"tools[{index}].function.parameters is nested too deeply; simplify it"
            ) from None
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "arguments": {"type": "object", **_object(schema)},
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


def _object(value: object) -> Json:
    assert isinstance(value, dict)
    return value


def _moved(schema: object, where: str) -> object:
    """References within the schema (`$ref`) are adapted to the path."""
    if isinstance(schema, list):
        return [_moved(one, where) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: where + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, where)
        for key, value in schema.items()
    }
