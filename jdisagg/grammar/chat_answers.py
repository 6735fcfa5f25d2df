"""Grammars of chat answers that may think first, and may call tools instead.

The grammar of a request (`response_format`) restricts the content of an answer. A model that thinks
writes its reasoning before the content. A model with tools may call them, in its own format,
instead of writing content. Both are outside the request's grammar, as in OpenAI's API.

A marker that the tokenizer has as a token is matched as this token, because llguidance matches
text by ordinary tokens only."""

import json
from collections.abc import Sequence

from jdisagg.grammar.json_blanks import with_few
from jdisagg.grammar.schema_forms import schema_for_llguidance
from jdisagg.grammar.structural_tags import TEXT, quoted, regex_literal
from jdisagg.request import Grammar, GrammarKind

# Identifies these grammars, since a stream must know whether to parse its answer.
_HEAD = "%llguidance {}\nstart: chat_thought chat_answer\n"
_BLANKS = r"/\n{0,2}/"


def may_think_or_call(grammar: Grammar | None) -> bool:
    """Returns whether the grammar was made by `with_thought_and_calls`."""
    return grammar is not None and grammar.text.startswith(_HEAD)


def with_thought_and_calls(
    grammar: Grammar, marks: tuple[str, str] | None, begun: bool, calls: Sequence[str]
) -> Grammar:
    """Returns a grammar of answers that allows reasoning before, and tool calls instead of, content
    that follows `grammar`. A Lark grammar, and a schema that cannot be read, are returned
    unchanged.

    Args:
        marks: Lark expressions of the markers around reasoning, or None if the model writes no
            reasoning.
        begun: Whether the prompt ends within reasoning.
        calls: Lark expressions of tool calls, which may replace the content.
    """
    content = _content(grammar)
    if content is None:
        return grammar
    thought = '""'
    lines = [f"chat_answer: {' | '.join((content, *calls))}"]
    if marks is not None:
        begin, end = marks
        # Text up to a marker that is text itself ends at its first occurrence.
        lazy = "[lazy]" if end.startswith('"') else ""
        lines.append(f"chat_reasoning{lazy}: TEXT {end}")
        thought = f"chat_reasoning {_BLANKS}"
        thought = thought if begun else f"({begin} {thought})?"
    lines.append(f"chat_thought: {thought}")
    return Grammar(GrammarKind.LARK, _HEAD + "\n".join((*lines, TEXT)))


def marker(text: str, token_id: int | None) -> str:
    """Returns the Lark expression of a marker. `token_id`: The token of this text, if any."""
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def marked_call(mark: str) -> str:
    """Returns the Lark expression of a call in the model's own format, which begins with `mark`."""
    return f"{mark} <[*]>*"


def plain_call(names: Sequence[str]) -> str:
    """Returns the Lark expression of a tool call that is a bare JSON object, without a marker. It
    calls one of the tools `names`."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": [*names]}, "parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return f"%json {json.dumps(with_few(schema))}"


def _content(grammar: Grammar) -> str | None:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            try:
                return _json(json.loads(grammar.text))
            except (ValueError, RecursionError):
                return None
        case GrammarKind.REGEX:
            return regex_literal(grammar.text)
        case GrammarKind.CHOICE:
            return f"({' | '.join(map(quoted, json.loads(grammar.text)))})"
    return None


def _json(schema: object) -> str | None:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return None
    return f"%json {json.dumps(with_few(schema_for_llguidance(schema)))}"
