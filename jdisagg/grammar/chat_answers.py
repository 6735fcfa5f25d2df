"""Extends the grammar of a chat answer by reasoning and tool calls.

The grammar of a request (`response_format`) restricts the content of an answer. Reasoning and tool
calls are not restricted by the request's grammar, as in OpenAI's API.

If a marker is a single token of the tokenizer, the grammar matches this token, because llguidance
matches text by ordinary tokens only."""

import json
from collections.abc import Sequence

from jdisagg.grammar.json_blanks import with_few
from jdisagg.grammar.schema_forms import schema_for_llguidance
from jdisagg.grammar.structural_tags import TEXT, quoted, regex_literal
from jdisagg.request import Grammar, GrammarKind

# Beginning of these grammars, by which the answer parser recognizes them.
_HEAD = "%llguidance {}\nstart: chat_thought chat_answer\n"
_BLANKS = r"/\n{0,2}/"


def may_think_or_call(grammar: Grammar | None) -> bool:
    """Returns whether the grammar is a result of `with_thought_and_calls` or allows any text, so
    that the answer may contain reasoning or tool calls."""
    return grammar is not None and (grammar.free or grammar.text.startswith(_HEAD))


def with_thought_and_calls(
    grammar: Grammar,
    marks: tuple[str, str] | None,
    begun: bool,
    calls: Sequence[str],
    headers: tuple[str, str] = (_BLANKS, ""),
) -> Grammar:
    """Returns a grammar that also allows reasoning before the content, and tool calls instead of
    the content. `grammar` is the grammar of the content. A Lark grammar and an unreadable schema
    are returned unchanged.

    Args:
        marks: Lark expressions of the markers around reasoning, or None if the model generates no
            reasoning.
        calls: Lark expressions of tool calls, which may replace the content.
        headers: Lark expressions of the text after reasoning, and of the text before the content
            with and without reasoning.
    """
    content = _content(grammar)
    if content is None:
        return grammar
    thought = '""'
    lines = [f"chat_answer: {' | '.join((content, *calls))}"]
    if marks is not None:
        begin, end = marks
        # If the end marker is text and not a token, the reasoning ends at its first occurrence.
        lazy = "[lazy]" if end.startswith('"') else ""
        lines.append(f"chat_reasoning{lazy}: TEXT {end}")
        after, before = headers
        thought = f"chat_reasoning {after}"
        thought = f"{thought if begun else f'({begin} {thought})?'} {before}"
    lines.append(f"chat_thought: {thought}")
    return Grammar(GrammarKind.LARK, _HEAD + "\n".join((*lines, TEXT)))


def marker(text: str, token_id: int | None) -> str:
    """`token_id` is the token with this text, or None if there is no such token."""
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def marked_call(mark: str) -> str:
    return f"{mark} <[*]>*"


def plain_call(names: Sequence[str]) -> str:
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
