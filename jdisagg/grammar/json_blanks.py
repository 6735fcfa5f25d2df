"""Which blanks may stand between the tokens of JSON, as llguidance is told within a schema."""

import json
from collections.abc import Mapping

# So few in a row that a model which got among them comes out again.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
# The key of llguidance's own options. A schema that has it says for itself which blanks may come.
OPTIONS = "x-guidance"
ONE_BLANK: Mapping[str, object] = {OPTIONS: {"whitespace_pattern": r"\x20"}}
_NONE = f'"{OPTIONS}":{{"whitespace_flexible":false}}'


def says_itself(schema: str) -> bool:
    """Whether a schema, as text, has options of its own."""
    return f'"{OPTIONS}"' in schema


def with_few(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema with at most `WHITESPACE`, where it does not say otherwise."""
    few = {OPTIONS: {"whitespace_pattern": WHITESPACE}}
    return schema if says_itself(json.dumps(schema)) else {**schema, **few}


def without(schema: str) -> str:
    """The schema, as text, of JSON without blanks. What is no object stays as it is."""
    head, brace, rest = schema.partition("{")
    if head.strip() or not brace or says_itself(schema):
        return schema
    comma = "" if rest.lstrip().startswith("}") else ","
    return f"{{{_NONE}{comma}{rest}"
