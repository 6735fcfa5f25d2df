"""Limits the white space between the JSON tokens of an answer, by llguidance options in the JSON
schema."""

import json
from collections.abc import Mapping

# A limited run, because some models otherwise generate whitespace without end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
# The key of llguidance's options. A schema that has it defines its own whitespace rules.
OPTIONS = "x-guidance"
ONE_BLANK: Mapping[str, object] = {OPTIONS: {"whitespace_pattern": r"\x20"}}
_NONE = f'"{OPTIONS}":{{"whitespace_flexible":false}}'


def says_itself(schema: str) -> bool:
    return f'"{OPTIONS}"' in schema


def with_few(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the schema unchanged if it already has llguidance options."""
    few = {OPTIONS: {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}}
    return schema if says_itself(json.dumps(schema)) else {**schema, **few}


def without(schema: str) -> str:
    """Text that is not a JSON object, or that already contains llguidance options, is returned
    unchanged."""
    head, brace, rest = schema.partition("{")
    if head.strip() or not brace or says_itself(schema):
        return schema
    comma = "" if rest.lstrip().startswith("}") else ","
    return f"{{{_NONE}{comma}{rest}"
