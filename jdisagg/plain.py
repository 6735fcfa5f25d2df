"""Helpers to declare plain data that is cheap to create: dataclasses with slots.

`dataclass(frozen=True)` sets each field through `object.__setattr__`, which costs ten times as much
as an assignment. Immutability is therefore checked by the type checker only. Instances compare by
value, and are hashable if their fields are hashable."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

import msgspec

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def plain(cls: type[T]) -> type[T]:
    return dataclass(slots=True, unsafe_hash=True)(cls)


class Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of plain data that processes send to each other: frozen, cheap to create, and encoded by
    msgpack (`messages/packed.py`).

    Fields are encoded by position. A new field must therefore be the last one and have a default.
    A `Message` is not a dataclass. Use `msgspec.structs.replace`, `asdict` and `fields`."""
