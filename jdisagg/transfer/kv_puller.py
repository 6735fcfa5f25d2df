"""The receiving half of `JaxTransferChannel`: asks the sender's processes for pieces, pulls them, puts them together.

A `pull` sends its requests at once; what comes back is worked on by this half's own thread, which also watches what is under way.
Invariants:
- a request's id is random and fresh; a pull that is tried again is another pull with other ids. (A request that nobody answers is sent
  again as it is, for messages may be lost: the sender never serves an id twice.)
- global arrays are made only when each piece is there: an array that has not arrived never reaches a program;
- a pull ends at its deadline whoever is silent. What it asked for is withdrawn, and where bytes were on their way on a connection that
  moves nothing else, the connection is poisoned and dropped; the next pull makes a new one;
- a receiver's process asks every process of the sender (which of them hold the offer's rank it does not know), and those that hold
  nothing say so; it is complete when its own devices have all their pieces.
"""

import dataclasses
import itertools
import secrets
import threading
from dataclasses import dataclass, field

import jax

from jdisagg import errors
from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.transfer.assembly import Assembly
from jdisagg.transfer.channel import PullTarget
from jdisagg.transfer.channel_thread import ChannelThread
from jdisagg.transfer.kv_link import KvLink
from jdisagg.transfer.kv_messages import Leave, Posted, Pulled, PullRequest, Refused, Withdraw
from jdisagg.transfer.pieces import add_counts
from jdisagg.transfer.polled_pull import PolledPull, is_ready
from jdisagg.transfer.transfer_engine import ID_BITS, EngineOptions, Inlet, is_dead_connection

WATCH_SECONDS = 0.01
IDLE_SECONDS = 0.25
ASK_AGAIN_SECONDS = 1.0
QUIET_SECONDS = 1.0  # a connection on which something arrived this lately is alive


@dataclass(slots=True)
class _Connection:
    """To one sender process. `number` grows with each new one. `moved`: when something last arrived."""

    end: KvEnd
    number: int
    inlet: Inlet | None = None
    moved: float = 0.0


@dataclass(slots=True, eq=False)
class _Ask:
    """What one sender process was asked for one pull, and when last. `arrays` once they are on their way."""

    pull_id: int
    connection: _Connection
    transfer: "_Transfer"
    asked: float
    request: PullRequest | None = None
    arrays: list[jax.Array] | None = None
    refused: bool = False


@dataclass(slots=True, eq=False)
class _Transfer:
    pull: PolledPull
    peer: str
    assembly: Assembly
    asks: list[_Ask] = field(default_factory=list)


class KvPuller:
    """See the module's docstring. `_peers`, `_connections` and `_asks` are under the lock; `_watched` and `_stuck` belong to the thread."""

    def __init__(self, clock: Clock, link: KvLink, options: EngineOptions) -> None:
        self._clock, self._link, self._options = clock, link, options
        self._lock = threading.Lock()
        self._peers: dict[str, MeshCard] = {}
        self._connections: dict[KvEnd, _Connection] = {}
        self._asks: dict[int, _Ask] = {}
        self._turns: dict[tuple[str, tuple[int, ...], int], int] = {}
        self._numbers = itertools.count(1)
        self._moved: dict[tuple[int, int], int] = {}
        self._watched: list[_Transfer] = []
        self._stuck: list[tuple[_Ask, float]] = []
        self._thread = ChannelThread("kv-pull", self._watch)

    def connect(self, peer: str, card: MeshCard) -> None:
        with self._lock:
            known = self._peers.setdefault(peer, card)
        assert known == card, f"peer {peer!r} was introduced with another mesh; its name must hold its boot id"

    def disconnect(self, peer: str) -> None:
        with self._lock:
            card = self._peers.pop(peer, None)
            self._turns = {key: turn for key, turn in self._turns.items() if key[0] != peer}
            shared = {end for other in self._peers.values() for end in other.ends}
        if card is not None:
            self._thread.submit(lambda: self._drop_peer(peer, [end for end in card.ends if end not in shared]))

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> PolledPull:
        pull = PolledPull(offer_id, self._clock, deadline_seconds)
        try:
            self._begin(pull, offer_id, target, deadline_seconds)
        except JdisaggError as error:
            pull.fail(error)
        except Exception as error:
            pull.fail(HandoffError(f"the pull of offer {offer_id:#x} could not begin: {error}"))
        return pull

    def handle(self, sender: KvEnd, message: Posted | Refused) -> None:
        self._thread.submit(lambda: self._take(sender, message))

    def under_way(self) -> int:
        with self._lock:
            return len(self._asks) + len(self._stuck)

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        with self._lock:
            return dict(self._moved)

    def close(self) -> None:
        self._thread.close(self._close_all)

    def _begin(self, pull: PolledPull, offer_id: int, target: PullTarget, deadline_seconds: float) -> None:
        with self._lock:
            card = self._peers.get(target.peer)
        if card is None:
            raise HandoffError(f"peer {target.peer!r} is not connected; greet it first")
        if card.transports != self._options.transports or not card.ends:
            raise IncompatiblePeerError(
                f"transports is {self._options.transports} here and {card.transports} on peer {target.peer!r}, which has "
                f"{len(card.ends)} ends on the KV plane; set the same number on both, and serve both with the channel between processes"
            )
        assembly = Assembly.of(target)
        transfer = _Transfer(pull, target.peer, assembly)
        with self._lock:
            key = (target.peer, target.zeros.shape, target.rank)
            turn = self._turns[key] = self._turns.get(key, -1) + 1
            for end in card.ends:
                ask = _Ask(secrets.randbits(ID_BITS), self._connection(end), transfer, self._clock.now())
                transfer.asks.append(ask)
                self._asks[ask.pull_id] = ask
        for ask in transfer.asks:
            ask.request = self._request(ask, offer_id, target, deadline_seconds, turn)
            self._link.send(ask.connection.end, ask.request)
        self._thread.submit(lambda: self._watched.append(transfer))

    def _request(self, ask: _Ask, offer_id: int, target: PullTarget, deadline_seconds: float, turn: int) -> PullRequest:
        zeros = target.zeros
        _, components, heads, tokens, head_size = zeros.shape
        return PullRequest(
            pull_id=ask.pull_id,
            offer_id=offer_id,
            sender_boot_id=ask.connection.end.boot_id,
            link=ask.connection.number,
            transports=self._options.transports,
            deadline_seconds=deadline_seconds,
            codec=target.codec,
            dtype=str(zeros.dtype),
            components=components,
            granule=target.granule,
            tokens=tokens,
            head_size=head_size,
            head_shards=heads // target.granule,
            wanted=ask.transfer.assembly.wanted,
            process=jax.process_index(),
            turn=turn,
        )

    def _connection(self, end: KvEnd) -> _Connection:
        """Under the lock."""
        if end not in self._connections:
            self._connections[end] = _Connection(end, next(self._numbers), moved=self._clock.now())
        return self._connections[end]

    # From here on: on the thread.

    def _take(self, sender: KvEnd, message: Posted | Refused) -> None:
        with self._lock:
            ask = self._asks.get(message.pull_id)
        if ask is None or ask.connection.end != sender:
            return  # over, or not meant for us
        if isinstance(message, Refused):
            ask.refused = ask.arrays is None
            return ask.transfer.pull.fail(_typed(message))
        if ask.arrays is not None or ask.transfer.pull.is_ready():
            return  # a double; or it ended meanwhile, and the watch withdraws it
        try:
            self._receive(ask, message)
        except JdisaggError as error:
            ask.transfer.pull.fail(error)
        except Exception as error:
            ask.transfer.pull.fail(HandoffError(f"the pieces could not be pulled from {sender.control}: {error}"))

    def _receive(self, ask: _Ask, message: Posted) -> None:
        connection, assembly = ask.connection, ask.transfer.assembly
        with self._lock:
            current = self._connections.get(connection.end) is connection
        if not current or message.link != connection.number:
            raise HandoffError(f"the connection to {connection.end.control} was dropped before the pieces came; pull again")
        avals = assembly.expect(message.heads, message.pieces)
        arrays: list[jax.Array] = []
        if avals:
            if connection.inlet is None:
                connection.inlet = Inlet(self._options)
            arrays = connection.inlet.pull(message.address, ask.pull_id, avals)  # where this raises, what was posted is withdrawn
            assembly.coming(message.pieces, arrays)
        ask.arrays = arrays
        if assembly.complete:
            ask.transfer.pull.deliver(assembly.flat, assembly.nbytes, lambda arrays: self._arrived(assembly, arrays))

    def _arrived(self, assembly: Assembly, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """On the polling thread, under the pull's lock."""
        with self._lock:
            add_counts(self._moved, assembly.bytes_per_pair)
        return assembly.assemble(arrays)

    def _watch(self) -> float:
        """Settles the pulls that are over, and drops connections that are stuck."""
        under_way: list[_Transfer] = []
        for transfer in self._watched:
            if transfer.pull.is_ready() or self._has_failed(transfer):
                self._settle(transfer)
            else:
                self._ask_again(transfer)
                under_way.append(transfer)
        self._watched = under_way
        now = self._clock.now()
        stuck: list[tuple[_Ask, float]] = []
        for ask, deadline in self._stuck:
            assert ask.arrays is not None
            if all(map(is_ready, ask.arrays)):
                continue
            if now >= deadline and now - ask.connection.moved >= QUIET_SECONDS:
                self._drop(ask.connection)
            else:
                stuck.append((ask, deadline))
        self._stuck = stuck
        return WATCH_SECONDS if self._watched or self._stuck else IDLE_SECONDS

    def _has_failed(self, transfer: _Transfer) -> bool:
        """Whether one of several senders failed while others have not answered yet."""
        for ask in transfer.asks:
            if ask.arrays and all(map(is_ready, ask.arrays)) and (error := _error_of(ask.arrays)):
                transfer.pull.fail(HandoffError(f"the pieces from {ask.connection.end.control} could not be computed or moved: {error}"))
                return True
        return False

    def _ask_again(self, transfer: _Transfer) -> None:
        """A message may be lost: those who have not answered are asked again, under the same id."""
        now = self._clock.now()
        for ask in transfer.asks:
            if ask.arrays is None and ask.request is not None and now - ask.asked >= ASK_AGAIN_SECONDS:
                ask.asked = now
                self._link.send(ask.connection.end, dataclasses.replace(ask.request, deadline_seconds=transfer.pull.deadline - now))

    def _settle(self, transfer: _Transfer) -> None:
        arrived = transfer.pull.failed() is None or transfer.assembly.assembled
        for ask in transfer.asks:
            with self._lock:
                self._asks.pop(ask.pull_id, None)
            end = ask.connection.end
            if ask.arrays is not None and all(map(is_ready, ask.arrays)):
                error = _error_of(ask.arrays)
                if error is None and ask.arrays:
                    ask.connection.moved = self._clock.now()
                    self._link.send(end, Pulled(ask.pull_id))
                elif error is not None and is_dead_connection(error):
                    self._drop(ask.connection)
            elif not ask.refused and not arrived:
                self._link.send(end, Withdraw(ask.pull_id))
                if ask.arrays is not None:
                    self._stuck.append((ask, transfer.pull.deadline))
        transfer.asks.clear()

    def _drop(self, connection: _Connection) -> None:
        """Poisons and forgets a connection; the next pull makes another. Pulls under way on it fail."""
        with self._lock:
            if self._connections.get(connection.end) is connection:
                del self._connections[connection.end]
        if connection.inlet is not None:
            inlet, connection.inlet = connection.inlet, None
            asks = [ask for transfer in self._watched for ask in transfer.asks] + [ask for ask, _ in self._stuck]
            inlet.close(in_flight=any(ask.connection is connection and not all(map(is_ready, ask.arrays or ())) for ask in asks))
        self._link.send(connection.end, Leave(connection.number))

    def _drop_peer(self, peer: str, ends: list[KvEnd]) -> None:
        for transfer in self._watched:
            if transfer.peer == peer:
                transfer.pull.fail(HandoffError(f"peer {peer!r} was disconnected"))
        for end in ends:
            with self._lock:
                connection = self._connections.get(end)
            if connection is not None:
                self._drop(connection)

    def _close_all(self) -> None:
        for transfer in self._watched:
            transfer.pull.fail(HandoffError("the channel was closed"))
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._watched.clear()
        self._stuck.clear()
        with self._lock:
            self._asks.clear()
            self._peers.clear()


def _error_of(arrays: list[jax.Array]) -> str | None:
    """Of arrays that are ready."""
    try:
        jax.block_until_ready(arrays)
    except Exception as error:
        return str(error)
    return None


def _typed(message: Refused) -> JdisaggError:
    """HandoffError or IncompatiblePeerError: what a pull may fail with."""
    named = getattr(errors, message.error, HandoffError)
    incompatible = isinstance(named, type) and issubclass(named, IncompatiblePeerError | errors.ConfigError)
    return (IncompatiblePeerError if incompatible else HandoffError)(message.message)
