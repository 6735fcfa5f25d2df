"""The sending half of `NegotiatedChannel`: holds offers and serves the requested pieces.

A posting is the memory that is reserved for one pull until the pull ends. Invariants:
- Each receiver process has an `Outlet` of its own, so that a stalled receiver delays no other. A
  receiver that has reconnected or restarted gets a new outlet.
- Each process of the sending mesh computes the same plan of all pieces, from its mesh and two
  fields of the request: `wanted`, the receiving devices, and `turn`, the preferred replica. Each
  process serves the pieces that it holds.
- A posting is freed when it has been pulled, when it is withdrawn or revoked, or when its deadline
  passes.
- This module must not distinguish backends: all differences are in `Outlet` (backend.py)."""

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import (
    KvBackend,
    Leave,
    Open,
    Opened,
    Posted,
    PostedPiece,
    Pulled,
    PullRequest,
    Refused,
    Withdraw,
)
from jdisagg.transfer.backend import Backend, Outlet
from jdisagg.transfer.boxes import HEAD_DIMENSION
from jdisagg.transfer.channel import BlockStamp, Offered
from jdisagg.transfer.channel_thread import ChannelThread, ComputeWait
from jdisagg.transfer.ended_offers import REMEMBERED_IDS, EndedOffers
from jdisagg.transfer.kv_link import KvLink
from jdisagg.transfer.pieces import (
    OfferedBlock,
    PlannedPiece,
    RequestedPieces,
    check_geometry,
    leaves_of,
    plan_of_request,
)
from jdisagg.transfer.polled_pull import is_ready
from jdisagg.transfer.sender_errors import error_text
from jdisagg.transfer.transfer_engine import EngineOptions

GIVEN_UP = "the receiver gave the pull up"
TOO_LATE = "the pull's deadline has passed"
CLOSED = "the connection was closed meanwhile; pull again"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    receiver: KvEnd
    request: PullRequest
    until: float


@dataclass(slots=True)
class _Posting:
    offer_id: int
    leaves: int
    until: float
    answer: Posted
    answered: bool = False


@dataclass(slots=True)
class _PeerState:
    link: int
    outlet: Outlet
    used: float
    postings: dict[int, _Posting] = field(default_factory=dict)


class KvSender:
    """The sending half of a channel (see the module's docstring). The lock guards `_offers`,
    `_waiting` and `_ended`. Only the sender's thread uses `_peers` and `_seen`. `card`: mesh with
    the device numbers that receivers use, if blocks are on the meshes of several pipeline stages.
    Set before the first offer."""

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
        self._lock = threading.Lock()
        self._offers: dict[int, OfferedBlock] = {}
        self._waiting: dict[int, list[_Waiting]] = {}
        self._ended = EndedOffers()
        self._peers: dict[KvEnd, _PeerState] = {}
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._tick_due = 0.0
        self._thread = ChannelThread("kv-send", self._regularly)

    def offer(self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp) -> None:
        offered = OfferedBlock.of(block, rank, stamp, next(self._numbers), self.card)
        with self._lock:
            if not self._ended.admits(offer_id, self._offers):
                return
            self._offers[offer_id] = offered
            waiting = self._waiting.pop(offer_id, [])
        for wait in waiting:
            self._thread.submit(lambda wait=wait: self._serve(wait))

    def release(self, offer_id: int) -> None:
        with self._lock:
            if self._offers.pop(offer_id, None) is not None:
                self._ended.released(offer_id)

    def revoke(self, offer_id: int, reason: str) -> None:
        with self._lock:
            self._offers.pop(offer_id, None)
            waiting = self._waiting.pop(offer_id, [])
            self._ended.revoked(offer_id, reason)
        self._thread.submit(
            lambda: self._withdraw_offer(
                offer_id, f"offer {offer_id:#x} was revoked: {reason}", waiting
            )
        )

    def offered(self) -> Offered:
        with self._lock:
            return Offered(len(self._offers), sum(offer.nbytes for offer in self._offers.values()))

    def handle(
        self, receiver: KvEnd, message: Open | PullRequest | Withdraw | Pulled | Leave
    ) -> None:
        self._thread.submit(lambda: self._take(receiver, message))

    def postings(self) -> int:
        return sum(len(peer.postings) for peer in list(self._peers.values()))

    def close(self) -> None:
        self._thread.close(self._close_all)

    # The methods below run on the thread.

    def _take(
        self, receiver: KvEnd, message: Open | PullRequest | Withdraw | Pulled | Leave
    ) -> None:
        peer = self._peers.get(receiver)
        match message:
            case Open():
                if (message.sender_boot_id, message.transports) == (
                    self._end.boot_id,
                    self._options.transports,
                ):
                    self._open(receiver, message.link)
            case PullRequest():
                self._requested(receiver, message)
            case Pulled():
                if peer is not None:
                    peer.postings.pop(message.pull_id, None)
                    peer.outlet.pulled(message.pull_id)
            case Withdraw():
                self._note_seen(message.pull_id)  # a delayed request must not be served
                self._stop_waiting(receiver, message.pull_id)
                if peer is not None:
                    peer.outlet.given_up(message.pull_id)
                    if not _withdraw(peer, message.pull_id, GIVEN_UP) and message.ahead:
                        peer.outlet.refuse(message.pull_id, 1, error_text(HandoffError(GIVEN_UP)))
            case Leave():
                if peer is not None and peer.link <= message.link:
                    self._close_peer(receiver)

    def _requested(self, receiver: KvEnd, request: PullRequest) -> None:
        if request.sender_boot_id != self._end.boot_id:
            return self._refuse(
                receiver,
                request,
                HandoffError(f"the sender at {self._end.control} has restarted; connect again"),
            )
        if request.transports != self._options.transports:
            ours = self._options.transports
            error = (
                f"transports is {ours} at the sender and {request.transports} at the receiver; set"
                " the same on both"
            )
            return self._refuse(receiver, request, IncompatiblePeerError(error))
        if request.pull_id in self._seen:
            return self._answer_again(receiver, request)
        self._note_seen(request.pull_id)
        if request.address and not self._is_where_pulled(receiver, request):
            return self._refuse(
                receiver, request, self._open(receiver, request.link) or HandoffError(CLOSED)
            )
        wait = _Waiting(receiver, request, self._clock.now() + request.deadline_seconds)
        with self._lock:
            known = request.offer_id in self._offers or request.offer_id in self._ended
            if not known:
                self._waiting.setdefault(request.offer_id, []).append(wait)
        if known:
            self._serve(wait)

    def _serve(self, wait: _Waiting) -> None:
        receiver, request = wait.receiver, wait.request
        try:
            remaining = wait.until - self._clock.now()
            if remaining <= 0:  # the receiver has given up
                return self._flush(receiver, request, HandoffError(TOO_LATE))
            self._post(receiver, request, remaining)
        except JdisaggError as error:
            self._refuse(receiver, request, error)
        except Exception as error:
            self._refuse(
                receiver,
                request,
                HandoffError(
                    f"the pieces of offer {request.offer_id:#x} could not be posted: {error}"
                ),
            )

    def _post(self, receiver: KvEnd, request: PullRequest, seconds: float) -> None:
        with self._lock:
            offer = self._offers.get(request.offer_id)
            ended = self._ended.how(request.offer_id)
        if offer is None:
            raise HandoffError(f"offer {request.offer_id:#x} was {ended}")
        pieces = _pieces(offer, request)
        posted = tuple(
            PostedPiece(piece.source, request.wanted[piece.receiver].device, piece.part)
            for piece in pieces
        )
        if request.address and posted != request.pieces:
            raise IncompatiblePeerError(
                f"the receiver pulls {request.pieces} ahead, and of offer {request.offer_id:#x} it"
                f" gets {posted}"
            )
        if not pieces:
            return self._link.send(receiver, _nothing(request, offer))
        peer = self._peer(receiver, request.link, request.backend)
        if request.address and peer.outlet.address != request.address:
            raise HandoffError(CLOSED)
        seconds += self._timeouts.slack_seconds
        until, heads = self._clock.now() + seconds, offer.shape[HEAD_DIMENSION]
        wanted = RequestedPieces(offer, pieces, request.granule, request.codec)
        reserved = peer.outlet.reserve(request.pull_id, wanted, seconds)
        answer = Posted(
            request.pull_id, request.link, peer.outlet.address, heads, posted, reserved.memory
        )
        posting = _Posting(request.offer_id, reserved.leaves, until, answer)
        peer.postings[request.pull_id] = posting
        if peer.outlet.answers_early:
            self._answer(receiver, posting, request.address)
        if reserved.sources:
            self._write_once_computed(receiver, request, offer.number, reserved.sources)

    def _answer(self, receiver: KvEnd, posting: _Posting, address: str = "") -> None:
        posting.answered = True
        if not address:
            self._link.send(receiver, posting.answer)

    def _write_once_computed(
        self, receiver: KvEnd, request: PullRequest, number: int, sources: Sequence[jax.Array]
    ) -> None:
        def write() -> None:
            self._write(receiver, request)

        if self._computing is None or all(map(is_ready, sources)):
            return write()
        self._computing.then(number, sources, lambda: self._thread.submit(write))

    def _write(self, receiver: KvEnd, request: PullRequest) -> None:
        peer = self._peers.get(receiver)
        posting = peer.postings.get(request.pull_id) if peer is not None else None
        if peer is None or posting is None:
            return  # withdrawn meanwhile
        try:
            peer.outlet.write(request.pull_id)
        except Exception as error:
            _withdraw(peer, request.pull_id, "")
            broken = HandoffError(
                f"the pieces of offer {request.offer_id:#x} could not be computed or moved: {error}"
            )
            return self._refuse(receiver, request, broken)
        if not posting.answered:
            self._answer(receiver, posting)

    def _answer_again(self, receiver: KvEnd, request: PullRequest) -> None:
        peer = self._peers.get(receiver)
        posting = peer.postings.get(request.pull_id) if peer is not None else None
        with self._lock:
            offer, ended = self._offers.get(request.offer_id), self._ended.how(request.offer_id)
        if posting is not None:
            # The receiver has extended the pull's deadline if bytes keep arriving.
            seconds = request.deadline_seconds + self._timeouts.slack_seconds
            posting.until = max(posting.until, self._clock.now() + seconds)
            if posting.answered:
                self._link.send(receiver, posting.answer)
        elif ended is not None:
            self._link.send(
                receiver,
                _refusal(request, HandoffError(f"offer {request.offer_id:#x} was {ended}")),
            )
        elif offer is not None:
            try:
                if not _pieces(offer, request):
                    self._link.send(receiver, _nothing(request, offer))
            except JdisaggError as error:
                self._link.send(receiver, _refusal(request, error))

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

    def _open(self, receiver: KvEnd, link: int) -> HandoffError | None:
        try:
            self._link.send(receiver, Opened(link, self._peer(receiver, link).outlet.address))
        except HandoffError as error:  # an older connection
            return error
        except Exception as error:
            return HandoffError(f"no connection could be opened: {error}")
        return None

    def _is_where_pulled(self, receiver: KvEnd, request: PullRequest) -> bool:
        peer = self._peers.get(receiver)
        return peer is not None and (peer.link, peer.outlet.address) == (
            request.link,
            request.address,
        )

    def _refuse(self, receiver: KvEnd, request: PullRequest, error: JdisaggError) -> None:
        self._link.send(receiver, _refusal(request, error))
        self._flush(receiver, request, error)

    def _flush(self, receiver: KvEnd, request: PullRequest, error: JdisaggError) -> None:
        """Fails a pull that the receiver has started before any answer, so that the pull does not
        wait at the outlet until its deadline."""
        if request.address and self._is_where_pulled(receiver, request):
            leaves = len(request.pieces) * leaves_of(request.codec)
            self._peers[receiver].outlet.refuse(request.pull_id, max(1, leaves), error_text(error))

    def _note_seen(self, pull_id: int) -> None:
        self._seen[pull_id] = None
        while len(self._seen) > REMEMBERED_IDS:
            self._seen.popitem(last=False)

    def _stop_waiting(self, receiver: KvEnd, pull_id: int) -> None:
        self._drop_waits(lambda wait: (wait.receiver, wait.request.pull_id) == (receiver, pull_id))

    def _drop_waits(self, over: Callable[[_Waiting], bool]) -> list[_Waiting]:
        dropped: list[_Waiting] = []
        with self._lock:
            for offer_id, waits in list(self._waiting.items()):
                dropped += filter(over, waits)
                kept = [wait for wait in waits if not over(wait)]
                if kept:
                    self._waiting[offer_id] = kept
                else:
                    del self._waiting[offer_id]
        return dropped

    def _withdraw_offer(self, offer_id: int, reason: str, waiting: list[_Waiting]) -> None:
        for wait in waiting:
            self._refuse(wait.receiver, wait.request, HandoffError(reason))
        for receiver, peer in self._peers.items():
            for pull_id in [
                pull_id
                for pull_id, posting in peer.postings.items()
                if posting.offer_id == offer_id
            ]:
                _withdraw(peer, pull_id, reason)
                self._link.send(receiver, Refused(pull_id, HandoffError.__name__, reason))

    def _regularly(self) -> float:
        if time.monotonic() >= self._tick_due:
            self._tick_due = time.monotonic() + self._timeouts.tick_seconds
            now = self._clock.now()
            for backend in self._backends.values():
                backend.sweep()
            for receiver in list(self._peers):
                try:
                    self._expire(receiver, now)
                except Exception:
                    # The other outlets continue to serve. This receiver opens a new connection.
                    _log.exception("the outlet for %s failed and is closed", receiver.control)
                    self._close_peer(receiver)
            for wait in self._drop_waits(lambda wait: now >= wait.until):
                self._flush(wait.receiver, wait.request, HandoffError(TOO_LATE))
        return self._timeouts.tick_seconds

    def _expire(self, receiver: KvEnd, now: float) -> None:
        peer = self._peers[receiver]
        for pull_id in [
            pull_id for pull_id, posting in peer.postings.items() if now >= posting.until
        ]:
            _withdraw(peer, pull_id, TOO_LATE)
        if not peer.postings and time.monotonic() - peer.used > self._timeouts.outlet_idle_seconds:
            self._close_peer(receiver)
            for backend in self._backends.values():
                backend.drop_spare()
        else:
            peer.outlet.tick()

    def _close_peer(self, receiver: KvEnd) -> None:
        peer = self._peers.pop(receiver, None)
        if peer is not None:
            peer.outlet.close(in_flight=bool(peer.postings))

    def _close_all(self) -> None:
        for receiver in list(self._peers):
            self._close_peer(receiver)
        if self._computing is not None:
            self._computing.close()
        with self._lock:
            self._offers.clear()
            self._waiting.clear()


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


def _nothing(request: PullRequest, offer: OfferedBlock) -> Posted:
    return Posted(request.pull_id, request.link, "", offer.shape[HEAD_DIMENSION], ())


def _refusal(request: PullRequest, error: JdisaggError) -> Refused:
    return Refused(request.pull_id, type(error).__name__, error.message)


def _withdraw(peer: _PeerState, pull_id: int, reason: str) -> bool:
    posting = peer.postings.pop(pull_id, None)
    if posting is not None:
        peer.outlet.withdraw(pull_id, posting.leaves, error_text(HandoffError(reason)))
    return posting is not None
