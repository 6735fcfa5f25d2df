"""The prompts of one mesh, whether they are computed there or elsewhere.

A prompt is looked up in the prefix cache when it arrives. If an earlier prompt (the leader) is
about to compute blocks that it needs, so that common blocks are computed once, it may wait until
the leader's chunks with these blocks are issued. It waits only for prompts that precede it in the
queue or have begun. When it has pages, it is queued for chunks (`scheduler/prefill_batches.py`).
The blocks of a chunk are cached when the chunk is issued, because commands run in order.

Invariants (each is a test of the same name in tests/scheduler/test_shared_prompts.py):
- a_prompt_waits_for_blocks_that_another_will_compute_and_for_no_others
- who_waits_is_released_once_when_the_blocks_are_there_or_their_prompt_has_ended
- nothing_is_left_when_all_prompts_have_ended
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from jdisagg.errors import HandoffError, OverloadedError
from jdisagg.messages.ports import Child
from jdisagg.messages.step_commands import PrefillChunk, PrefillResult, SampleSpec
from jdisagg.plain import plain
from jdisagg.request import Identity, Request
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.prefill_batches import PrefillBatches, gathers
from jdisagg.scheduler.prices import MovePrice
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.sequences import Prompt
from jdisagg.telemetry import Counters


@plain
class Leader:
    """A prompt that will compute blocks that another prompt needs. The first `blocks` blocks of
    both prompts are the same."""

    key: int
    blocks: int


@dataclass(slots=True)
class _Shared:
    prompt: Prompt
    reached: int = 0  # number of leading blocks whose chunks are issued
    stalled: bool = False
    waits: Leader | None = None
    followers: dict[int, int] = field(default_factory=dict)  # number of common blocks by key


class SharedPrompts:
    """A prompt is registered until its blocks are computed. One that is not registered waits for
    none."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Shared] = {}
        self._makers: dict[bytes, dict[int, None]] = {}  # prompts that have each block

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, prompt: Prompt) -> None:
        self._prompts[prompt.key] = _Shared(prompt)
        for name in prompt.chain:
            self._makers.setdefault(name, {})[prompt.key] = None

    def leader(self, key: int, useful: Chain, known: int) -> Leader | None:
        """Returns the prompt that will compute most of the next blocks of prompt `key`, or None if
        no prompt will compute the next block. If several compute equally many, returns the one that
        was registered first."""
        own, best = self._prompts.get(key), Leader(0, known)
        if own is None or known >= len(useful):
            return None
        for other in self._makers.get(useful[known], ()):
            shared = self._prompts[other]
            prompt, waits = shared.prompt, shared.prompt.rank < 0
            if other == key or shared.stalled or (waits and own.prompt.order < prompt.order):
                continue
            if shared.reached <= known and (count := _common(useful, prompt.chain)) > best.blocks:
                best = Leader(other, count)
        return best if best.blocks > known else None

    def follow(self, key: int, leader: Leader) -> None:
        self._prompts[key].waits = leader
        self._prompts[leader.key].followers[key] = leader.blocks

    def waits(self, key: int) -> bool:
        shared = self._prompts.get(key)
        return shared is not None and shared.waits is not None

    def reached(self, key: int, blocks: int) -> tuple[int, ...]:
        """Records that the chunks with a prompt's first `blocks` blocks are issued. Returns the
        keys of the prompts that need not wait any longer."""
        shared = self._prompts.get(key)
        if shared is None:
            return ()
        shared.reached, shared.stalled = max(shared.reached, blocks), False
        return self._release(shared, blocks)

    def stall(self, key: int) -> tuple[int, ...]:
        shared = self._prompts.get(key)
        if shared is None:
            return ()
        shared.stalled = True
        return self._release(shared)

    def end(self, key: int) -> tuple[int, ...]:
        """Removes a prompt that was computed or cancelled. Returns the keys of the prompts that
        still waited for it. Idempotent."""
        shared = self._prompts.pop(key, None)
        if shared is None:
            return ()
        if shared.waits is not None:
            self._prompts[shared.waits.key].followers.pop(key, None)
        for name in shared.prompt.chain:
            makers = self._makers[name]
            del makers[key]
            if not makers:
                del self._makers[name]
        return self._release(shared)

    def _release(self, shared: _Shared, blocks: int = sys.maxsize) -> tuple[int, ...]:
        free = tuple([key for key, wanted in shared.followers.items() if wanted <= blocks])
        for key in free:
            del shared.followers[key]
            self._prompts[key].waits = None
        return free


def _common(one: Chain, other: Chain) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:  # equal names imply that all earlier names are equal
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low


class ChunkTimes:
    """Measured durations of prefill chunks."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._price = MovePrice()

    def took(self, chunk_tokens: int, seconds: float) -> None:
        self._price.add(chunk_tokens, seconds)

    def seconds(self, tokens: int) -> float:
        """Returns the predicted seconds to compute `tokens` tokens in as few chunks as possible.
        While all measured chunks had similar lengths, the time is proportional to the tokens.
        Before the first measurement, returns the number of tokens, which is enough to compare."""
        line = self._price.line()
        if line is None:
            return tokens
        if self._price.alike:
            return tokens * self._price.per_unit
        chunks = -(-tokens // self._largest)
        return chunks * line[0] + tokens * line[1]


def waiting_pays(
    times: ChunkTimes, queued: Sequence[int], rank: int, tokens: int, common_tokens: int
) -> bool:
    """Returns whether a prompt is computed sooner if it waits for the common blocks of its leader.

    If it does not wait, it is computed on the rank that ends first, in the same chunks as the
    prompts before it. If it waits, its first chunk begins after the leader's last.

    Args:
        queued: For each rank, the number of tokens that are computed before the prompt.
        rank: Rank of the leader.
    """
    alone = min([times.seconds(before + tokens) for before in queued])
    return times.seconds(queued[rank]) + times.seconds(tokens - common_tokens) < alone


def check_queue(worker: str, waiting: Collection[Prompt], priority: int, limit: int) -> None:
    """Raises OverloadedError if `limit` prompts of this or a higher priority wait, or twice as many
    of any."""
    before = sum([one.priority >= priority for one in waiting])
    if before >= limit or len(waiting) >= 2 * limit:
        raise OverloadedError(
            f"worker {worker!r}: {len(waiting)} requests wait for pages, the queue's limit; try"
            " again later",
            retry_after_seconds=1.0,
        )


class Prompts:
    """The prompts of one mesh, from their arrival until `forget`.

    Attributes:
        released: What `take_released` returns next.
    """

    def __init__(self, state: DecodeState, ids: Callable[[], int], counters: Counters) -> None:
        self.backlog = Backlog()
        self._state = state
        self._limits = limits = state.limits
        self._kept = kept = state.residency
        self._counters = counters
        # otherwise a hit needs a snapshot, which is cached when the prompt ends
        self._shares = not kept.snapshots or limits.window_pages_per_rank > 0
        self._ids = ids
        self.compute_in(limits.computed_by(False))
        self._shared = SharedPrompts()
        self._prompts: dict[int, Prompt] = {}
        self.released: list[Prompt] = []
        self._left_alone: set[int] = set()  # prompts whose leader ended
        self._steps_waited = 0  # decode steps since the last chunk, with a prompt queued

    def compute_in(self, limits: MeshLimits) -> None:
        """Computes prompts in chunks of the sizes of `limits`. None is queued for chunks."""
        kept = self._kept
        self._batches = PrefillBatches(limits, self._ids, kept.cut_tokens, kept.begin_snapshot)
        self._times = ChunkTimes(limits.chunk_buckets[-1])

    def __bool__(self) -> bool:
        """Returns whether a prompt is queued for chunks."""
        return any(self._batches.queues)

    def __len__(self) -> int:
        """Returns the number of prompts that are not forgotten."""
        return len(self._prompts)

    def begin(self, prompt: Prompt, *, named: bool = True, shared: bool = True) -> Prompt:
        """Registers a prompt and names its blocks.

        Args:
            named: Whether cached blocks may be used.
            shared: Whether the prompt may wait for blocks of other prompts, and they for its own.
        """
        self._prompts[prompt.key] = prompt
        if named and self._kept.on:
            self._name(prompt)
        if shared and prompt.chain:
            self._shared.begin(prompt)
        return prompt

    def _name(self, prompt: Prompt) -> None:
        kept = self._kept
        prompt.chain = kept.chain(prompt.request, prompt.token_ids)
        if prompt.chain:
            usable = kept.usable_tokens(prompt.most_known, prompt.computes)
            prompt.useful = prompt.chain[: usable // kept.block_tokens]
        if prompt.continues:
            prompt.tail = kept.find_tail(
                prompt.request, prompt.useful, prompt.tokens - 1, prompt.children[0].accepted
            )

    def look_up(self, prompt: Prompt) -> None:
        if prompt.useful:
            kept, ranks = self._kept, range(self._limits.ranks)
            most = len(prompt.useful) * kept.block_tokens
            prompt.known = tuple([kept.match(rank, prompt.useful) for rank in ranks])
            prompt.cached = tuple(
                [kept.cached_tokens(rank, prompt.useful, most, True) for rank in ranks]
            )

    def expect(self, prompt: Prompt, known_tokens: int) -> None:
        """Counts the prompt as work to come, except for its first `known_tokens` positions."""
        self.backlog.add(prompt.key, prompt.tokens, known_tokens, prompt.priority)

    def follows(self, prompt: Prompt) -> int:
        """Looks a prompt up. If another prompt will compute blocks of it, and waiting for them is
        faster than computing them, the prompt waits. Then returns the number of its leading
        positions that will be cached, otherwise 0."""
        if not prompt.useful:
            return 0
        reuse = self._joins(prompt)
        if not reuse and prompt.key in self._left_alone:
            self._counters.add("prefix_waits_taken_over")
        self._left_alone.discard(prompt.key)
        return reuse

    def _joins(self, prompt: Prompt) -> int:
        self.look_up(prompt)
        known = max(prompt.known, default=0)
        leader = self._shared.leader(prompt.key, prompt.useful, known) if self._shares else None
        if leader is None:
            return 0
        first = self._prompts[leader.key]
        reuse = self._kept.usable_tokens(leader.blocks * self._kept.block_tokens, True)
        common = reuse - prompt.known_tokens
        rank, queued = first.rank, [self.queued_tokens(one) for one in range(self._limits.ranks)]
        for one in self._prompts.values():  # without pages, and hence on the rank that ends first
            if one.rank < 0 and one is not prompt and not self._shared.waits(one.key):
                place = queued.index(min(queued))
                queued[place] += one.tokens - one.known_tokens
                rank = place if one is first else rank
        left = prompt.tokens - prompt.known_tokens
        if common < 1 or not waiting_pays(self._times, queued, rank, left, common):
            return 0
        self._shared.follow(prompt.key, leader)
        self._counters.add("prefix_waits")
        return reuse

    def reached(self, prompt: Prompt) -> None:
        """Records that the blocks that the last look-up found need not be waited for."""
        self._release(self._shared.reached(prompt.key, max(prompt.known, default=0)))

    def stall(self, key: int) -> None:
        """Lets no prompt wait for this one until it goes on."""
        self._release(self._shared.stall(key))

    def rename(self) -> None:
        """Names the blocks of all prompts without pages anew, because the weights have changed, and
        lets no prompt wait for another."""
        free = [self._prompts[key] for one in self._prompts for key in self._shared.end(one)]
        for prompt in self._prompts.values():
            if prompt.rank < 0 and prompt.chain:
                self._name(prompt)
        self.released += free

    def take_released(self) -> list[Prompt]:
        """Returns the prompts that need not wait for blocks of another prompt any longer, since the
        last call. They may have to wait for yet another one (`follows`)."""
        released, self.released = self.released, []
        return [one for one in released if self._prompts.get(one.key) is one]

    def _release(self, keys: tuple[int, ...], ended: bool = False) -> None:
        self.released += [self._prompts[key] for key in keys]
        if ended:
            self._left_alone.update(keys)

    # ---- prompts that have pages

    @property
    def placed(self) -> list[Prompt]:
        """The prompts that have pages to be computed in."""
        return [one for one in self._prompts.values() if one.rank >= 0]

    @property
    def queued(self) -> list[Prompt]:
        """The prompts that are queued for chunks."""
        return list(self._batches)

    def stall_those_to(self, destinations: Collection[str]) -> set[int]:
        """Lets no prompt wait for prompts to these destinations. Returns their keys."""
        stalled = {key for key, one in self._prompts.items() if one.destination in destinations}
        for key in stalled:
            self.stall(key)
        return stalled

    def queued_tokens(self, rank: int) -> int:
        return self._batches.queued_tokens(rank)

    def add(
        self,
        key: int,
        rank: int,
        samples: tuple[SampleSpec, ...],
        cached_tokens: int,
        epoch: int,
        windows: tuple[int, ...] = (),
    ) -> None:
        """Queues a prompt that has pages for chunks.

        Args:
            epoch: Epoch of the prefix cache when the prompt got its pages.
        """
        prompt, state = self._prompts[key], self._state
        prompt.rank, prompt.cached_tokens, prompt.epoch = rank, cached_tokens, epoch
        prompt.pages, prompt.windows = state.ledgers[rank].pages(key), windows
        prompt.state = state.states.slot(rank, key)
        prompt.samples, prompt.adapter = samples, state.adapters.slot_of(prompt.request)
        prompt.snapshots = ()
        if self._kept.snapshots and not windows:
            wanted = self._kept.wanted_snapshots(rank, prompt.chain, prompt.tokens, cached_tokens)
            prompt.snapshots = wanted
        prompt.images = prompt.request.scoped_images
        self._batches.add(prompt)
        self.expect(prompt, cached_tokens)

    def withdraw(self, key: int) -> None:
        """Takes the prompt's chunks that are not issued from the queue. Its pages are freed."""
        if (prompt := self._prompts.get(key)) is not None:
            self._batches.remove(prompt)
            prompt.rank = -1

    def forget(self, key: int) -> None:
        if (prompt := self._prompts.pop(key, None)) is not None:
            self._left_alone.discard(key)
            self._batches.remove(prompt)
            self.backlog.forget(key)
            if followers := self._shared.end(key):
                self._release(followers, ended=True)

    # ---- chunks

    def beside(self) -> tuple[int, ...]:
        """Returns the sizes of the chunks that may run together with a decode step. Empty if
        `grid_tokens` is set, because then a KV block must always be computed by the same
        programs."""
        on_grid = self._kept.on and not self._kept.keeps_answers
        return () if on_grid else self._batches.beside(self._limits.mixed_buckets)

    @property
    def gathering(self) -> bool:
        """Whether the queued prompts would wait for prompts of other dp ranks (`gather_steps`)."""
        return self._steps_waited < self._limits.gather_steps and gathers(self._batches.queues)

    def next_chunk(
        self,
        step: int,
        held: Collection[int] = (),
        chunk_in_flight: bool = False,
        beside: tuple[int, ...] = (),
    ) -> PrefillChunk | None:
        """Returns the next chunk, or None if there is none (`PrefillBatches.next_chunk`)."""
        chunk = self._batches.next_chunk(step, held, chunk_in_flight, beside)
        if chunk is None:
            return None
        self._steps_waited = 0
        for row in chunk.rows:
            prompt = self._prompts[row.sequence]
            if row.samples:  # no later row needs the pixels
                prompt.images, prompt.request = (), prompt.request.without_pixels()
            if prompt.chain:
                self._keep(prompt, row.start + len(row.tokens))
        return chunk

    def _keep(self, prompt: Prompt, tokens: int) -> None:
        kept = self._kept
        chain = prompt.chain[: tokens // kept.block_tokens]
        if self._shares and prompt.epoch == kept.epoch:
            kept.keep(prompt.rank, prompt.key, chain)
            kept.settle_snapshots(prompt.rank, prompt.key, chain, goes_on=True)
        self._release(self._shared.reached(prompt.key, len(chain)))

    def computed(self, chunk: PrefillChunk, result: PrefillResult, seconds: float) -> None:
        for key, part in result.prompts:
            if (prompt := self._prompts.get(key)) is not None:
                prompt.scores.append(part)
        for row in chunk.rows:
            self.backlog.computed(row.sequence, len(row.tokens))
        self._times.took(chunk.chunk_tokens, seconds)

    def step_ended(self) -> None:
        self._steps_waited = self._steps_waited + 1 if self else 0


class Attempts:
    """The latest attempt number of each (request, child), so that calls of earlier attempts can be
    refused. An entry expires when no earlier attempt can hold a lease any more."""

    def __init__(self) -> None:
        # least recently seen first
        self._seen: OrderedDict[tuple[Identity, int], tuple[int, float]] = OrderedDict()

    def take(self, request: Request, children: Iterable[Child], attempt: int, now: float) -> None:
        """Records an attempt. Raises HandoffError if a later attempt was recorded."""
        keys = [(request.identity, child.index) for child in children]
        for key in keys:
            latest, _ = self._seen.get(key, (attempt, now))
            if attempt < latest:
                raise HandoffError(
                    f"request {request.request_id!r}, child {key[1]}: attempt {attempt} comes after"
                    f" attempt {latest}; it is ignored"
                )
        for key in keys:
            self._seen[key] = (attempt, now)
            self._seen.move_to_end(key)

    def forget_before(self, instant: float) -> None:
        while self._seen and next(iter(self._seen.values()))[1] < instant:
            self._seen.popitem(last=False)


def causal_pairs(start: int, end: int) -> float:
    return (end - start) * start + (end - start) * (end - start + 1) / 2


class Backlog:
    """The prefill work that a mesh has accepted but not computed yet.

    Invariant: both sums are zero when no work is left.

    Attributes:
        tokens: Number of uncomputed positions.
        pairs: Number of (query, key) pairs of causal attention in which the query is uncomputed,
            which estimates the cost of attention.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.pairs = 0.0
        # first uncomputed position, end of the prompt, and priority
        self._prompts: dict[int, tuple[int, int, int]] = {}

    def add(self, key: int, tokens: int, cached_tokens: int = 0, priority: int = 0) -> None:
        prompt = cached_tokens, tokens, priority
        if self._prompts.get(key) != prompt:
            self.forget(key)
            self._prompts[key] = prompt
            self._count(cached_tokens, tokens, 1)

    def by_priority(self) -> dict[int, int]:
        tokens = Counter[int]()
        for start, end, priority in self._prompts.values():
            tokens[priority] += end - start
        return tokens

    def computed(self, key: int, tokens: int) -> None:
        known = self._prompts.get(key)
        if known is None:
            return
        start, end, priority = known
        until = min(end, start + tokens)
        self._count(start, until, -1)
        if until == end:
            del self._prompts[key]
        else:
            self._prompts[key] = until, end, priority

    def forget(self, key: int) -> None:
        known = self._prompts.pop(key, None)
        if known is not None:
            start, end, _ = known
            self._count(start, end, -1)

    def _count(self, start: int, end: int, sign: int) -> None:
        self.tokens += sign * (end - start)
        self.pairs += sign * causal_pairs(start, end)
