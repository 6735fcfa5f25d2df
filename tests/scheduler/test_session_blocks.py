"""Which blocks belong to which session, and which pauses have begun or ended."""

from jdisagg.prompt.hints import Hints, Retention
from jdisagg.request import Request
from jdisagg.scheduler.retention import KeptSession, SessionBlocks

A, B, C, D = (bytes([letter]) for letter in b"abcd")


def request(session: str = "s", tenant: str = "", pause: float = 0.0, scope: str = "") -> Request:
    hints = Hints(session, Retention(1.0, 60.0), pause_seconds=pause)
    return Request("r", (1,), tenant=tenant, cache_scope=scope, hints=hints)


PLAIN = Request("r", (1,))


def made(*cached: bytes, sessions: int = 9, most: int = 99) -> SessionBlocks:
    return SessionBlocks(set(cached).__contains__, sessions, most)


def of(blocks: SessionBlocks, session: str = "s", tenant: str = "") -> KeptSession:
    found = blocks.find((tenant, "", session))
    assert found is not None
    return found


def test_a_block_that_another_request_used_is_no_sessions_own() -> None:
    blocks = made(A)  # before the session
    blocks.noted(request(), (A, B, C, D), 1.0)
    assert of(blocks).own == {B, C, D}
    blocks.noted(PLAIN, (A, B), 2.0)
    blocks.noted(request("t"), (A, C), 3.0)
    assert of(blocks).own == {D} and not of(blocks, "t").own
    blocks.noted(request(), (A, B, C, D), 4.0)
    assert of(blocks).own >= {D} and blocks.drop(("", "", "s")) >= {D}
    assert blocks.find(("", "", "s")) is None and of(blocks, "t").chain == (A, C)


def test_blocks_of_earlier_turns_stay_its_own() -> None:
    blocks = made()
    blocks.noted(request(), (A, B), 1.0)
    blocks.noted(request(), (A, C), 2.0)
    assert of(blocks).chain == (A, C) and of(blocks).own == {A, B, C}


def test_equal_keys_of_two_tenants_are_two_sessions() -> None:
    blocks = made()
    blocks.noted(request(tenant="one"), (A,), 1.0)
    blocks.noted(request(tenant="two"), (B,), 2.0)
    blocks.noted(request(scope="salt"), (C,), 3.0)
    assert of(blocks, tenant="one").own == {A} and of(blocks, tenant="two").own == {B}
    assert blocks.find(("", "", "s")) is None and len(blocks) == 3


def test_sessions_unused_for_longest_are_forgotten_first() -> None:
    blocks = made(sessions=2)
    for session in ("a", "b", "a", "c"):
        blocks.noted(request(session), (session.encode(),), 1.0)
    assert blocks.find(("", "", "b")) is None and len(blocks) == 2
    blocks = made(most=3)
    blocks.noted(request("a"), (A, B), 1.0)
    blocks.noted(request("b"), (C, D), 2.0)
    assert blocks.find(("", "", "a")) is None
    blocks.noted(request("b"), (A, B, C, D), 3.0)
    assert len(of(blocks, "b").own) == 4, "a session alone is kept"


def test_a_pause_begins_once_and_ends_by_the_clock_by_a_call_or_with_the_next_turn() -> None:
    blocks = made()
    blocks.noted(request(pause=10.0), (A,), 5.0)
    session = of(blocks)
    assert blocks.begun_pauses() == [session] and not blocks.begun_pauses()
    assert session.pause_left(7.0) == 8.0 and session.retention_left(7.0) == 58.0
    assert not blocks.ended_pauses(14.9)
    assert blocks.ended_pauses(15.0) == [session] and session.pause_until is None
    assert not blocks.ended_pauses(16.0) and session.pause_left(16.0) == 0.0
    blocks.noted(request(pause=10.0), (A,), 20.0)
    assert blocks.end_pause(("", "", "s")) is session
    assert not blocks.begun_pauses() and not blocks.ended_pauses(99.0)
    blocks.noted(request(pause=10.0), (A,), 100.0)
    blocks.noted(request(), (A, B), 101.0)
    assert not blocks.begun_pauses() and not blocks.ended_pauses(999.0)
