"""Decides which waiting prompts get pages on a mesh, on which data-parallel rank, and who gives way
to them.

Prompts wait in one queue in order of arrival, in which each unit of priority is a head start
(`scheduler/sequences.py`). None overtakes the first one, so that small prompts do not starve an
old large one. There are two exceptions. A prompt of higher priority may get the pages of others of
lower priority, which lose them: sequences are preempted; prompts whose KV is sent and that have no
issued chunk return to the queue. And prompts for a decode worker that
fetches its KV too slowly (a stalled destination) are not computed, so that others pass them.

A prompt that is decoded here gets pages for the expected growth of its answer too, and at least one
page stays free for each sequence that may still need some. One whose KV is sent needs pages for its
own positions alone."""

import bisect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from jdisagg.errors import HandoffError, InvalidRequestError
from jdisagg.messages.ports import Child
from jdisagg.request import Request
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.executor import sequences_ahead
from jdisagg.scheduler.handoff import Handoff, HandoffState
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.prompts import Prompts
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.sequences import (
    Prompt,
    Sequence,
    SequenceGroup,
    Stage,
    YieldingSequence,
    sample_spec,
    to_preempt,
)

MAX_EXPERTS_BYTES = 16 << 20  # of a request, so that they fit a message
# All destinations together may have this many times as many unfetched tokens as one.
STALLED_TOTAL = 4

# copies between state slots, as in `CopyPages.states`
StateCopies = tuple[tuple[int, int, int], ...]
_Holder = tuple[YieldingSequence, Sequence | Prompt]
_Place = tuple[int, int]  # a rank, and the number of leading positions that it caches


class _Need(NamedTuple):
    """The number of pages that a prompt needs, and of tokens of its answer that they cover."""

    pages: int
    growth: int


def stalled_destinations(offered: Mapping[str, int], most: int) -> tuple[frozenset[str], bool]:
    """Returns the decode workers that have at least `most` unfetched tokens, and whether all
    together have so many that no chunk may be issued. `offered` has the unfetched tokens by decode
    worker."""
    total = sum(offered.values())
    if total < most:
        return frozenset(), False
    stalled = frozenset([name for name, tokens in offered.items() if tokens >= most])
    return stalled, total >= STALLED_TOTAL * most


@dataclass(slots=True)
class Admitted:
    """The outcome of `admit`.

    Attributes:
        prompts: Prompts that have pages now.
        groups: The sequences of those that are decoded here.
        yielded: Number of sequences that gave way to requests of higher priority.
        copies: Copies of recurrent state, to be issued in this order before the next command.
    """

    prompts: list[Prompt] = field(default_factory=list)
    groups: list[SequenceGroup] = field(default_factory=list)
    yielded: int = 0
    copies: list[StateCopies] = field(default_factory=list)


class Admission:
    """The queue of one mesh.

    Args:
        growth_tokens: Number of tokens of an answer for which pages are reserved.
        ahead_sequences: Number of sequences that may hold pages beyond the number of batch slots;
            None means a quarter of the slots.
    """

    def __init__(
        self,
        state: DecodeState,
        prompts: Prompts,
        growth_tokens: int = 0,
        ahead_sequences: int | None = None,
    ) -> None:
        self._state = state
        self.prompts = prompts
        self._growth_tokens = growth_tokens
        self._ahead = sequences_ahead(state.limits.slots_per_rank, ahead_sequences)
        self._idle: list[Prompt] = []  # prompts to send that may still be put back
        self.queue: list[Prompt] = []

    def check(
        self,
        request: Request,
        children: tuple[Child, ...],
        computes: bool = True,
        sent_from: int | None = None,
    ) -> None:
        """Checks that a request fits on an idle mesh.

        Args:
            computes: Whether the mesh certainly computes the prompt.
            sent_from: First position whose KV is sent to a decode worker; None if the request is
                decoded here.

        Raises:
            InvalidRequestError: It does not fit.
            HandoffError: `sent_from` is no position between blocks.
        """
        if request.images:
            self._check_images(request, computes)
        if request.sampling.return_routed_experts:
            self._check_experts(request)
        if sent_from is not None:
            return self._check_sent(request, children, sent_from)
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
        self._check_samples(children)
        most = self._limit(request)
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

    def _check_images(self, request: Request, computes: bool) -> None:
        form = self._state.limits.images
        if form is None:
            raise InvalidRequestError(
                "images: this worker reads none, because its model has no vision encoder that is"
                " served, its checkpoint lacks the encoder's weights, or its instance has pipeline"
                " stages or several processes; send text only"
            )
        for image in request.images:
            form.check(image, request.prompt_token_ids, computes)

    def _check_experts(self, request: Request) -> None:
        limits, spec = self._state.limits, self._state.limits.kv_spec
        if not spec.records:
            raise InvalidRequestError(
                "return_routed_experts: this worker does not record the experts of tokens; start"
                " all workers with --routed_experts, or omit it"
                if spec.choices
                else "return_routed_experts: the model has no experts; omit it"
            )
        positions = len(request.prompt_token_ids) + request.most_tokens(limits.context_tokens)
        nbytes = request.sampling.n * positions * sum(2 * chosen for chosen, _ in spec.choices)
        if nbytes > MAX_EXPERTS_BYTES:
            raise InvalidRequestError(
                f"return_routed_experts: the experts of prompt and answers take up to {nbytes}"
                f" bytes ({positions} positions each), and at most {MAX_EXPERTS_BYTES} fit a reply;"
                " send a shorter prompt, or lower max_tokens or n"
            )

    def _check_samples(self, children: tuple[Child, ...]) -> None:
        most = self._state.limits.samples_per_chunk
        if len(children) > most:
            raise InvalidRequestError(
                f"n={len(children)} exceeds the {most} samples of one prefill; ask for fewer"
            )

    def _check_sent(self, request: Request, children: tuple[Child, ...], start: int) -> None:
        limits = self._state.limits
        tokens = len(request.prompt_token_ids) + len(children[0].accepted)
        most, size = limits.pages_per_rank, limits.page_size
        if tokens > limits.context_tokens or pages_for(tokens, size) > most:
            raise InvalidRequestError(
                f"prompt has {tokens} tokens; this prefill worker holds {limits.context_tokens} of"
                f" context and {most} pages of {size} per rank: shorten it"
            )
        if start % limits.granule_tokens or not 0 <= start <= tokens:
            raise HandoffError(
                f"from_token={start} must be a multiple of {limits.granule_tokens} and at most the"
                f" prompt's {tokens} tokens: do both workers run the same version?"
            )
        self._check_samples(children)

    def enqueue(self, waiting: Prompt) -> None:
        bisect.insort(self.queue, waiting, key=lambda waiting: waiting.order)

    def withdraw(self, key: int) -> None:
        if self.queue:
            self.queue = [waiting for waiting in self.queue if waiting.key != key]

    def spares(self, rank: int, pages: int) -> bool:
        """Returns whether a restore may take `pages` free pages of a rank: no prompt to be decoded
        waits for pages, and enough other pages are free for each running sequence to grow."""
        state, size = self._state, self._state.limits.page_size
        growth = len(state.growing[rank]) * pages_for(self._growth_tokens, size)
        waits = any([waiting.decodes for waiting in self.queue])
        return not waits and state.ledgers[rank].free_pages >= pages + growth

    # ---- pages for those that wait

    def admit(
        self, lease_until: float, stalled: Collection[str] = (), to: Admitted | None = None
    ) -> Admitted:
        """Gives pages to prompts from the start of the queue, as long as there is room or others
        give way. A group has the key of its prompt. The outcome is added to `to`, if given."""
        admitted, blocked = to or Admitted(), False
        self._idle = [one for one in self.prompts.queued if not (one.begun or one.decodes)]
        for prompt in tuple(self._idle) if stalled else ():
            if prompt.destination in stalled:
                self._put_back(prompt)
        for prompt in tuple(self.queue):
            if prompt.destination in stalled or (blocked and not self._presses(prompt)):
                continue
            need = self._need(prompt)
            place = self._place(prompt, need)
            if place is None and self._presses(prompt):
                for holder in self._to_give_way(prompt, need):
                    admitted.yielded += self.give_way(holder)
                place = self._place(prompt, need)
                if place is None:
                    break
            if place is not None:
                self.queue.remove(prompt)
                self._take(prompt, need, place, lease_until, admitted)
            elif self._of_one_priority():
                break
            else:
                blocked = True
        return admitted

    def give_way(self, holder: Sequence | Prompt) -> int:
        """Takes the pages of a sequence, or of a prompt without issued chunk. Returns the number of
        preempted sequences."""
        if isinstance(holder, Prompt):
            self._put_back(holder)
        elif holder.stage is Stage.RESERVED:
            yielded = len(holder.group.alive)
            self._state.end_group(holder.group, preempted=True, yielded=True)
            return yielded
        elif holder.stage is not Stage.ENDED:
            self._state.end_child(holder, preempted=True, yielded=True)
            return 1
        return 0

    def release(self, prompt: Prompt, chain: Chain = ()) -> None:
        """Releases the pages of a prompt whose KV is sent. The blocks of `chain` stay cached."""
        key, rank = prompt.key, prompt.rank
        if rank >= 0:
            self.prompts.withdraw(key)
            self._state.residency.let_go(rank, key, chain)
            self._state.room.free(rank, key)

    def _put_back(self, prompt: Prompt) -> None:
        self._idle.remove(prompt)
        self.release(prompt)
        self.prompts.stall(prompt.key)  # those before it in the queue would wait for it
        self.enqueue(prompt)

    # ---- who gives way

    def _presses(self, waiting: Prompt) -> bool:
        return any(True for _ in self._holders(waiting.priority))

    def _of_one_priority(self) -> bool:
        lowest = self._lowest_priority()
        return lowest is None or all([one.priority <= lowest for one in self.queue])

    def _lowest_priority(self) -> int | None:
        lowest, idle = self._state.lowest_priority, [one.priority for one in self._idle]
        return min(idle if lowest is None else [lowest, *idle], default=None)

    def _to_give_way(self, waiting: Prompt, need: _Need) -> list[Sequence | Prompt]:
        """Returns those that must give way so that some rank has room for a prompt. Chooses the
        rank on which they have the lowest priorities, and then the fewest. Returns an empty list if
        this cannot make room."""
        best: list[YieldingSequence] | None = None
        holders = list(self._holders(waiting.priority))
        for rank in range(self._state.limits.ranks):
            able = [one for one, holder in holders if holder.rank == rank]
            pages, slots, _ = self._short(waiting, need, rank)
            few = to_preempt(able, pages, slots)
            if few is not None and (best is None or _worth(few) < _worth(best)):
                best = few
        by_key = {one.key: holder for one, holder in holders}
        return [by_key[one.key] for one in best or ()]

    def _holders(self, priority: int) -> Iterator[_Holder]:
        lowest = self._lowest_priority()
        if lowest is None or lowest >= priority:
            return
        for prompt in self._idle:
            if prompt.priority < priority:
                rank, key, newness = prompt.rank, prompt.key, (*prompt.order, 0)
                pages, slots = self._own_pages(rank, key), self._state.room.own(rank, key)
                yield YieldingSequence(key, prompt.priority, newness, pages, slots=slots), prompt
        for group in self._state.groups.values():
            # a reserved group's caller begins at once
            if group.request.priority < priority and group.handoff.state is not _RESERVED:
                yield from self._holders_of(group, priority)

    def _holders_of(self, group: SequenceGroup, priority: int) -> Iterator[_Holder]:
        alive, growing = group.alive, self._state.growing[group.rank]
        # without all its KV, a group gives way as a whole
        together = [alive] if group.root_held else [[child] for child in alive]
        for some in together:
            if some[0].yields_to(priority):
                owners = [child.key for child in some]
                pages = self._own_pages(group.rank, *owners, *[group.key] * group.root_held)
                yield (
                    YieldingSequence(
                        some[0].key,
                        group.request.priority,
                        some[0].age_key,
                        pages + len(growing.intersection(owners)),
                        computed=not group.root_held,
                        slots=len(some),
                    ),
                    some[0],
                )

    def _own_pages(self, rank: int, *owners: int) -> int:
        ledger = self._state.ledgers[rank]
        held = Counter([page for owner in owners for page in ledger.pages(owner)])
        return sum([ledger.references(page) == count for page, count in held.items()])

    # ---- room

    def _short(self, waiting: Prompt, need: _Need, rank: int) -> tuple[int, int, int]:
        """Returns how many pages and slots a rank lacks for a prompt (negative numbers are to
        spare), and how many of its leading positions the rank caches."""
        state, limits, slots = self._state, self._state.limits, 0
        pages = need.pages + len(state.growing[rank]) - state.ledgers[rank].free_pages
        cached, chain, kept = 0, waiting.chain, state.residency
        if chain:
            cached = kept.cached_tokens(rank, chain, waiting.most_known, waiting.computes)
            pages -= kept.held_pages(rank, chain, cached)
        if state.room.on:
            slots = self._slots(waiting) - state.room.available(rank)
        if waiting.decodes and (held := state.living[rank]):
            crowd = held + len(waiting.children) - limits.slots_per_rank - self._ahead
            slots = max(slots, crowd)
        return pages, slots, cached

    def _place(self, waiting: Prompt, need: _Need) -> _Place | None:
        places, ledgers = list[_Place](), self._state.ledgers
        for rank in range(self._state.limits.ranks):
            pages, slots, cached = self._short(waiting, need, rank)
            if pages <= 0 and slots <= 0:
                places.append((rank, cached))
        if len(places) > 1:
            return max(
                places,
                key=lambda one: (self._attraction(waiting, *one), ledgers[one[0]].free_pages),
            )
        return places[0] if places else None

    def _attraction(self, waiting: Prompt, rank: int, cached: int) -> int:
        """A prompt whose KV is sent takes the rank that ends first. Others take the one that caches
        most, unless it has many more sequences than another."""
        if not waiting.decodes:
            return cached - waiting.tokens - self.prompts.queued_tokens(rank)
        living = self._state.living
        return cached if living[rank] <= min(living) + self._ahead else 0

    def _tail(self, waiting: Prompt, rank: int, cached: int) -> bytes:
        tail, kept = waiting.tail, self._state.residency
        if tail is None or cached < tail.start or not kept.pages(rank, tail.name):
            return b""
        return tail.name

    def _slots(self, waiting: Prompt) -> int:
        if waiting.decodes:
            return len(waiting.children) * self._state.states.on
        return self._state.room.needed(waiting.tokens)

    def _need(self, waiting: Prompt) -> _Need:
        growth = self._growth_tokens if waiting.decodes else 0
        pages = self._pages(waiting, growth)
        if growth and pages > self._state.limits.pages_per_rank:
            growth, pages = 1, self._pages(waiting, 1)
        return _Need(pages, growth)

    def _pages(self, waiting: Prompt, growth_tokens: int) -> int:
        size, children = self._state.limits.page_size, len(waiting.children)
        known = waiting.tokens
        covered = pages_for(self._covered(waiting, known, growth_tokens), size)
        if children == 1 or not waiting.decodes:
            return covered
        shared = pages_for(known, size)
        own = covered - shared
        copies = (children - 1) * (known % size != 0)
        return shared + copies + children * own

    def _covered(self, waiting: Prompt, known: int, growth_tokens: int) -> int:
        if not growth_tokens:
            return known
        return max(known, min(self._limit(waiting.request), known + growth_tokens))

    def _limit(self, request: Request) -> int:
        most = request.most_tokens(self._state.limits.context_tokens)
        return len(request.prompt_token_ids) + most - 1

    # ---- what an admitted prompt gets

    def _take(
        self, waiting: Prompt, need: _Need, place: _Place, lease_until: float, to: Admitted
    ) -> None:
        to.prompts.append(waiting)
        kept, room = self._state.residency, self._state.room
        rank, cached = place
        if waiting.decodes:
            to.groups.append(self._reserve(waiting, need, place, lease_until))
        else:
            held = kept.reserve(rank, waiting.key, waiting.chain, cached, need.pages)
            assert held is not None, "room was checked"
            windows = self._begin_windows(waiting, rank, cached) if room.windows else ()
            if not room.windows:
                room.states.take(rank, waiting.key)
            samples = [
                sample_spec(waiting.request, one.index, one.accepted) for one in waiting.children
            ]
            self.prompts.add(waiting.key, rank, tuple(samples), cached, kept.epoch, windows)
            if room.windows and room.windows[rank].repeats(waiting.key):
                self.prompts.stall(waiting.key)  # few of its blocks can be reused
        if waiting.computes and cached and kept.snapshots and not room.windows:
            # before another prompt can evict the snapshot
            (source,) = kept.use_snapshot(rank, waiting.chain, cached)
            to.copies.append(((rank, source, room.states.slot(rank, waiting.key)),))

    def _begin_windows(self, waiting: Prompt, rank: int, cached: int) -> tuple[int, ...]:
        """Leaves pages of sliding-window layers to those behind it that have room, too."""
        room, ledgers = self._state.room, self._state.ledgers
        left, promised = sum([ledger.free_pages for ledger in ledgers]), 0
        for later in self.queue:
            left -= self._pages(later, 0)
            if left < 0:
                break
            promised += self._slots(later)
        kept, promised = self._state.residency, promised // len(ledgers)
        return room.begin_windows(kept, rank, waiting, cached, promised)

    def _reserve(
        self, waiting: Prompt, need: _Need, place: _Place, lease_until: float
    ) -> SequenceGroup:
        rank, cached = place
        size, ledger = self._state.limits.page_size, self._state.ledgers[rank]
        handoff = Handoff(waiting.key, HandoffState.RESERVED, lease_until)
        group = SequenceGroup(
            waiting.key,
            waiting.request,
            waiting.attempt,
            rank,
            waiting.arrival,
            handoff,
            until=lease_until,
        )
        known = waiting.tokens
        prompt_pages = pages_for(known, size)
        own_pages = pages_for(self._covered(waiting, known, need.growth), size) - prompt_pages
        group.chain, group.cached_tokens = waiting.chain, cached
        group.epoch = self._state.residency.epoch
        tail = self._tail(waiting, rank, cached)
        held = self._state.residency.reserve(
            rank, group.key, group.chain, group.cached_tokens, prompt_pages, tail
        )
        assert held is not None, "room was checked"
        if waiting.continues and (tail or group.cached_tokens == known - 1):
            group.complete, group.cached_tokens = True, known - 1
        states = self._state.states
        states.take(rank, group.key)
        for number, child in enumerate(waiting.children):
            key, accepted = self._state.new_key(), list(child.accepted)
            sequence = Sequence(key, child.index, group, accepted, self._limit(waiting.request))
            ledger.share(group.key, sequence.key, prompt_pages)
            if number:
                states.take(rank, sequence.key)
            else:
                states.share(rank, group.key, sequence.key)
            if number and known % size:
                copy = ledger.own(sequence.key, prompt_pages - 1)
                assert copy is not None, "the group holds the page too"
                group.copies.append((rank, *copy))
            extended = ledger.extend(sequence.key, own_pages)
            assert extended is not None, "room was checked"
            group.children.append(sequence)
        self._state.add_group(group)
        return group


_RESERVED = HandoffState.RESERVED


def _worth(few: Sized[YieldingSequence]) -> tuple[int, int]:
    return max([one.priority for one in few], default=0), len(few)
