"""Converts structural tags, in the form of vLLM and xgrammar, to a Lark grammar.

A structural tag allows free text. Certain texts, called triggers, force the model to continue in a
certain form.

    {"triggers": ["<function="],
     "structures": [{"begin": "<function=f>", "schema": {...}, "end": "</function>"}]}

The newer form is {"format": F}, in which F consists of the types in `_FORMATS`. Free text ends
where a trigger, the end of the enclosing tag or a text after it is complete (llguidance's `lazy`).
Free text must therefore be last, or be followed by one of them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from jdisagg.errors import InvalidRequestError
from jdisagg.grammar.json_blanks import with_few
from jdisagg.grammar.schema_forms import SchemaError, schema_for_llguidance

Json = Mapping[str, object]
TEXT = "TEXT: /(.|\\n)*/"
_NO: Json = {"enum": []}  # a schema that nothing satisfies
MOST_PARTS = 512


def structural_lark(tag: Json) -> str:
    """Raises InvalidRequestError, which names the invalid part."""
    rules = _Rules()
    try:
        if "format" in tag:
            start = rules.of(tag["format"], "format")
        else:
            tags = {"tags": _list(tag, "structures", ""), "triggers": tag.get("triggers")}
            start = rules.triggered(tags, "", "")
    except RecursionError:
        raise InvalidRequestError("structural_tag is nested too deeply; simplify it") from None
    return "\n".join(("%llguidance {}", f"start: {start}", *rules.lines, TEXT))


class _Rules:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._parts = 0

    def of(self, part: object, where: str, ends: str = "") -> str:
        """`ends`: text after the part. Free text, and a regex, end where it is first complete."""
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise InvalidRequestError(f"{where}: more than {MOST_PARTS} parts; simplify it")
        kind = part.get("type") if isinstance(part, dict) else None
        make = _FORMATS.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise InvalidRequestError(
                f"{where}.type must be one of {', '.join(_FORMATS)}, got {str(kind)[:80]!r}; or"
                " send a grammar"
            )
        return make(self, cast(Json, part), where, ends)

    def constant(self, part: Json, where: str, ends: str) -> str:
        return quoted(_text(part, "value", where) + ends)

    def schema(self, part: Json, where: str, ends: str) -> str:
        schema = part.get("json_schema", part.get("schema"))
        if not isinstance(schema, dict | bool):
            raise InvalidRequestError(f"{where}.json_schema must be a JSON schema; send one")
        if isinstance(schema, bool):
            schema = {} if schema else _NO
        try:
            shown = with_few(schema_for_llguidance(schema))
        except SchemaError as error:
            raise InvalidRequestError(f"{where}.json_schema.{error}") from None
        return _then(f"%json {json.dumps(shown)}", ends)

    def regex(self, part: Json, where: str, ends: str) -> str:
        regex = self._rule(regex_literal(_text(part, "pattern", where)), terminal=True)
        return self._until(regex, ends) if ends else regex

    def text(self, part: Json, where: str, ends: str) -> str:
        return self._until("TEXT", ends) if ends else "TEXT"

    def sequence(self, part: Json, where: str, ends: str) -> str:
        found: list[str] = []
        for at, element in reversed([*enumerate(_list(part, "elements", where))]):
            name = f"{where}.elements[{at}]"
            if isinstance(element, dict) and element.get("type") == "const_string":
                ends = _text(element, "value", name) + ends
                continue
            if found and not ends and _free(element):
                raise InvalidRequestError(
                    f"{name} is free text before other elements, so its end is unknown; put it"
                    " last, before a const_string, or into a tag with an end"
                )
            found.append(f"({self.of(element, name, ends)})")
            ends = ""
        return " ".join(filter(None, (quoted(ends) if ends else "", *reversed(found))))

    def either(self, part: Json, where: str, ends: str) -> str:
        elements = _list(part, "elements", where)
        found = [self.of(one, f"{where}.elements[{at}]", ends) for at, one in enumerate(elements)]
        return f"({' | '.join(found)})"

    def tag(self, part: Json, where: str, ends: str, begun: str = "") -> str:
        begin, end = _text(part, "begin", where), _text(part, "end", where, empty=True)
        content = part.get("content")
        if content is None and "schema" in part:
            content = {"type": "json_schema", "json_schema": part["schema"]}
        rest = begin.removeprefix(begun)
        inner = self.of(content, f"{where}.content".lstrip("."), end or ends)
        tag = self._rule(" ".join(filter(None, (quoted(rest) if rest else "", inner))))
        return _then(tag, ends if end else "")

    def triggered(self, part: Json, where: str, ends: str) -> str:
        tags, dot = _list(part, "tags", where), f"{where}." if where else ""
        triggers = part.get("triggers")
        if not isinstance(triggers, list) or not all(isinstance(one, str) for one in triggers):
            raise InvalidRequestError(f"{dot}triggers must be a list of strings; send one")
        by_trigger: dict[str, list[str]] = {}
        for at, tag in enumerate(tags):
            name = f"{dot}tags[{at}]"
            begin = _text(tag, "begin", name) if isinstance(tag, dict) else ""
            trigger = next((one for one in triggers if one and begin.startswith(one)), None)
            if trigger is None:
                raise InvalidRequestError(
                    f"{name}.begin must begin with one of the triggers, got {begin[:80]!r}; add its"
                    " beginning to the triggers"
                )
            by_trigger.setdefault(trigger, []).append(self.tag(cast(Json, tag), name, "", trigger))
        called = [
            f"{self._until('TEXT', trigger)} ({' | '.join(some)})"
            for trigger, some in by_trigger.items()
        ]
        free = self.text(part, where, ends)
        one = self._rule(" | ".join(called))
        if part.get("stop_after_first") is not True:
            return f"{one}{'+' if part.get('at_least_one') is True else '*'} {free}"
        one = _then(one, ends)
        return one if part.get("at_least_one") is True else f"({one} | {free})"

    def separated(self, part: Json, where: str, ends: str) -> str:
        some: list[str] = []
        for at, tag in enumerate(_list(part, "tags", where)):
            name = f"{where}.tags[{at}]"
            if not isinstance(tag, dict):
                raise InvalidRequestError(f"{name} must be a tag; send one")
            some.append(self.tag(tag, name, ""))
        one = self._rule(" | ".join(some))
        separator = _text(part, "separator", where, empty=True)
        more = f" ({quoted(separator)} {one})*" if separator else f" {one}*"
        found = one if part.get("stop_after_first") is True else f"{one}{more}"
        return _then(found if part.get("at_least_one") is True else f"({found})?", ends)

    def _until(self, terminal: str, ends: str) -> str:
        return self._rule(f"{terminal} {quoted(ends)}", lazy=True)

    def _rule(self, body: str, *, lazy: bool = False, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


_FORMATS: dict[str, Callable[[_Rules, Json, str, str], str]] = {
    "const_string": _Rules.constant,
    "json_schema": _Rules.schema,
    "regex": _Rules.regex,
    "any_text": _Rules.text,
    "sequence": _Rules.sequence,
    "or": _Rules.either,
    "tag": _Rules.tag,
    "triggered_tags": _Rules.triggered,
    "tags_with_separator": _Rules.separated,
}


def _free(part: object) -> bool:
    match part:
        case {"type": "any_text" | "triggered_tags"}:
            return True
        case {"type": "or", "elements": [*parts]}:
            return any(map(_free, parts))
        case {"type": "sequence", "elements": [*_, part]} | {
            "type": "tag",
            "end": "",
            "content": part,
        }:
            return _free(part)
    return False


def _then(rule: str, ends: str) -> str:
    return f"{rule} {quoted(ends)}" if ends else rule


def regex_literal(pattern: str) -> str:
    # An unescaped slash would end the expression.
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern.replace("\n", "\\n"))
    return f"/{escaped}/"


def quoted(text: str) -> str:
    return json.dumps(text)


def _text(part: Json, name: str, where: str, *, empty: bool = False) -> str:
    value = part.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise InvalidRequestError(f"{where}.{name} must be a text; send one")
    return value


def _list(part: Json, name: str, where: str) -> Sequence[object]:
    value = part.get(name)
    if not isinstance(value, list) or not value:
        dot = f"{where}." if where else ""
        raise InvalidRequestError(f"{dot}{name} must be a non-empty list; send one")
    return value
