"""What structural tags let through, and at which places an answer may end; against texts that were
judged by hand."""

import json
import re
from typing import Any

import pytest

from jdisagg.errors import InvalidRequestError
from jdisagg.grammar.json_blanks import with_few, without
from jdisagg.grammar.structural_tags import structural_lark
from jdisagg.request import Grammar, GrammarKind
from tests.grammar.matching import COMPILER, allowed, begin, ends, ids_of, text, walk
from tests.time_scale import seconds

AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "additionalProperties": False}
CALLS = {
    "triggers": ["<function="],
    "structures": [
        {"begin": "<function=f>", "schema": AGE, "end": "</function>"},
        {"begin": "<function=g>", "schema": EMPTY, "end": "</function>"},
    ],
}
THINKING = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            {
                "type": "or",
                "elements": [
                    {"type": "const_string", "value": 'say "no"'},
                    {"type": "regex", "pattern": r"[0-9]{2}/\d"},
                ],
            },
        ],
    }
}
AGE_TAG = {
    "type": "tag",
    "begin": "<age>",
    "content": {"type": "json_schema", "json_schema": AGE},
    "end": "</age>",
}


def once(**options: bool) -> dict[str, object]:
    tags = {"type": "triggered_tags", "triggers": ["<age>"], "tags": [AGE_TAG]}
    return {"format": tags | options}


MUST = once(at_least_one=True, stop_after_first=True)
MAY = once(stop_after_first=True)

AGES = {"format": {"type": "tags_with_separator", "tags": [AGE_TAG], "separator": "; "}}

FREE: dict[str, Any] = {"type": "any_text"}
NAME: dict[str, Any] = {"type": "regex", "pattern": "[a-z<>/]+"}


def tagged(content: dict[str, Any], end: str = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": "<a>", "content": content, "end": end}


def joined(kind: str, *elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "elements": [*elements]}


def constant(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


OPEN_OR_AGE = {"type": "triggered_tags", "triggers": ["<age>"], "tags": [AGE_TAG]}
# (what ends with "</a>" or "</a>!", an answer)
ENDED: list[tuple[dict[str, Any], str]] = [
    (tagged(joined("or", FREE, constant("q"))), "<a>x</a>"),
    (tagged(joined("or", {"type": "json_schema", "json_schema": AGE}, FREE)), '<a>{"age":3}</a>'),
    (tagged(joined("sequence", constant("x:"), FREE)), "<a>x:y</a>"),
    (tagged(NAME), "<a>xy</a>"),
    (tagged(OPEN_OR_AGE), "<a>so</a>"),
    (tagged(OPEN_OR_AGE), '<a>so<age>{"age":3}</age>.</a>'),
    (tagged(OPEN_OR_AGE | {"stop_after_first": True}), '<a>so<age>{"age":3}</age></a>'),
    (tagged({**tagged(FREE, ""), "begin": "<b>"}), "<a><b>x</a>"),
    (tagged({**tagged(FREE, "</b>"), "begin": "<b>"}), "<a><b>x</b></a>"),
    (joined("sequence", NAME, constant("</a>")), "xy</a>"),
    (joined("sequence", FREE, constant("</"), constant("a>")), "x y</a>"),
    (joined("sequence", joined("or", constant("q"), FREE), constant("</a>")), "q</a>"),
    (joined("sequence", joined("or", constant("b"), constant("b<")), constant("</a>")), "b</a>"),
]

# None: no answer begins like this; else whether one may end here.
CASES: list[tuple[Any, str, bool | None]] = [
    (CALLS, "Hello.", True),
    (CALLS, "a <function", True),
    (CALLS, 'x <function=f>{"age": 7}</function> y <function=g>{}</function> z', True),
    (CALLS, "x <function=f>", False),
    (CALLS, 'x <function=f>{"age": 7}', False),
    (CALLS, 'x <function=f>{"age": 7}</function>', True),
    (CALLS, "x <function=h", None),
    (CALLS, 'x <function=f>{"b', None),
    (CALLS, 'x <function=f>{"age": 777', None),
    (THINKING, "<t>so", False),
    (THINKING, "<t>so</t>", False),
    (THINKING, '<t>so</t>say "no"', True),
    (THINKING, "<t>so</t>12/3", True),
    (THINKING, "<t>so</t>1x", None),
    (THINKING, "12", None),
    (MUST, "so", False),
    (MUST, 'so <age>{"age":3}</age>', True),
    (MUST, 'so <age>{"age":3}</age>!', None),
    (MAY, "so", True),
    (MAY, 'so <age>{"age":3}</age>!', None),
    (once(at_least_one=True), 'so <age>{"age":3}</age>! <age>{"age":4}</age>', True),
    (once(at_least_one=True), "so!", False),
    (AGES, "", True),
    (AGES, '<age>{"age":3}</age>', True),
    (AGES, '<age>{"age":3}</age>; ', False),
    (AGES, '<age>{"age":3}</age>; <age>{"age":4}</age>', True),
    (AGES, '<age>{"age":3}</age><', None),
    (AGES, "so", None),
]


@pytest.mark.parametrize(("tag", "said", "may_end"), CASES)
def test_a_trigger_obliges_and_free_text_is_free(
    tag: dict[str, object], said: str, may_end: bool | None
) -> None:
    assert ends(Grammar(GrammarKind.LARK, structural_lark(tag)), said) == may_end


@pytest.mark.parametrize(("part", "said"), ENDED)
def test_free_text_and_a_regex_end_where_the_text_after_them_is_complete(
    part: dict[str, Any], said: str
) -> None:
    for format, whole in ((part, said), (joined("sequence", part, constant("!")), f"{said}!")):
        grammar = Grammar(GrammarKind.LARK, structural_lark({"format": format}))
        assert [ends(grammar, text) for text in (whole[:-1], whole, f"{whole}z")] == [
            False,
            True,
            None,
        ]


@pytest.mark.parametrize("tag", [CALLS, THINKING, MUST, MAY])
async def test_the_door_takes_it_for_a_grammar(tag: dict[str, object]) -> None:
    await COMPILER.admit(Grammar(GrammarKind.LARK, structural_lark(tag)), seconds(60))


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({}, "structures must be a non-empty list"),
        ({"structures": [{}], "triggers": 3}, "triggers must be a list of strings"),
        ({"structures": [{"begin": "a"}], "triggers": ["b"]}, r"tags\[0\].begin must begin with"),
        ({"format": {"type": "grammar"}}, "format.type must be one of const_string"),
        ({"format": {"type": "or", "elements": []}}, "format.elements must be a non-empty list"),
        ({"format": {"type": "regex"}}, "format.pattern must be a text"),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}] * 2}},
            r"format.elements\[0\] is free text before other elements",
        ),
        (
            {"format": joined("sequence", joined("or", NAME, tagged(FREE, "")), NAME)},
            r"format.elements\[0\] is free text before other elements",
        ),
        ({"format": {"type": "json_schema"}}, "format.json_schema must be a JSON schema"),
    ],
)
def test_what_is_no_structural_tag_is_refused_by_its_part(
    tag: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        structural_lark(tag)


def test_a_deep_tag_is_refused() -> None:
    part: dict[str, object] = {"type": "any_text"}
    for _ in range(5000):
        part = {"type": "or", "elements": [part]}
    with pytest.raises(InvalidRequestError, match="simplify it"):
        structural_lark({"format": part})


def test_json_without_blanks_has_none_and_else_few() -> None:
    for schema in ('{"type": "object"}', " {}", json.dumps(AGE)):
        ids, _ = walk(Grammar(GrammarKind.JSON_SCHEMA, without(schema)), 3)
        assert not re.search(r"\s", re.sub(r'"([^"\\]|\\.)*("|$)', "", text(ids)))
    assert allowed(begin(Grammar(GrammarKind.JSON_SCHEMA, without(json.dumps(AGE))), ids_of("{")))
    assert not allowed(
        begin(Grammar(GrammarKind.JSON_SCHEMA, without(json.dumps(AGE))), ids_of('{ "age"'))
    )
    own = {"x-guidance": {"whitespace_flexible": True}}
    assert with_few(own) == own and without(json.dumps(own)) == json.dumps(own)
    assert without("true") == "true"
