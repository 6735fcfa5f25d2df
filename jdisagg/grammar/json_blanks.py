"""Rules for white space between JSON tokens, as llguidance options within a schema."""

import json
from collections.abc import Mapping

# A limited run, because some models otherwise generate whitespace without end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
# The key of llguidance's options. A schema that has it defines its own whitespace rules.
OPTIONS = "x-guidance"
ONE_BLANK: Mapping[str, object] = {OPTIONS: {"whitespace_pattern": r"\x20"}}
_NONE = f'"{OPTIONS}":{{"whitespace_flexible":false}}'


def says_itself(schema: str) -> bool:
    """Returns whether a schema, given as text, has llguidance options of its own."""
    return f'"{OPTIONS}"' in schema


def with_few(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Limits white space to `WHITESPACE`, unless the schema has options of its own."""
    few = {OPTIONS: {"whitespace_pattern": WHITESPACE}}
    return schema if says_itself(json.dumps(schema)) else {**schema, **few}


def without(schema: str) -> str:
    """Returns a schema, given as text, with white space forbidden. Other text is unchanged."""
    head, brace, rest = schema.partition("{")
    if head.strip() or not brace or says_itself(schema):
        return schema
    comma = "" if rest.lstrip().startswith("}") else ","
    return f"{{{_NONE}{comma}{rest}"
