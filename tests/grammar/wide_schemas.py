"""JSON Schemas of the kinds that programs send, from a seed: nested objects, open and closed ones,
arrays with bounds and with a head, enumerations, constants, unions, references within and to
themselves, formats, patterns, numbers with limits.

Each can be satisfied: what llguidance then refuses is a lack of ours. The kinds and how often they
come follow what JSONSchemaBench (Geng et al., 2025, https://arxiv.org/abs/2501.10868) found in the
field."""

import random
from collections.abc import Callable

Schema = dict[str, object]

NAMES = (
    *("id", "name", "createdAt", "tags", "owner", "items", "price", "status", "url", "address"),
    *("first-name", "@type", "$value", "x y", "größe", 'say "hi"', "back\\slash", "a/b", "日本"),
)
WORDS = ("red", "green", "blue", "yes", "no", "ünï", "a b", 'with "quotes"', "tab\there", "", "🐕")
PATTERNS = (
    r"^[a-z]{2,6}$",
    r"^(red|green|blue)$",
    r"^[A-Z][a-z]+-[0-9]{1,3}$",
    r"^x?y+z$",
    r"^\d{3}-\d{4}$",
    r"^#[0-9a-fA-F]{6}$",
    r"^[^@\s]{1,8}@[a-z]{2,8}\.(com|org)$",
    r"^v\d{1,2}(\.\d{1,2}){0,2}(-(alpha|beta))?$",
    r"^/(\w{1,6}/){0,2}\w{1,6}$",
    r"[0-9]{2}",  # anywhere in the text
    r"^ab",  # and whatever follows
    r"yz$",
)
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
DEEPEST = 4


def wide_schema(seed: int) -> Schema:
    """Mostly an object at the top, as clients ask for."""
    return _Maker(random.Random(f"schema {seed}")).top()


class _Maker:
    """Of one schema. Each kind gets the depth at which it stands."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._known: list[str] = []  # definitions that may be referred to

    def top(self) -> Schema:
        definitions: dict[str, object] = {}
        where = self._rng.choice(("$defs", "$defs", "definitions"))
        for index in range(self._rng.choice((0, 0, 1, 2, 3))):
            name = self._rng.choice((f"part{index}", f"Part {index}", f"a/b~{index}"))
            definitions[name] = self._tree(where, name) if self._chance(0.25) else self._object(2)
            self._known.append(_pointer(where, name))
        body = self._object(0) if self._chance(0.85) else self._any(0)
        head: Schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        if self._chance(0.5):
            head |= {"title": "Something", "description": 'What "it" is.'}
        if self._chance(0.5):  # without blanks, of which a small model writes many
            head["x-guidance"] = {"whitespace_flexible": False}
        return head | body | ({where: definitions} if definitions else {})

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _any(self, depth: int) -> Schema:
        if self._known and self._chance(0.25):
            return {"$ref": self._rng.choice(self._known)}
        nested: list[Callable[[int], Schema]] = [
            self._object,
            self._object,
            self._array,
            self._array,
            self._array,
            self._tuple,
            self._tuple,
            self._any_of,
            self._one_of,
            self._any_of,
            self._one_of,
            self._all_of,
            self._map,
        ]
        if depth < DEEPEST and self._chance(0.4):
            return self._rng.choice(nested)(depth)
        kinds = (self._text, self._text, self._number, self._integer, self._enum, self._plain)
        return self._rng.choice(kinds)()

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randint(1, 5 if depth == 0 else 3))
        found: Schema = {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
        }
        required = [name for name in names if self._chance(0.7)]
        if required or self._chance(0.5):
            self._rng.shuffle(required)
            found["required"] = required
        # in an open one a small model goes on for long
        if self._chance(0.92):
            found["additionalProperties"] = False
        elif self._chance(0.5):
            found["additionalProperties"] = self._plain()
        return found

    def _tree(self, where: str, name: str) -> Schema:
        """Refers to itself."""
        again: Schema = {"$ref": _pointer(where, name)}
        children: Schema = {"type": "array", "items": again, "maxItems": self._rng.randint(1, 2)}
        child: Schema = {"anyOf": [{"type": "null"}, again]}
        return {
            "type": "object",
            "properties": {"value": self._plain(), "next": self._rng.choice((children, child))},
            "required": ["value"],
            "additionalProperties": False,
        }

    def _map(self, depth: int) -> Schema:
        """An object of which the values alone are said, or some names by a pattern."""
        if self._chance(0.5):
            return {"type": "object", "additionalProperties": self._any(depth + 2)}
        return {
            "type": "object",
            "patternProperties": {"^x-[a-z]{1,4}$": self._any(depth + 2)},
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> Schema:
        found: Schema = {"type": "array", "items": self._any(depth + 1)}
        least = self._rng.randint(0, 3)
        if least:
            found["minItems"] = least
        if self._chance(0.8):
            found["maxItems"] = least + self._rng.randint(0, 3)
        return found

    def _tuple(self, depth: int) -> Schema:
        head = [self._any(depth + 1) for _ in range(self._rng.randint(1, 3))]
        rest: object = False if self._chance(0.7) else self._plain()
        least = self._rng.randint(0, len(head))
        return {
            "type": "array",
            "prefixItems": head,
            "items": rest,
            "minItems": least,
            "maxItems": len(head) + 1,
        }

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth + 1) for _ in range(self._rng.randint(2, 4))]}

    def _one_of(self, depth: int) -> Schema:
        """Objects told apart by a constant."""
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": self._any(depth + 2)},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for kind in self._rng.sample(WORDS, self._rng.randint(2, 3))
            ]
        }

    def _all_of(self, depth: int) -> Schema:
        """A base, and more about what has it."""
        first, second, third = self._rng.sample(NAMES, 3)
        base: Schema = {
            "type": "object",
            "properties": {first: self._any(depth + 2)},
            "required": [first],
        }
        more: Schema = {
            "properties": {second: self._any(depth + 2), third: self._plain()},
            "required": [second],
        }
        return {"allOf": [base, more]}

    def _text(self) -> Schema:
        match self._rng.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._rng.choice(PATTERNS)}
            case 1:
                return {"type": "string", "format": self._rng.choice(FORMATS)}
            case 2:
                least = self._rng.randint(0, 4)
                return {
                    "type": "string",
                    "minLength": least,
                    "maxLength": least + self._rng.randint(0, 8),
                }
            case _:
                longest = self._rng.randint(10, 60)
                found: Schema = {"type": "string"}
                return found | ({"maxLength": longest} if self._chance(0.8) else {})

    def _number(self) -> Schema:
        low, width = self._rng.uniform(-100, 100), self._rng.choice((0.5, 1.0, 10.0, 1e6))
        found: Schema = {"type": "number"}
        found[self._rng.choice(("minimum", "exclusiveMinimum"))] = round(low, 2)
        if self._chance(0.7):
            found[self._rng.choice(("maximum", "exclusiveMaximum"))] = round(low + width, 2)
        return found

    def _integer(self) -> Schema:
        low = self._rng.randint(-1000, 1000)
        match self._rng.randrange(4):
            case 0:
                return {"type": "integer"}
            case 1:
                return {"type": "integer", "minimum": low}
            case 2:
                return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 40}
            case _:
                step = self._rng.choice((2, 5, 10))
                return {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 50 * step}

    def _enum(self) -> Schema:
        values: list[object] = [
            *self._rng.sample(WORDS, 3),
            7,
            -2.5,
            None,
            True,
            ["a", 1],
            {"b": {}},
        ]
        if self._chance(0.3):
            return {"const": self._rng.choice(values)}
        return {"enum": self._rng.sample(values, self._rng.randint(1, 5))}

    def _plain(self) -> Schema:
        kinds: tuple[object, ...] = ("boolean", "null", "integer", "number", "string")
        if self._chance(0.2):
            return {"type": self._rng.sample(kinds, 2), "maxLength": 40}
        kind = self._rng.choice(kinds)
        found: Schema = {"type": kind}
        return found | ({"maxLength": 40} if kind == "string" else {})


def _pointer(where: str, name: str) -> str:
    """As a fragment: RFC 6901, section 6."""
    return f"#/{where}/{name.replace('~', '~0').replace('/', '~1').replace(' ', '%20')}"
