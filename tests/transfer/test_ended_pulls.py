"""Pulls that end before their pieces arrive, over the transfer engine, which ends none by itself:
cancelled, late, refused, or of a receiver that is gone. Nothing stays at either end."""

import dataclasses
from collections.abc import Callable

import pytest

from jdisagg.messages.kv_plane import KvMessage, Leave, Posted, PullRequest, Refused, Withdraw
from jdisagg.transfer import transfer_engine
from jdisagg.transfer.channel import Pull
from jdisagg.transfer.negotiated_channel import NegotiatedChannel
from jdisagg.transfer.transfer_engine import EngineInlet, EngineOptions
from tests.transfer.conformance import LONG_SECONDS, Case, Ends, arrives, case, fails, settled
from tests.transfer.loopback import RECEIVER, SENDER, Loopback


@dataclasses.dataclass
class Bench:
    """One block, both channels, and every message that was sent. `lose` names those that get
    lost."""

    ends: Ends
    block: Case
    sender: NegotiatedChannel
    receiver: NegotiatedChannel
    sent: list[KvMessage] = dataclasses.field(default_factory=list)
    lose: Callable[[KvMessage], bool] = lambda message: False

    def tamper(self, message: KvMessage) -> list[KvMessage]:
        self.sent.append(message)
        return [] if self.lose(message) else [message]

    def pull(self, offer_id: int, deadline_seconds: float = LONG_SECONDS) -> Pull:
        return self.ends.pull(offer_id, self.block, deadline_seconds)

    def offer(self, offer_id: int) -> None:
        self.sender.offer(offer_id, self.block.block, 0)

    def check(self, pull: Pull) -> None:
        arrives(pull, self.block)

    def waits(self, count: int) -> None:
        settled(lambda: self.sender._sender.waiting() == count)

    def at_rest(self) -> None:
        settled(lambda: self.sender.postings() == self.receiver.under_way() == 0)

    def count(self, kind: type[KvMessage]) -> int:
        return sum(isinstance(message, kind) for message in self.sent)

    @property
    def requests(self) -> list[PullRequest]:
        return [message for message in self.sent if isinstance(message, PullRequest)]


@pytest.fixture
def bench(ends: Ends, loopback: Loopback) -> Bench:
    channels = loopback.channels
    bench = Bench(ends, case("tp=2", "tp=4"), channels[SENDER], channels[RECEIVER])
    loopback.tamper = bench.tamper
    return bench


def test_a_revocation_that_is_lost_is_said_again(bench: Bench) -> None:
    bench.lose = lambda message: isinstance(message, Refused) and bench.count(Refused) == 1
    pull = bench.pull(7)
    bench.sender.revoke(7, "prefill failed")
    settled(lambda: bench.count(Refused) == 1)
    bench.ends.clock.seconds = 1.0
    fails(pull, "^offer 0x7 was revoked: prefill failed$")
    assert bench.count(Posted) == 0
    bench.at_rest()


def test_cancelled_pulls_of_offers_never_made_leave_nothing(bench: Bench) -> None:
    for number in range(3):
        pull = bench.pull(number)
        bench.waits(1)
        pull.cancel()
        bench.waits(0)
    bench.at_rest()
    assert bench.count(Withdraw) == 3
    bench.offer(1)  # too late for the first, in time for another
    assert bench.sender.postings() == 0
    bench.check(bench.pull(1))
    assert bench.count(Leave) == 0, "the connection lives"


def test_a_request_that_comes_after_its_withdrawal_is_not_served(bench: Bench) -> None:
    bench.lose = lambda message: isinstance(message, PullRequest)
    bench.pull(7).cancel()
    bench.at_rest()
    bench.sender.handle(RECEIVER, bench.requests[0])  # it was only late
    bench.lose = lambda message: False
    bench.offer(7)
    bench.check(bench.pull(7))
    bench.at_rest()
    assert bench.sender._sender.waiting() == 0
    assert [message.pull_id for message in bench.sent if isinstance(message, Posted)] == [
        bench.requests[-1].pull_id
    ]


def test_a_request_that_is_doubled_after_its_pull_has_ended_is_not_served_again(
    bench: Bench,
) -> None:
    bench.offer(7)
    bench.check(bench.pull(7))
    bench.at_rest()
    bench.sender.handle(RECEIVER, bench.requests[0])
    bench.check(bench.pull(7))
    assert bench.count(Posted) == 2
    bench.at_rest()


def test_a_pull_ends_at_its_deadline_and_so_does_what_waits_for_it(bench: Bench) -> None:
    bench.lose = lambda message: isinstance(message, Withdraw)
    pull = bench.pull(7, 5.0)
    bench.waits(1)
    bench.ends.clock.seconds = 5.0
    fails(pull, r"within the deadline of 5\.0 s")
    bench.at_rest()  # the sender, too, knows the deadline
    bench.waits(0)


def test_a_receiver_that_is_gone_leaves_nothing_at_the_sender(bench: Bench) -> None:
    for number in range(3):
        bench.pull(number, 5.0)
    bench.waits(3)
    bench.lose = lambda message: True  # killed: it says nothing more
    bench.receiver.close()
    for number in range(2):
        bench.offer(number)
    settled(lambda: bench.sender.postings() == 2)
    bench.ends.clock.seconds = 7.0
    settled(lambda: bench.sender.postings() == bench.sender._sender.waiting() == 0)


def test_a_receiver_that_closes_withdraws_what_it_waits_for(bench: Bench) -> None:
    pull = bench.pull(7)
    bench.waits(1)
    bench.receiver.close()
    fails(pull, "^the channel was closed$")
    bench.waits(0)
    bench.offer(7)
    bench.at_rest()
    assert bench.count(Posted) == 0


def test_a_pull_that_waits_for_its_block_waits_on_when_its_connection_is_dropped(
    bench: Bench,
) -> None:
    puller, pull = bench.receiver._puller, bench.pull(7)
    bench.waits(1)
    puller._thread.submit(lambda: puller._drop(puller._peers[SENDER]))
    settled(lambda: bench.count(PullRequest) == 2)
    bench.offer(7)
    bench.check(pull)
    bench.at_rest()
    assert bench.count(Withdraw) == bench.count(Posted) == 1, "nothing is posted for the old one"


def test_an_outlet_that_was_closed_meanwhile_is_replaced(bench: Bench) -> None:
    """As after a long rest of one side alone."""
    bench.offer(7)
    bench.check(bench.pull(7))
    bench.at_rest()
    before = bench.sender._sender._peers[RECEIVER].outlet.address
    bench.sender.handle(RECEIVER, Leave(bench.requests[0].link))
    bench.check(bench.pull(7))
    assert bench.sender._sender._peers[RECEIVER].outlet.address != before
    assert bench.count(Leave) == 0


def test_a_pull_that_the_old_outlet_took_with_it_leaves_the_new_connection_alone(
    bench: Bench,
) -> None:
    bench.offer(7)
    bench.check(bench.pull(7))
    peer = bench.receiver._puller._peers[SENDER]
    inlet = peer.inlet
    assert isinstance(inlet, EngineInlet)
    for seconds in (1.0, 2.0):
        assert not inlet.failed("127.0.0.1:9", seconds)
    assert not inlet.failed(inlet.address, 3.0)
    assert inlet.failed(inlet.address, 4.0), "the second error of a connection closes it"
    assert bench.count(Leave) == 0 and bench.receiver._puller._peers[SENDER] is peer


def test_an_outlet_that_cannot_be_made_is_said_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_port(self: EngineOptions) -> None:
        raise RuntimeError("Address already in use")

    bench.offer(7)
    monkeypatch.setattr(EngineOptions, "start_server", no_port)
    fails(bench.pull(7), "could not be posted: Address already in use")
    assert bench.count(Refused) == 1


def test_a_pull_that_comes_too_late_costs_no_other_its_connection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(transfer_engine, "_keep_for_ever", kept.append)
    late, other = bench.pull(7, 5.0), bench.pull(8)
    bench.waits(2)
    bench.ends.clock.seconds = 5.0
    fails(late, "was not made .* within the deadline")
    settled(lambda: bench.receiver.under_way() <= 1)
    assert other.failed() is None
    bench.offer(8)
    bench.check(other)
    assert bench.count(Leave) == 0 and not kept
