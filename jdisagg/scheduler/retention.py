"""Retention of cached blocks: in which order pages, host memory and disk evict them.

A client can ask that the KV of a prompt is retained (`Hints`). A retained block counts as used
later than it was, by a multiple of the seconds that are left of its retention. This decays with the
block's age, and each use renews it. It is a weight and not a pin: a block that is evicted always
exists, and at most half of a tier is retained. While more is, blocks go by their last use alone.

Invariants (each is a test of the same name in tests/scheduler/test_retention.py):
- the_block_of_least_worth_goes_first
- without_retention_the_least_recently_used_goes_first
- a_tier_of_retained_blocks_gives_room

Sessions: which cached blocks each has, and whether a pause follows its turn. A session is made by
requests with its key (`Hints.session`) and belongs to their tenant and cache scope. Its chain is
that of its last turn. Blocks that no other request used are its own: in a pause these alone are
evicted before others, and they alone are freed with the session.

Invariants (tests/scheduler/test_session_blocks.py):
- a_block_that_another_request_used_is_no_sessions_own
- equal_keys_of_two_tenants_are_two_sessions
- sessions_unused_for_longest_are_forgotten_first
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Generic, TypeVar

from jdisagg.prompt.hints import Retention
from jdisagg.request import Request

MOST_RETAINED = 1 << 18  # names of retained blocks that a worker remembers

K = TypeVar("K")


def worth(last_use: float, retention: Retention | None, age: float) -> float:
    """Returns the time as whose last use the last use of a block counts. The block with the
    smallest time is evicted first.

    Args:
        age: Seconds since the last use.
    """
    if retention is None or age >= retention.seconds:
        return last_use
    return last_use + retention.weight * (retention.seconds - age)


class Retained:
    """The retention of blocks by name, for all tiers of a worker, and the time of its last turn."""

    def __init__(self, most: int = MOST_RETAINED) -> None:
        self._most = most
        self._by_name: OrderedDict[bytes, Retention] = OrderedDict()  # longest unasked first
        self.now = 0.0

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def advance(self, now: float) -> None:
        if now > self.now:
            self.now = now

    def of(self, name: bytes) -> Retention | None:
        return self._by_name.get(name)

    def forget(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._by_name.pop(name, None)

    def asked(self, request: Request, chain: Iterable[bytes], block_tokens: int) -> None:
        """Notes what a request asks for its blocks. A block that several requests retain keeps the
        retention that begins with the greatest worth."""
        hints = request.hints
        if hints is None or hints.retention is None:
            return
        retention, by_name = hints.retention, self._by_name
        most = hints.retained_tokens // block_tokens if hints.retained_tokens else None
        for count, name in enumerate(chain):
            if most is not None and count >= most:
                break
            known = by_name.pop(name, retention)
            by_name[name] = max(known, retention, key=_at_first)
        while len(by_name) > self._most:
            by_name.popitem(last=False)


class EvictionOrder(Generic[K]):
    """The order in which keys are evicted: those of blocks, or of their pages.

    Args:
        retained: Retention of blocks by name; None if no key is retained.
        name_of: Function that returns the name of a key's block.
        most_retained: Number of retained keys above which retention does not count.
    """

    def __init__(
        self,
        retained: Retained | None = None,
        name_of: Callable[[K], bytes] | None = None,
        most_retained: int = 0,
    ) -> None:
        self._retained = retained
        self._name_of = name_of
        self._most_retained = most_retained
        # Keys with their last use, least recently used first, for each retention. As `worth` grows
        # with the last use, the first key of some queue has the least worth.
        self._plain: OrderedDict[K, float] = OrderedDict()
        self._queues: dict[Retention, OrderedDict[K, float]] = {}
        self._ended: dict[Retention, OrderedDict[K, float]] = {}  # keys whose retention has ended
        self._queue_of: dict[K, OrderedDict[K, float]] = {}  # queues of keys that are not plain

    def __len__(self) -> int:
        return len(self._plain) + len(self._queue_of)

    def __contains__(self, key: K) -> bool:
        return key in self._plain or key in self._queue_of

    def __iter__(self) -> Iterator[K]:
        """Iterates in the order of eviction."""
        if not self._queue_of:
            return iter(self._plain)
        weighed = [self._weighed(*one) for one in self._all_queues()]
        return map(itemgetter(1), heapq.merge(*weighed, key=itemgetter(0)))

    def add(self, key: K) -> None:
        """Adds a key, or moves it, as the most recently used one."""
        retained = self._retained
        if not retained and not self._queue_of:
            self._plain[key] = 0.0 if retained is None else retained.now
            self._plain.move_to_end(key)
            return
        self.discard(key)
        assert retained is not None and self._name_of is not None, "no key is retained without them"
        retention = retained.of(self._name_of(key))
        if retention is None:
            self._plain[key] = retained.now
        else:
            queue = self._queue_of[key] = self._queues.setdefault(retention, OrderedDict())
            queue[key] = retained.now

    def add_first(self, key: K) -> None:
        """Adds a key as the one that is evicted first."""
        self._plain[key] = -math.inf
        self._plain.move_to_end(key, last=False)

    def is_first(self, key: K) -> bool:
        """Returns whether a key was added by `add_first`, and not used since."""
        return self._plain.get(key) == -math.inf

    def discard(self, key: K) -> None:
        if key in self._plain:
            del self._plain[key]
        elif (queue := self._queue_of.pop(key, None)) is not None:
            del queue[key]

    def pop(self) -> K:
        """Removes the key that is evicted first, and returns it. Raises KeyError if there is
        none."""
        if not self._queue_of:
            return self._plain.popitem(last=False)[0]
        first = [next(self._weighed(*one)) for one in self._all_queues()]
        _, key = min(first, key=itemgetter(0))
        self.discard(key)
        return key

    def clear(self) -> None:
        self._queue_of.clear()
        for queues in ((self._plain,), self._queues.values(), self._ended.values()):
            for queue in queues:
                queue.clear()

    def _all_queues(self) -> list[tuple[Retention | None, OrderedDict[K, float]]]:
        """Returns the queues that have keys, each with the retention that counts for its keys."""
        self._end_retentions()
        counts = sum(map(len, self._queues.values())) <= self._most_retained
        queues = [
            (retention if counts else None, queue) for retention, queue in self._queues.items()
        ]
        ended = [(None, queue) for queue in (self._plain, *self._ended.values())]
        return [one for one in (*queues, *ended) if one[1]]

    def _end_retentions(self) -> None:
        now = self._now
        for retention, queue in self._queues.items():
            while queue:
                key, last_use = next(iter(queue.items()))
                if now - last_use < retention.seconds:
                    break
                del queue[key]
                ended = self._queue_of[key] = self._ended.setdefault(retention, OrderedDict())
                ended[key] = last_use

    def _weighed(
        self, retention: Retention | None, queue: OrderedDict[K, float]
    ) -> Iterator[tuple[float, K]]:
        now = self._now
        for key, last_use in queue.items():
            yield worth(last_use, retention, now - last_use), key

    @property
    def _now(self) -> float:
        return 0.0 if self._retained is None else self._retained.now


def _at_first(retention: Retention) -> float:
    return worth(0.0, retention, 0.0)


MOST_SESSIONS, MOST_BLOCKS = 1 << 16, 1 << 18  # that a worker remembers

SessionKey = tuple[str, str, str]  # tenant, cache scope, key


@dataclass(slots=True, eq=False)
class KeptSession:
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
        self._sessions: OrderedDict[SessionKey, KeptSession] = OrderedDict()  # longest unused first
        self._owners: dict[bytes, KeptSession] = {}
        self._in_chains = 0  # blocks in the chains of all sessions
        self._paused: dict[SessionKey, KeptSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, key: SessionKey) -> KeptSession | None:
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
        session = self._sessions.setdefault(key, KeptSession())
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

    def noted_tail(self, request: Request, name: bytes) -> None:
        """Notes a block that no other request uses, and that is in no chain."""
        key = request.tenant, request.cache_scope, request.hints.session if request.hints else ""
        if (session := self._sessions.get(key)) is not None:
            self._owners[name] = session
            session.own.add(name)

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

    def begun_pauses(self) -> list[KeptSession]:
        """Returns the sessions whose pause has begun since the last call."""
        begun = [session for session in self._paused.values() if session.leaves]
        for session in begun:
            session.leaves = False
        return begun

    def ended_pauses(self, now: float) -> list[KeptSession]:
        """Ends the pauses that were expected to end by now. Returns their sessions."""
        ended = [key for key, session in self._paused.items() if not session.pause_left(now)]
        return [self.end_pause(key) for key in ended]

    def end_pause(self, key: SessionKey) -> KeptSession:
        self._paused.pop(key, None)
        session = self._sessions[key]
        session.pause_until, session.leaves = None, False
        return session

    def _share(self, name: bytes) -> None:
        if (owner := self._owners.pop(name, None)) is not None:
            owner.own.discard(name)
