"""Decides which requests get pages on a decode worker. Requests wait in a queue in order of
arrival, and its first request is served first.

No request overtakes the first one, so that small requests do not starve an old large request. The
exception is a request of higher priority that gets pages by preempting sequences (`pressing`).

After a reservation, at least one page is free for each sequence that may still need pages."""

import bisect
from collections import Counter
from collections.abc import Sequence as Sized

from jdisagg.errors import InvalidRequestError
from jdisagg.messages.ports import Child
from jdisagg.request import Request
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.executor import sequences_ahead
from jdisagg.scheduler.handoff import Handoff, HandoffState
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.priorities import YieldingSequence, to_preempt
from jdisagg.scheduler.prompt import Prompt
from jdisagg.scheduler.sequences import Sequence, SequenceGroup, Stage

# stages in which a sequence has pages and may lose them
_HOLDING = (Stage.RESERVED, Stage.READY, Stage.RUNNING)


class Reservations:
    """Queues the requests of one mesh and reserves pages for them, first request first.

    Args:
        ahead_sequences: Number of sequences that may hold pages beyond the number of batch slots;
            None means a quarter of the slots.
    """

    def __init__(
        self, state: DecodeState, growth_tokens: int, ahead_sequences: int | None = None
    ) -> None:
        self._state = state
        self._growth_tokens = growth_tokens
        self._ahead = sequences_ahead(state.limits.slots_per_rank, ahead_sequences)
        self.queue: list[Prompt] = []

    def __len__(self) -> int:
        return len(self.queue)

    def priorities(self) -> dict[int, int]:
        return Counter([waiting.priority for waiting in self.queue])

    def check(self, request: Request, children: tuple[Child, ...]) -> None:
        """Raises InvalidRequestError if the request would not fit even on an idle mesh."""
        limits = self._state.limits
        prompt = len(request.prompt_token_ids)
        if self._state.states.on and len(children) > limits.state_slots_per_rank:
            raise InvalidRequestError(
                f"n={len(children)} exceeds the {limits.state_slots_per_rank} sequences whose state"
                " a rank holds; ask for fewer, or give the worker more slots_per_rank"
            )
        if prompt >= limits.context_tokens:
            raise InvalidRequestError(
                f"prompt has {prompt} tokens; with one to generate the context holds"
                f" {limits.context_tokens}: shorten it"
            )
        if len(children) > limits.samples_per_chunk:
            raise InvalidRequestError(
                f"n={len(children)} exceeds the {limits.samples_per_chunk} samples of one prefill;"
                " ask for fewer"
            )
        most = prompt + request.most_tokens(limits.context_tokens) - 1
        capacity = limits.pages_per_rank * limits.page_size
        if most > capacity:
            raise InvalidRequestError(
                f"prompt of {prompt} tokens and max_tokens={request.sampling.max_tokens} need KV"
                f" for {most} positions, a rank holds {capacity} ({limits.pages_per_rank} pages of"
                f" {limits.page_size}); lower max_tokens or give the worker more pages"
            )
        if len(children) == 1:
            return  # it can begin with fewer pages than it needs at its end
        least = self._pages(Prompt(0, request, children, 0.0), growth_tokens=1)
        if least > limits.pages_per_rank:
            raise InvalidRequestError(
                f"n={len(children)} streams of a prompt of {prompt} tokens need {least} pages to"
                f" begin, a rank holds {limits.pages_per_rank}; lower n or give the worker more"
                " pages"
            )

    def enqueue(self, waiting: Prompt) -> None:
        """Queues a request that `check` accepted."""
        bisect.insort(self.queue, waiting, key=lambda waiting: waiting.order)

    def withdraw(self, key: int) -> None:
        self.queue = [waiting for waiting in self.queue if waiting.key != key]

    def grant(self, lease_until: float) -> list[SequenceGroup]:
        """Reserves pages for requests from the start of the queue, as long as there is room.
        Returns the new groups. A group has the key of its prompt."""
        granted: list[SequenceGroup] = []
        while self.queue:
            group = self.grant_one(self.queue[0], lease_until)
            if group is None:
                break
            granted.append(group)
        return granted

    def grant_one(self, waiting: Prompt, lease_until: float) -> SequenceGroup | None:
        choice = self._rank_with_room(waiting)
        if choice is None:
            return None
        self.queue.remove(waiting)
        return self._reserve(waiting, *choice, lease_until)

    # ---- sequences that yield

    def pressing(self) -> Prompt | None:
        lowest = self._state.lowest_priority if self.queue else None
        if lowest is None:
            return None
        for waiting in self.queue:
            if waiting.priority > lowest and any(
                self._holders(rank, waiting.priority) for rank in range(self._state.limits.ranks)
            ):
                return waiting
        return None

    def to_preempt(self, waiting: Prompt) -> list[Sequence]:
        """Returns the sequences that must be preempted so that some rank has room for a request.
        Chooses the rank whose preempted sequences have the lowest priorities, and then the fewest.
        Returns an empty list if a rank has room already, or if preemption cannot make room."""
        best: list[YieldingSequence] | None = None
        for rank in range(self._state.limits.ranks):
            able = self._holders(rank, waiting.priority)
            pages, sequences = self._short(waiting, rank)
            few = to_preempt(able, pages, sequences)
            if few is not None and (best is None or _worth(few) < _worth(best)):
                best = few
        keys = {one.key: number for number, one in enumerate(best or ())}
        found = [
            child
            for group in self._state.groups.values()
            for child in group.alive
            if child.key in keys
        ]
        return sorted(found, key=lambda child: keys[child.key])

    def _holders(self, rank: int, priority: int) -> list[YieldingSequence]:
        state, ledger = self._state, self._state.ledgers[rank]
        return [
            YieldingSequence(
                child.key,
                group.request.priority,
                child.age_key,
                sum([ledger.references(page) == 1 for page in ledger.pages(child.key)])
                + (child.key in state.growing[rank]),
                child.stage is not Stage.RESERVED,
            )
            for group in state.groups.values()
            if group.rank == rank and group.request.priority < priority
            if group.handoff.state is not HandoffState.RESERVED  # its caller begins at once
            for child in group.alive
            if child.stage in _HOLDING and child.yields_to(priority)
        ]

    def _short(self, waiting: Prompt, rank: int) -> tuple[int, int]:
        state, limits = self._state, self._state.limits
        cached = self._cached_tokens(waiting, rank)
        need = self._pages(waiting, self._growth_tokens)
        if need > limits.pages_per_rank:
            need = self._pages(waiting, 1)
        need -= state.residency.held_pages(rank, waiting.chain, cached)
        pages = need + len(state.growing[rank]) - state.ledgers[rank].free_pages
        children, held = len(waiting.children), state.living[rank]
        sequences = held + children - limits.slots_per_rank - self._ahead if held else 0
        if state.states.on:
            sequences = max(sequences, children - state.states.free_slots(rank))
        return pages, sequences

    def spares(self, rank: int, pages: int) -> bool:
        """Returns whether `pages` free pages of a rank may be used for something else: no request
        waits for pages, and enough other pages are free for each running sequence to grow."""
        state, size = self._state, self._state.limits.page_size
        growth = len(state.growing[rank]) * pages_for(self._growth_tokens, size)
        return not self.queue and state.ledgers[rank].free_pages >= pages + growth

    def _fits(self, rank: int, need: int, children: int) -> bool:
        state, held = self._state, self._state.living[rank]
        crowded = held and held + children > state.limits.slots_per_rank + self._ahead
        return not crowded and state.ledgers[rank].free_pages >= need + len(state.growing[rank])

    def _rank_with_room(self, waiting: Prompt) -> tuple[int, int] | None:
        limits, best, most = self._state.limits, None, (-1, -1)
        quiet = min(self._state.living) + self._ahead
        for rank in range(limits.ranks):
            ledger = self._state.ledgers[rank]
            held = self._state.living[rank]
            growth = self._growth_tokens
            need = self._pages(waiting, growth)
            if need > limits.pages_per_rank:
                growth, need = 1, self._pages(waiting, 1)
            cached = self._cached_tokens(waiting, rank)
            need -= self._state.residency.held_pages(rank, waiting.chain, cached)
            if not self._fits(rank, need, len(waiting.children)):
                continue
            if not self._state.states.has_room(rank, len(waiting.children)):
                continue
            worth = (cached if held <= quiet else 0, ledger.free_pages)
            if worth > most:
                best, most = (rank, growth), worth
        return best

    def _cached_tokens(self, waiting: Prompt, rank: int) -> int:
        most, computes = waiting.most_known, waiting.computes
        return self._state.residency.cached_tokens(rank, waiting.chain, most, computes)

    def _pages(self, waiting: Prompt, growth_tokens: int) -> int:
        size, children = self._state.limits.page_size, len(waiting.children)
        known = waiting.tokens
        covered = pages_for(self._covered(waiting, known, growth_tokens), size)
        if children == 1:
            return covered
        shared = pages_for(known, size)
        own = covered - shared
        copies = (children - 1) * (known % size != 0)
        return shared + copies + children * own

    def _covered(self, waiting: Prompt, known: int, growth_tokens: int) -> int:
        limit = (
            len(waiting.request.prompt_token_ids)
            + waiting.request.most_tokens(self._state.limits.context_tokens)
            - 1
        )
        return max(known, min(limit, known + growth_tokens))

    def _reserve(
        self, waiting: Prompt, rank: int, growth_tokens: int, lease_until: float
    ) -> SequenceGroup:
        size, ledger = self._state.limits.page_size, self._state.ledgers[rank]
        context = self._state.limits.context_tokens
        handoff = Handoff(waiting.key, HandoffState.RESERVED, lease_until)
        group = SequenceGroup(
            waiting.key,
            waiting.request,
            waiting.attempt,
            rank,
            waiting.arrival,
            handoff,
            context,
            until=lease_until,
        )
        known = waiting.tokens
        prompt_pages = pages_for(known, size)
        own_pages = pages_for(self._covered(waiting, known, growth_tokens), size) - prompt_pages
        group.chain, group.cached_tokens = waiting.chain, self._cached_tokens(waiting, rank)
        group.epoch, group.computes = self._state.residency.epoch, waiting.computes
        held = self._state.residency.reserve(
            rank, group.key, group.chain, group.cached_tokens, prompt_pages
        )
        assert held is not None, "room was checked"
        states = self._state.states
        states.take(rank, group.key)
        for number, child in enumerate(waiting.children):
            limit = group.prompt_tokens + waiting.request.most_tokens(context) - 1
            accepted = len(child.accepted)
            sequence = Sequence(
                self._state.new_key(),
                child.index,
                group,
                list(child.accepted),
                accepted,
                limit,
                told=accepted,
            )
            ledger.share(group.key, sequence.key, prompt_pages)
            if number:
                states.take(rank, sequence.key)
            else:
                states.share(rank, group.key, sequence.key)
            if number and known % size:
                copy = ledger.own(sequence.key, prompt_pages - 1)
                assert copy is not None, "the group holds the page too"
                group.copies.append((rank, *copy))
            assert ledger.extend(sequence.key, own_pages) is not None, "room was checked"
            group.children.append(sequence)
        self._state.add_group(group)
        return group


def _worth(few: Sized[YieldingSequence]) -> tuple[int, int]:
    return max([one.priority for one in few], default=0), len(few)
