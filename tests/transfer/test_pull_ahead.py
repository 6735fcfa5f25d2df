"""Pulls that begin before the sender has said a word: no answer is waited for, and whatever
happens, nothing stays in the engine."""

import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import pytest

from jdisagg.errors import IncompatiblePeerError
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import (
    KvMessage,
    Leave,
    Opened,
    Posted,
    PullRequest,
    Refused,
    Withdraw,
)
from jdisagg.transfer import transfer_engine
from jdisagg.transfer.boxes import mesh_card
from jdisagg.transfer.channel import BlockStamp, Pull, PullTarget
from jdisagg.transfer.negotiated_channel import NegotiatedChannel
from jdisagg.transfer.transfer_engine import EngineOptions, EngineOutlet
from tests.transfer.conformance import (
    LONG_SECONDS,
    Case,
    ChannelConformance,
    Ends,
    arrives,
    case,
    fails,
    finished,
    settled,
)
from tests.transfer.loopback import RECEIVER, SENDER, Loopback


class Ahead:
    """Both channels as one who knows each block's mesh and rank sees them: every pull that can be
    is pulled ahead."""

    def __init__(
        self, sender: NegotiatedChannel, receiver: NegotiatedChannel, loopback: Loopback
    ) -> None:
        self.inner, self._sender = receiver, sender
        self.posted: list[Posted] = []
        self.requests: list[PullRequest] = []
        self.opened = 0
        self._blocks: dict[int, tuple[MeshCard, int, int]] = {}
        self._connected: set[str] = set()
        loopback.tamper = self.note

    def note(self, message: KvMessage) -> list[KvMessage]:
        self.opened += isinstance(message, Opened)
        self.posted += [message] if isinstance(message, Posted) else []
        self.requests += [message] if isinstance(message, PullRequest) else []
        return [message]

    def offer(
        self,
        offer_id: int,
        block: jax.Array,
        rank: int,
        stamp: BlockStamp = BlockStamp(),  # noqa: B008
    ) -> None:
        self._sender.offer(offer_id, block, rank, stamp)
        self._blocks[offer_id] = (card_of(block), block.shape[2], rank)

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        if offer_id in self._blocks:
            card, heads, rank = self._blocks[offer_id]
            if (name := str(card)) not in self._connected:
                before = self.opened
                self._connected.add(name)
                self.inner.connect(name, card)
                settled(lambda: self.opened > before and self._knows_where())
            target = dataclasses.replace(target, peer=name, heads=heads, source_rank=rank)
        return self.inner.pull(offer_id, target, deadline_seconds)

    def _knows_where(self) -> bool:
        connection = self.inner._puller._peers.get(SENDER)
        return connection is not None and connection.address != ""

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner if name == "bytes_per_pair" else self._sender, name)


def card_of(block: jax.Array) -> MeshCard:
    mesh = block.sharding.mesh  # type: ignore[attr-defined]
    return dataclasses.replace(mesh_card(mesh), ends=(SENDER,), transports=2)


class TestPullsAhead(ChannelConformance):
    @pytest.fixture
    def ends(
        self, ends: Ends, loopback: Loopback, request: pytest.FixtureRequest
    ) -> Iterator[Ends]:
        both = Ahead(loopback.channels[SENDER], loopback.channels[RECEIVER], loopback)
        yield Ends(both, both, ends.clock)  # type: ignore[arg-type]
        ahead = {request.pull_id for request in both.requests if request.address}
        assert not ahead & {message.pull_id for message in both.posted}, (
            "a pull ahead waits for no answer"
        )
        if request.node.name.startswith(
            ("test_each_destination", "test_a_lossy_codec", "test_an_offer_can_be_pulled_again")
        ):
            assert both.requests and all(request.address for request in both.requests)


@dataclasses.dataclass
class Bench:
    """One block, a receiver that is connected to its mesh, and every message that was sent. `lose`
    names those that get lost."""

    ends: Ends
    block: Case
    sender: NegotiatedChannel
    receiver: NegotiatedChannel
    sent: list[KvMessage] = dataclasses.field(default_factory=list)
    lose: Callable[[KvMessage], bool] = lambda message: False

    def tamper(self, message: KvMessage) -> list[KvMessage]:
        self.sent.append(message)
        return [] if self.lose(message) else [message]

    @property
    def target(self) -> PullTarget:
        return dataclasses.replace(self.block.target(0), peer="known", heads=4, source_rank=0)

    def pull(self, offer_id: int, deadline_seconds: float = LONG_SECONDS) -> Pull:
        before = self.count(PullRequest)
        pull = self.ends.receiver.pull(offer_id, self.target, deadline_seconds)
        assert self.count(PullRequest) == before + 1
        assert self.requests[-1].address, "it is to be pulled ahead"
        return pull

    def offer(self, offer_id: int) -> None:
        self.sender.offer(offer_id, self.block.block, 0)

    def check(self, pull: Pull) -> None:
        arrives(pull, self.block)

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
    # the answer to `ends` is not counted
    settled(lambda: bench.receiver._puller._peers[SENDER].address != "")
    loopback.tamper = bench.tamper
    ends.receiver.connect("known", card_of(bench.block.block))
    settled(lambda: bench.count(Opened) == 1)
    return bench


def test_what_is_pulled_before_it_is_offered_comes_without_an_answer(bench: Bench) -> None:
    pulls = [bench.pull(number) for number in range(4)]
    assert not any(pull.is_ready() for pull in pulls)
    for number in range(4):
        bench.offer(number)
    for pull in pulls:
        bench.check(pull)
    bench.check(bench.pull(0))  # and again, when it is there
    assert bench.count(Posted) == bench.count(Refused) == 0
    bench.at_rest()


@pytest.mark.parametrize("offered", [True, False])
def test_a_refusal_reaches_a_pull_ahead_with_its_reason(bench: Bench, offered: bool) -> None:
    """Also when the message that says so is lost: the reason waits in the engine."""
    bench.lose = lambda message: isinstance(message, Refused)
    if offered:
        bench.offer(7)
        bench.ends.sender.release(7)
    pull = bench.pull(7)
    if not offered:
        bench.ends.sender.revoke(7, "prefill failed")
    fails(pull, "^offer 0x7 was " + ("released$" if offered else "revoked: prefill failed$"))
    assert bench.count(Refused) == 1
    bench.at_rest()


def test_another_geometry_is_refused_by_type_also_in_the_engine(bench: Bench) -> None:
    bench.lose = lambda message: isinstance(message, Refused)
    bench.ends.sender.offer(7, case("tp=2", "tp=4", dtype="bfloat16").block, 0)
    with pytest.raises(IncompatiblePeerError, match="dtype is 'bfloat16'.*'float32'"):
        finished(bench.pull(7)).arrays()
    bench.at_rest()


def test_a_sender_that_lies_otherwise_than_its_card_says_refuses(bench: Bench) -> None:
    bench.ends.sender.offer(7, case("tp=4", "tp=4").block, 0)
    with pytest.raises(IncompatiblePeerError, match="pulls .* ahead"):
        finished(bench.pull(7)).arrays()
    bench.offer(8)
    bench.check(bench.pull(8))
    bench.at_rest()


def test_cancelled_pulls_of_offers_never_made_leave_nothing_in_the_engine(bench: Bench) -> None:
    for number in range(3):
        pull = bench.pull(number)
        settled(lambda number=number: bench.count(PullRequest) == number + 1)
        pull.cancel()
    bench.at_rest()
    assert [message.ahead for message in bench.sent if isinstance(message, Withdraw)] == [True] * 3
    bench.offer(1)  # too late for the first, in time for another
    assert bench.sender.postings() == 0
    bench.check(bench.pull(1))
    assert bench.count(Leave) == 0, "the connection lives"


def test_a_cancelled_pull_whose_request_was_lost_is_flushed_all_the_same(bench: Bench) -> None:
    bench.lose = lambda message: isinstance(message, PullRequest)
    pull = bench.pull(7)
    pull.cancel()
    bench.at_rest()
    bench.sender.handle(RECEIVER, bench.requests[0])  # it was only late
    bench.lose = lambda message: False
    bench.offer(7)
    bench.check(bench.pull(7))
    bench.at_rest()
    assert bench.count(Leave) == 0


def test_a_lost_request_is_asked_again_and_a_doubled_one_posted_once(bench: Bench) -> None:
    bench.lose = lambda message: isinstance(message, PullRequest) and bench.count(PullRequest) == 1
    pull = bench.pull(7)
    bench.offer(7)
    bench.ends.clock.seconds = 1.0
    bench.check(pull)
    assert bench.count(PullRequest) == 2
    bench.sender.handle(RECEIVER, bench.requests[0])
    bench.at_rest()


def test_a_pull_ahead_ends_at_its_deadline_and_so_does_what_waits_for_it(bench: Bench) -> None:
    bench.lose = lambda message: isinstance(message, Withdraw)
    pull = bench.pull(7, 5.0)
    settled(lambda: bench.sender._sender.waiting() == 1)
    bench.ends.clock.seconds = 5.0
    fails(pull, r"within the deadline of 5\.0 s")
    bench.at_rest()  # the sender, too, knows the deadline
    settled(lambda: not bench.sender._sender.waiting())


def test_a_receiver_that_is_gone_leaves_nothing_at_the_sender(bench: Bench) -> None:
    for number in range(3):
        bench.pull(number, 5.0)
    settled(lambda: bench.sender._sender.waiting() == 3)
    bench.lose = lambda message: True  # killed: it says nothing more
    bench.receiver.close()
    for number in range(2):
        bench.offer(number)
    bench.ends.clock.seconds = 7.0
    settled(lambda: bench.sender.postings() == bench.sender._sender.waiting() == 0)


def test_an_outlet_that_was_closed_meanwhile_is_replaced(bench: Bench) -> None:
    """As after a long rest of one side alone."""
    bench.offer(7)
    bench.check(bench.pull(7))
    bench.at_rest()
    sender = bench.sender
    sender.handle(RECEIVER, Leave(bench.requests[0].link))
    fails(bench.pull(7), "closed meanwhile; pull again|could not be computed or moved")
    bench.at_rest()
    # where the sender posts now, only it can say
    bench.check(bench.ends.receiver.pull(7, bench.target, LONG_SECONDS))
    bench.check(bench.pull(7))
    assert bench.requests[-1].address != bench.requests[0].address


def test_a_pull_that_the_old_outlet_took_with_it_leaves_the_new_connection_alone(
    bench: Bench,
) -> None:
    bench.offer(7)
    puller, sender = bench.receiver._puller, bench.sender
    peer = puller._peers[SENDER]
    # only the engine's error arrives
    before, bench.lose = peer.address, lambda message: isinstance(message, Refused)
    sender.handle(RECEIVER, Leave(peer.link))
    fails(bench.pull(7), "could not be computed or moved")
    bench.at_rest()
    assert bench.count(Leave) == 0 and puller._peers[SENDER] is peer and peer.address != before
    bench.check(bench.pull(7))


def test_an_outlet_that_cannot_be_made_is_said_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_port(self: EngineOptions) -> None:
        raise RuntimeError("Address already in use")

    bench.offer(7)
    bench.sender.handle(RECEIVER, Leave(1))
    settled(lambda: not bench.sender._sender._peers)
    monkeypatch.setattr(EngineOptions, "start_server", no_port)
    said = "no connection could be opened: Address already in use|could not be computed or moved"
    fails(bench.pull(7), said)
    assert bench.count(Refused) == 1


@pytest.mark.parametrize("expired", [False, True])
def test_the_server_of_a_refusal_is_deleted_only_after_the_refusal_has_expired(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, expired: bool
) -> None:
    """To delete it earlier crashed the process in one of some hundred tries (JAX 0.12)."""
    kept, keep = list[object](), transfer_engine._keep_for_ever
    monkeypatch.setattr(
        transfer_engine, "_keep_for_ever", lambda server: [keep(server), kept.append(server)]
    )
    bench.offer(7)
    bench.ends.sender.release(7)
    fails(bench.pull(7), "was released")
    bench.at_rest()
    assert (bench.count(Refused), bench.count(Withdraw)) == (1, 0)
    sender = bench.sender._sender
    outlet = sender._peers[RECEIVER].outlet
    assert isinstance(outlet, EngineOutlet) and outlet._errors_until > time.monotonic()
    if expired:
        outlet._errors_until = time.monotonic()
    sender.close()
    assert bool(kept) is not expired


def test_a_forged_opening_or_one_of_an_older_connection_changes_nothing(bench: Bench) -> None:
    receiver, link = bench.receiver, 1
    receiver.handle(KvEnd(SENDER.control, 0xDEAD), Opened(link, "127.0.0.1:9"))
    receiver.handle(SENDER, Opened(link - 1, "127.0.0.1:9"))
    bench.offer(7)
    bench.check(bench.pull(7))


def test_a_pull_that_comes_too_late_costs_no_other_its_connection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(transfer_engine, "_keep_for_ever", kept.append)
    late, other = bench.pull(7, 5.0), bench.pull(8)
    # both wait for their offers
    settled(lambda: bench.sender._sender.waiting() == 2)
    bench.ends.clock.seconds = 5.0
    fails(late, "was not made .* within the deadline|has not arrived within the deadline")
    # the sender has ended it, or the connection was dropped
    settled(lambda: bench.receiver.under_way() <= 1)
    assert other.failed() is None
    bench.offer(8)
    bench.check(other)
    assert bench.count(Leave) == 0 and not kept
