"""Finds prompts of one mesh that share a prefix, so that their common blocks are computed once.

If the next block of a prompt is also a block of an earlier prompt (the leader), the prompt may wait
until the leader's chunks with the common blocks are issued.

A prompt waits only for prompts that precede it in the queue or have begun.

Invariants (each is a test of the same name in tests/scheduler/test_shared_prompts.py):
- a_prompt_waits_for_blocks_that_another_will_compute_and_for_no_others
- who_waits_is_released_once_when_the_blocks_are_there_or_their_prompt_has_ended
- nothing_is_left_when_all_prompts_have_ended
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jdisagg.plain import plain
from jdisagg.scheduler.prices import MovePrice
from jdisagg.scheduler.residency import Chain

Order = tuple[float, int]


@plain
class Leader:
    """A prompt that will compute blocks that another prompt needs. The first `blocks` blocks of
    both prompts are the same."""

    key: int
    blocks: int


@dataclass(slots=True)
class _Prompt:
    order: Order
    chain: Chain
    reached: int = 0  # number of leading blocks whose chunks are issued
    begun: bool = False
    stalled: bool = False
    waits: Leader | None = None
    followers: dict[int, int] = field(default_factory=dict)  # number of common blocks by key


class SharedPrompts:
    """A prompt is registered until its blocks are computed. One that is not registered waits for
    none."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}
        self._makers: dict[bytes, dict[int, None]] = {}  # prompts that have each block

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, key: int, order: Order, chain: Chain) -> None:
        """`order` is its sort key in the queue. `chain` has the names of its blocks."""
        self._prompts[key] = _Prompt(order, chain)
        for name in chain:
            self._makers.setdefault(name, {})[key] = None

    def leader(self, key: int, useful: Chain, known: int) -> Leader | None:
        """Returns the prompt that will compute most of the next blocks of prompt `key`, or None if
        no prompt will compute the next block. If several compute equally many, returns the one that
        was registered first."""
        own, best = self._prompts.get(key), Leader(0, known)
        if own is None or known >= len(useful):
            return None
        for other in self._makers.get(useful[known], ()):
            prompt = self._prompts[other]
            if other == key or prompt.stalled or not (prompt.begun or prompt.order < own.order):
                continue
            if prompt.reached <= known and (count := _common(useful, prompt.chain)) > best.blocks:
                best = Leader(other, count)
        return best if best.blocks > known else None

    def follow(self, key: int, leader: Leader) -> None:
        self._prompts[key].waits = leader
        self._prompts[leader.key].followers[key] = leader.blocks

    def waits(self, key: int) -> bool:
        prompt = self._prompts.get(key)
        return prompt is not None and prompt.waits is not None

    def started(self, key: int) -> None:
        if (prompt := self._prompts.get(key)) is not None:
            prompt.begun = True

    def reached(self, key: int, blocks: int) -> tuple[int, ...]:
        """Records that the chunks with a prompt's first `blocks` blocks are issued. Returns the
        keys of the prompts that need not wait any longer."""
        prompt = self._prompts.get(key)
        if prompt is None:
            return ()
        prompt.reached, prompt.stalled = max(prompt.reached, blocks), False
        return self._release(prompt, blocks)

    def stall(self, key: int) -> tuple[int, ...]:
        prompt = self._prompts.get(key)
        if prompt is None:
            return ()
        prompt.stalled = True
        return self._release(prompt, len(prompt.chain))

    def end(self, key: int) -> tuple[int, ...]:
        """Removes a prompt that was computed or cancelled. Returns the keys of the prompts that
        still waited for it. Idempotent."""
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return ()
        if prompt.waits is not None:
            self._prompts[prompt.waits.key].followers.pop(key, None)
        for name in prompt.chain:
            makers = self._makers[name]
            del makers[key]
            if not makers:
                del self._makers[name]
        return self._release(prompt, len(prompt.chain))

    def _release(self, prompt: _Prompt, blocks: int) -> tuple[int, ...]:
        free = tuple([key for key, wanted in prompt.followers.items() if wanted <= blocks])
        for key in free:
            del prompt.followers[key]
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
