"""Connects a worker to the workers that send KV to it (peers), and checks that both are compatible.

Workers exchange a hello before any other message. A hello contains a random id of the worker's
current run (boot id), by which a restart of the peer is detected. A connection is reused as long as
KV transfers have the same boot id. A peer is disconnected when it has restarted or has not been
used for a long time.

Page size and layout may differ between two workers. Protocol, model, weights, KV spec with dtype,
block sizes and data-plane transports must be equal."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import groupby

from jdisagg.clock import BackgroundTasks, limit
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError
from jdisagg.layout.kv_spec import KVLayer, KVSpec
from jdisagg.messages.packed import compatible
from jdisagg.messages.ports import HandoffSource, PeerHello, PeerMessage, PeerPort
from jdisagg.messages.step_commands import ConnectPeer, DisconnectPeer
from jdisagg.messages.worker_status import LinkTimes
from jdisagg.scheduler.prices import MovePrice
from jdisagg.settings.timeouts import HandoffTimeouts
from jdisagg.telemetry import Counters
from jdisagg.worker.step_loop import StepLoop

log = logging.getLogger(__name__)

_COMPARED = (
    "model_fingerprint",
    "kv_layers",
    "kv_dtype",
    "layer_groups",
    "block_bytes",
    "windows_apart",
    "weights",
)

# A change of a link is noticeable if it exceeds this share; for the latency, by these seconds, too.
CHANGE, LEAST_SECONDS = 0.25, 1e-3
# Assumed time per byte. It is used while all blocks had the same size, because it cannot be
# measured then.
ASSUMED_BYTE_SECONDS = 1e-9

# Time without a transfer after which the reported times of a link are halved.
HALVED_SECONDS = 60.0

MOST_PULLS = 64
SLOW, FAST = 1 / 2, 1 / 8  # limits of slow and fast pulls, as parts of the time limit

PeerResolver = Callable[[HandoffSource], PeerPort]
"""Gives the port of a source by its address. Raises HandoffError where there is none. Opening one
must not wait."""


@dataclass(frozen=True, slots=True)
class PeerLink:
    """The connection to a peer, valid until the peer restarts. `checksum_key`: key of the peer's
    checksums of KV blocks."""

    peer: str = ""
    checksum_key: int = 0
    codec: str = "none"
    verify: bool = False


@dataclass(slots=True)
class _Connected:
    hello: PeerHello
    link: PeerLink
    used_at: float


class LinkMeter:
    """Measures the links from senders.

    A link is reported again only after a noticeable change, because each report makes the router
    recompute its costs. The reported times of an unused link are halved again and again, because
    only transfers measure it, and a router would otherwise never use a link that was slow once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._links: dict[str, _MeasuredLink] = {}

    def add(self, sender: str, size_bytes: int, seconds: float) -> None:
        now = self._now()
        link = self._links.get(sender)
        if link is None or link.halvings(now):
            link = self._links[sender] = _MeasuredLink(sender)
        link.add(size_bytes, seconds, now)

    def links(self) -> tuple[LinkTimes, ...]:
        now = self._now()
        return tuple([link.times(now) for link in self._links.values()])

    def forget(self, sender: str) -> None:
        self._links.pop(sender, None)


class _MeasuredLink:
    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._price = MovePrice()
        self._reported: LinkTimes | None = None
        self._used_at = 0.0

    def add(self, size_bytes: int, seconds: float, now: float) -> None:
        self._used_at = now
        self._price.add(size_bytes, seconds)
        line = self._price.line()
        assert line is not None, "a block was recorded"
        byte_seconds = ASSUMED_BYTE_SECONDS if self._price.alike else line[1]
        link = LinkTimes(self._sender, line[0], byte_seconds)
        before = self._reported
        if before is None or any(
            abs(new - old) > CHANGE * max(old, new) + least
            for old, new, least in (
                (before.latency_seconds, link.latency_seconds, LEAST_SECONDS),
                (before.byte_seconds, link.byte_seconds, 0.0),
            )
        ):
            self._reported = link

    def halvings(self, now: float) -> int:
        return int((now - self._used_at) / HALVED_SECONDS)

    def times(self, now: float) -> LinkTimes:
        link, share = self._reported, 0.5 ** self.halvings(now)
        assert link is not None, "a block was recorded"
        return LinkTimes(self._sender, share * link.latency_seconds, share * link.byte_seconds)


class LinkShare:
    """Shares the link from one sending worker fairly among the hand-offs that receive from it.

    Pulls begin in turns that rotate among the hand-offs, so that a short prompt does not wait
    behind all blocks of a long one. On a fast link many pulls are in flight, because each pull
    costs a round trip. After a slow pull their number is halved, because concurrent pulls on a slow
    link only delay each other. Used on the event loop only."""

    def __init__(self) -> None:
        self.most = MOST_PULLS
        self._running = 0
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}  # by hand-off, in rotation

    def took(self, seconds: float, limit_seconds: float) -> None:
        """Adapts the number of simultaneous pulls to the time that a pull of a computed block took.
        `limit_seconds` is the time limit of the pull."""
        if seconds > SLOW * limit_seconds:
            self.most = max(1, min(self.most, self._running) // 2)
        elif seconds < FAST * limit_seconds:
            self.most = min(MOST_PULLS, self.most + 1)

    async def begin_turn(self, handoff: int) -> None:
        """The caller must call `end_turn` when the pull has ended."""
        if self._running < self.most and not self._waiting:
            self._running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(handoff, deque()).append(turn)
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn began at the same time
                self._running -= 1
            self._give_turns()
            raise

    def end_turn(self) -> None:
        self._running -= 1
        self._give_turns()

    def _give_turns(self) -> None:
        while self._waiting and self._running < self.most:
            handoff = next(iter(self._waiting))
            turns = self._waiting.pop(handoff)
            turn = turns.popleft()
            if turns:
                self._waiting[handoff] = turns  # after the other hand-offs
            if not turn.done():
                self._running += 1
                turn.set_result(None)


@dataclass(slots=True, eq=False, repr=False)
class SideCalls:
    _counters: Counters
    _timeouts: HandoffTimeouts
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: Callable[[], Awaitable[None]]) -> None:
        self._tasks.spawn(self._send(message))

    def send_until_received(self, message: Callable[[], Awaitable[None]]) -> None:
        self._tasks.spawn(self._send_again(message))

    async def stop(self) -> None:
        self._stopping.set()
        await self._tasks.ended()

    async def _send_again(self, message: Callable[[], Awaitable[None]]) -> None:
        for _ in range(self._timeouts.abort_tries):
            if await self._send(message):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.abort_pause_seconds):
                    await self._stopping.wait()
                    return

    async def _send(self, message: Callable[[], Awaitable[None]]) -> bool:
        try:
            with limit(self._timeouts.call_seconds):
                await message()
        except (JdisaggError, TimeoutError):
            self._counters.add("messages_to_senders_lost")
            return False
        return True


@dataclass(slots=True, eq=False, repr=False)
class SenderLine:
    """Sends the messages of one hand-off's receiver to its sender: acknowledgements, heartbeats,
    aborts. They are sent in the background. A lost acknowledgement is repeated after the next
    answered heartbeat, because a migration waits for all acknowledgements. An abort is repeated a
    limited number of times until the sender has received it."""

    peer: PeerPort
    source: HandoffSource
    _attempt: int
    _calls: SideCalls
    _meter: LinkMeter
    share: LinkShare
    link: PeerLink = PeerLink()
    _unsent: list[int] = field(default_factory=list)
    _sending: bool = False

    @property
    def name(self) -> str:
        return f"hand-off {self.source.handoff_id}"

    async def greet(self, peers: "Peers", codec: str | None = None) -> None:
        """Exchanges hellos and connects to the sender, as `Peers.greet`. `codec`: codec to use
        instead of the configured one."""
        link = await peers.greet(self.source, self.peer)
        self.link = link if codec is None else replace(link, codec=codec)

    def offers(self) -> AsyncIterator[PeerMessage]:
        return self.peer.offers(self.source.handoff_id, self._attempt)

    def arrived(self, size_bytes: int, seconds: float) -> None:
        self._meter.add(self.source.worker, size_bytes, seconds)

    def acknowledge(self, offer_id: int) -> None:
        """Acknowledges a block. One message is in flight at a time; the next message contains all
        acknowledgements made in the meantime."""
        self._unsent.append(offer_id)
        self._send_next()

    def acknowledge_all(self, offer_ids: tuple[int, ...]) -> None:
        """Repeats all acknowledgements at the end of the hand-off. If one of them was lost, a
        migration, or a hand-off that sent no blocks, would otherwise not end at its sender."""
        self._calls.send(lambda: self.peer.acknowledge(self.source.handoff_id, offer_ids))

    async def heartbeat(self) -> None:
        """Renews the sender's lease. Raises JdisaggError if the sender does not answer."""
        await self.peer.acknowledge(self.source.handoff_id, ())
        if self._unsent:
            self._send_next()

    def give_up(self, reason: str) -> None:
        peer, handoff_id = self.peer, self.source.handoff_id
        self._calls.send_until_received(lambda: peer.abort(handoff_id, reason))

    def _send_next(self) -> None:
        if not self._sending:
            self._sending = True
            self._calls.send(self._acknowledge)

    async def _acknowledge(self) -> None:
        ids, self._unsent = self._unsent, []
        try:
            await self.peer.acknowledge(self.source.handoff_id, tuple(ids))
        except BaseException:
            self._unsent = [*ids, *self._unsent]
            self._sending = False
            raise
        self._sending = bool(self._unsent)
        if self._sending:
            self._calls.send(self._acknowledge)


class Peers:
    """Connections of one worker to the workers that send KV to it. `find`: function that returns
    the port to a source worker. It raises HandoffError if the worker is unknown."""

    def __init__(
        self,
        find: PeerResolver,
        hello: PeerHello,
        loop: StepLoop,
        codec: str,
        now: Callable[[], float],
        timeouts: HandoffTimeouts,
        calls: SideCalls,
    ) -> None:
        self.now = now
        self.calls = calls
        self.meter = LinkMeter(now)
        self.find = find
        self._hello = hello
        self._loop = loop
        self._codec = codec
        self._verify = hello.checksum_key != 0
        self._hello_seconds = timeouts.hello_seconds
        self._idle_seconds = timeouts.peer_idle_seconds
        self._connected: dict[tuple[str, str], _Connected] = {}
        self._shares: dict[str, LinkShare] = {}

    def introduce(self, hello: PeerHello) -> None:
        self._hello = hello

    @property
    def own_name(self) -> str:
        return self._hello.worker

    def line_to(self, source: HandoffSource, attempt: int) -> SenderLine:
        """Raises HandoffError if the worker is unknown."""
        share = self._shares.setdefault(source.worker, LinkShare())
        return SenderLine(self.find(source), source, attempt, self.calls, self.meter, share)

    async def greet(self, source: HandoffSource, port: PeerPort) -> PeerLink:
        """Exchanges hellos with a peer and connects to it. Returns the connection, which is reused
        if the peer has not restarted. Raises IncompatiblePeerError if the workers are not
        compatible. The message has the name of the field that differs. Raises HandoffError if the
        peer does not answer."""
        ours = self._hello.weights
        if source.weights != ours:
            raise IncompatiblePeerError(
                f"weights are {ours!r} on {self.own_name!r}, and the KV of {source.worker!r} is of"
                f" {source.weights!r}: these workers cannot hand over KV until both have the same"
            )
        known = self._connected.get((source.worker, source.address))
        same = known is not None and known.hello.weights == ours
        if known is not None and same and source.boot_id and known.hello.boot_id == source.boot_id:
            known.used_at = self.now()
            return known.link
        late = HandoffError(
            f"worker {source.worker!r} did not answer a hello within {self._hello_seconds:g} s"
        )
        with limit(self._hello_seconds, late):
            theirs = await port.hello(self._hello)
        known = self._connected.get((source.worker, source.address))
        # within one process this is the same object each time
        if known is not None and known.hello is theirs:
            known.used_at = self.now()
            return known.link
        check_hello(self._hello, theirs)
        if self._verify and not theirs.checksum_key:
            raise IncompatiblePeerError(
                f"limits.verify is set on {self._hello.worker!r} and not on {theirs.worker!r}: it"
                " sends no checksums; set it alike"
            )
        return self._connect(source, theirs)

    def sweep(self, now: float, in_use: Collection[str] = ()) -> None:
        """Peers in `in_use` have running KV transfers and stay connected."""
        for key, connected in list(self._connected.items()):
            if connected.link.peer in in_use:
                connected.used_at = now
            elif now - connected.used_at > self._idle_seconds:
                self._disconnect(key)

    def _connect(self, source: HandoffSource, theirs: PeerHello) -> PeerLink:
        key, name = (source.worker, source.address), peer_name(theirs)
        known = self._connected.get(key)
        link = PeerLink(name if theirs.mesh else "", theirs.checksum_key, self._codec, self._verify)
        if known is not None and known.link.peer == name:
            known.used_at, known.hello, known.link = self.now(), theirs, link
            return link
        if theirs.mesh is None:
            return link
        if known is not None:
            self._disconnect(key)
        self._connected[key] = _Connected(theirs, link, self.now())
        self._loop.fire(ConnectPeer(self._loop.next_number(), name, theirs.mesh))
        return link

    def _disconnect(self, key: tuple[str, str]) -> None:
        gone = self._connected.pop(key)
        self.meter.forget(gone.hello.worker)
        self._shares.pop(key[0], None)
        self._loop.fire(DisconnectPeer(self._loop.next_number(), gone.link.peer))


def words_of_layers(spec: KVSpec) -> str:
    """Describes the KV of each layer, as `PeerHello.kv_layers`."""
    runs = [(len(list(same)), _words(layer)) for layer, same in groupby(spec.layers)]
    return ", ".join(f"{count} x {words}" for count, words in runs)


def check_hello(ours: PeerHello, theirs: PeerHello) -> None:
    """Raises IncompatiblePeerError if two workers are not compatible: a field that must be equal
    differs, or the protocol versions are not compatible. The message has both values. Logs a
    warning if two workers of one kind have different autotune results."""
    ranges = [(one.protocol, one.oldest_protocol or one.protocol) for one in (ours, theirs)]
    if not compatible(*ranges):
        raise IncompatiblePeerError(
            f"protocol is {ours.protocol} on {ours.worker!r} and {theirs.protocol} on"
            f" {theirs.worker!r}: these workers cannot hand over KV; run versions of jdisagg that"
            " work together"
        )
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in _COMPARED]
    if ours.mesh is not None and theirs.mesh is not None:
        pairs.append(("transports", ours.mesh.transports, theirs.mesh.transports))
    for name, mine, other in pairs:
        if mine != other:
            raise IncompatiblePeerError(
                f"{name} is {mine!r} on {ours.worker!r} and {other!r} on {theirs.worker!r}: these"
                " workers cannot hand over KV; serve the same model with the same settings on both"
            )
    _check_tuning(ours, theirs)


def _check_tuning(ours: PeerHello, theirs: PeerHello) -> None:
    """A bfloat16 stream may change at a near tie anyway, a float32 stream never."""
    (kind, _, mine), (other_kind, _, other) = (one.tuning.rpartition(":") for one in (ours, theirs))
    if mine == other or not mine or not other or kind != other_kind:
        return
    differ = (
        f"autotune results are {mine} on {ours.worker!r} and {other} on {theirs.worker!r}, so that"
        " sums may differ in the last bits"
    )
    remedy = "give all workers of the kind one file by --autotune_results"
    if ours.kv_dtype == "float32" and not (ours.tuned_apart and theirs.tuned_apart):
        raise IncompatiblePeerError(
            f"{differ}: no float32 sequence moves between these workers; {remedy}, or set"
            " limits.tuned_apart on both"
        )
    log.warning("%s and a sequence that moves may change; %s", differ, remedy)


def peer_name(hello: PeerHello) -> str:
    """Returns a peer's name in step commands. A worker has another name after each restart."""
    return f"{hello.worker}#{hello.boot_id:x}"


def _words(layer: KVLayer) -> str:
    parts, kept = (
        " ".join(
            f"{part.name}[{part.heads},{part.width}]{part.dtype and f' {part.dtype}'}"
            for part in arrays
        )
        for arrays in (layer.components, layer.state)
    )
    words = [parts, layer.window and f"window {layer.window}", kept and f"state {kept}"]
    return f"({' '.join(filter(None, words))})"
