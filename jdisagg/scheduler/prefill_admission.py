"""Decides which waiting prompts get pages on a prefill mesh, and on which data-parallel rank.

No prompt overtakes another, with one exception. A decode worker that is too slow to fetch its
prompts' KV is called a stalled destination. Prompts of a stalled destination are not computed, so
that prompts of other destinations overtake them.

`admit` depends only on its snapshot, so recorded snapshots can be replayed."""

from collections.abc import Mapping

import msgspec

STALLED_TOTAL = 4


class QueuedPrompt(msgspec.Struct, frozen=True, gc=False):
    """The properties of a waiting prompt that admission uses.

    Attributes:
        pages: Number of pages that the whole prompt needs. All are assigned together.
        cached_tokens: For each rank, the number of the prompt's leading tokens that the rank
            caches; empty if no rank caches any.
        arrival: Time of arrival, made earlier by the `head_start` of the priority.
    """

    key: int
    arrival: float
    destination: str
    tokens: int
    pages: int
    cached_tokens: tuple[int, ...] = ()
    states: int = 0
    priority: int = 0

    @property
    def known_tokens(self) -> int:
        return max(self.cached_tokens, default=0)

    def left_tokens(self, rank: int) -> int:
        return self.tokens - (self.cached_tokens[rank] if self.cached_tokens else 0)

    @property
    def order(self) -> tuple[float, int]:
        return (self.arrival, self.key)


_Begun = tuple[QueuedPrompt, int]  # a prompt that has pages, and its rank


class RankLoad(msgspec.Struct, frozen=True, gc=False):
    """The load of one data-parallel rank: numbers of free pages, of prompt tokens in no issued
    chunk, and of free state slots."""

    free_pages: int
    queued_tokens: int
    free_states: int = 0


class AdmissionSnapshot(msgspec.Struct, frozen=True):
    """The input of `admit`.

    Attributes:
        offered_tokens: For each decode worker, the number of tokens whose KV it has not fetched
            yet.
        most_offered_tokens: Number of unfetched tokens from which on a decode worker counts as
            stalled.
    """

    waiting: tuple[QueuedPrompt, ...]
    unbegun: tuple[tuple[QueuedPrompt, int], ...]
    ranks: tuple[RankLoad, ...]
    offered_tokens: Mapping[str, int]
    most_offered_tokens: int


class Admission(msgspec.Struct, frozen=True):
    """The decision of `admit`. The caller first withdraws and then places prompts.

    Attributes:
        stalled: Decode workers whose prompts are not computed, because they fetch KV too slowly.
        full: Whether no chunk may be issued, because all decode workers together have too many
            unfetched tokens.
    """

    placed: tuple[tuple[int, int], ...] = ()
    withdrawn: tuple[int, ...] = ()
    stalled: frozenset[str] = frozenset()
    full: bool = False
    blocked: int | None = None

    @property
    def reason(self) -> str:
        """Reason why prompts must wait, for logs and metrics; "" if no prompt waits."""
        reasons = []
        if self.stalled:
            reasons.append(f"too much is offered to {', '.join(sorted(self.stalled))}")
        if self.full:
            reasons.append("too much is offered to all destinations together")
        if self.blocked is not None:
            reasons.append(f"no rank has room for prompt {self.blocked}")
        return "; ".join(reasons)


def admit(now: AdmissionSnapshot) -> Admission:
    stalled, full = _stalled(now.offered_tokens, now.most_offered_tokens)
    if not now.waiting and not stalled:
        return Admission(full=full) if full else _NOTHING
    free = [rank.free_pages for rank in now.ranks]
    queued = [rank.queued_tokens for rank in now.ranks]
    states = [rank.free_states for rank in now.ranks]
    withdrawn: list[int] = []

    def withdraw(prompt: QueuedPrompt, rank: int) -> None:
        withdrawn.append(prompt.key)
        free[rank] += prompt.pages
        states[rank] += prompt.states
        queued[rank] -= prompt.left_tokens(rank)

    unbegun = list(now.unbegun)
    for prompt, rank in now.unbegun if stalled else ():
        if prompt.destination in stalled:
            withdraw(prompt, rank)
            unbegun.remove((prompt, rank))
    placed, blocked = [], None
    for prompt in now.waiting:
        if prompt.destination in stalled:
            continue
        rank = _rank_with_room(prompt, free, queued, states)
        if rank is None:
            for other in _giving_way(prompt, unbegun, free, states):
                withdraw(*other)
                unbegun.remove(other)
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


def _giving_way(
    prompt: QueuedPrompt, unbegun: list[_Begun], free: list[int], states: list[int]
) -> list[_Begun]:
    """Chooses the lowest priority first, and among equal priorities the newest prompt."""
    lower = [one for one in unbegun if one[0].priority < prompt.priority]
    lower.sort(key=lambda one: one[0].order, reverse=True)
    lower.sort(key=lambda one: one[0].priority)
    for rank in range(len(free)):
        pages, slots, few = free[rank], states[rank], []
        for other in [one for one in lower if one[1] == rank]:
            few.append(other)
            pages, slots = pages + other[0].pages, slots + other[0].states
            if pages >= prompt.pages and slots >= prompt.states:
                return few
    return []


def _rank_with_room(
    prompt: QueuedPrompt, free: list[int], queued: list[int], states: list[int]
) -> int | None:
    """If several would finish at the same time, returns the one with most free pages."""
    ranks = [
        rank
        for rank, free_pages in enumerate(free)
        if free_pages >= prompt.pages and states[rank] >= prompt.states
    ]
    return min(
        ranks, key=lambda rank: (queued[rank] + prompt.left_tokens(rank), -free[rank]), default=None
    )


_NOTHING = Admission()
