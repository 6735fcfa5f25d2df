"""Converts the answer format that an HTTP client requests (structured output) to a `Grammar`.

The supported fields are OpenAI's `response_format` (`text.format` in /v1/responses), Anthropic's
`output_config.format`, vLLM's `structured_outputs` and its older `guided_*`, and SGLang's `regex`,
`json_schema` and `ebnf`. Structural tags are possible in the fields of OpenAI and vLLM. A schema is
kept as text, because the order of its properties determines their order in the answer."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from jdisagg.errors import InvalidRequestError
from jdisagg.grammar.json_blanks import without
from jdisagg.grammar.structural_tags import structural_lark
from jdisagg.request import Grammar, GrammarKind
from jdisagg.service.http.bodies import GUIDED, SCHEMA, Guided, Restriction, Structured
from jdisagg.service.http.fields import ANYTHING, TEXT, YES, Fields, begins

RESPONSE_FORMAT, STRUCTURED_OUTPUTS = "response_format", "structured_outputs"
RESPONSE_TEXT, MESSAGE_OUTPUT, OLD_MESSAGE_OUTPUT = "text", "output_config", "output_format"
_GUIDED = tuple(f"{GUIDED}{name}" for name in ("json", "regex", "choice", "grammar"))
_FIELDS = (RESPONSE_FORMAT, STRUCTURED_OUTPUTS, *_GUIDED, "regex", "json_schema", "ebnf")
# Fields that set an option of another name. The first that was sent is named in errors.
_SENT_AS = {
    "grammar": (*_FIELDS, RESPONSE_TEXT, MESSAGE_OUTPUT, OLD_MESSAGE_OUTPUT),
    "logprobs": ("top_logprobs",),
    "max_tokens": ("max_output_tokens", "max_completion_tokens"),
    "stop": ("stop_sequences",),
    "include_stop_str_in_output": ("no_stop_trim",),
    "thinking_budget": (
        *("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"),
        *("thinking.budget_tokens", "reasoning.max_tokens", "chat_template_kwargs"),
    ),
    "request_id": ("rid",),
    "cache_salt": ("extra_key",),
    "session": ("session_id", "prompt_cache_key"),
}
_FORMATS = "text, json_object, json_schema or structural_tag"


_STRUCTURAL = ("structures", "triggers", "format")
# Kinds by their name in `structured_outputs`, and by their name after `guided_`.
_KINDS = {"json": GrammarKind.JSON_SCHEMA, "regex": GrammarKind.REGEX, "grammar": GrammarKind.LARK}
# SGLang's fields in addition to `response_format`. Grammars of SGLang and vLLM may be in EBNF.
_OF_SGLANG = {
    "regex": GrammarKind.REGEX,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "ebnf": GrammarKind.LARK,
}
_LONGEST_EBNF = 16 << 10


def grammar_from(fields: Fields) -> Grammar | None:
    """Returns None if no field sets one. Raises InvalidRequestError if a field is invalid, or if
    two fields set a grammar."""
    with named_as_sent(fields):
        given = fields.fill(Restriction)
        nested = given.structured_outputs or Structured()
        found = {
            RESPONSE_FORMAT: _of_format(fields.part(RESPONSE_FORMAT), nested=True),
            STRUCTURED_OUTPUTS: _of_structured(nested, f"{STRUCTURED_OUTPUTS}."),
            GUIDED: _of_structured(_guided(fields), GUIDED),
        }
        for name, kind in _OF_SGLANG.items():
            text = getattr(given, name)
            found[name] = None if text is None else _of_text(kind, text)
    asked = [(name, grammar) for name, grammar in found.items() if grammar is not None]
    if len(asked) > 1:
        raise InvalidRequestError(
            f"{asked[0][0]} and {asked[1][0]} both restrict the answer; send one of them"
        )
    return asked[0][1] if asked else None


def grammar_of_response(fields: Fields) -> Grammar | None:
    text = fields.part(RESPONSE_TEXT)
    text.ignore("verbosity")
    with named_as_sent(fields):
        return _of_format(text.part("format"), nested=False)


def grammar_of_message(fields: Fields) -> Grammar | None:
    """Reads the grammar of a /v1/messages request: the field `output_config.format`, or
    `output_format`, its older name. Returns None if neither sets a grammar."""
    formats = fields.part(MESSAGE_OUTPUT).part("format"), fields.part(OLD_MESSAGE_OUTPUT)
    with named_as_sent(fields):
        found = [one for one in (_of_format(part, nested=False) for part in formats) if one]
    if len(found) > 1:
        raise InvalidRequestError(
            f"{OLD_MESSAGE_OUTPUT} and {MESSAGE_OUTPUT} both have a format; send one of them"
        )
    return found[0] if found else None


def grammar_name(fields: Fields) -> str:
    return next((name for name in _SENT_AS["grammar"] if fields.has(name)), "")


def is_strict(fields: Fields) -> bool:
    for name, inner in ((RESPONSE_FORMAT, "json_schema"), (RESPONSE_TEXT, "format")):
        if fields.has(name) and begins(fields.raw(name), b"{"):
            outer = fields.part(name)
            if outer.read("strict", YES) or outer.part(inner).read("strict", YES):
                return True
    return False


@contextmanager
def named_as_sent(fields: Fields) -> Iterator[None]:
    """Context manager in which an error about an option is raised with the name of the field that
    the client sent."""
    try:
        yield
    except InvalidRequestError as error:
        option = re.split(r"\W", error.message, maxsplit=1)[0]
        unread = fields.unread()
        sent = (one for one in _SENT_AS.get(option, ()) if one not in unread and _has(fields, one))
        if type(error) is not InvalidRequestError or not (name := next(sent, "")):
            raise
        raise InvalidRequestError(name + error.message.removeprefix(option)) from None


def _has(fields: Fields, path: str) -> bool:
    name, _, inner = path.partition(".")
    if not fields.has(name) or not inner:
        return fields.has(name)
    return begins(fields.raw(name), b"{") and fields.part(name).has(inner)


def _of_format(format: Fields, *, nested: bool) -> Grammar | None:
    if not format.names:
        return None
    kind = format.given("type", TEXT)
    if kind == "text":
        return None
    if kind == "json_object":
        schema = format.read("schema", SCHEMA)  # as in llama.cpp and others
        return Grammar(
            GrammarKind.JSON_OBJECT if schema is None else GrammarKind.JSON_SCHEMA, schema or ""
        )
    if kind == "json_schema":
        part = format.part("json_schema") if nested and not format.has("schema") else format
        # `strict` has no effect, because answers always follow the schema.
        part.ignore("name", "description", "strict")
        return Grammar(GrammarKind.JSON_SCHEMA, part.given("schema", SCHEMA))
    if kind == "structural_tag":
        parts = {name: format.read(name, ANYTHING) for name in _STRUCTURAL if format.has(name)}
        return _of_tag(parts, format.path)
    raise InvalidRequestError(f"{format.path}type must be {_FORMATS}, got {kind[:80]!r}")


def _guided(fields: Fields) -> Structured:
    given = msgspec.structs.asdict(fields.fill(Guided))
    return Structured(**{name.removeprefix(GUIDED): value for name, value in given.items()})


def _of_structured(given: Structured, path: str) -> Grammar | None:
    texts = {name: getattr(given, name) for name in _KINDS}
    found = [_of_text(_KINDS[name], text) for name, text in texts.items() if text is not None]
    if given.choice is not None:
        found.append(Grammar.of_choices(given.choice))
    if given.json_object:
        found.append(Grammar(GrammarKind.JSON_OBJECT))
    if given.structural_tag is not None:
        found.append(_of_tag(given.structural_tag, f"{path}structural_tag."))
    if given.disable_any_whitespace:
        found = [_without_blanks(grammar) for grammar in found]
    if len(found) > 1:
        kinds = " and ".join(grammar.kind.value for grammar in found)
        raise InvalidRequestError(
            f"{path}* restricts the answer in {len(found)} ways: {kinds}; send one of them"
        )
    return found[0] if found else None


def _of_text(kind: GrammarKind, text: str) -> Grammar:
    if kind is GrammarKind.LARK and "::=" in text and len(text) <= _LONGEST_EBNF:
        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter raises errors of many types for invalid text
            raise InvalidRequestError(
                f"grammar: the EBNF {text[:64]!r} cannot be converted to Lark: {error}; send Lark"
            ) from None
    return Grammar(kind, text)


def _of_tag(tag: Mapping[str, object], path: str) -> Grammar:
    try:
        return Grammar(GrammarKind.LARK, structural_lark(tag))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}{error.message}") from None


def _without_blanks(grammar: Grammar) -> Grammar:
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return Grammar(GrammarKind.JSON_SCHEMA, without('{"type":"object"}'))
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return Grammar(grammar.kind, without(grammar.text))
    return grammar
