"""Decides which waiting prompts get pages on a prefill mesh, on which rank, and which are held
back. Pure.

Prompts are served by arrival: the oldest gets pages on the rank that would finish it first and has
room for all of it. No prompt overtakes another, with one exception. A destination that does not
fetch what was offered to it is stalled: its prompts are held back, and those not begun give their
pages back, so that others pass them. When the tokens offered to all destinations reach
`STALLED_TOTAL` times the limit of one, the whole mesh is held back.

`admit` is a function of its snapshot alone, so that recorded snapshots can be replayed."""

from collections.abc import Mapping

import msgspec

STALLED_TOTAL = 4


class QueuedPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as admission sees it.

    Attributes:
        pages: Pages that it needs, all at once.
        cached_tokens: By rank, positions that need no computing there; empty if none do.
        states: Slots of recurrent state that it needs.
    """

    key: int
    arrival: float
    destination: str
    tokens: int
    pages: int
    cached_tokens: tuple[int, ...] = ()
    states: int = 0

    @property
    def known_tokens(self) -> int:
        """Cached tokens on the rank that has most."""
        return max(self.cached_tokens, default=0)

    def left_tokens(self, rank: int) -> int:
        """Returns the tokens to compute on a rank."""
        return self.tokens - (self.cached_tokens[rank] if self.cached_tokens else 0)

    @property
    def order(self) -> tuple[float, int]:
        return (self.arrival, self.key)


class RankLoad(msgspec.Struct, frozen=True, gc=False):
    """Free pages of a rank, tokens placed there that are in no chunk yet, and free state slots."""

    free_pages: int
    queued_tokens: int
    free_states: int = 0


class AdmissionSnapshot(msgspec.Struct, frozen=True):
    """The input of `admit`.

    Attributes:
        waiting: Prompts without pages, oldest first.
        unbegun: Prompts with pages, and their rank, for which no chunk was issued.
        offered_tokens: By destination, tokens offered and not fetched.
        most_offered_tokens: Limit of these for one destination.
    """

    waiting: tuple[QueuedPrompt, ...]
    unbegun: tuple[tuple[QueuedPrompt, int], ...]
    ranks: tuple[RankLoad, ...]
    offered_tokens: Mapping[str, int]
    most_offered_tokens: int


class Admission(msgspec.Struct, frozen=True):
    """What to do, in this order.

    Attributes:
        withdrawn: Prompts that give their pages back and wait again.
        placed: Prompts that get pages, and their rank.
        stalled: Destinations whose prompts are held back.
        full: Issue nothing at all.
        blocked: The oldest prompt that no rank has room for.
    """

    placed: tuple[tuple[int, int], ...] = ()
    withdrawn: tuple[int, ...] = ()
    stalled: frozenset[str] = frozenset()
    full: bool = False
    blocked: int | None = None

    @property
    def reason(self) -> str:
        """Why something is held back, or ""."""
        reasons = []
        if self.stalled:
            reasons.append(f"too much is offered to {', '.join(sorted(self.stalled))}")
        if self.full:
            reasons.append("too much is offered to all destinations together")
        if self.blocked is not None:
            reasons.append(f"no rank has room for prompt {self.blocked}")
        return "; ".join(reasons)


def admit(now: AdmissionSnapshot) -> Admission:
    """Decides which prompts get pages and which are held back."""
    stalled, full = _stalled(now.offered_tokens, now.most_offered_tokens)
    if not now.waiting and not stalled:
        return Admission(full=full) if full else _NOTHING
    free = [rank.free_pages for rank in now.ranks]
    queued = [rank.queued_tokens for rank in now.ranks]
    states = [rank.free_states for rank in now.ranks]
    withdrawn = []
    for prompt, rank in now.unbegun if stalled else ():
        if prompt.destination in stalled:
            withdrawn.append(prompt.key)
            free[rank] += prompt.pages
            states[rank] += prompt.states
            queued[rank] -= prompt.left_tokens(rank)
    placed, blocked = [], None
    for prompt in now.waiting:
        if prompt.destination in stalled:
            continue
        rank = _rank_with_room(prompt, free, queued, states)
        if rank is None:
            blocked = prompt.key
            break
        placed.append((prompt.key, rank))
        free[rank] -= prompt.pages
        states[rank] -= prompt.states
        queued[rank] += prompt.left_tokens(rank)
    return Admission(tuple(placed), tuple(withdrawn), stalled, full, blocked)


def _stalled(offered_tokens: Mapping[str, int], most: int) -> tuple[frozenset[str], bool]:
    total = sum(offered_tokens.values())
    if total < most:
        return frozenset(), False
    stalled = frozenset([name for name, tokens in offered_tokens.items() if tokens >= most])
    return stalled, total >= STALLED_TOTAL * most


def _rank_with_room(
    prompt: QueuedPrompt, free: list[int], queued: list[int], states: list[int]
) -> int | None:
    """Returns the rank that finishes the prompt first, and among equals the one with most free
    pages."""
    ranks = [
        rank
        for rank, free_pages in enumerate(free)
        if free_pages >= prompt.pages and states[rank] >= prompt.states
    ]
    return min(
        ranks, key=lambda rank: (queued[rank] + prompt.left_tokens(rank), -free[rank]), default=None
    )


_NOTHING = Admission()
