"""The sessions whose KV a mesh caches: which blocks each has, and whether a pause follows its turn.

A session is made by requests with its key (`Hints.session`) and belongs to their tenant and cache
scope. Its chain is that of its last turn. Blocks that no other request used are its own: in a pause
these alone are evicted before others, and they alone are freed with the session.

Does no I/O. Invariants (each is a test of the same name in tests/scheduler/test_session_blocks.py):
- a_block_that_another_request_used_is_no_sessions_own
- equal_keys_of_two_tenants_are_two_sessions
- sessions_unused_for_longest_are_forgotten_first
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from jdisagg.prompt.hints import Retention
from jdisagg.request import Request

MOST_SESSIONS, MOST_BLOCKS = 1 << 16, 1 << 18  # that a worker remembers

SessionKey = tuple[str, str, str]  # tenant, cache scope, key


@dataclass(slots=True, eq=False)
class Session:
    """A session and its last turn.

    Attributes:
        chain: Names of the blocks of the last prompt, and of its answer once it has ended.
        own: Names of blocks, also of earlier turns, that no other request used.
        turn_at: Time at which the last turn began or ended.
        pause_until: Time at which the pause after the last turn is expected to end; None if no
            pause follows, or if it has ended.
        leaves: Whether the pause has just begun, so that blocks are yet to be demoted.
    """

    chain: tuple[bytes, ...] = ()
    own: set[bytes] = field(default_factory=set)
    turn_at: float = 0.0
    retention: Retention | None = None
    pause_until: float | None = None
    leaves: bool = False

    def retention_left(self, now: float) -> float:
        return max(0.0, self.turn_at + self.retention.seconds - now) if self.retention else 0.0

    def pause_left(self, now: float) -> float:
        return max(0.0, (self.pause_until or now) - now)


class SessionBlocks:
    """Args:
    cached: Function that returns whether a block is in pages or in another tier.
    """

    def __init__(
        self,
        cached: Callable[[bytes], bool],
        most_sessions: int = MOST_SESSIONS,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        self._cached = cached
        self._most_sessions, self._most_blocks = most_sessions, most_blocks
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()  # longest unused first
        self._owners: dict[bytes, Session] = {}
        self._in_chains = 0  # blocks in the chains of all sessions
        self._paused: dict[SessionKey, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def noted(self, request: Request, chain: tuple[bytes, ...], now: float) -> None:
        """Notes the blocks of a request, when it begins and again with its answer."""
        hints = request.hints
        if hints is None or not hints.session:
            if self._owners:
                for name in chain:
                    self._share(name)
            return
        key = request.tenant, request.cache_scope, hints.session
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        for name in chain:
            owner = self._owners.get(name)
            if owner is None and not self._cached(name):
                self._owners[name] = session
                session.own.add(name)
            elif owner is not session:
                self._share(name)
        self._in_chains += len(chain) - len(session.chain)
        session.chain, session.turn_at = chain, now
        session.retention = hints.retention
        session.leaves = hints.pause_seconds > 0
        session.pause_until = now + hints.pause_seconds if session.leaves else None
        self._paused.pop(key, None)
        if session.leaves:
            self._paused[key] = session
        while len(self._sessions) > 1 and self._too_many:
            self.drop(next(iter(self._sessions)))

    @property
    def _too_many(self) -> bool:
        blocks = max(len(self._owners), self._in_chains)
        return len(self._sessions) > self._most_sessions or blocks > self._most_blocks

    def drop(self, key: SessionKey) -> frozenset[bytes]:
        """Forgets a session. Returns the names of its own blocks."""
        session = self._sessions.pop(key)
        self._paused.pop(key, None)
        self._in_chains -= len(session.chain)
        for name in session.own:
            del self._owners[name]
        own, session.own = frozenset(session.own), set()
        return own

    def clear(self) -> None:
        self._sessions.clear()
        self._owners.clear()
        self._paused.clear()
        self._in_chains = 0

    def begun_pauses(self) -> list[Session]:
        """Returns the sessions whose pause has begun since the last call."""
        begun = [session for session in self._paused.values() if session.leaves]
        for session in begun:
            session.leaves = False
        return begun

    def ended_pauses(self, now: float) -> list[Session]:
        """Ends the pauses that were expected to end by now. Returns their sessions."""
        ended = [key for key, session in self._paused.items() if not session.pause_left(now)]
        return [self.end_pause(key) for key in ended]

    def end_pause(self, key: SessionKey) -> Session:
        self._paused.pop(key, None)
        session = self._sessions[key]
        session.pause_until, session.leaves = None, False
        return session

    def _share(self, name: bytes) -> None:
        if (owner := self._owners.pop(name, None)) is not None:
            owner.own.discard(name)
