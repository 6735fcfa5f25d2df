"""Applies grammars to decode slots. Computes token masks between a step's forward pass and its
choice of tokens. Before the forward pass, plans runs: sequences of tokens that the grammar forces.

Each slot has a matcher, which follows the grammar through the tokens that were read back from the
device. Steps are pipelined: the forward pass of step n + 1 is issued, then the host waits for the
tokens of step n and makes the masks while the device computes. The device therefore waits for a
mask only if making it takes longer than a forward pass.

If the grammar allows exactly one token, the matcher consumes this token before the device chooses
it, and finds the forced tokens that follow. The next forward pass computes the whole run, one row
for each token. The step then chooses the token after the run. A forced token does not depend on the
logits, so a stream does not depend on whether its run was computed at once.

Every process of an instance computes the same masks and runs, because these depend only on the
commands and the sampled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jdisagg.errors import JdisaggError
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.grammar.matcher import BITS, TokenMatcher, mask_words
from jdisagg.messages.step_commands import SampleSpec, SlotAdmit, SlotGrow
from jdisagg.scheduler.executor import MeshLimits

ALL = np.uint32(0xFFFFFFFF)
LONGEST_RUN = 16  # a longer run continues in the next step
Slots = tuple[tuple[int, ...], ...]
# By (rank, row): tokens that a forward pass computes, the slot's own token first.
Runs = dict[tuple[int, int], list[int]]


def rows_for_runs(bucket: int) -> int:
    """Returns the number of additional rows, per dp rank, that a step of this batch size has for
    forced tokens."""
    return max(8, bucket // 2)


def pays(extra: int, rows: int, platform: str) -> bool:
    """Returns whether it saves time to compute `extra` forced tokens in a forward pass with `rows`
    rows. On an accelerator a few more rows are nearly free. On a CPU they made a step of eight rows
    18 % longer (benchmarks/LOG.md)."""
    return extra > 0 and (platform != "cpu" or 4 * extra >= rows)


def longest_run(limits: MeshLimits) -> int:
    """Returns the largest number of positions of one sequence in one forward pass. With recurrent
    state this is 1. With a ring buffer, the last position must not overwrite a position in the
    first position's window."""
    if limits.kv_spec.has_state:
        return 1
    if not limits.ring_pages:
        return LONGEST_RUN
    room = limits.ring_pages * limits.page_size - limits.kv_spec.widest_window + 1
    return max(1, min(LONGEST_RUN, room))


@dataclass(slots=True)
class _Row:
    """The state of a slot whose sequence has a grammar.

    Attributes:
        matcher: Matcher that has consumed all known tokens, including `run`; None if the grammar
            did not compile.
        position: Position of the slot's current token after all issued steps.
        limit: First position for which the slot has no page.
        longest: Maximum number of tokens in a run; 1 disables runs.
        run: The slot's current token, if the grammar forced it, and the forced tokens that follow.
            Else empty.
    """

    matcher: TokenMatcher | None
    position: int
    limit: int
    longest: int
    run: list[int] = field(default_factory=list)

    @property
    def active(self) -> bool:
        return self.position < self.limit


class GrammarRows:
    """Tracks the decode slots that have a grammar. Used by the dispatch thread only.

    Attributes:
        compiler: Compiler of grammars. None if the worker has no tokenizer; it then refuses
            requests with a grammar.
    """

    def __init__(self, vocabulary: int, longest: int, platform: str) -> None:
        self.compiler: GrammarCompiler | None = None
        self._vocabulary, self._longest, self._platform = vocabulary, longest, platform
        self._words = mask_words(vocabulary)
        self._rows: dict[tuple[int, int], _Row] = {}
        self._turn = 0  # forward passes so far; each one begins with another row
        # Tokens that are not consumed yet, with their rows and matchers (rank, row, matcher).
        self._issued: list[tuple[jax.Array, list[tuple[int, int, TokenMatcher]]]] = []

    def admit(self, admits: Sequence[SlotAdmit], grows: Sequence[SlotGrow]) -> None:
        """Records admitted sequences, and new position limits of slots that received pages."""
        for admit in admits:
            self._rows.pop((admit.rank, admit.slot), None)
            sampling = admit.sample.sampling
            if sampling.grammar is not None:
                # Counts and log-probabilities need a row that chooses each token.
                alone = sampling.penalised or sampling.logprobs is not None
                self._rows[admit.rank, admit.slot] = _Row(
                    self._matcher(admit.sample),
                    admit.position,
                    admit.limit,
                    1 if alone else self._longest,
                )
        for grow in grows:
            if (row := self._rows.get((grow.rank, grow.slot))) is not None:
                row.limit = grow.limit

    def runs(self, slots: Slots, room: int) -> Runs:
        """Returns the runs of at least two tokens for the next forward pass. Returns none if runs
        would not save time. Each dp rank has `room` additional rows, which slots get in order. Runs
        that do not fit are left to later steps."""
        taken: Runs = {}
        for rank, rank_slots in enumerate(slots):
            left = room
            for turn in range(len(rank_slots)):
                index = (turn + self._turn) % len(rank_slots)
                row = self._rows.get((rank, rank_slots[index]))
                if row is None or len(row.run) < 2:
                    continue
                count = min(len(row.run), row.limit - row.position, left + 1)
                if count >= 2:
                    taken[rank, index] = row.run[:count]
                    left -= count - 1
        self._turn += 1
        extra = sum(len(run) - 1 for run in taken.values())
        if not pays(extra, sum(map(len, slots)), self._platform):
            return {}
        for (rank, index), run in taken.items():
            row = self._rows[rank, slots[rank][index]]
            del row.run[: len(run) - 1]
            row.position += len(run) - 1
        return taken

    def masks(self, slots: Slots, width: int) -> np.ndarray:
        """Computes the masks of allowed tokens for a step, uint32 [ranks, width, W], in the order
        of `slots[rank]`. Blocks until the previous tokens are read back, unless the grammar forced
        them. The caller must call `issued` afterwards."""
        self._consume()
        masks = np.full((len(slots), width, self._words), ALL, np.uint32)
        for rank, row in enumerate(slots):
            for index, slot in enumerate(row):
                if (found := self._rows.get((rank, slot))) is not None and found.active:
                    self._fill_next(masks[rank, index], found)
        return masks

    def issued(self, slots: Slots, token: jax.Array) -> None:
        """Records the tokens that the step chooses, `token` [ranks, width], which may not be
        computed yet."""
        unknown: list[tuple[int, int, TokenMatcher]] = []
        for rank, rank_slots in enumerate(slots):
            for index, slot in enumerate(rank_slots):
                row = self._rows.get((rank, slot))
                if row is None or not row.active:
                    continue
                row.position += 1
                if not row.run and row.matcher is not None:
                    unknown.append((rank, index, row.matcher))
        if unknown:
            self._issued.append((token, unknown))

    def first_mask(self, spec: SampleSpec, mask: np.ndarray) -> None:
        """Fills `mask` [W] with the tokens that the grammar allows as first token."""
        mask[:] = ALL
        if spec.sampling.grammar is not None:
            self._fill(mask, self._matcher(spec))

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """Returns masks that allow all tokens, uint32 [*shape, W]."""
        return np.full((*shape, self._words), ALL, np.uint32)

    def _consume(self) -> None:
        issued, self._issued = self._issued, []
        for token, rows in issued:
            # Besides `start_reading`, which started the copy, only this code reads from devices.
            with jax.transfer_guard_device_to_host("allow"):
                host = np.asarray(token).tolist()
            for rank, index, matcher in rows:
                matcher.consume((host[rank][index],))

    def _matcher(self, spec: SampleSpec) -> TokenMatcher | None:
        params = spec.sampling
        assert params.grammar is not None
        if self.compiler is None:
            return None
        try:
            return self.compiler.matcher(params.grammar, params, spec.stop_ids, spec.output_history)
        except JdisaggError:
            return None  # the row gets STUCK_TOKEN, and its worker reports it

    def _fill_next(self, mask: np.ndarray, row: _Row) -> None:
        """Fills `mask` with the tokens that the grammar allows after the slot's current token."""
        del row.run[:1]
        if not row.run and row.matcher is not None and row.longest > 1:
            row.run = row.matcher.forced(row.longest, self._vocabulary)
        if row.run:
            mask[:] = 0
            mask[row.run[0] // BITS] = np.uint32(1 << row.run[0] % BITS)
        else:
            self._fill(mask, row.matcher)

    def _fill(self, mask: np.ndarray, matcher: TokenMatcher | None) -> None:
        if matcher is None:
            mask[:] = 0
        else:
            matcher.fill(mask)
