"""Decides which waiting prompts get pages on a prefill mesh, and on which data-parallel rank.

No prompt overtakes another, with one exception. A decode worker that is too slow to fetch its
prompts' KV is called a stalled destination. Prompts of a stalled destination are not computed, so
that prompts of other destinations overtake them.

`admit` depends only on its snapshot and has no side effects."""

from collections.abc import Mapping

import msgspec

from jdisagg.scheduler.prompt import Prompt

STALLED_TOTAL = 4


class RankLoad(msgspec.Struct, frozen=True, gc=False):
    """The load of one data-parallel rank: numbers of free pages, of prompt tokens in no issued
    chunk, and of free state slots."""

    free_pages: int
    queued_tokens: int
    free_states: int = 0


class AdmissionSnapshot(msgspec.Struct, frozen=True):
    """The input of `admit`.

    Attributes:
        unbegun: Prompts that have pages, and no issued chunk.
        offered_tokens: For each decode worker, the number of tokens whose KV it has not fetched
            yet.
        most_offered_tokens: Number of unfetched tokens from which on a decode worker counts as
            stalled.
    """

    waiting: tuple[Prompt, ...]
    unbegun: tuple[Prompt, ...]
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

    def withdraw(prompt: Prompt) -> None:
        withdrawn.append(prompt.key)
        unbegun.remove(prompt)
        free[prompt.rank] += prompt.needs_pages
        states[prompt.rank] += prompt.needs_states
        queued[prompt.rank] -= prompt.uncached_tokens(prompt.rank)

    unbegun = list(now.unbegun)
    for prompt in now.unbegun if stalled else ():
        if prompt.destination in stalled:
            withdraw(prompt)
    placed, blocked = [], None
    for prompt in now.waiting:
        if prompt.destination in stalled:
            continue
        rank = _rank_with_room(prompt, free, queued, states)
        if rank is None:
            for other in _giving_way(prompt, unbegun, free, states):
                withdraw(other)
            rank = _rank_with_room(prompt, free, queued, states)
        if rank is None:
            blocked = prompt.key
            break
        placed.append((prompt.key, rank))
        free[rank] -= prompt.needs_pages
        states[rank] -= prompt.needs_states
        queued[rank] += prompt.uncached_tokens(rank)
    return Admission(tuple(placed), tuple(withdrawn), stalled, full, blocked)


def _stalled(offered_tokens: Mapping[str, int], most: int) -> tuple[frozenset[str], bool]:
    total = sum(offered_tokens.values())
    if total < most:
        return frozenset(), False
    stalled = frozenset([name for name, tokens in offered_tokens.items() if tokens >= most])
    return stalled, total >= STALLED_TOTAL * most


def _giving_way(
    prompt: Prompt, unbegun: list[Prompt], free: list[int], states: list[int]
) -> list[Prompt]:
    """Chooses the lowest priority first, and among equal priorities the newest prompt."""
    lower = [one for one in unbegun if one.priority < prompt.priority]
    lower.sort(key=lambda one: one.order, reverse=True)
    lower.sort(key=lambda one: one.priority)
    for rank in range(len(free)):
        pages, slots, few = free[rank], states[rank], []
        for other in [one for one in lower if one.rank == rank]:
            few.append(other)
            pages, slots = pages + other.needs_pages, slots + other.needs_states
            if pages >= prompt.needs_pages and slots >= prompt.needs_states:
                return few
    return []


def _rank_with_room(
    prompt: Prompt, free: list[int], queued: list[int], states: list[int]
) -> int | None:
    """If several would finish at the same time, returns the one with most free pages."""
    ranks = [
        rank
        for rank, free_pages in enumerate(free)
        if free_pages >= prompt.needs_pages and states[rank] >= prompt.needs_states
    ]
    return min(
        ranks,
        key=lambda rank: (queued[rank] + prompt.uncached_tokens(rank), -free[rank]),
        default=None,
    )


_NOTHING = Admission()
