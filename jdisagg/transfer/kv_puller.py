"""The receiving half of `JaxTransferChannel`: asks the sender's processes for pieces, pulls them,
puts them together.

A `pull` sends its requests at once; what comes back is worked on by this half's own thread, which
also watches what is under way. Where the connection is open and the target says which rank of the
sender has which heads, nothing needs to come back: the pieces are planned here, as the sender will,
and pulled ahead of their posting, often of their computing. Else the sender says what waits where.
Invariants:
- a request's id is random and fresh; a pull that is tried again is another pull with other ids. (A
  request that nobody answers is sent again as it is, for messages may be lost: the sender never
  serves an id twice.)
- global arrays are made only when each piece is there: an array that has not arrived never reaches
  a program;
- of a sender whose shared memory can be mapped here (shared_memory.py) nothing goes through the
  engine: its answer says where the pieces lie, and they are arrays at once;
- nor of one whose registered memory can be read over NIXL (nixl_memory.py), or which lends its
  devices' memory on this host (device_memory.py): it is read where its answer says. Where that
  fails before anything ever came so, the next pull goes another way;
- a pull ends at its deadline whoever is silent. What it asked for is withdrawn, and where bytes
  were on their way on a connection that moves nothing else, the connection is poisoned and dropped;
  the next pull makes a new one;
- where it cannot plan, a receiver's process asks every process of the sender (which of them hold
  the offer's rank it does not know), and those that hold nothing say so; it is complete when its
  own devices have all their pieces."""

import functools
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Sequence

import jax
import msgspec

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import (
    InMemory,
    InRegistered,
    Leave,
    OnDevice,
    Open,
    Opened,
    Posted,
    PostedPiece,
    Pulled,
    Refused,
    Withdraw,
)
from jdisagg.transfer.assembly import Assembly
from jdisagg.transfer.channel import PullTarget
from jdisagg.transfer.channel_thread import ChannelThread
from jdisagg.transfer.device_memory import DeviceSender
from jdisagg.transfer.kv_link import KvLink
from jdisagg.transfer.kv_requests import (
    SenderConnection,
    SentRequest,
    Transfer,
    pieces_by_sender,
    request_of,
)
from jdisagg.transfer.memories import Memories
from jdisagg.transfer.nixl_memory import NixlSender
from jdisagg.transfer.pieces import add_counts
from jdisagg.transfer.polled_pull import PolledPull, is_ready
from jdisagg.transfer.said_errors import heard, named_error
from jdisagg.transfer.shared_memory import Leaf, SenderMemory
from jdisagg.transfer.transfer_engine import ID_BITS, EngineOptions, Inlet, is_dead_connection
from jdisagg.transfer.ways import ReadMemory, Ways

_log = logging.getLogger(__name__)


class KvPuller:
    """See the module's docstring. `_peers`, `_connections`, `_ways` and `_requests` are under the
    lock; `_watched` and `_stuck` belong to the thread."""

    def __init__(
        self, clock: Clock, link: KvLink, options: EngineOptions, memories: Memories
    ) -> None:
        self._ways = Ways(memories)
        self._clock, self._link, self._options = clock, link, options
        self._timeouts = options.timeouts
        self._lock = threading.Lock()
        self._peers: dict[str, MeshCard] = {}
        self._connections: dict[KvEnd, SenderConnection] = {}
        self._requests: dict[int, SentRequest] = {}
        self._turns: dict[tuple[str, tuple[int, ...], int], int] = {}
        self._numbers = itertools.count(1)
        self._moved: dict[tuple[int, int], int] = {}
        self._watched: list[Transfer] = []
        self._stuck: list[tuple[SentRequest, float]] = []
        self._untold: list[tuple[KvEnd, Pulled]] = []
        self._tell_at = self._watch_at = 0.0
        self._thread = ChannelThread("kv-pull", self._watch)

    def connect(self, peer: str, card: MeshCard) -> None:
        with self._lock:
            known = self._peers.setdefault(peer, card)
            opened = [
                self._connection(end)
                for end in card.ends
                if card.transports == self._options.transports
            ]
        assert known == card, (
            f"peer {peer!r} was introduced with another mesh; its name must hold its boot id"
        )
        for connection in opened:
            if connection.memory is not None:
                continue
            self._link.send(
                connection.end,
                Open(connection.end.boot_id, connection.number, self._options.transports),
            )

    def disconnect(self, peer: str) -> None:
        with self._lock:
            card = self._peers.pop(peer, None)
            self._turns = {key: turn for key, turn in self._turns.items() if key[0] != peer}
            shared = {end for other in self._peers.values() for end in other.ends}
        if card is not None:
            self._thread.submit(
                lambda: self._drop_peer(peer, [end for end in card.ends if end not in shared])
            )

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> PolledPull:
        pull = PolledPull(offer_id, self._clock, deadline_seconds)
        try:
            self._begin(pull, offer_id, target, deadline_seconds)
        except JdisaggError as error:
            pull.fail(error)
        except Exception as error:
            pull.fail(HandoffError(f"the pull of offer {offer_id:#x} could not begin: {error}"))
        return pull

    def handle(self, sender: KvEnd, message: Opened | Posted | Refused) -> None:
        self._thread.submit(lambda: self._take(sender, message))

    def under_way(self) -> int:
        with self._lock:
            return len(self._requests) + len(self._stuck)

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        with self._lock:
            return dict(self._moved)

    def channels(self) -> tuple[str, ...]:
        with self._lock:
            ways = [(end, each.memory) for end, each in self._connections.items()]
            return tuple(sorted(self._ways.said(end, memory) for end, memory in ways))

    def close(self) -> None:
        self._thread.close(self._close_all)

    def _begin(
        self, pull: PolledPull, offer_id: int, target: PullTarget, deadline_seconds: float
    ) -> None:
        with self._lock:
            card = self._peers.get(target.peer)
        if card is None:
            raise HandoffError(f"peer {target.peer!r} is not connected; greet it first")
        if card.transports != self._options.transports or not card.ends:
            raise IncompatiblePeerError(
                f"transports is {self._options.transports} here and {card.transports} on peer"
                f" {target.peer!r}, which has {len(card.ends)} ends on the KV plane; set the same"
                " number on both, and serve both with the channel between processes"
            )
        assembly = Assembly.of(target)
        transfer = Transfer(pull, target.peer, assembly)
        with self._lock:
            key = (target.peer, target.zeros.shape, target.rank)
            turn = self._turns[key] = self._turns.get(key, -1) + 1
            connections = [self._connection(end) for end in card.ends]
            ahead = self._plan_ahead(card, connections, target, assembly, turn)
            for place, connection in enumerate(connections):
                if ahead is None or place in ahead:
                    pieces = ahead[place] if ahead is not None else ()
                    sent = SentRequest(
                        secrets.randbits(ID_BITS),
                        connection,
                        transfer,
                        self._clock.now(),
                        ahead=pieces,
                    )
                    transfer.requests.append(sent)
                    self._requests[sent.pull_id] = sent
        for sent in transfer.requests:
            sent.connection.used = self._clock.now()
            sent.request = request_of(
                sent, offer_id, target, deadline_seconds, self._options.transports, turn
            )
            self._link.send(sent.connection.end, sent.request)
        self._thread.submit(
            lambda: self._watch_new(transfer, target.heads if ahead is not None else 0)
        )

    def _plan_ahead(
        self,
        card: MeshCard,
        connections: list[SenderConnection],
        target: PullTarget,
        assembly: Assembly,
        turn: int,
    ) -> dict[int, tuple[PostedPiece, ...]] | None:
        """The pieces for this process's devices by the sender's process that holds them; None where
        a sender must be asked first. Under the lock."""
        fresh = self._clock.now() - self._timeouts.fresh_seconds
        if not target.heads or any(
            not connection.address or connection.used < fresh for connection in connections
        ):
            return None
        return pieces_by_sender(card, target, assembly, turn)

    def _connection(self, end: KvEnd) -> SenderConnection:
        """Under the lock."""
        if end not in self._connections:
            memory = self._ways.memory_of(end)
            self._connections[end] = SenderConnection(
                end, next(self._numbers), moved=self._clock.now(), memory=memory
            )
            _log.info("KV comes from %s", self._ways.said(end, memory))
        return self._connections[end]

    # From here on: on the thread.

    def _watch_new(self, transfer: Transfer, heads: int) -> None:
        """`heads`: of the whole block, where it is pulled ahead."""
        self._watched.append(transfer)
        try:
            if heads and not transfer.pull.is_ready():
                transfer.assembly.expect(heads, ())  # also where no device of this process gets any
                for sent in transfer.requests:
                    assert sent.request is not None
                    self._receive(sent, sent.request.address, heads, sent.ahead)
                self._deliver(transfer)
        except JdisaggError as error:
            transfer.pull.fail(error)
        except Exception as error:
            transfer.pull.fail(HandoffError(f"the pieces could not be pulled: {error}"))

    def _opened(self, sender: KvEnd, message: Opened) -> None:
        with self._lock:
            connection = self._connections.get(sender)
        if connection is not None and connection.number == message.link:
            self._inlet(connection).open(message.address)
            connection.used = self._clock.now()
            connection.address = message.address

    def _inlet(self, connection: SenderConnection) -> Inlet:
        if connection.inlet is None:
            connection.inlet = Inlet(self._options)
        return connection.inlet

    def _take(self, sender: KvEnd, message: Opened | Posted | Refused) -> None:
        if isinstance(message, Opened):
            return self._opened(sender, message)
        with self._lock:
            sent = self._requests.get(message.pull_id)
        if sent is None or sent.connection.end != sender:
            return  # over, or not meant for us
        if isinstance(message, Refused):
            sent.refused = True
            return sent.transfer.pull.fail(named_error(message.error, message.message))
        if sent.arrays is not None or sent.transfer.pull.is_ready():
            return  # a double; or it ended meanwhile, and the watch withdraws it
        try:
            if message.link != sent.connection.number:
                raise _dropped(sent.connection)
            if message.memory is None:
                self._receive(sent, message.address, message.heads, message.pieces)
            else:
                self._map(sent, message, message.memory)
            if message.address:
                sent.connection.address = message.address
            self._deliver(sent.transfer)
        except JdisaggError as error:
            sent.transfer.pull.fail(error)
        except Exception as error:
            sent.transfer.pull.fail(
                HandoffError(f"the pieces could not be pulled from {sender.control}: {error}")
            )

    def _receive(
        self, sent: SentRequest, address: str, heads: int, pieces: tuple[PostedPiece, ...]
    ) -> None:
        """Lets the pieces come. Raises where the connection is not the one that was asked on, or
        has no room."""
        connection, assembly = sent.connection, sent.transfer.assembly
        self._check_current(connection)
        if sent.ahead and address != connection.address:
            raise _dropped(connection)
        avals = assembly.expect(heads, pieces)
        arrays: list[jax.Array] = []
        if avals:
            # where this raises, what was posted is withdrawn
            arrays = self._inlet(connection).pull(address, sent.pull_id, avals)
            assembly.coming(pieces, arrays)
        sent.arrays, sent.address = arrays, address

    def _map(
        self, sent: SentRequest, message: Posted, memory: InMemory | InRegistered | OnDevice
    ) -> None:
        """Takes what lies in the sender's shared memory, or is still to be written there; begins to
        read what lies in its registered memory or on its devices. Raises where that was taken
        back, or the connection is not the one that was asked on."""
        connection, assembly = sent.connection, sent.transfer.assembly
        self._check_current(connection)
        avals = assembly.expect(message.heads, message.pieces)
        deadline = sent.transfer.pull.deadline
        leaves: Sequence[Leaf]
        match connection.memory, memory:
            case SenderMemory() as mapped, InMemory():
                told = functools.partial(self._tell_pulled, connection.end, sent.pull_id, 0.0)
                leaves = mapped.leaves(memory, avals, lambda: self._thread.submit(told))
            case NixlSender() as registered, InRegistered():
                try:
                    leaves = registered.leaves(memory, avals, lambda: self._clock.now() < deadline)
                except HandoffError as error:
                    sent.unread = error.message
                    raise
            case DeviceSender() as lent, OnDevice():
                try:
                    leaves = lent.leaves(memory, avals, lambda: self._clock.now() < deadline)
                except HandoffError as error:
                    sent.unread = error.message
                    raise
            case _:
                raise HandoffError(
                    f"{connection.end.control} answered with memory that was not asked for"
                )
        assembly.coming(message.pieces, leaves)
        sent.arrays = leaves

    def _check_current(self, connection: SenderConnection) -> None:
        """Raises where it was dropped: what it had open is closed, and its sender kept nothing."""
        with self._lock:
            if self._connections.get(connection.end) is not connection:
                raise _dropped(connection)

    def _tell_pulled(self, end: KvEnd, pull_id: int, seconds: float) -> None:
        """Within so many seconds, together with others."""
        due = time.monotonic() + seconds
        self._tell_at = min(self._tell_at, due) if self._untold else due
        self._untold.append((end, Pulled(pull_id)))

    def _deliver(self, transfer: Transfer) -> None:
        assembly = transfer.assembly
        if assembly.complete:
            transfer.pull.deliver(
                assembly.flat,
                assembly.nbytes,
                lambda arrays: self._arrived(assembly, arrays),
                heard,
            )

    def _arrived(self, assembly: Assembly, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """On the polling thread, under the pull's lock."""
        with self._lock:
            add_counts(self._moved, assembly.bytes_per_pair)
        return assembly.assemble(arrays)

    def _watch(self) -> float:
        """Settles the pulls that are over, and drops connections that are stuck; every so often,
        though it is called after each job."""
        if self._untold and time.monotonic() >= self._tell_at:
            self._tell()
        early = self._watch_at - time.monotonic()
        if early > 0:
            return early
        self._watch_at = time.monotonic() + self._timeouts.watch_seconds
        self._settle_all()
        now = self._clock.now()
        stuck: list[tuple[SentRequest, float]] = []
        for sent, deadline in self._stuck:
            assert sent.arrays is not None
            if all(map(is_ready, sent.arrays)):
                continue
            if now >= deadline and now - sent.connection.moved >= self._timeouts.quiet_seconds:
                self._drop(sent.connection)
            else:
                stuck.append((sent, deadline))
        self._stuck = stuck
        return (
            self._timeouts.watch_seconds
            if self._watched or self._stuck or self._untold
            else self._timeouts.idle_seconds
        )

    def _settle_all(self) -> None:
        under_way: list[Transfer] = []
        for transfer in self._watched:
            if transfer.pull.is_ready() or self._has_failed(transfer):
                self._settle(transfer)
            else:
                self._ask_again(transfer)
                under_way.append(transfer)
        self._watched = under_way

    def _tell(self) -> None:
        for end, pulled in self._untold:
            self._link.send(end, pulled)
        self._untold.clear()

    def _has_failed(self, transfer: Transfer) -> bool:
        """Whether one of several senders failed while others have not answered yet."""
        for sent in transfer.requests:
            if (
                sent.arrays
                and all(map(is_ready, sent.arrays))
                and (error := _error_of(sent.arrays))
            ):
                broken = HandoffError(
                    f"the pieces from {sent.connection.end.control} could not be computed or moved:"
                    f" {error}"
                )
                transfer.pull.fail(heard(error) or broken)
                return True
        return False

    def _ask_again(self, transfer: Transfer) -> None:
        """A message may be lost: those who have not answered are asked again, under the same id.
        (Bytes answer a pull ahead, and one whose memory is still to be written.)"""
        now = self._clock.now()
        for sent in transfer.requests:
            if (
                (
                    sent.arrays is None
                    or sent.ahead
                    or isinstance(sent.connection.memory, SenderMemory)
                )
                and sent.request is not None
                and now - sent.sent_at >= self._timeouts.ask_again_seconds
            ):
                sent.sent_at = now
                self._link.send(
                    sent.connection.end,
                    msgspec.structs.replace(
                        sent.request, deadline_seconds=transfer.pull.deadline - now
                    ),
                )

    def _settle(self, transfer: Transfer) -> None:
        arrived = transfer.pull.failed() is None or transfer.assembly.assembled
        for sent in transfer.requests:
            end = sent.connection.end
            if sent.arrays is not None and all(map(is_ready, sent.arrays)):
                error = _error_of(sent.arrays)
                if error is None and sent.arrays:
                    sent.connection.moved = self._clock.now()
                    with self._lock:
                        self._ways.proved(end, sent.connection.memory)
                    # of shared memory it is told when nothing needs it
                    if not isinstance(sent.connection.memory, SenderMemory):
                        self._tell_pulled(end, sent.pull_id, self._timeouts.pulled_seconds)
                elif error is not None and isinstance(sent.connection.memory, ReadMemory):
                    self._link.send(end, Withdraw(sent.pull_id))
                    self._lose(sent.connection, sent.connection.memory, error)
                elif (
                    error is not None
                    and is_dead_connection(error)
                    and sent.address == sent.connection.address
                ):
                    self._drop(sent.connection)
            elif not arrived:
                memory = sent.connection.memory
                if isinstance(memory, ReadMemory) and (
                    sent.unread or (sent.arrays is not None and self._is_unproven(sent, memory))
                ):
                    why = sent.unread or "nothing came before the deadline"
                    self._lose(sent.connection, memory, why)
                # Who refuses has withdrawn it, or never had it; of its devices it keeps it for us.
                if not sent.refused or isinstance(memory, DeviceSender):
                    self._link.send(end, Withdraw(sent.pull_id, bool(sent.ahead)))
                if sent.arrays is not None and sent.connection.memory is None:
                    flushed = (
                        self._clock.now() + self._timeouts.flush_seconds if sent.ahead else 0.0
                    )
                    self._stuck.append((sent, max(transfer.pull.deadline, flushed)))
            # last: who sees that nothing is under way pulls past what failed, not over it again
            with self._lock:
                self._requests.pop(sent.pull_id, None)
        transfer.requests.clear()

    def _is_unproven(self, sent: SentRequest, memory: ReadMemory) -> bool:
        """Whether the deadline came before anything did from there in this way. (One that stalls
        later will go on, or its reads will fail.)"""
        with self._lock:
            proven = self._ways.is_proven(sent.connection.end, memory)
        return not proven and self._clock.now() >= sent.transfer.pull.deadline

    def _lose(self, connection: SenderConnection, memory: ReadMemory, why: str) -> None:
        """Drops a connection over which something could not be read."""
        with self._lock:
            self._ways.failed(connection.end, memory, why)
        self._drop(connection)

    def _drop(self, connection: SenderConnection) -> None:
        """Poisons and forgets a connection; the next pull makes another. Pulls under way on it
        fail."""
        with self._lock:
            if self._connections.get(connection.end) is connection:
                del self._connections[connection.end]
        if connection.memory is not None:
            connection.memory.close()
        if connection.inlet is not None:
            inlet, connection.inlet = connection.inlet, None
            requests = [sent for transfer in self._watched for sent in transfer.requests] + [
                sent for sent, _ in self._stuck
            ]
            inlet.close(
                in_flight=any(
                    sent.connection is connection and not all(map(is_ready, sent.arrays or ()))
                    for sent in requests
                )
            )
        self._tell()  # else the sender would take what has arrived for being on its way still
        self._link.send(connection.end, Leave(connection.number))

    def _drop_peer(self, peer: str, ends: list[KvEnd]) -> None:
        self._settle_all()
        for transfer in self._watched:
            if transfer.peer == peer:
                transfer.pull.fail(HandoffError(f"peer {peer!r} was disconnected"))
        for end in ends:
            with self._lock:
                self._ways.forget(end)
                connection = self._connections.get(end)
            if connection is not None:
                self._drop(connection)

    def _close_all(self) -> None:
        self._settle_all()
        self._tell()
        for transfer in self._watched:
            transfer.pull.fail(HandoffError("the channel was closed"))
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._watched.clear()
        self._stuck.clear()
        with self._lock:
            self._requests.clear()
            self._peers.clear()


def _error_of(arrays: Sequence[jax.Array | Leaf]) -> str | None:
    """Of arrays that are ready."""
    for array in arrays:
        if isinstance(array, Leaf) and array.error:
            return array.error
    try:
        jax.block_until_ready(arrays)
    except Exception as error:
        return str(error)
    return None


def _dropped(connection: SenderConnection) -> HandoffError:
    return HandoffError(
        f"the connection to {connection.end.control} was dropped before the pieces came; pull again"
    )
