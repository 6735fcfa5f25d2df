"""Reads a client's JSON object into a form: a struct whose fields have the names and types of the
object's fields.

    fields = Fields.of(body)
    asked = fields.fill(Completion)

A wrong type raises an InvalidRequestError with the path of the field, the expected type and the
value. A null field counts as absent. `unread` lists the fields that no form has and no code has
read. A part whose form depends on its content is a `Fields` of its own, which code reads by name.
The API's description (`openapi`) shows the same forms."""

import codecs
import functools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import NoneType
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from jdisagg.errors import InvalidRequestError
from jdisagg.request import at_most

T = TypeVar("T")

SHOWN_CHARACTERS = 80
# Decoding larger objects would delay other requests.
MAX_FIELDS = 1024
MAX_PARTS = 16_384

# For each unsupported field, the values without effect, and the advice in the error for others.
Refused = Mapping[str, tuple[Collection[object], str]]

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class FieldKind(Generic[T]):
    """A type that a field can have: `decode` decodes a value or raises an error, and `rule` is the
    name of the type in error messages."""

    rule: str
    decode: Callable[[msgspec.Raw], T]


def _whole(raw: msgspec.Raw) -> int:
    """Decodes an integer. 16.0 counts as an integer, as in JavaScript."""
    try:
        return _integer(raw)
    except msgspec.ValidationError:
        number = _number(raw)
        if not number.is_integer():
            raise
        return int(number)


def _yes(raw: msgspec.Raw) -> bool:
    """Also accepts 0, 1, "true" and "false", as other servers do."""
    known = _YES.get(bytes(raw).lower())
    return _boolean(raw) if known is None else known


def _text_or_json(raw: msgspec.Raw) -> str:
    given = bytes(raw)
    return _text(raw) if given.startswith(b'"') else given.decode()


def _object_of(
    kind: type[T], float_hook: Callable[[str], float] | None = None
) -> Callable[[msgspec.Raw], T]:
    """Returns a decoder of an object type. It also accepts [] as an empty object, because some
    languages do not distinguish the two."""
    decode = msgspec.json.Decoder(kind, strict=False, float_hook=float_hook).decode

    def decoded(raw: msgspec.Raw) -> T:
        if begins(raw, b"[") and bytes(raw).translate(None, b" \t\r\n") == b"[]":
            return decode(b"{}")
        return decode(raw)

    return decoded


def _exact_float(text: str) -> float:
    if Decimal(repr(value := float(text))) != Decimal(text):
        raise ValueError(f"{text:.80} has more digits than a 64-bit float")
    return value


_YES = {b"0": False, b"1": True, b'"false"': False, b'"true"': True}
_boolean = msgspec.json.Decoder(bool).decode
_text = msgspec.json.Decoder(str).decode
# Not strict: numbers may be strings, as other servers accept them.
_integer = msgspec.json.Decoder(int, strict=False).decode
_number = msgspec.json.Decoder(float, strict=False).decode

INTEGER = FieldKind("an integer", _whole)
YES = FieldKind("true or false", _yes)
TEXT_OR_JSON = FieldKind("a string", _text_or_json)
TEXT = FieldKind("a string", msgspec.json.Decoder(str).decode)
OBJECT = FieldKind("an object", _object_of(dict[str, msgspec.Raw]))
SCHEMA_OBJECT = FieldKind(
    "a JSON schema whose numbers fit into 64-bit floats",
    _object_of(dict[str, object], _exact_float),
)
_LIST = FieldKind("a list of objects", msgspec.json.Decoder(list[msgspec.Raw]).decode)
ANYTHING: FieldKind[object] = FieldKind("JSON whose numbers fit into 64-bit floats", _any.decode)
# Annotates a field of a form that code reads by name, because its form depends on its content.
BY_HAND: FieldKind[msgspec.Raw] = FieldKind("JSON", lambda raw: raw)
_KINDS: dict[object, FieldKind[Any]] = {
    int: INTEGER,
    float: FieldKind("a number", _number),
    bool: YES,
    str: TEXT,
    str | list[str]: FieldKind(
        "a string or a list of strings", msgspec.json.Decoder(str | list[str]).decode
    ),
    list[str]: FieldKind("a list of strings", msgspec.json.Decoder(list[str]).decode),
    list[int]: FieldKind(
        "a list of integers", msgspec.json.Decoder(list[int], strict=False).decode
    ),
    dict[int, float]: FieldKind("an object of token ids and numbers", _object_of(dict[int, float])),
    dict[str, object]: FieldKind("an object", _object_of(dict[str, object])),
}


class Form(msgspec.Struct):
    """Fields of a JSON object. A field that a `FieldKind` annotates is decoded by it. A nested form
    without any field counts as absent.

    Attributes:
        refused: Fields that are not supported.
        ignored: Fields that have no meaning in jdisagg.
    """

    refused: ClassVar[Refused] = {}
    ignored: ClassVar[Collection[str]] = ()


F = TypeVar("F", bound=Form)


class Fields:
    """The fields of one JSON object, which may be nested in a request. `path` is the prefix of
    field names in error messages, such as "messages[2]." for the third message."""

    def __init__(self, raw: Mapping[str, msgspec.Raw], path: str = "") -> None:
        self._raw = raw
        self._path = path
        self._read: set[str] = set()
        self._left_out: list[str] = []
        self._parts: dict[str, Fields] = {}

    @classmethod
    def of(cls, body: bytes) -> "Fields":
        """Parses a request body. Raises InvalidRequestError if the body is not a JSON object."""
        try:
            body = body.removeprefix(codecs.BOM_UTF8)
            body.decode("utf-8")
            read = _object.decode(body)
            at_most("fields of the body", len(read), MAX_FIELDS)
            return cls(read)
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                f"the body is not valid UTF-8 at byte {error.start}; send JSON in UTF-8"
            ) from None
        except msgspec.ValidationError:
            raise InvalidRequestError("the body must be a JSON object; send {...}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(
                f"the body is not valid JSON: {error}; send a JSON object"
            ) from None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._raw)

    @property
    def path(self) -> str:
        return self._path

    def raw(self, name: str) -> msgspec.Raw:
        return self._raw[name]

    def has(self, name: str) -> bool:
        """Returns whether the field is present and not null. The field then counts as read."""
        raw = self._raw.get(name)
        if raw is None:
            return False
        self._read.add(name)
        return memoryview(raw) != b"null"  # copies nothing, unlike bytes()

    def read(self, name: str, kind: FieldKind[T]) -> T | None:
        """Raises InvalidRequestError for a wrong type."""
        if not self.has(name):
            return None
        raw = self._raw[name]
        try:
            return kind.decode(raw)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            reason = "" if isinstance(error, msgspec.ValidationError) else f" ({error})"
            raise InvalidRequestError(
                f"{self._path}{name} must be {kind.rule}, got {shown(raw)}{reason}"
            ) from None

    def given(self, name: str, kind: FieldKind[T]) -> T:
        """Raises InvalidRequestError if the field is absent."""
        value = self.read(name, kind)
        if value is None:
            raise InvalidRequestError(f"{self._path}{name} is missing: send {kind.rule}")
        return value

    def part(self, name: str) -> "Fields":
        """Returns the fields of a nested object. If the object is absent, the result has no
        fields."""
        if name not in self._parts:
            path = f"{self._path}{name}."
            self._parts[name] = Fields(self.read(name, OBJECT) or {}, path)
        return self._parts[name]

    def fill(self, form: type[F]) -> F:
        """Reads all fields of a form. Raises InvalidRequestError for a wrong type, a missing field,
        or a field that the form refuses."""
        if form.refused:
            self.refuse(form.refused)
        self._read.update(form.ignored)
        readers, required = _readers(form)
        values: dict[str, Any] = {}
        for name, raw in self._raw.items():
            if (reader := readers.get(name)) is not None:
                self._read.add(name)
                absent = memoryview(raw) == b"null"
                if not absent and (value := reader.read(self, name)) is not None:
                    values[reader.attribute] = value
        for name in required:
            if readers[name].attribute not in values:
                rule = readers[name].rule
                raise InvalidRequestError(f"{self._path}{name} is missing: send {rule}")
        return form(**values)

    def parts(
        self, name: str, most: int = MAX_PARTS, text_field: str = ""
    ) -> "list[Fields] | None":
        """If the list has more than `most` objects, raises InvalidRequestError before decoding the
        objects. `text_field`: if set, a string in the list is accepted in place of an object with
        this field."""
        listed = self.read(name, _LIST)
        if listed is None:
            return None
        at_most(f"{self._path}{name}", len(listed), most)
        try:
            objects = [
                {text_field: one} if text_field and begins(one, b'"') else _object.decode(one)
                for one in listed
            ]
        except (msgspec.MsgspecError, RecursionError):
            raise InvalidRequestError(
                f"{self._path}{name} must be {_LIST.rule}, got {shown(self._raw[name])}"
            ) from None
        return [Fields(one, f"{self._path}{name}[{at}].") for at, one in enumerate(objects)]

    def refuse(self, refused: Refused) -> None:
        """Raises InvalidRequestError if the object has an unsupported field. A field whose value
        has no effect is accepted."""
        for name in self._raw.keys() & refused.keys():
            neutral, remedy = refused[name]
            if self.has(name) and self.read(name, ANYTHING) not in neutral:
                raise InvalidRequestError(
                    f"{self._path}{name}={shown(self._raw[name])} is not supported; {remedy}"
                )

    def ignore(self, *names: str) -> None:
        self._read.update(names)

    def leave_out(self, *names: str) -> None:
        """Makes `unread` list further names, for parts of the request that have no effect."""
        self._left_out += names

    def unread(self) -> list[str]:
        """Returns the names of fields that were not read, those of nested objects after a dot, and
        then the names that `leave_out` added."""
        own = [name for name in self._raw if name not in self._read]
        inner = [f"{at}.{name}" for at, part in self._parts.items() for name in part.unread()]
        return own + inner + self._left_out


class _Reader(NamedTuple):
    attribute: str
    read: Callable[[Fields, str], object]
    rule: str


@functools.cache
def _readers(form: type[Form]) -> tuple[dict[str, _Reader], list[str]]:
    """Returns the reader of each field, and the names of required fields."""
    fields = msgspec.structs.fields(form)
    readers = {one.encode_name: _Reader(one.name, *_reader(one.type)) for one in fields}
    return readers, [one.encode_name for one in fields if one.required]


def _reader(hint: Any) -> tuple[Callable[[Fields, str], object], str]:
    kinds, marks = [one for one in get_args(hint) if one is not NoneType], ()
    if NoneType in get_args(hint):
        hint = functools.reduce(operator.or_, kinds)
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
    for kind in (*marks, _KINDS.get(hint)):
        if isinstance(kind, FieldKind):
            return lambda fields, name: fields.read(name, kind), kind.rule
    if hint is Fields:
        return Fields.part, OBJECT.rule
    if hint == list[Fields]:
        (most,) = [one.max_length for one in marks] or [MAX_PARTS]
        return lambda fields, name: fields.parts(name, most), _LIST.rule

    def filled(fields: Fields, name: str) -> object:
        part = fields.part(name)
        return part.fill(hint) if part.names else None

    return filled, OBJECT.rule


def begins(raw: msgspec.Raw, mark: bytes) -> bool:
    """Unlike a conversion to `bytes`, this copies nothing."""
    return memoryview(raw)[:1] == mark


def shown(raw: msgspec.Raw) -> str:
    text = bytes(memoryview(raw)[: 4 * SHOWN_CHARACTERS]).decode("utf-8", "ignore")
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
