"""Random JSON Schemas, from a seed: objects, arrays, unions, references, and what numbers, texts
and enumerations may be asked to be. Small, so that a small model reaches their end."""

import random

WORDS = ("name", "age", "colour", "dog", "tree", "size", "when", "kind", "items", "of")
PATTERNS = ("^[a-z]{2,6}$", "^(red|green|blue)$", "^[A-Z][a-z]+-[0-9]{1,3}$", "^x?y+z$")
FORMATS = ("date", "time", "uuid", "ipv4", "email")

Schema = dict[str, object]


def random_schema(seed: int) -> Schema:
    """An object at the top, as clients ask for; closed, and all that is required is there."""
    rng = random.Random(seed)
    definitions = {f"part{index}": _object(rng, 2, ()) for index in range(rng.randint(0, 2))}
    schema = _object(rng, 0, tuple(definitions))
    return schema | ({"$defs": definitions} if definitions else {})


def _object(rng: random.Random, depth: int, known: tuple[str, ...]) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4 if depth == 0 else 2))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _any(rng, depth + 1, known) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _any(rng: random.Random, depth: int, known: tuple[str, ...]) -> Schema:
    if known and rng.random() < 0.3:
        return {"$ref": f"#/$defs/{rng.choice(known)}"}
    if depth < 3 and rng.random() < 0.35:
        return rng.choice((_object, _array, _union))(rng, depth, known)
    return rng.choice((_text, _number, _integer, _choice, _constant))(rng)


def _array(rng: random.Random, depth: int, known: tuple[str, ...]) -> Schema:
    least = rng.randint(0, 2)
    items = _any(rng, depth + 1, known)
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _union(rng: random.Random, depth: int, known: tuple[str, ...]) -> Schema:
    return {"anyOf": [_any(rng, depth + 1, known) for _ in range(rng.randint(2, 3))]}


def _text(rng: random.Random) -> Schema:
    match rng.randrange(3):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS)}
        case _:
            least = rng.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-100, 100)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice((1, 10, 1000))}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 9, 5000))}


def _choice(rng: random.Random) -> Schema:
    values = [*rng.sample(WORDS, 2), rng.randint(0, 99), None, True]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _constant(rng: random.Random) -> Schema:
    return rng.choice(({"type": "boolean"}, {"type": "null"}, {"const": rng.choice(WORDS)}))
