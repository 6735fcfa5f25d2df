"""Whom a worker receives KV from: finds the peer's port, greets it, and makes it known to its own mesh.

A hello comes before all else, so that a peer that was restarted at its address is never taken for the one that was there before: another
boot id is another peer to the mesh. Who is known by the boot id that a hand-off names need not be greeted again. Peers are connected once,
and disconnected when they were replaced or long unused.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from jdisagg.clock import limit
from jdisagg.dispatch.ports import HandoffSource, PeerHello, PeerPort
from jdisagg.errors import HandoffError, IncompatiblePeerError
from jdisagg.scheduler.commands import ConnectPeer, DisconnectPeer
from jdisagg.worker.peer_hello import check_hello, peer_name
from jdisagg.worker.step_loop import StepLoop

HELLO_SECONDS = 5.0
IDLE_SECONDS = 600.0

PeerResolver = Callable[[HandoffSource], PeerPort]
"""Gives the port of a source by its address. Raises HandoffError where there is none. Opening one must not wait."""


@dataclass(frozen=True, slots=True)
class Link:
    """How blocks come from one start of one peer: its name in commands, the key of its checksums, the codec."""

    peer: str = ""
    checksum_key: int = 0
    codec: str = "none"
    verify: bool = False


@dataclass(slots=True)
class _Connected:
    hello: PeerHello
    link: Link
    used_at: float


class Peers:
    """`peers`: ports by worker name (embedded), or a resolver by address."""

    def __init__(
        self,
        peers: Mapping[str, PeerPort] | PeerResolver,
        hello: PeerHello,
        loop: StepLoop,
        codec: str,
        verify: bool,
        now: Callable[[], float],
    ) -> None:
        self._peers = peers
        self._hello = hello
        self._loop = loop
        self._codec = codec
        self._verify = verify
        self._now = now
        self._connected: dict[tuple[str, str], _Connected] = {}

    def find(self, source: HandoffSource) -> PeerPort:
        """Raises HandoffError when there is no such peer."""
        if not isinstance(self._peers, Mapping):
            return self._peers(source)
        peer = self._peers.get(source.worker)
        if peer is None:
            raise HandoffError(f"worker {source.worker!r} is not known here; known: {', '.join(self._peers) or 'none'}")
        return peer

    async def greet(self, source: HandoffSource, port: PeerPort) -> Link:
        """Raises IncompatiblePeerError naming what differs, HandoffError when there is no answer."""
        known = self._connected.get((source.worker, source.address))
        if known is not None and source.boot_id and known.hello.boot_id == source.boot_id:
            known.used_at = self._now()
            return known.link
        try:
            with limit(HELLO_SECONDS):
                theirs = await port.hello(self._hello)
        except TimeoutError:
            raise HandoffError(f"worker {source.worker!r} did not answer a hello within {HELLO_SECONDS:g} s") from None
        known = self._connected.get((source.worker, source.address))
        if known is not None and known.hello is theirs:  # within one process the very same object comes each time
            known.used_at = self._now()
            return known.link
        check_hello(self._hello, theirs)
        if self._verify and not theirs.checksum_key:
            raise IncompatiblePeerError(
                f"limits.verify is set on {self._hello.worker!r} and not on {theirs.worker!r}: it sends no checksums; set it alike"
            )
        return self._connect(source, theirs)

    def sweep(self, now: float, in_use: Collection[str] = ()) -> None:
        """Peers that nothing was pulled from for long are disconnected; a hello connects them again. `in_use`: hand-offs from them last."""
        for key, connected in list(self._connected.items()):
            if connected.link.peer in in_use:
                connected.used_at = now
            elif now - connected.used_at > IDLE_SECONDS:
                self._disconnect(key)

    def _connect(self, source: HandoffSource, theirs: PeerHello) -> Link:
        key, name = (source.worker, source.address), peer_name(theirs)
        known = self._connected.get(key)
        link = Link(name if theirs.mesh else "", theirs.checksum_key, self._codec, self._verify)
        if known is not None and known.link.peer == name:
            known.used_at, known.hello, known.link = self._now(), theirs, link
            return link
        if theirs.mesh is None:
            return link
        if known is not None:
            self._disconnect(key)
        self._connected[key] = _Connected(theirs, link, self._now())
        self._loop.fire(ConnectPeer(self._loop.next_number(), name, theirs.mesh))
        return link

    def _disconnect(self, key: tuple[str, str]) -> None:
        gone = self._connected.pop(key)
        self._loop.fire(DisconnectPeer(self._loop.next_number(), gone.link.peer))
