"""What clients of the OpenAI API ask of an answer's form, as a `Grammar`.

OpenAI's `response_format` (in /v1/responses `text.format`), vLLM's `structured_outputs`, and the
older `guided_*`, which mean the same; structural tags in either. A schema is passed on as it was
written: the order of its properties is that of the answer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from jdisagg.errors import InvalidRequestError
from jdisagg.grammar.json_blanks import without
from jdisagg.grammar.structural_tags import structural_lark
from jdisagg.request import Grammar, GrammarKind
from jdisagg.service.http.fields import ANYTHING, TEXT, YES, FieldKind, Fields

RESPONSE_FORMAT, STRUCTURED_OUTPUTS, RESPONSE_TEXT = "response_format", "structured_outputs", "text"
_GUIDED = tuple(f"guided_{name}" for name in ("json", "regex", "choice", "grammar"))
_FIELDS = (RESPONSE_FORMAT, STRUCTURED_OUTPUTS, *_GUIDED)
_FORMATS = "text, json_object, json_schema or structural_tag"


def _schema(raw: msgspec.Raw) -> str:
    """An object, or a text that holds one: some clients send it so."""
    given = bytes(raw)
    if given.startswith(b'"'):
        return _text(raw)
    if not given.startswith((b"{", b"true", b"false")):
        raise msgspec.ValidationError
    return given.decode()


def _structural(raw: msgspec.Raw) -> Mapping[str, object]:
    """An object, or a text that holds one, as vLLM's clients send it."""
    given = bytes(raw)
    return _plain_object(_text(raw) if given.startswith(b'"') else given)


_text = msgspec.json.Decoder(str).decode
_plain_object = msgspec.json.Decoder(dict[str, object]).decode
_SCHEMA = FieldKind("a JSON schema", _schema)
_TAG: FieldKind[Mapping[str, object]] = FieldKind("a structural tag", _structural)
_STRUCTURAL = ("structures", "triggers", "format")
_CHOICES = FieldKind("a list of strings", msgspec.json.Decoder(list[str]).decode)
# By name in `structured_outputs`, and without `guided_`.
_KINDS = {"json": GrammarKind.JSON_SCHEMA, "regex": GrammarKind.REGEX, "grammar": GrammarKind.LARK}
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "whitespace_pattern": ((), "blanks within JSON are for the model to choose"),
    "disable_additional_properties": ((False,), "write additionalProperties into the schema"),
}


def grammar_from(fields: Fields) -> Grammar | None:
    """What a request of completions or chats asks for. Raises InvalidRequestError naming the field,
    also where it asks twice."""
    with named_as_sent(fields):
        found = {
            RESPONSE_FORMAT: _of_format(fields.part(RESPONSE_FORMAT), nested=True),
            STRUCTURED_OUTPUTS: _of_structured(fields.part(STRUCTURED_OUTPUTS), ""),
            "guided_": _of_structured(fields, "guided_"),
        }
    asked = [(name, grammar) for name, grammar in found.items() if grammar is not None]
    if len(asked) > 1:
        raise InvalidRequestError(
            f"{asked[0][0]} and {asked[1][0]} both say what the answer must be; send one of them"
        )
    return asked[0][1] if asked else None


def grammar_of_response(fields: Fields) -> Grammar | None:
    """What `text` of /v1/responses asks for."""
    text = fields.part(RESPONSE_TEXT)
    text.ignore("verbosity")
    with named_as_sent(fields):
        return _of_format(text.part("format"), nested=False)


@contextmanager
def named_as_sent(fields: Fields) -> Iterator[None]:
    """An error about the grammar names the field that it came in."""
    try:
        yield
    except InvalidRequestError as error:
        name = next((name for name in (*_FIELDS, RESPONSE_TEXT) if fields.has(name)), "")
        if not name or not error.message.startswith("grammar: "):
            raise
        raise InvalidRequestError(f"{name}: {error.message.removeprefix('grammar: ')}") from None


def _of_format(format: Fields, *, nested: bool) -> Grammar | None:
    """`nested`: the schema is in a part of its own, which has its name beside it."""
    if not format.names:
        return None
    kind = format.given("type", TEXT)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if kind == "json_schema":
        part = format.part("json_schema") if nested else format
        # `strict` changes nothing: what does not follow the schema cannot come
        part.ignore("name", "description", "strict")
        return Grammar(GrammarKind.JSON_SCHEMA, part.given("schema", _SCHEMA))
    if kind == "structural_tag":
        parts = {name: format.read(name, ANYTHING) for name in _STRUCTURAL if format.has(name)}
        return _of_tag(parts, format.path)
    raise InvalidRequestError(
        f"{format.path}type must be {_FORMATS}, got {kind[:80]!r}; send one of those"
    )


def _of_structured(fields: Fields, prefix: str) -> Grammar | None:
    fields.refuse({prefix + name: rule for name, rule in _REFUSED.items()})
    found: list[Grammar] = []
    for name, kind in _KINDS.items():
        text = fields.read(prefix + name, _SCHEMA if name == "json" else TEXT)
        if text is not None:
            found.append(Grammar(kind, text))
    choices = fields.read(f"{prefix}choice", _CHOICES)
    if choices is not None:
        found.append(Grammar.of_choices(choices))
    if fields.read(f"{prefix}json_object", YES):
        found.append(Grammar(GrammarKind.JSON_OBJECT))
    if (tag := fields.read(f"{prefix}structural_tag", _TAG)) is not None:
        found.append(_of_tag(tag, f"{fields.path}structural_tag."))
    if fields.read(f"{prefix}disable_any_whitespace", YES):
        found = [_without_blanks(grammar) for grammar in found]
    if len(found) > 1:
        kinds = " and ".join(grammar.kind.value for grammar in found)
        raise InvalidRequestError(
            f"{fields.path}{prefix}* says in {len(found)} ways what the answer must be: {kinds};"
            " send one of them"
        )
    return found[0] if found else None


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
