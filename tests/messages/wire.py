"""The schema of everything that processes send each other, and whether another one only adds to it.

    python -m tests.messages.wire

writes the schema of this tree to `wire.json`: that of protocol version OLDEST, which later versions
must extend."""

import json
import typing
from pathlib import Path
from typing import Any

import msgspec

from jdisagg.messages.instance import FollowerMessage, LeaderMessage
from jdisagg.messages.kv_plane import KvPlanePort
from jdisagg.messages.packed import OLDEST, PROTOCOL
from jdisagg.messages.ports import DecodePort, PeerPort, PrefillPort
from jdisagg.messages.registry import RegistryPort
from jdisagg.messages.roles import ClusterRolesPort, RolePort
from jdisagg.messages.spans import SpanSessionPort
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.messages.weights import OfferPort, WeightsPort
from jdisagg.service.internal import rpc

PATH = Path(__file__).with_name("wire.json")
PORTS = (
    PrefillPort,
    DecodePort,
    PeerPort,
    SpanSessionPort,
    KvPlanePort,
    RegistryPort,
    RolePort,
    ClusterRolesPort,
    WeightsPort,
    OfferPort,
)
# Messages within an instance, whose processes have the same version.
WITHIN = (StepCommand, StepResult, FollowerMessage, LeaderMessage)


def kinds() -> dict[str, object]:
    """Returns everything that goes over a connection: arguments and replies of every port's
    methods, and each message of the unions that streams and files carry."""
    found = sent()
    for port in PORTS:
        for method in rpc.methods(port):
            hints = typing.get_type_hints(getattr(port, method.name))
            hints.pop("return")
            name = f"{port.__name__}.{method.name}"
            found[name] = tuple[tuple(hints.values())] if hints else type(None)
    found |= within()
    return {name: kind for name, kind in found.items() if kind is not type(None)}


def sent() -> dict[str, object]:
    """Returns the arguments and replies of every port's methods."""
    found: dict[str, object] = {}
    for port in PORTS:
        for method in rpc.methods(port):
            reply = typing.get_type_hints(getattr(port, method.name))["return"]
            reply = typing.get_args(reply)[0] if method.streams else reply
            found[f"{port.__name__}.{method.name}"] = method.arguments_kind
            found[f"{port.__name__}.{method.name} reply"] = reply
    return found


def within() -> dict[str, object]:
    """Returns the messages within an instance."""
    return {kind.__name__: kind for union in WITHIN for kind in typing.get_args(union)}


def schema(found: dict[str, object]) -> dict[str, Any]:
    """Returns the JSON schema of kinds, without texts for readers: one entry for each kind, and one
    for each class by its name."""
    roots, classes = msgspec.json.schema_components(list(found.values()))
    return _bare({**classes, **dict(zip(found, roots, strict=True))})


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        texts = ("description", "title")
        bare = {name: _bare(inner) for name, inner in value.items() if name not in texts}
        if bare.get("type") == "array" and "items" not in bare:
            bare.setdefault("prefixItems", [])  # left out by msgspec 0.23 if empty
        return bare
    return [_bare(inner) for inner in value] if isinstance(value, list | tuple) else value


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns the entries of `old` that `new` does not keep: each must be equal, or have more
    fields, all with defaults, behind those of `old`."""
    return [name for name, value in old.items() if not _extends(value, new.get(name))]


def _extends(old: dict[str, Any], new: dict[str, Any] | None) -> bool:
    if new is None or old == new:
        return new is not None
    if "properties" in old and "properties" in new:  # sent with the names of its fields
        same = {**old, "properties": {**new["properties"], **old["properties"]}} == new
        return same and old.get("required", []) == new.get("required", [])
    before, after = old.get("prefixItems"), new.get("prefixItems")
    if before is None or after is None or after[: len(before)] != before:
        return False
    rest = ("prefixItems", "minItems", "maxItems")
    same = {key: value for key, value in old.items() if key not in rest} == {
        key: value for key, value in new.items() if key not in rest
    }
    return same and new.get("minItems", 0) <= len(before)


if __name__ == "__main__":
    assert PROTOCOL == OLDEST, "the schema of an older version is kept"
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in schema(sent()).items()]
    text = ",\n".join(sorted(lines))
    PATH.write_text(f'{{"protocol": {OLDEST}, "schema": {{\n{text}\n}}}}\n', encoding="utf-8")
