"""Every message arrives as sent. Other bytes raise an InvalidRequestError and use little memory."""

import hashlib
import json
import tracemalloc
import typing

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdisagg.errors import IncompatiblePeerError, InvalidRequestError
from jdisagg.messages.instance import FollowerMessage, LeaderMessage
from jdisagg.messages.kv_plane import KvPlanePort
from jdisagg.messages.packed import PROTOCOL, Unpacker, check_protocol, pack
from jdisagg.messages.ports import DecodePort, PeerPort, PrefillPort
from jdisagg.messages.registry import RegistryPort
from jdisagg.messages.roles import ClusterRolesPort, RolePort
from jdisagg.messages.spans import SpanSessionPort
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.service.internal import rpc
from tests.messages.values import of_annotation

PORTS = (
    PrefillPort,
    DecodePort,
    PeerPort,
    SpanSessionPort,
    KvPlanePort,
    RegistryPort,
    RolePort,
    ClusterRolesPort,
)


def _kinds() -> dict[str, object]:
    """Returns everything that goes over a connection: arguments and replies of every port's
    methods, and each message of the unions that streams and files carry."""
    found: dict[str, object] = {}
    for port in PORTS:
        for method in rpc.methods(port):
            hints = typing.get_type_hints(getattr(port, method.name))
            reply = hints.pop("return")
            reply = typing.get_args(reply)[0] if method.streams else reply
            if hints:
                found[f"{port.__name__}.{method.name}"] = tuple[tuple(hints.values())]
            found[f"{port.__name__}.{method.name} reply"] = reply
    for union in (StepCommand, StepResult, FollowerMessage, LeaderMessage):
        for kind in typing.get_args(union):
            found[kind.__name__] = kind
    return {name: kind for name, kind in found.items() if kind is not type(None)}


KINDS = _kinds()
QUICK = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("name", KINDS)
def test_a_message_arrives_equal(name: str) -> None:
    unpack = Unpacker(KINDS[name])

    @QUICK
    @given(of_annotation(KINDS[name]))
    def check(message: object) -> None:
        assert unpack(pack(message)) == message

    check()


@pytest.mark.parametrize("name", KINDS)
def test_spoiled_bytes_are_refused_or_are_another_message(name: str) -> None:
    """Truncated, flipped or replaced bytes give a typed error, or a message whose fields have their
    types, so that it packs and unpacks to the same bytes."""
    unpack = Unpacker(KINDS[name])

    @QUICK
    @given(of_annotation(KINDS[name]), st.data())
    def check(message: object, data: st.DataObject) -> None:
        sent = bytearray(pack(message))
        match data.draw(st.sampled_from(["cut", "flip", "replace"])):
            case "cut":
                sent = sent[: data.draw(st.integers(0, len(sent) - 1))]
            case "flip":
                bit = data.draw(st.integers(0, 8 * len(sent) - 1))
                sent[bit // 8] ^= 1 << bit % 8
            case _:
                at = data.draw(st.integers(0, len(sent) - 1))
                sent[at : at + 4] = data.draw(st.binary(max_size=8))
        try:
            read = unpack(bytes(sent))
        except InvalidRequestError:
            return
        again = pack(read)
        assert pack(unpack(again)) == again

    check()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "spoiled",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x92\xa5Other\xc3",
        b"\xa2\xff\xfe",
    ],
    ids=[
        "nothing",
        "never used",
        "an array of 4 billion",
        "a map of 4 billion",
        "a text of 4 GB",
        "4 GB",
        "deep",
        "wrong tag",
        "no UTF-8",
    ],
)
def test_what_is_no_message_is_refused(name: str, spoiled: bytes) -> None:
    unpack = Unpacker(KINDS[name])
    with pytest.raises(InvalidRequestError):
        unpack(spoiled)


@pytest.mark.parametrize("name", KINDS)
def test_lengths_that_are_only_claimed_take_no_memory(name: str) -> None:
    """Replaces the length of each array by 100 million, one at a time."""
    unpack = Unpacker(KINDS[name])

    @settings(QUICK, max_examples=5)
    @given(of_annotation(KINDS[name]))
    def check(message: object) -> None:
        sent = pack(message)
        for at in [at for at, byte in enumerate(sent) if 0x80 <= byte < 0xC0][:20]:
            kind = {0x80: b"\xdf", 0x90: b"\xdd", 0xA0: b"\xdb", 0xB0: b"\xdb"}[sent[at] & 0xF0]
            claimed = sent[:at] + kind + b"\x06\x00\x00\x00" + sent[at + 1 :]
            try:
                unpack(claimed)
            except InvalidRequestError:
                continue

    tracemalloc.start()
    try:
        check()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("theirs", [None, "3", str(PROTOCOL + 1), b"\xff", ""])
def test_another_protocol_is_refused_naming_both(theirs: str | bytes | None) -> None:
    named = theirs if isinstance(theirs, str) else "none"
    with pytest.raises(IncompatiblePeerError, match=f"{named} and this process speaks {PROTOCOL}"):
        check_protocol(theirs, "PeerPort")
    check_protocol(str(PROTOCOL), "PeerPort")


def test_a_number_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        pack((2**64,))
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        pack(("\ud800",))


# Whoever changes a message counts PROTOCOL up and writes down what it is now.
WIRE = (28, "8b3d7e2d806c2e22")


def test_a_message_that_has_changed_is_another_protocol() -> None:
    """Covers order and types of all fields, nested ones included. Names are not sent."""
    schemas, parts = msgspec.json.schema_components(list(KINDS.values()))
    text = json.dumps([_bare(one) for one in (*schemas, parts)], sort_keys=True)
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert (PROTOCOL, found) == WIRE, "count PROTOCOL up, and write down its number and this digest"


def _bare(schema: object) -> object:
    """Removes texts for readers."""
    if isinstance(schema, dict):
        return {
            name: _bare(inner)
            for name, inner in schema.items()
            if name not in ("description", "title")
        }
    return [_bare(inner) for inner in schema] if isinstance(schema, list) else schema
