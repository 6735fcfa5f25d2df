"""Every message arrives as sent. Other bytes raise an InvalidRequestError and use little memory."""

import contextlib
import hashlib
import importlib
import inspect
import json
import pkgutil
import tracemalloc
from typing import Protocol, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jdisagg.messages
from jdisagg.errors import IncompatiblePeerError, InvalidRequestError
from jdisagg.messages.kv_plane import WORKFLOW, BlockState, KvMessage
from jdisagg.messages.packed import OLDEST, PROTOCOL, Unpacker, check_protocol, pack, protocol_text
from jdisagg.messages.ports import PeerPort
from jdisagg.plain import Message
from jdisagg.service.internal import rpc
from tests.messages.values import of_annotation
from tests.messages.wire import PATH, breaks, kinds, schema, sent, within

KINDS = kinds()
TRIED = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
EXAMPLES = pytest.mark.parametrize("examples", [4, pytest.param(15, marks=pytest.mark.slow)])


@EXAMPLES
@pytest.mark.parametrize("name", KINDS)
def test_a_message_arrives_equal_and_spoiled_is_refused_or_another(
    name: str, examples: int
) -> None:
    """Truncated, flipped or replaced bytes give a typed error, or a message whose fields have their
    types, so that it packs and unpacks to the same bytes."""
    unpack = Unpacker(KINDS[name])

    @settings(TRIED, max_examples=examples)
    @given(of_annotation(KINDS[name]), st.data())
    def check(message: object, data: st.DataObject) -> None:
        sent = bytearray(pack(message))
        assert unpack(bytes(sent)) == message
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


SPOILED = {
    "nothing": b"",
    "a byte that msgpack never uses": b"\xc1",
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "a text of 4 GB": b"\xdb\xff\xff\xff\xff",
    "4 GB": b"\xc6\xff\xff\xff\xff",
    "a hundred thousand deep": b"\x91" * 100_000,
    "a wrong tag": b"\x92\xa5Other\xc3",
    "no UTF-8": b"\xa2\xff\xfe",
}


def test_what_is_no_message_is_refused() -> None:
    taken = []
    for name, kind in KINDS.items():
        unpack = Unpacker(kind)
        for spoiled, data in SPOILED.items():
            with contextlib.suppress(InvalidRequestError):
                taken.append((name, spoiled, unpack(data)))
    assert not taken


@EXAMPLES
@pytest.mark.parametrize("name", KINDS)
def test_lengths_that_are_only_claimed_take_no_memory(name: str, examples: int) -> None:
    """Replaces the length of each array by 100 million, one at a time."""
    unpack = Unpacker(KINDS[name])

    @settings(TRIED, max_examples=-(-examples // 3))
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


@pytest.mark.parametrize(
    "theirs",
    [None, "3", str(OLDEST - 1), f"{PROTOCOL + 9}/{PROTOCOL + 1}", b"\xff", "", "9" * 5000, "1/x"],
)
def test_a_protocol_that_does_not_work_with_ours_is_refused_naming_both(
    theirs: str | bytes | None,
) -> None:
    named = theirs if isinstance(theirs, str) else "none"
    works = PROTOCOL if OLDEST == PROTOCOL else f"{OLDEST} to {PROTOCOL}"
    with pytest.raises(IncompatiblePeerError, match=f"{named} and this process speaks {works}"):
        check_protocol(theirs, "PeerPort")


@pytest.mark.parametrize(
    "theirs", [protocol_text(), str(OLDEST), f"{PROTOCOL + 1}/{PROTOCOL}", f"{PROTOCOL + 5}/3"]
)
def test_versions_that_work_together_are_served_but_not_within_an_instance(theirs: str) -> None:
    check_protocol(theirs, "PeerPort")
    if int(theirs.partition("/")[0]) != PROTOCOL:
        with pytest.raises(IncompatiblePeerError, match=f"this process speaks {PROTOCOL};"):
            check_protocol(theirs, "Instance", same=True)


def test_whatever_holds_fields_among_the_messages_is_a_frozen_message() -> None:
    """Dataclasses and messages need other functions to change them."""
    others = []
    for module in pkgutil.iter_modules(jdisagg.messages.__path__):
        found = importlib.import_module(f"jdisagg.messages.{module.name}")
        for kind in vars(found).values():
            if inspect.isclass(kind) and kind.__module__ == found.__name__:
                config = getattr(kind, "__struct_config__", None)
                frozen = config and config.frozen and config.gc is False
                if getattr(kind, "__annotations__", None) and not frozen:
                    others.append(kind)
    assert not others


class Old(Message, frozen=True, tag="Both"):
    first: int
    second: str = "x"


class New(Message, frozen=True, tag="Both"):
    first: int
    second: str = "x"
    third: tuple[int, ...] = (3,)


class _OldPort(Protocol):
    async def call(self, one: Old) -> Old: ...


class _NewPort(Protocol):
    async def call(self, one: New, two: int = 2) -> New: ...


def test_fields_and_parameters_that_a_version_adds_are_ignored_or_filled_in() -> None:
    (old,), (new,) = rpc.methods(_OldPort), rpc.methods(_NewPort)
    assert old.unpack_arguments(pack((New(1, "y", (4,)), 5))) == (Old(1, "y"),)
    assert new.unpack_arguments(pack((Old(1, "y"),))) == (New(1, "y", (3,)), 2)
    assert old.unpack_reply(pack(New(1, "y"))) == Old(1, "y")
    assert new.unpack_reply(pack(Old(1, "y"))) == New(1, "y")


def test_a_number_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        pack((2**64,))
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        pack(("\ud800",))


def test_the_workflow_of_a_block_reaches_every_state_by_messages_that_exist() -> None:
    named = {kind.__name__ for kind in get_args(KvMessage)} | {"acknowledge", ""}
    assert {message for _, _, message in WORKFLOW.values()} <= named
    assert hasattr(PeerPort, "acknowledge")
    reached = {BlockState.OFFERED}
    for _ in BlockState:
        reached |= {after for (state, _), (_, after, _) in WORKFLOW.items() if state in reached}
    assert reached == set(BlockState)
    assert set(BlockState) - {state for state, _ in WORKFLOW} == {BlockState.VERIFIED}


# Whoever changes a message counts PROTOCOL up and writes down what it is now.
WIRE = (53, "17742fb288f911fb")


def test_a_message_that_has_changed_is_another_protocol() -> None:
    """Covers order and types of all fields, nested ones included. Names are not sent."""
    text = json.dumps(schema({**sent(), **within()}), sort_keys=True)
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert (PROTOCOL, found) == WIRE, "count PROTOCOL up, and write down its number and this digest"


def test_this_version_only_adds_fields_to_the_oldest_that_it_works_with() -> None:
    kept = json.loads(PATH.read_text(encoding="utf-8"))
    assert kept["protocol"] == OLDEST, "run python -m tests.messages.wire"
    broken = breaks(kept["schema"], schema(sent()))
    assert not broken, f"{broken} break version {OLDEST}: set OLDEST = PROTOCOL, and run wire.py"


def test_only_fields_with_defaults_at_the_end_are_an_extension() -> None:
    def of(*fields: object) -> dict[str, object]:
        made = msgspec.defstruct("M", fields, array_like=True, tag=True)  # pyright: ignore
        return msgspec.json.schema_components([made])[1]

    old = of(("a", int))
    assert not breaks(old, of(("a", int), ("b", str, "13612ab1c14e075c")))
    for changed in (
        of(("a", int), ("b", str)),
        of(("b", str, "13612ab1c14e075c")),
        of(("a", float)),
        of(("b", str, "13612ab1c14e075c"), ("a", int, 1)),
    ):
        assert breaks(old, changed) == ["M"]
    assert breaks(old, {}) == ["M"]
