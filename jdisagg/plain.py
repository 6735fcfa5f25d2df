"""Plain data that nobody changes: a dataclass with slots which type checkers take for frozen, and
which costs little to make.

`dataclass(frozen=True)` sets each field by a call of `object.__setattr__`, ten times what an
assignment costs, and a request makes about seventy such objects on its way through router and
workers. That none is assigned to is therefore checked where it costs nothing: by the type checker.
Equal by value, hashable where their fields are."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

import msgspec

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def plain(cls: type[T]) -> type[T]:
    return dataclass(slots=True, unsafe_hash=True)(cls)


class Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Plain data that also crosses process boundaries: frozen, cheap to make, and its own wire
    format (`messages/packed.py`). Fields go by position: a new one comes last and has a default. It
    is no dataclass: `msgspec.structs.replace`, `asdict` and `fields` are for it."""
