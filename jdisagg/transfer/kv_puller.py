"""The receiving half of `NegotiatedChannel`: requests, pulls and assembles the sender's pieces.

Each request follows `WORKFLOW` (messages/kv_plane.py). Invariants:
- Each request has a new random id. A retry of a failed pull is a new pull with new ids. An
  unanswered request is sent again with the same id, because messages may be lost. The sender serves
  each id once.
- Global arrays are made only after all pieces have arrived, so that no program waits for a
  transfer.
- A pull ends at its deadline, even if a sender does not answer. The deadline moves while bytes of
  the sender keep arriving, because a retry would only add load to a slow link. At the deadline the
  requests of the pull are withdrawn. If the inlet finds its connection broken or stuck, the
  connection is closed. Unanswered requests are withdrawn, and sent over a new connection with new
  ids.
- A receiver process sends requests to every process of the sender, because any of
  them may hold pieces. Processes without pieces answer with an empty list. The pull is complete
  when this process's devices have all their pieces. This module must not distinguish backends: all
  differences are in `Inlet` (backend.py)."""

import contextlib
import functools
import itertools
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
import msgspec

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import (
    MOST_PATIENCE,
    BlockEvent,
    BlockState,
    KvBackend,
    KvLink,
    Leave,
    Posted,
    Pulled,
    PullRequest,
    Refused,
    Withdraw,
    after,
)
from jdisagg.transfer.backend import AnnouncedArrays, Backend, Inlet
from jdisagg.transfer.channel import Leaf, Pull, PullTarget, is_ready
from jdisagg.transfer.channel_thread import ChannelThread
from jdisagg.transfer.pieces import Assembly
from jdisagg.transfer.sender_errors import named_error, sender_error
from jdisagg.transfer.transfer_engine import ID_BITS, EngineOptions

_TITLES = {
    KvBackend.SHARED: "shared memory",
    KvBackend.NIXL: "NIXL",
    KvBackend.ENGINE: "transfer engine",
}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PeerState:
    """State of the connection to one sender process.

    Attributes:
        link: Number of the current connection to the process. Each new connection has a higher
            number.
    """

    end: KvEnd
    link: int
    inlet: Inlet


@dataclass(slots=True, eq=False)
class SentRequest:
    """The request of one pull to one sender process.

    Attributes:
        arrays: One object to poll for each requested array. None until the transfer has started.
        unread: Reason why the sender's memory could not be read. "" otherwise.
    """

    peer: PeerState
    transfer: "Transfer"
    request: PullRequest
    sent_at: float = 0.0
    state: BlockState = BlockState.ASKED
    arrays: Sequence[jax.Array | Leaf] | None = None
    address: str = ""
    unread: str = ""

    def advance(self, event: BlockEvent) -> bool:
        """Returns whether the event changes the state."""
        state = after(self.state, event)
        if state is not None:
            self.state = state
        return state is not None

    @property
    def has_ended(self) -> bool:
        return self.arrays is not None and all(map(is_ready, self.arrays))


@dataclass(slots=True, eq=False)
class Transfer:
    """`patience_seconds`: seconds without arriving bytes after which the pull fails. `until`: time
    at which the pull fails in any case."""

    pull: Pull
    source: str
    assembly: Assembly
    patience_seconds: float
    until: float
    requests: list[SentRequest] = field(default_factory=list)


class KvPuller:
    """The receiving half of a channel (see the module's docstring). The lock guards `_cards`,
    `_peers`, `_proven`, `_unusable` and `_requests`. Only the puller's thread uses `_watched`.

    `backends`: in order of preference. A backend that failed with a sender process, and had never
    succeeded with it, is not used with this process again."""

    def __init__(
        self, clock: Clock, link: KvLink, options: EngineOptions, backends: Sequence[Backend]
    ) -> None:
        self._backends = backends
        self._proven: set[tuple[KvEnd, KvBackend]] = set()
        self._unusable: set[tuple[KvEnd, KvBackend]] = set()
        self._clock, self._link, self._options = clock, link, options
        self._timeouts = options.timeouts
        self._lock = threading.Lock()
        self._cards: dict[str, MeshCard] = {}
        self._peers: dict[KvEnd, PeerState] = {}
        self._requests: dict[int, SentRequest] = {}
        self._turns: dict[tuple[str, tuple[int, ...], int], int] = {}
        self._numbers = itertools.count(1)
        self._moved: Counter[tuple[int, int]] = Counter()
        self._watched: list[Transfer] = []
        self._unreported: list[tuple[KvEnd, Pulled]] = []
        self._report_at = self._watch_at = 0.0
        self._thread = ChannelThread("kv-pull", self._watch)

    def connect(self, peer: str, card: MeshCard) -> None:
        with self._lock:
            known = self._cards.setdefault(peer, card)
            if card.transports == self._options.transports:
                for end in card.ends:
                    self._peer(end)
        assert known == card, (
            f"peer {peer!r} was introduced with another mesh; its name must hold its boot id"
        )

    def disconnect(self, peer: str) -> None:
        with self._lock:
            card = self._cards.pop(peer, None)
            self._turns = {key: turn for key, turn in self._turns.items() if key[0] != peer}
            shared = {end for other in self._cards.values() for end in other.ends}
        if card is not None:
            self._thread.submit(
                lambda: self._drop_peer(peer, [end for end in card.ends if end not in shared])
            )

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        pull = Pull(offer_id, self._clock, deadline_seconds)
        with _failing(pull, f"the pull of offer {offer_id:#x} could not begin"):
            self._begin(pull, offer_id, target, deadline_seconds)
        return pull

    def handle(self, sender: KvEnd, message: Posted | Refused) -> None:
        self._thread.submit(lambda: self._take(sender, message))

    def under_way(self) -> int:
        with self._lock:
            peers = list(self._peers.values())
            return len(self._requests) + sum(peer.inlet.abandoned() for peer in peers)

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        with self._lock:
            return dict(self._moved)

    def channels(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(map(self._described, self._peers.values())))

    def close(self) -> None:
        self._thread.close(self._close_all)

    def _begin(
        self, pull: Pull, offer_id: int, target: PullTarget, deadline_seconds: float
    ) -> None:
        with self._lock:
            card = self._cards.get(target.peer)
        if card is None:
            raise HandoffError(f"peer {target.peer!r} is not connected; connect it first")
        if card.transports != self._options.transports or not card.ends:
            raise IncompatiblePeerError(
                f"transports is {self._options.transports} here and {card.transports} on peer"
                f" {target.peer!r}, which has {len(card.ends)} ends on the KV plane; set the same"
                " number on both, and serve both with the channel between processes"
            )
        assembly = Assembly(target)
        until = self._clock.now() + MOST_PATIENCE * deadline_seconds
        transfer = Transfer(pull, target.peer, assembly, deadline_seconds, until)
        with self._lock:
            key = (target.peer, target.zeros.shape, target.rank)
            turn = self._turns[key] = self._turns.get(key, -1) + 1
            peers = [self._peer(end) for end in card.ends]
            for peer in peers:
                request = request_of(
                    peer, assembly, offer_id, target, self._options.transports, turn
                )
                transfer.requests.append(SentRequest(peer, transfer, request))
                self._requests[request.pull_id] = transfer.requests[-1]
        for sent in transfer.requests:
            self._ask(sent)
        self._thread.submit(lambda: self._watched.append(transfer))

    def _ask(self, sent: SentRequest) -> None:
        """Asks for the block, again if no answer came or the deadline has moved."""
        sent.sent_at = self._clock.now()
        left = sent.transfer.pull.deadline - sent.sent_at
        request = msgspec.structs.replace(sent.request, deadline_seconds=left)
        self._link.send(sent.peer.end, request)

    def _peer(self, end: KvEnd) -> PeerState:
        """The caller must hold the lock."""
        if end not in self._peers:
            inlet = next(
                backend.inlet(end)
                for backend in self._backends
                if (end, backend.kind) not in self._unusable and backend.reaches(end)
            )
            peer = PeerState(end, next(self._numbers), inlet)
            peer.inlet.arrived(self._clock.now())
            self._peers[end] = peer
            _log.info("KV comes from %s", self._described(peer))
        return self._peers[end]

    @staticmethod
    def _described(peer: PeerState) -> str:
        """Returns "ADDRESS BACKEND"."""
        return f"{peer.end.control} {_TITLES[peer.inlet.backend]}"

    # The methods below run on the thread.

    def _take(self, sender: KvEnd, message: Posted | Refused) -> None:
        with self._lock:
            sent = self._requests.get(message.pull_id)
        if sent is None or sent.peer.end != sender:
            return  # the pull has ended, or the message is from another process
        refused = isinstance(message, Refused)
        if after(sent.state, BlockEvent.REFUSE if refused else BlockEvent.POST) is None:
            return  # a duplicate
        if isinstance(message, Refused):
            sent.advance(BlockEvent.REFUSE)
            return sent.transfer.pull.fail(named_error(message.error, message.message))
        if sent.transfer.pull.is_ready():
            return  # the pull has ended and will be withdrawn
        with _failing(sent.transfer.pull, f"the pieces could not be pulled from {sender.control}"):
            if message.link != sent.peer.link:
                raise _dropped(sent.peer)
            self._receive(sent, message)
            self._deliver(sent.transfer)

    def _receive(self, sent: SentRequest, answer: Posted) -> None:
        peer, assembly = sent.peer, sent.transfer.assembly
        with self._lock:
            if self._peers.get(peer.end) is not peer:  # its sender has closed the posting
                raise _dropped(peer)
        avals = assembly.expect(answer.heads, answer.pieces)
        arrays: Sequence[jax.Array | Leaf] = ()
        if avals:
            deadline = sent.transfer.pull.deadline
            pulled = functools.partial(self._report_pulled, peer.end, sent.request.pull_id, 0.0)
            try:
                announced = AnnouncedArrays(
                    answer,
                    avals,
                    in_time=lambda: self._clock.now() < deadline,
                    unused=lambda: self._thread.submit(pulled),
                )
                arrays = peer.inlet.pull(announced)
            except HandoffError as error:
                sent.unread = error.message
                raise
            assembly.coming(answer.pieces, arrays)
        sent.advance(BlockEvent.POST)
        sent.arrays, sent.address = arrays, answer.address

    def _report_pulled(self, end: KvEnd, pull_id: int, seconds: float) -> None:
        due = time.monotonic() + seconds
        self._report_at = min(self._report_at, due) if self._unreported else due
        self._unreported.append((end, Pulled(pull_id)))

    def _deliver(self, transfer: Transfer) -> None:
        assembly = transfer.assembly
        if assembly.complete:
            transfer.pull.deliver(
                assembly.flat, assembly.nbytes, lambda arrays: self._arrived(assembly, arrays)
            )

    def _arrived(self, assembly: Assembly, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Runs on the polling thread, under the pull's lock."""
        with self._lock:
            self._moved.update(assembly.bytes_per_pair)
        return assembly.assemble(arrays)

    def _watch(self) -> float:
        if self._unreported and time.monotonic() >= self._report_at:
            self._report()
        early = self._watch_at - time.monotonic()
        if early > 0:
            return early
        self._watch_at = time.monotonic() + self._timeouts.watch_seconds
        self._settle_all()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            if peer.inlet.is_stuck(self._clock.now()):
                self._drop(peer)
        waits = self._watched or self._unreported or any(peer.inlet.abandoned() for peer in peers)
        return self._timeouts.watch_seconds if waits else self._timeouts.idle_seconds

    def _settle_all(self) -> None:
        under_way: list[Transfer] = []
        for transfer in self._watched:
            self._be_patient(transfer)
            if transfer.pull.is_ready() or self._has_failed(transfer):
                self._settle(transfer)
            else:
                self._send_again(transfer)
                under_way.append(transfer)
        self._watched = under_way

    def _be_patient(self, transfer: Transfer) -> None:
        """Repeats the request, so that the sender also keeps the pieces until the new deadline."""
        now, half = self._clock.now(), transfer.patience_seconds / 2
        left = transfer.pull.deadline - now
        if left > half or now >= transfer.until:
            return
        moving = [sent for sent in transfer.requests if sent.arrays and not sent.has_ended]
        if not any([sent.peer.inlet.flows(now, half) for sent in moving]):
            return
        seconds = min(transfer.patience_seconds, transfer.until - now)
        transfer.pull.extend(seconds)
        for sent in moving:
            self._ask(sent)

    def _report(self) -> None:
        for end, pulled in self._unreported:
            self._link.send(end, pulled)
        self._unreported.clear()

    def _has_failed(self, transfer: Transfer) -> bool:
        for sent in transfer.requests:
            if sent.arrays and sent.has_ended and (error := _error_of(sent.arrays)):
                broken = HandoffError(
                    f"the pieces from {sent.peer.end.control} could not be computed or moved:"
                    f" {error}"
                )
                transfer.pull.fail(sender_error(error) or broken)
                return True
        return False

    def _send_again(self, transfer: Transfer) -> None:
        due = self._clock.now() - self._timeouts.ask_again_seconds
        for sent in transfer.requests:
            waits = sent.state is BlockState.ASKED or sent.peer.inlet.borrows
            if waits and sent.sent_at <= due:
                self._ask(sent)

    def _settle(self, transfer: Transfer) -> None:
        arrived = transfer.pull.failed() is None or transfer.assembly.assembled
        for sent in transfer.requests:
            if sent.arrays is not None and sent.has_ended:
                self._settle_ended(sent, sent.arrays)
            elif not arrived:
                self._give_up(sent)
            # The request is removed last. A caller that finds no request in progress therefore
            # never pulls over a failed connection.
            with self._lock:
                self._requests.pop(sent.request.pull_id, None)
        transfer.requests.clear()

    def _settle_ended(self, sent: SentRequest, arrays: Sequence[jax.Array | Leaf]) -> None:
        peer, inlet = sent.peer, sent.peer.inlet
        error = _error_of(arrays)
        sent.advance(BlockEvent.ARRIVE if error is None else BlockEvent.GIVE_UP)
        if error is None and arrays:
            inlet.arrived(self._clock.now())
            with self._lock:
                self._proven.add((peer.end, inlet.backend))
            if not inlet.borrows:  # borrowed memory is reported when no array needs it
                seconds = self._timeouts.pulled_seconds
                self._report_pulled(peer.end, sent.request.pull_id, seconds)
        elif error is not None and inlet.reads:
            self._link.send(peer.end, Withdraw(sent.request.pull_id))
            self._lose(peer, error)
        elif error and not sender_error(error) and inlet.failed(sent.address, self._clock.now()):
            self._drop(peer)

    def _give_up(self, sent: SentRequest) -> None:
        peer, inlet = sent.peer, sent.peer.inlet
        if inlet.reads and (sent.unread or (sent.arrays is not None and self._is_unproven(sent))):
            self._lose(peer, sent.unread or "nothing came before the deadline")
        # A sender that has refused the request has withdrawn the pull already. It still keeps the
        # leaves if this process reads the sender's memory directly.
        if sent.advance(BlockEvent.GIVE_UP) or inlet.reads:
            self._link.send(peer.end, Withdraw(sent.request.pull_id))
        if sent.arrays is not None:
            inlet.abandon(sent.arrays, sent.transfer.pull.deadline)

    def _is_unproven(self, sent: SentRequest) -> bool:
        with self._lock:
            proven = (sent.peer.end, sent.peer.inlet.backend) in self._proven
        return not proven and self._clock.now() >= sent.transfer.pull.deadline

    def _lose(self, peer: PeerState, why: str) -> None:
        key = peer.end, peer.inlet.backend
        with self._lock:
            unusable = key not in self._proven
            if unusable:
                self._unusable.add(key)
        if unusable:
            _log.warning(
                "KV from %s cannot be read by %s; another backend is used from now on: %s",
                peer.end.control,
                _TITLES[peer.inlet.backend],
                why,
            )
        self._drop(peer)

    def _drop(self, peer: PeerState) -> None:
        with self._lock:
            if self._peers.get(peer.end) is peer:
                del self._peers[peer.end]
        requests = [
            sent
            for transfer in self._watched
            for sent in transfer.requests
            if sent.peer is peer and not (sent.arrays is not None and sent.has_ended)
        ]
        peer.inlet.close(in_flight=any(sent.arrays for sent in requests))
        self._report()  # before Leave, so that the sender does not treat these leaves as in flight
        self._link.send(peer.end, Leave(peer.link))
        for sent in requests:
            if sent.arrays is None and not sent.transfer.pull.is_ready():
                self._ask_over_another(sent)

    def _ask_over_another(self, sent: SentRequest) -> None:
        """Asks over a new connection, because an answer over the old one could not be used."""
        self._link.send(sent.peer.end, Withdraw(sent.request.pull_id))
        with self._lock:
            del self._requests[sent.request.pull_id]
            sent.peer = peer = self._peer(sent.peer.end)
            sent.request = msgspec.structs.replace(
                sent.request,
                pull_id=secrets.randbits(ID_BITS),
                link=peer.link,
                backend=peer.inlet.backend,
            )
            self._requests[sent.request.pull_id] = sent
        self._ask(sent)

    def _drop_peer(self, peer: str, ends: list[KvEnd]) -> None:
        self._settle_all()
        for transfer in self._watched:
            if transfer.source == peer:
                transfer.pull.fail(HandoffError(f"peer {peer!r} was disconnected"))
        for end in ends:
            with self._lock:
                for kind in KvBackend:
                    self._proven.discard((end, kind))
                    self._unusable.discard((end, kind))
                state = self._peers.get(end)
            if state is not None:
                self._drop(state)

    def _close_all(self) -> None:
        self._settle_all()
        for transfer in self._watched:
            transfer.pull.fail(HandoffError("the channel was closed"))
        self._settle_all()  # withdraws them
        self._report()
        for peer in list(self._peers.values()):
            self._drop(peer)
        with self._lock:
            self._requests.clear()
            self._cards.clear()


def request_of(
    peer: PeerState,
    assembly: Assembly,
    offer_id: int,
    target: PullTarget,
    transports: int,
    turn: int,
) -> PullRequest:
    """Returns the request to one sender process, with a new id and without a deadline."""
    zeros = target.zeros
    _, components, heads, tokens, head_size = zeros.shape
    return PullRequest(
        pull_id=secrets.randbits(ID_BITS),
        offer_id=offer_id,
        sender_boot_id=peer.end.boot_id,
        link=peer.link,
        transports=transports,
        deadline_seconds=0.0,
        codec=target.codec,
        dtype=str(zeros.dtype),
        components=components,
        granule=target.granule,
        tokens=tokens,
        head_size=head_size,
        head_shards=heads // target.granule,
        wanted=assembly.wanted,
        process=jax.process_index(),
        turn=turn,
        backend=peer.inlet.backend,
    )


@contextlib.contextmanager
def _failing(pull: Pull, what: str) -> Iterator[None]:
    """Fails the pull with the error that is raised inside."""
    try:
        yield
    except JdisaggError as error:
        pull.fail(error)
    except Exception as error:
        pull.fail(HandoffError(f"{what}: {error}"))


def _error_of(arrays: Sequence[jax.Array | Leaf]) -> str | None:
    for array in arrays:
        if isinstance(array, Leaf) and array.error:
            return array.error
    try:
        jax.block_until_ready(arrays)
    except Exception as error:
        return str(error)
    return None


def _dropped(peer: PeerState) -> HandoffError:
    return HandoffError(
        f"the connection to {peer.end.control} was dropped before the pieces came; pull again"
    )
