"""The sending half of `NegotiatedChannel`: holds offers and serves the requested pieces.

Each pull follows `WORKFLOW` (messages/kv_plane.py). Invariants:
- Each receiver process has an `Outlet` of its own, so that a stalled receiver delays no other. A
  receiver that has reconnected or restarted gets a new outlet.
- Each process of the sending mesh computes the same plan of all pieces, from its mesh and two
  fields of the request: `wanted`, the receiving devices, and `turn`, the preferred replica. Each
  process serves the pieces that it holds.
- The memory that is reserved for a pull is freed when it has been pulled, when it is withdrawn or
  revoked, or when its deadline passes.
- A request for a pull that has ended gets the pull's last answer again, so no id is served twice.
- This module must not distinguish backends: all differences are in `Outlet` (backend.py)."""

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.layout.reshard_plan import HEAD_DIMENSION
from jdisagg.messages.kv_plane import (
    BlockEvent,
    BlockState,
    KvBackend,
    KvLink,
    Leave,
    Posted,
    PostedPiece,
    Pulled,
    PullRequest,
    Refused,
    Withdraw,
    after,
)
from jdisagg.transfer.backend import Backend, Outlet
from jdisagg.transfer.channel import REMEMBERED_IDS, BlockStamp, Offered, Offers, is_ready
from jdisagg.transfer.channel_thread import ChannelThread, ComputeWait
from jdisagg.transfer.pieces import (
    OfferedBlock,
    PlannedPiece,
    RequestedPieces,
    check_geometry,
    plan_of_request,
)
from jdisagg.transfer.sender_errors import error_text
from jdisagg.transfer.transfer_engine import EngineOptions

GIVEN_UP = "the receiver gave the pull up"
TOO_LATE = "the pull's deadline has passed"
CLOSED = "the connection was closed meanwhile; pull again"

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pull:
    """One pull of one receiver process.

    Attributes:
        leaves: Number of arrays that the receiver reads.
        answer: Message to send when the pieces may be read. None while nothing is reserved.
    """

    receiver: KvEnd
    request: PullRequest
    until: float
    state: BlockState = BlockState.ASKED
    leaves: int = 0
    answer: Posted | None = None

    @property
    def key(self) -> "_Key":
        return self.receiver, self.request.pull_id


_Key = tuple[KvEnd, int]


@dataclass(slots=True)
class _PeerState:
    link: int
    outlet: Outlet
    used: float


class KvSender:
    """The sending half of a channel (see the module's docstring). Only the sender's thread changes
    `_peers`, `_pulls` and `_answered`. `card`: mesh with the device numbers that receivers use, if
    blocks are on the meshes of several pipeline stages. Set before the first offer."""

    def __init__(
        self,
        clock: Clock,
        end: KvEnd,
        link: KvLink,
        options: EngineOptions,
        backends: Sequence[Backend],
    ) -> None:
        self._clock, self._end, self._link, self._options = clock, end, link, options
        self._backends = {backend.kind: backend for backend in backends}
        self.card: jax.sharding.Mesh | None = None
        self._numbers = itertools.count()
        self._computing = ComputeWait("kv-wait") if len(backends) > 1 else None
        self._timeouts = options.timeouts
        self._offers: Offers[OfferedBlock] = Offers()
        self._peers: dict[KvEnd, _PeerState] = {}
        self._pulls: dict[_Key, _Pull] = {}
        # pulls that have ended, with their last answer
        self._answered: OrderedDict[_Key, Posted | Refused | None] = OrderedDict()
        self._tick_due = 0.0
        self._thread = ChannelThread("kv-send", self._regularly)

    def offer(self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp) -> None:
        offered = OfferedBlock.of(block, rank, stamp, next(self._numbers), self.card)
        if self._offers.add(offer_id, offered):
            self._thread.submit(lambda: self._serve_all(offer_id))

    def release(self, offer_id: int) -> None:
        self._offers.release(offer_id)

    def revoke(self, offer_id: int, reason: str) -> None:
        self._offers.revoke(offer_id, reason)
        error = HandoffError(f"offer {offer_id:#x} was revoked: {reason}")
        self._thread.submit(lambda: self._refuse_all(offer_id, error))

    def offered(self) -> Offered:
        return self._offers.offered()

    def handle(self, receiver: KvEnd, message: PullRequest | Withdraw | Pulled | Leave) -> None:
        self._thread.submit(lambda: self._take(receiver, message))

    def postings(self) -> int:
        """Returns the number of pulls for which memory is reserved."""
        return sum(pull.answer is not None for pull in list(self._pulls.values()))

    def waiting(self) -> int:
        """Returns the number of pulls of blocks that are not offered yet."""
        return sum(pull.answer is None for pull in list(self._pulls.values()))

    def close(self) -> None:
        self._thread.close(self._close_all)

    # The methods below run on the thread.

    def _take(self, receiver: KvEnd, message: PullRequest | Withdraw | Pulled | Leave) -> None:
        peer = self._peers.get(receiver)
        match message:
            case PullRequest():
                self._requested(receiver, message)
            case Pulled():
                self._end_pull((receiver, message.pull_id), BlockEvent.ARRIVE)
                if peer is not None:
                    peer.outlet.pulled(message.pull_id)
            case Withdraw():
                pull = self._pulls.get((receiver, message.pull_id))
                if pull is not None:
                    return self._fail(pull, BlockEvent.GIVE_UP, HandoffError(GIVEN_UP))
                self._remember((receiver, message.pull_id))  # a delayed request is not served
            case Leave():
                if peer is not None and peer.link <= message.link:
                    self._close_peer(receiver)

    def _requested(self, receiver: KvEnd, request: PullRequest) -> None:
        key = (receiver, request.pull_id)
        pull, until = self._pulls.get(key), self._clock.now() + request.deadline_seconds
        if pull is not None:
            self._ask_again(pull, until)
        elif key not in self._answered:
            pull = self._pulls[key] = _Pull(receiver, request, until)
            self._serve(pull)
        elif answer := self._answered[key]:
            self._link.send(receiver, answer)

    def _ask_again(self, pull: _Pull, until: float) -> None:
        """An answer was lost, or the receiver extends the deadline because bytes keep arriving."""
        slack = self._timeouts.slack_seconds if pull.answer is not None else 0.0
        pull.until = max(pull.until, until + slack)
        if pull.state is BlockState.POSTED and pull.answer is not None:
            self._link.send(pull.receiver, pull.answer)

    def _serve_all(self, offer_id: int) -> None:
        for pull in list(self._pulls.values()):
            if pull.request.offer_id == offer_id and pull.state is BlockState.ASKED:
                self._serve(pull)

    def _refuse_all(self, offer_id: int, error: HandoffError) -> None:
        for pull in list(self._pulls.values()):
            if pull.request.offer_id == offer_id:
                self._fail(pull, BlockEvent.REFUSE, error)

    def _serve(self, pull: _Pull) -> None:
        """Posts the requested pieces, unless the block is not offered yet."""
        request = pull.request
        try:
            self._check(pull)
            offer = self._offers.get(request.offer_id)
            if offer is None:
                return
            if self._clock.now() >= pull.until:  # the receiver has given up
                return self._fail(pull, BlockEvent.GIVE_UP, HandoffError(TOO_LATE))
            self._post(pull, offer)
        except JdisaggError as error:
            self._fail(pull, BlockEvent.REFUSE, error)
        except Exception as error:
            broken = f"the pieces of offer {request.offer_id:#x} could not be posted: {error}"
            self._fail(pull, BlockEvent.REFUSE, HandoffError(broken))

    def _check(self, pull: _Pull) -> None:
        request, ours = pull.request, self._options.transports
        if request.sender_boot_id != self._end.boot_id:
            raise HandoffError(f"the sender at {self._end.control} has restarted; connect again")
        if request.transports != ours:
            raise IncompatiblePeerError(
                f"transports is {ours} at the sender and {request.transports} at the receiver; set"
                " the same on both"
            )

    def _post(self, pull: _Pull, offer: OfferedBlock) -> None:
        receiver, request = pull.receiver, pull.request
        pieces, heads = _pieces(offer, request), offer.shape[HEAD_DIMENSION]
        posted = tuple(
            PostedPiece(piece.source, request.wanted[piece.receiver].device, piece.part)
            for piece in pieces
        )
        if not pieces:
            nothing = Posted(request.pull_id, request.link, "", heads, ())
            self._link.send(receiver, nothing)
            self._advance(pull, BlockEvent.POST)
            return self._end_pull(pull.key, BlockEvent.ARRIVE, nothing)
        peer = self._peer(receiver, request.link, request.backend)
        pull.until += self._timeouts.slack_seconds
        wanted = RequestedPieces(offer, pieces, request.granule, request.codec)
        seconds = pull.until - self._clock.now()
        reserved = peer.outlet.reserve(request.pull_id, wanted, seconds)
        address, pull.leaves = peer.outlet.address, reserved.leaves
        self._advance(pull, BlockEvent.RESERVE)
        pull.answer = Posted(request.pull_id, request.link, address, heads, posted, reserved.memory)
        if peer.outlet.answers_early:
            self._answer(pull)
        if reserved.sources:
            self._write_once_computed(pull, offer.number, reserved.sources)

    def _answer(self, pull: _Pull) -> None:
        self._advance(pull, BlockEvent.POST)
        if pull.answer is not None:
            self._link.send(pull.receiver, pull.answer)

    def _write_once_computed(self, pull: _Pull, number: int, sources: Sequence[jax.Array]) -> None:
        if self._computing is None or all(map(is_ready, sources)):
            return self._write(pull)
        self._computing.then(
            number, sources, lambda: self._thread.submit(lambda: self._write(pull))
        )

    def _write(self, pull: _Pull) -> None:
        request = pull.request
        if self._pulls.get(pull.key) is not pull:
            return  # it has ended meanwhile
        try:
            self._peers[pull.receiver].outlet.write(request.pull_id)
        except Exception as error:
            broken = (
                f"the pieces of offer {request.offer_id:#x} could not be computed or moved: {error}"
            )
            return self._fail(pull, BlockEvent.REFUSE, HandoffError(broken))
        if pull.state is BlockState.RESERVED:
            self._answer(pull)

    def _advance(self, pull: _Pull, event: BlockEvent) -> None:
        state = after(pull.state, event)
        assert state is not None, (pull.state, event)
        pull.state = state

    def _fail(self, pull: _Pull, event: BlockEvent, error: JdisaggError) -> None:
        """Ends a pull without its pieces."""
        receiver, request = pull.receiver, pull.request
        refusal = Refused(request.pull_id, type(error).__name__, error.message)
        if event is BlockEvent.REFUSE:
            self._link.send(receiver, refusal)
        reserved, given_up = pull.answer is not None, event is BlockEvent.GIVE_UP
        self._end_pull(pull.key, event, refusal if event is BlockEvent.REFUSE else None)
        if reserved:
            outlet = self._peers[receiver].outlet
            outlet.withdraw(request.pull_id, pull.leaves, error_text(error), given_up)

    def _end_pull(
        self, key: _Key, event: BlockEvent, answer: Posted | Refused | None = None
    ) -> None:
        pull = self._pulls.get(key)
        if pull is not None and after(pull.state, event) is not None:
            self._advance(pull, event)
            del self._pulls[key]
            self._remember(key, answer)

    def _remember(self, key: _Key, answer: Posted | Refused | None = None) -> None:
        self._answered[key] = answer
        while len(self._answered) > REMEMBERED_IDS:
            self._answered.popitem(last=False)

    def _peer(
        self, receiver: KvEnd, link: int, backend: KvBackend = KvBackend.ENGINE
    ) -> _PeerState:
        peer = self._peers.get(receiver)
        if peer is not None and link < peer.link:
            raise HandoffError(f"connection {link} was replaced by {peer.link}; pull again")
        if peer is None or link > peer.link:
            for other in [end for end in self._peers if end.control == receiver.control]:
                # an older connection, or an older boot, of the same receiver
                self._close_peer(other)
            if backend not in self._backends:
                raise HandoffError(f"this process has no {backend} backend; pull by another one")
            outlet = self._backends[backend].outlet()
            peer = self._peers[receiver] = _PeerState(link, outlet, 0.0)
        peer.used = time.monotonic()
        return peer

    def _regularly(self) -> float:
        if time.monotonic() >= self._tick_due:
            self._tick_due = time.monotonic() + self._timeouts.tick_seconds
            now = self._clock.now()
            for pull in [pull for pull in self._pulls.values() if now >= pull.until]:
                late = HandoffError(TOO_LATE)
                self._guarded(
                    pull.receiver, lambda pull=pull: self._fail(pull, BlockEvent.GIVE_UP, late)
                )
            for receiver in list(self._peers):
                self._guarded(receiver, lambda receiver=receiver: self._look_after(receiver))
        return self._timeouts.tick_seconds

    def _guarded(self, receiver: KvEnd, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # The other outlets continue to serve. This receiver opens a new connection.
            _log.exception("the outlet for %s failed and is closed", receiver.control)
            self._close_peer(receiver)

    def _look_after(self, receiver: KvEnd) -> None:
        peer = self._peers[receiver]
        idle = time.monotonic() - peer.used > self._timeouts.outlet_idle_seconds
        if idle and not self._reserved(receiver):
            self._close_peer(receiver)
        else:
            peer.outlet.tick()

    def _reserved(self, receiver: KvEnd) -> list[_Pull]:
        return [
            pull
            for pull in self._pulls.values()
            if pull.receiver == receiver and pull.answer is not None
        ]

    def _close_peer(self, receiver: KvEnd) -> None:
        peer = self._peers.pop(receiver, None)
        if peer is not None:
            reserved = self._reserved(receiver)
            for pull in reserved:
                self._end_pull(pull.key, BlockEvent.GIVE_UP)
            peer.outlet.close(in_flight=bool(reserved))
            for backend in self._backends.values() if not self._peers else ():
                backend.drop_spare()

    def _close_all(self) -> None:
        for receiver in list(self._peers):
            self._close_peer(receiver)
        if self._computing is not None:
            self._computing.close()
        self._pulls.clear()
        self._offers.clear()


def _pieces(offer: OfferedBlock, request: PullRequest) -> tuple[PlannedPiece, ...]:
    shape = (
        1,
        request.components,
        request.granule * request.head_shards,
        request.tokens,
        request.head_size,
    )
    check_geometry(offer, request.dtype, shape, request.granule)
    return plan_of_request(offer, request)
