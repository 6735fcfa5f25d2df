"""The sending half of `JaxTransferChannel`: offers, and the pieces that receivers ask for.

All engine work (cut, encode, post) is done on this half's own thread, by order of arrival, without
waiting for anything. Invariants:
- each receiver process has an `Outlet` of its own, so that a stalled one harms itself alone; a
  receiver that connects anew (a higher link number) or restarts (another boot id at its address)
  gets a new one;
- every process of the sender makes the same plan from the request alone (own mesh, `wanted`,
  `turn`), and posts the pieces it holds;
- a posting ends: pulled, withdrawn, revoked, or its deadline passed. Then nothing of it is held
  here or in the engine;
- a request for an offer that is not made yet waits, within its deadline;
- to a receiver that maps this process's shared memory (shared_memory.py) nothing is posted in the
  engine: once a block is computed its pieces are written there, and the answer says where;
- likewise to one that reads this process's registered memory (nixl_memory.py), whose answer comes
  when they are written, for it looks at nothing before;
- and likewise to one that copies from this process's devices (device_memory.py), where the pieces
  stay as they are;
- a pull ahead, which waits in the engine already, always meets something there: the pieces, or an
  error."""

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import msgspec

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import (
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
from jdisagg.transfer.boxes import HEAD_DIMENSION
from jdisagg.transfer.channel import BlockStamp, Offered
from jdisagg.transfer.channel_thread import ChannelThread, ComputeWait
from jdisagg.transfer.device_memory import DeviceOutlet
from jdisagg.transfer.ended_offers import REMEMBERED_IDS, EndedOffers
from jdisagg.transfer.kv_link import KvLink
from jdisagg.transfer.memories import Memories
from jdisagg.transfer.nixl_memory import NixlOutlet
from jdisagg.transfer.pieces import (
    DeviceLeaves,
    HostLeaves,
    OfferedBlock,
    PlannedPiece,
    check_geometry,
    encoded_pieces,
    host_leaves,
    leaves_of,
    plan_of_request,
)
from jdisagg.transfer.polled_pull import is_ready
from jdisagg.transfer.said_errors import said
from jdisagg.transfer.shared_memory import MemoryOutlet
from jdisagg.transfer.transfer_engine import EngineOptions, Outlet

GIVEN_UP = "the receiver gave the pull up"
TOO_LATE = "the pull's deadline has passed"
CLOSED = "the connection was closed meanwhile; pull again"

_log = logging.getLogger(__name__)
# what receivers read by themselves, once they were told; and all that goes past the engine
_Read = NixlOutlet | DeviceOutlet
_Past = MemoryOutlet | _Read


@dataclass(frozen=True, slots=True)
class _Waiting:
    receiver: KvEnd
    request: PullRequest
    until: float


@dataclass(frozen=True, slots=True)
class _Posting:
    receiver: KvEnd
    offer_id: int
    leaves: int
    until: float
    answer: Posted


@dataclass(slots=True)
class _Door:
    """What is kept for one receiver process."""

    link: int
    outlet: Outlet | _Past
    used: float
    postings: dict[int, _Posting] = field(default_factory=dict)


class KvSender:
    """See the module's docstring. `_offers`, `_waiting`, `_ended` are under the lock; `_doors` and
    `_seen` belong to the thread."""

    def __init__(
        self, clock: Clock, end: KvEnd, link: KvLink, options: EngineOptions, memories: Memories
    ) -> None:
        self._clock, self._end, self._link, self._options = clock, end, link, options
        self._memories = memories
        self._numbers = itertools.count()
        past = memories.shared or memories.nixl or memories.device
        self._computing = ComputeWait("kv-wait") if past else None
        self._timeouts = options.timeouts
        self._lock = threading.Lock()
        self._offers: dict[int, OfferedBlock] = {}
        self._waiting: dict[int, list[_Waiting]] = {}
        self._ended = EndedOffers()
        self._doors: dict[KvEnd, _Door] = {}
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._tick_due = 0.0
        self._thread = ChannelThread("kv-send", self._regularly)

    def offer(self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp) -> None:
        offered = OfferedBlock.of(block, rank, stamp, next(self._numbers))
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
        """Pieces' postings that wait to be pulled, in all."""
        return sum(len(door.postings) for door in list(self._doors.values()))

    def close(self) -> None:
        self._thread.close(self._close_all)

    # From here on: on the thread.

    def _take(
        self, receiver: KvEnd, message: Open | PullRequest | Withdraw | Pulled | Leave
    ) -> None:
        door = self._doors.get(receiver)
        match message:
            case Open():
                if (message.sender_boot_id, message.transports) == (
                    self._end.boot_id,
                    self._options.transports,
                ):
                    self._open(receiver, message.link)
            case PullRequest():
                self._ask(receiver, message)
            case Pulled():
                if door is not None:
                    door.postings.pop(message.pull_id, None)
                    if isinstance(door.outlet, _Past):
                        door.outlet.pulled(message.pull_id)
            case Withdraw():
                self._note_seen(message.pull_id)  # a request that comes later still comes too late
                self._stop_waiting(receiver, message.pull_id)
                if door is not None and isinstance(door.outlet, _Read):
                    door.outlet.pulled(message.pull_id)  # whatever it reads, it keeps nothing
                if (
                    door is not None
                    and not _withdraw(door, message.pull_id, GIVEN_UP)
                    and message.ahead
                ):
                    door.outlet.refuse(message.pull_id, 1, said(HandoffError(GIVEN_UP)))
            case Leave():
                if door is not None and door.link <= message.link:
                    self._close_door(receiver)

    def _ask(self, receiver: KvEnd, request: PullRequest) -> None:
        if request.sender_boot_id != self._end.boot_id:
            return self._refuse(
                receiver,
                request,
                HandoffError(f"the sender at {self._end.control} has restarted; greet it again"),
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
            if remaining <= 0:  # the receiver has given it up
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
            PostedPiece(piece.source, request.wanted[piece.place].device, piece.part)
            for piece in pieces
        )
        if request.address and posted != request.pieces:
            raise IncompatiblePeerError(
                f"the receiver pulls {request.pieces} ahead, and of offer {request.offer_id:#x} it"
                f" gets {posted}"
            )
        if not pieces:
            return self._link.send(
                receiver, Posted(request.pull_id, request.link, "", offer.shape[HEAD_DIMENSION], ())
            )
        door = self._door(receiver, request.link, request)
        if request.address and door.outlet.address != request.address:
            raise HandoffError(CLOSED)
        seconds += self._timeouts.slack_seconds
        until, heads = self._clock.now() + seconds, offer.shape[HEAD_DIMENSION]
        answer = Posted(request.pull_id, request.link, door.outlet.address, heads, posted)
        if isinstance(door.outlet, _Past):
            leaves = (
                DeviceLeaves(tuple(encoded_pieces(offer, pieces, request.granule, request.codec)))
                if isinstance(door.outlet, DeviceOutlet)
                else host_leaves(offer, pieces, request.granule, request.codec)
            )
            memory = door.outlet.reserve(request.pull_id, leaves.sizes, leaves.places, seconds)
            answer = msgspec.structs.replace(answer, memory=memory)
            posting = _Posting(receiver, request.offer_id, len(leaves.places), until, answer)
            door.postings[request.pull_id] = posting
            return self._write_once_computed(receiver, request, answer, offer.number, leaves)
        arrays = encoded_pieces(offer, pieces, request.granule, request.codec)
        door.outlet.post(request.pull_id, arrays, seconds)
        posting = _Posting(receiver, request.offer_id, len(arrays), until, answer)
        door.postings[request.pull_id] = posting
        if not request.address:
            self._link.send(receiver, answer)

    def _write_once_computed(
        self,
        receiver: KvEnd,
        request: PullRequest,
        answer: Posted,
        number: int,
        leaves: HostLeaves | DeviceLeaves,
    ) -> None:
        """Writes the pieces to memory when they are there, and says where they lie; where in shared
        memory at once, for what lies there says itself whether it is written."""
        early = isinstance(self._doors[receiver].outlet, MemoryOutlet)
        if early:
            self._link.send(receiver, answer)

        def write() -> None:
            posting = self._write(receiver, request, leaves)
            if posting is not None and not early:
                self._link.send(receiver, posting.answer)

        if self._computing is None or all(map(is_ready, leaves.sources)):
            return write()
        self._computing.then(number, leaves.sources, lambda: self._thread.submit(write))

    def _write(
        self, receiver: KvEnd, request: PullRequest, leaves: HostLeaves | DeviceLeaves
    ) -> _Posting | None:
        """None: it did not."""
        door = self._doors.get(receiver)
        if (
            door is None
            or request.pull_id not in door.postings
            or not isinstance(door.outlet, _Past)
        ):
            return None  # taken back meanwhile
        posting = door.postings[request.pull_id]
        try:
            match door.outlet, leaves:
                case DeviceOutlet() as outlet, DeviceLeaves():
                    memory = outlet.write(request.pull_id, leaves.arrays())
                    answer = msgspec.structs.replace(posting.answer, memory=memory)
                    posting = door.postings[request.pull_id] = replace(posting, answer=answer)
                case (MemoryOutlet() | NixlOutlet()) as outlet, HostLeaves():
                    outlet.write(request.pull_id, leaves.arrays())
                case _:
                    return None  # for another connection than there is now
        except Exception as error:
            _withdraw(door, request.pull_id, "")
            broken = HandoffError(
                f"the pieces of offer {request.offer_id:#x} could not be computed or moved: {error}"
            )
            self._refuse(receiver, request, broken)
            return None
        return posting

    def _answer_again(self, receiver: KvEnd, request: PullRequest) -> None:
        """The first answer may have been lost. Nothing is posted a second time: the id may have
        been pulled, or withdrawn."""
        door = self._doors.get(receiver)
        posting = door.postings.get(request.pull_id) if door is not None else None
        with self._lock:
            offer, ended = self._offers.get(request.offer_id), self._ended.how(request.offer_id)
        if door is not None and posting is not None:
            if not isinstance(door.outlet, _Read) or door.outlet.has_written(request.pull_id):
                self._link.send(receiver, posting.answer)
        elif ended is not None:
            self._link.send(
                receiver,
                _refusal(request, HandoffError(f"offer {request.offer_id:#x} was {ended}")),
            )
        elif offer is not None:
            try:
                if not _pieces(offer, request):
                    self._link.send(
                        receiver,
                        Posted(request.pull_id, request.link, "", offer.shape[HEAD_DIMENSION], ()),
                    )
            except JdisaggError as error:
                self._link.send(receiver, _refusal(request, error))

    def _door(self, receiver: KvEnd, link: int, request: PullRequest | None = None) -> _Door:
        door = self._doors.get(receiver)
        if door is not None and link < door.link:
            raise HandoffError(f"connection {link} was replaced by {door.link}; pull again")
        if door is None or link > door.link:
            for other in [end for end in self._doors if end.control == receiver.control]:
                # an older connection, or an older life, of the same receiver
                self._close_door(other)
            door = self._doors[receiver] = _Door(link, self._outlet(request), 0.0)
        door.used = time.monotonic()
        return door

    def _outlet(self, request: PullRequest | None) -> Outlet | _Past:
        memories = self._memories
        if request is None or not (request.shared or request.nixl or request.device):
            return Outlet(self._options)
        if request.shared and memories.shared is not None:
            return MemoryOutlet(memories.shared)
        if request.nixl and memories.nixl is not None:
            return NixlOutlet(memories.nixl)
        if request.device and memories.device is not None:
            return DeviceOutlet(memories.device)
        raise HandoffError("this process has no such memory to read; pull again without")

    def _open(self, receiver: KvEnd, link: int) -> HandoffError | None:
        """Says where the outlet is; returns why there is none."""
        try:
            self._link.send(receiver, Opened(link, self._door(receiver, link).outlet.address))
        except HandoffError as error:  # an older connection
            return error
        except Exception as error:
            return HandoffError(f"no connection could be opened: {error}")
        return None

    def _is_where_pulled(self, receiver: KvEnd, request: PullRequest) -> bool:
        """Whether what is being pulled ahead is pulled from the outlet that there is."""
        door = self._doors.get(receiver)
        return door is not None and (door.link, door.outlet.address) == (
            request.link,
            request.address,
        )

    def _refuse(self, receiver: KvEnd, request: PullRequest, error: JdisaggError) -> None:
        self._link.send(receiver, _refusal(request, error))
        self._flush(receiver, request, error)

    def _flush(self, receiver: KvEnd, request: PullRequest, error: JdisaggError) -> None:
        """What is being pulled ahead will not be posted."""
        if request.address and self._is_where_pulled(receiver, request):
            leaves = len(request.pieces) * leaves_of(request.codec)
            self._doors[receiver].outlet.refuse(request.pull_id, max(1, leaves), said(error))

    def _note_seen(self, pull_id: int) -> None:
        self._seen[pull_id] = None
        while len(self._seen) > REMEMBERED_IDS:
            self._seen.popitem(last=False)

    def _stop_waiting(self, receiver: KvEnd, pull_id: int) -> None:
        self._drop_waits(lambda wait: (wait.receiver, wait.request.pull_id) == (receiver, pull_id))

    def _drop_waits(self, over: Callable[[_Waiting], bool]) -> list[_Waiting]:
        """Forgets the requests that wait in vain, and gives them."""
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
        for receiver, door in self._doors.items():
            for pull_id in [
                pull_id
                for pull_id, posting in door.postings.items()
                if posting.offer_id == offer_id
            ]:
                _withdraw(door, pull_id, reason)
                self._link.send(receiver, Refused(pull_id, HandoffError.__name__, reason))

    def _regularly(self) -> float:
        if time.monotonic() >= self._tick_due:
            self._tick_due = time.monotonic() + self._timeouts.tick_seconds
            now = self._clock.now()
            if self._memories.device is not None:
                self._memories.device.sweep()
            for receiver in list(self._doors):
                try:
                    self._look_after(receiver, now)
                except Exception:
                    # the others must be looked after all the same; its receiver opens another
                    _log.exception("the outlet for %s failed and is closed", receiver.control)
                    self._close_door(receiver)
            for wait in self._drop_waits(lambda wait: now >= wait.until):
                self._flush(wait.receiver, wait.request, HandoffError(TOO_LATE))
        return self._timeouts.tick_seconds

    def _look_after(self, receiver: KvEnd, now: float) -> None:
        door = self._doors[receiver]
        for pull_id in [
            pull_id for pull_id, posting in door.postings.items() if now >= posting.until
        ]:
            _withdraw(door, pull_id, TOO_LATE)
        if not door.postings and time.monotonic() - door.used > self._timeouts.outlet_idle_seconds:
            self._close_door(receiver)
            if self._memories.shared is not None:
                self._memories.shared.drop_spare()
        else:
            door.outlet.tick()

    def _close_door(self, receiver: KvEnd) -> None:
        door = self._doors.pop(receiver, None)
        if door is not None:
            door.outlet.close(in_flight=bool(door.postings))

    def _close_all(self) -> None:
        for receiver in list(self._doors):
            self._close_door(receiver)
        if self._computing is not None:
            self._computing.close()
        if self._memories.shared is not None:
            self._memories.shared.close()
        with self._lock:
            self._offers.clear()
            self._waiting.clear()


def _pieces(offer: OfferedBlock, request: PullRequest) -> tuple[PlannedPiece, ...]:
    """What of the offer this process holds for the request. Raises where the two do not fit."""
    shape = (
        1,
        request.components,
        request.granule * request.head_shards,
        request.tokens,
        request.head_size,
    )
    check_geometry(offer, request.dtype, shape, request.granule)
    return plan_of_request(offer, request)


def _refusal(request: PullRequest, error: JdisaggError) -> Refused:
    return Refused(request.pull_id, type(error).__name__, error.message)


def _withdraw(door: _Door, pull_id: int, reason: str) -> bool:
    """Whether anything was posted under the id."""
    posting = door.postings.pop(pull_id, None)
    if posting is not None:
        door.outlet.withdraw(pull_id, posting.leaves, said(HandoffError(reason)))
    return posting is not None
