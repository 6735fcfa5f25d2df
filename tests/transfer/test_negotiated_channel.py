"""The channel between processes, over the real transfer engine: both ends in this process."""

import dataclasses
import os
import socket

import msgspec
import pytest

from jdisagg.errors import ConfigError, HandoffError, IncompatiblePeerError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import (
    KvMessage,
    Open,
    Posted,
    Pulled,
    PullRequest,
    Refused,
    Withdraw,
)
from jdisagg.transfer.backend import AnnouncedArrays
from jdisagg.transfer.transfer_engine import EngineInlet, EngineOptions, EngineOutlet
from tests.transfer.conformance import LONG_SECONDS, Ends, arrives, case, finished, settled
from tests.transfer.loopback import RECEIVER, SENDER, Loopback, card
from tests.transfer.process_conformance import ProcessConformance


class TestEngineChannel(ProcessConformance):
    pass


def test_a_doubled_request_is_posted_once_and_a_doubled_answer_pulled_once(
    ends: Ends, loopback: Loopback
) -> None:
    doubled: list[KvMessage] = []

    def twice(message: KvMessage) -> list[KvMessage]:
        doubled.append(message)
        return [message, message]

    loopback.tamper = twice
    block = case("tp=2", "dp=2,tp=2")
    ends.sender.offer(7, block.block, 0)
    for _ in range(5):
        arrives(ends.pull(7, block), block)
    assert {type(message) for message in doubled} >= {PullRequest, Posted}
    settled(lambda: loopback.channels[SENDER].postings() == 0)


@pytest.mark.parametrize("lost", [PullRequest, Posted])
def test_a_pull_of_which_nobody_hears_ends_at_its_deadline_and_the_next_one_arrives(
    ends: Ends, loopback: Loopback, lost: type[KvMessage]
) -> None:
    block, dropped = case("tp=2", "tp=2"), []

    def lose(message: KvMessage) -> list[KvMessage]:
        dropped.extend([message] if isinstance(message, lost) else [])
        return [] if isinstance(message, lost) else [message]

    loopback.tamper = lose
    ends.sender.offer(7, block.block, 0)
    pull = ends.receiver.pull(7, block.target(0), 5.0)
    settled(lambda: len(dropped) == 1)
    ends.clock.seconds = 5.0
    with pytest.raises(HandoffError, match=r"within the deadline of 5\.0 s"):
        pull.arrays()
    loopback.tamper = lambda message: [message]
    arrives(ends.pull(7, block), block)
    settled(lambda: loopback.channels[SENDER].postings() == 0)


@pytest.mark.parametrize("lost", [Pulled, Withdraw])
def test_a_sender_that_never_hears_how_a_pull_ended_frees_the_posting_at_its_deadline(
    ends: Ends, loopback: Loopback, lost: type[KvMessage]
) -> None:
    block, dropped = case("tp=2", "tp=2"), []

    def lose(message: KvMessage) -> list[KvMessage]:
        gone = isinstance(message, lost) or (lost is Withdraw and isinstance(message, Posted))
        if gone:
            dropped.append(type(message))
        return [] if gone else [message]

    loopback.tamper = lose
    ends.sender.offer(7, block.block, 0)
    pull = ends.receiver.pull(7, block.target(0), 5.0)
    if lost is Pulled:
        finished(pull).arrays()
    else:
        settled(lambda: Posted in dropped)
        pull.cancel()
    settled(lambda: lost in dropped)
    assert loopback.channels[SENDER].postings() == 1
    ends.clock.seconds = 6.0
    settled(lambda: loopback.channels[SENDER].postings() == 0)


def test_an_outlet_that_fails_is_closed_and_the_other_receivers_are_looked_after(
    ends: Ends, loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, broken, sender = (
        case("tp=2", "tp=2"),
        KvEnd("127.0.0.1:3", 0xC),
        loopback.channels[SENDER],
    )
    sender.handle(broken, Open(SENDER.boot_id, 1, 2))
    peers = sender._sender._peers
    settled(lambda: broken in peers)
    outlet, tick = peers[broken].outlet, EngineOutlet.tick

    def fail(self: EngineOutlet) -> None:
        if self is outlet:
            raise RuntimeError("the engine says no")
        tick(self)

    monkeypatch.setattr(EngineOutlet, "tick", fail)
    loopback.tamper = lambda message: [] if isinstance(message, Pulled) else [message]
    ends.sender.offer(7, block.block, 0)
    arrives(ends.pull(7, block, 5.0), block)
    assert sender.postings() == 1
    ends.clock.seconds = 6.0
    settled(lambda: sender.postings() == 0 and broken not in peers)
    loopback.tamper = lambda message: [message]
    arrives(ends.pull(7, block), block)


def test_pieces_under_an_id_that_was_not_posted_end_at_the_deadline_and_the_connection_is_made_anew(
    ends: Ends, loopback: Loopback
) -> None:
    """A wrong id is what a lost posting looks like: the engine never answers it."""
    block, numbers = case("tp=2", "tp=2"), []

    def misdirect(message: KvMessage) -> list[KvMessage]:
        if isinstance(message, PullRequest):
            numbers.append(message.link)
        if isinstance(message, Posted) and len(numbers) == 2:
            loopback.channels[SENDER].handle(RECEIVER, Pulled(message.pull_id))
            return [msgspec.structs.replace(message, address=other.address)]
        return [message]

    other = EngineOutlet(EngineOptions(transports=2))  # where nothing is posted
    loopback.tamper = misdirect
    ends.sender.offer(7, block.block, 0)
    arrives(ends.pull(7, block), block)
    pull = ends.receiver.pull(7, block.target(0), 5.0)
    settled(lambda: loopback.channels[SENDER].postings() == 0)
    assert not pull.is_ready()
    ends.clock.seconds = 5.0
    with pytest.raises(HandoffError, match=r"has not arrived within the deadline of 5\.0 s"):
        pull.arrays()
    settled(lambda: loopback.channels[RECEIVER].under_way() == 0)
    arrives(ends.pull(7, block), block)
    assert numbers[0] == numbers[1] < numbers[2]
    other.close(in_flight=False)


def test_connections_that_are_made_anew_leave_no_threads_behind(
    ends: Ends, loopback: Loopback
) -> None:
    block, numbers = case("tp=2", "tp=2"), set[int]()

    def note(message: KvMessage) -> list[KvMessage]:
        numbers.update([message.link] if isinstance(message, Posted) else [])
        return [message]

    loopback.tamper = note
    ends.sender.offer(7, block.block, 0)
    arrives(ends.pull(7, block), block)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        waiting = ends.receiver.pull(8, block.target(0), LONG_SECONDS)
        ends.receiver.disconnect("")
        assert finished(waiting).failed() is not None
        ends.receiver.connect("", card(SENDER))
        settled(lambda: loopback.channels[RECEIVER].under_way() == 0)
        arrives(ends.pull(7, block), block)
    assert len(numbers) == 6
    settled(lambda: len(os.listdir("/proc/self/task")) <= before)


def test_a_deleted_block_fails_its_pull_and_the_process_lives(ends: Ends) -> None:
    block = case("tp=2", "tp=2")
    copy = block.block + 0
    ends.sender.offer(7, copy, 0)
    copy.delete()
    with pytest.raises(HandoffError, match="deleted"):
        finished(ends.receiver.pull(7, block.target(0), LONG_SECONDS)).arrays()


def test_another_number_of_transports_is_refused_on_both_sides_before_anything_connects(
    ends: Ends, loopback: Loopback
) -> None:
    block = case("tp=1", "tp=1")
    ends.sender.offer(7, block.block, 0)
    ends.receiver.connect("other", card(SENDER, transports=4))
    target = dataclasses.replace(block.target(0), peer="other")
    with pytest.raises(IncompatiblePeerError, match="transports is 2 here and 4 on peer 'other'"):
        finished(ends.receiver.pull(7, target, LONG_SECONDS)).arrays()
    loopback.tamper = lambda message: [
        msgspec.structs.replace(message, transports=4)
        if isinstance(message, PullRequest)
        else message
    ]
    with pytest.raises(
        IncompatiblePeerError, match="transports is 2 at the sender and 4 at the receiver"
    ):
        finished(ends.receiver.pull(7, block.target(0), LONG_SECONDS)).arrays()


def test_a_request_for_another_boot_of_the_process_is_refused(
    ends: Ends, loopback: Loopback
) -> None:
    block = case("tp=1", "tp=1")
    ends.sender.offer(7, block.block, 0)
    loopback.tamper = lambda message: [
        msgspec.structs.replace(message, sender_boot_id=0xDEAD)
        if isinstance(message, PullRequest)
        else message
    ]
    with pytest.raises(HandoffError, match="has restarted"):
        finished(ends.receiver.pull(7, block.target(0), LONG_SECONDS)).arrays()


def test_an_answer_from_somebody_else_is_ignored(ends: Ends, loopback: Loopback) -> None:
    requests: list[PullRequest] = []

    def note(message: KvMessage) -> list[KvMessage]:
        requests.extend([message] if isinstance(message, PullRequest) else [])
        return [message]

    loopback.tamper = note
    block = case("tp=1", "tp=1")
    pull = ends.receiver.pull(7, block.target(0), LONG_SECONDS)
    loopback.channels[RECEIVER].handle(
        KvEnd(SENDER.control, 0xDEAD), Refused(requests[0].pull_id, "HandoffError", "a lie")
    )
    ends.sender.offer(7, block.block, 0)
    finished(pull).arrays()


def test_pulls_of_a_peer_that_is_disconnected_fail_and_the_other_peers_go_on(ends: Ends) -> None:
    block = case("tp=2", "tp=2")
    ends.receiver.connect("gone", card(KvEnd("127.0.0.1:3", 0xC)))
    lost = ends.receiver.pull(7, dataclasses.replace(block.target(0), peer="gone"), LONG_SECONDS)
    waiting = ends.receiver.pull(7, block.target(0), LONG_SECONDS)
    ends.receiver.disconnect("gone")
    ends.receiver.disconnect("gone")
    with pytest.raises(HandoffError, match="'gone' was disconnected"):
        finished(lost).arrays()
    with pytest.raises(HandoffError, match="'gone' is not connected"):
        ends.receiver.pull(
            7, dataclasses.replace(block.target(0), peer="gone"), LONG_SECONDS
        ).arrays()
    ends.sender.offer(7, block.block, 0)
    finished(waiting).arrays()


def test_the_kv_plane_never_listens_on_every_interface() -> None:
    for host in ("", "0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="every interface"):
            EngineOptions(host)
    assert EngineOptions("localhost").start_server().address().startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("address", "said"), [("0.0.0.0", "means every interface"), (None, "has no address")]
)
def test_a_name_that_the_kv_plane_cannot_listen_on_is_refused(
    address: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    with pytest.raises(ConfigError, match=f"KV plane: host 'kv.example' {said}"):
        EngineOptions("kv.example").start_server()


def test_pieces_that_cannot_be_received_are_given_back_at_once(
    ends: Ends, loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without room for what comes: the sender must not hold it until the deadline."""
    block, refused = case("tp=2", "tp=2"), []

    def no_room(inlet: EngineInlet, arrays: AnnouncedArrays) -> None:
        refused.append(arrays.answer.pull_id)
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(EngineInlet, "pull", no_room)
    ends.sender.offer(7, block.block, 0)
    with pytest.raises(HandoffError, match="out of memory"):
        finished(ends.receiver.pull(7, block.target(0), LONG_SECONDS)).arrays()
    assert refused
    settled(lambda: loopback.channels[SENDER].postings() == 0)
    assert loopback.channels[RECEIVER].under_way() == 0
