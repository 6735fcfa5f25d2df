"""The channel between processes, over the real transfer engine: both ends in this process."""

import dataclasses
import os
import socket
from unittest.mock import Mock

import msgspec
import pytest

from jdisagg.errors import ConfigError, IncompatiblePeerError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvMessage, Posted, Pulled, PullRequest, Refused, Withdraw
from jdisagg.transfer.backend import AnnouncedArrays
from jdisagg.transfer.negotiated_channel import NegotiatedChannel
from jdisagg.transfer.transfer_engine import EngineInlet, EngineOptions, EngineOutlet
from tests.transfer.conformance import LONG_SECONDS, Ends, arrives, case, fails, finished, settled
from tests.transfer.loopback import RECEIVER, SENDER, Loopback, card
from tests.transfer.process_conformance import ProcessConformance


class TestEngineChannel(ProcessConformance):
    pass


@pytest.fixture
def sender(loopback: Loopback, ends: Ends) -> NegotiatedChannel:
    return loopback.channels[SENDER]


def lose(loopback: Loopback, *lost: type[KvMessage]) -> list[type[KvMessage]]:
    """From now on, such messages are lost. Returns the types of those that were."""
    dropped: list[type[KvMessage]] = []

    def tamper(message: KvMessage) -> list[KvMessage]:
        if not isinstance(message, lost):
            return [message]
        dropped.append(type(message))
        return []

    loopback.tamper = tamper
    return dropped


def test_a_doubled_request_is_posted_once_and_a_doubled_answer_pulled_once(
    ends: Ends, loopback: Loopback, sender: NegotiatedChannel
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
    settled(lambda: sender.postings() == 0)


@pytest.mark.parametrize("lost", [PullRequest, Posted])
def test_a_pull_of_which_nobody_hears_ends_at_its_deadline_and_the_next_one_arrives(
    ends: Ends, loopback: Loopback, sender: NegotiatedChannel, lost: type[KvMessage]
) -> None:
    block, dropped = case("tp=2", "tp=2"), lose(loopback, lost)
    ends.sender.offer(7, block.block, 0)
    pull = ends.pull(7, block, 5.0)
    settled(lambda: len(dropped) == 1)
    ends.clock.seconds = 5.0
    fails(pull, r"within the deadline of 5\.0 s")
    loopback.tamper = lambda message: [message]
    arrives(ends.pull(7, block), block)
    settled(lambda: sender.postings() == 0)


@pytest.mark.parametrize("lost", [Pulled, Withdraw])
def test_a_sender_that_never_hears_how_a_pull_ended_frees_the_posting_at_its_deadline(
    ends: Ends, loopback: Loopback, sender: NegotiatedChannel, lost: type[KvMessage]
) -> None:
    block = case("tp=2", "tp=2")
    dropped = lose(loopback, lost, *([Posted] if lost is Withdraw else []))
    ends.sender.offer(7, block.block, 0)
    pull = ends.pull(7, block, 5.0)
    if lost is Pulled:
        finished(pull).arrays()
    else:
        settled(lambda: Posted in dropped)
        pull.cancel()
    settled(lambda: lost in dropped)
    assert sender.postings() == 1
    ends.clock.seconds = 6.0
    settled(lambda: sender.postings() == 0)


def test_an_outlet_that_fails_is_closed_and_the_other_receivers_are_looked_after(
    ends: Ends, loopback: Loopback, sender: NegotiatedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, broken = case("tp=2", "tp=2"), KvEnd("127.0.0.1:3", 0xC)
    heard, peers = loopback.heard(), sender._sender._peers
    ends.sender.offer(7, block.block, 0)
    arrives(ends.pull(7, block), block)
    (request,) = (message for message in heard if isinstance(message, PullRequest))
    sender.handle(broken, request)
    settled(lambda: broken in peers)
    sender.handle(broken, Pulled(request.pull_id))
    settled(lambda: sender.postings() == 0)
    outlet, tick = peers[broken].outlet, EngineOutlet.tick

    def fail(self: EngineOutlet) -> None:
        if self is outlet:
            raise RuntimeError("the engine says no")
        tick(self)

    monkeypatch.setattr(EngineOutlet, "tick", fail)
    lose(loopback, Pulled)
    arrives(ends.pull(7, block, 5.0), block)
    assert sender.postings() == 1
    ends.clock.seconds = 6.0
    settled(lambda: sender.postings() == 0 and broken not in peers)
    loopback.tamper = lambda message: [message]
    arrives(ends.pull(7, block), block)


def test_pieces_under_an_id_that_was_not_posted_end_at_the_deadline_and_the_connection_is_made_anew(
    ends: Ends, loopback: Loopback, sender: NegotiatedChannel
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
    pull = ends.pull(7, block, 5.0)
    settled(lambda: sender.postings() == 0)
    assert not pull.is_ready()
    ends.clock.seconds = 5.0
    fails(pull, r"has not arrived within the deadline of 5\.0 s")
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
        waiting = ends.pull(8, block)
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
    fails(ends.pull(7, block), "deleted")


def change_requests(loopback: Loopback, **fields: int) -> None:
    def change(message: KvMessage) -> list[KvMessage]:
        asks = isinstance(message, PullRequest)
        return [msgspec.structs.replace(message, **fields) if asks else message]

    loopback.tamper = change


def test_another_number_of_transports_is_refused_on_both_sides_before_anything_connects(
    ends: Ends, loopback: Loopback
) -> None:
    block = case("tp=1", "tp=1")
    ends.sender.offer(7, block.block, 0)
    ends.receiver.connect("other", card(SENDER, transports=4))
    target = dataclasses.replace(block.target(0), peer="other")
    with pytest.raises(IncompatiblePeerError, match="transports is 2 here and 4 on peer 'other'"):
        finished(ends.receiver.pull(7, target, LONG_SECONDS)).arrays()
    change_requests(loopback, transports=4)
    said = "transports is 2 at the sender and 4 at the receiver"
    with pytest.raises(IncompatiblePeerError, match=said):
        finished(ends.pull(7, block)).arrays()


def test_a_request_for_another_boot_of_the_process_is_refused(
    ends: Ends, loopback: Loopback
) -> None:
    block = case("tp=1", "tp=1")
    ends.sender.offer(7, block.block, 0)
    change_requests(loopback, sender_boot_id=0xDEAD)
    fails(ends.pull(7, block), "has restarted")


def test_an_answer_from_somebody_else_is_ignored(ends: Ends, loopback: Loopback) -> None:
    block, messages = case("tp=1", "tp=1"), loopback.heard()
    pull = ends.pull(7, block)
    (request,) = (message for message in messages if isinstance(message, PullRequest))
    lie = Refused(request.pull_id, "HandoffError", "a lie")
    loopback.channels[RECEIVER].handle(KvEnd(SENDER.control, 0xDEAD), lie)
    ends.sender.offer(7, block.block, 0)
    finished(pull).arrays()


def test_pulls_of_a_peer_that_is_disconnected_fail_and_the_other_peers_go_on(ends: Ends) -> None:
    block = case("tp=2", "tp=2")
    ends.receiver.connect("gone", card(KvEnd("127.0.0.1:3", 0xC)))
    gone = dataclasses.replace(block.target(0), peer="gone")
    lost, waiting = ends.receiver.pull(7, gone, LONG_SECONDS), ends.pull(7, block)
    ends.receiver.disconnect("gone")
    ends.receiver.disconnect("gone")
    fails(lost, "'gone' was disconnected")
    fails(ends.receiver.pull(7, gone, LONG_SECONDS), "'gone' is not connected")
    ends.sender.offer(7, block.block, 0)
    finished(waiting).arrays()


def test_the_kv_plane_never_listens_on_every_interface_nor_where_a_name_means_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for host in ("", "0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="every interface"):
            EngineOptions(host)
    assert EngineOptions("localhost").start_server().address().startswith("127.0.0.1:")
    everywhere = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", 0))
    unknown = socket.gaierror(-2, "Name or service not known")
    for found, said in (([everywhere], "means every interface"), (unknown, "has no address")):
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=[found]))
        with pytest.raises(ConfigError, match=f"KV plane: host 'kv.example' {said}"):
            EngineOptions("kv.example").start_server()


def test_pieces_that_cannot_be_received_are_given_back_at_once(
    ends: Ends, loopback: Loopback, sender: NegotiatedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without room for what comes: the sender must not hold it until the deadline."""
    block, refused = case("tp=2", "tp=2"), []

    def no_room(inlet: EngineInlet, arrays: AnnouncedArrays) -> None:
        refused.append(arrays.answer.pull_id)
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(EngineInlet, "pull", no_room)
    ends.sender.offer(7, block.block, 0)
    fails(ends.pull(7, block), "out of memory")
    assert refused
    settled(lambda: sender.postings() == 0)
    assert loopback.channels[RECEIVER].under_way() == 0
