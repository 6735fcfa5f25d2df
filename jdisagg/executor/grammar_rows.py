"""The rows that have a grammar: masks, which the dispatch thread asks for between a step's forward
pass and its choice of tokens, and runs of forced tokens, which it asks for before the pass.

A slot's matcher stands where the tokens that were read back have brought it. Steps run ahead: the
forward pass of step n + 1 is issued, then the tokens of step n are waited for, and their masks are
made while the device computes. So rows without a grammar lose no run-ahead, and the device waits
for a mask only where making it takes longer than a forward pass.

Where the grammar allows one token alone, the matcher goes on with it before it was chosen, and
finds those that are forced behind it. The next step's forward pass computes all of that run, one
row a token, and its choice is of the token behind the run. A token is forced whatever the logits
say, so that no stream depends on whether its run was taken.

Every process of an instance makes the same masks and runs from the same commands and tokens: where
a slot stands follows from its admission and its steps."""

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
LONGEST_RUN = 16  # a longer one goes on in the next step
Slots = tuple[tuple[int, ...], ...]
# by rank and row, the tokens from the slot's own on that a forward pass computes
Runs = dict[tuple[int, int], list[int]]


def rows_for_runs(bucket: int) -> int:
    """Rows that a step of so many has beside them for runs of forced tokens, on each rank."""
    return max(8, bucket // 2)


def pays(extra: int, rows: int, platform: str) -> bool:
    """Whether a forward pass that takes so many tokens beside those of its rows saves more than it
    costs. On an accelerator a few rows more are nearly free; on a CPU they made a step of eight
    rows 18 % longer (benchmarks/LOG.md)."""
    return extra > 0 and (platform != "cpu" or 4 * extra >= rows)


def longest_run(limits: MeshLimits) -> int:
    """Positions of a sequence that one forward pass may compute. A state takes one token after the
    other; in a ring the last one must leave what the first one's window reaches."""
    if limits.kv_spec.has_state:
        return 1
    if not limits.ring_pages:
        return LONGEST_RUN
    room = limits.ring_pages * limits.page_size - limits.kv_spec.widest_window + 1
    return max(1, min(LONGEST_RUN, room))


@dataclass(slots=True)
class _Row:
    """A slot whose sequence has a grammar. `position`: of the slot's token when all issued steps
    are over. `run`: that token, where it was forced, and those that are forced behind it; the
    matcher is behind them all. `longest`: of a run; with 1 none is looked for."""

    matcher: TokenMatcher | None  # None: its grammar could not be compiled
    position: int
    limit: int
    longest: int
    run: list[int] = field(default_factory=list)

    @property
    def active(self) -> bool:
        return self.position < self.limit


class GrammarRows:
    """Called by the dispatch thread alone. `compiler`: None where the model has no tokenizer; a
    grammar then allows nothing (workers refuse it before that)."""

    def __init__(self, vocabulary: int, longest: int, platform: str) -> None:
        self.compiler: GrammarCompiler | None = None
        self._vocabulary, self._longest, self._platform = vocabulary, longest, platform
        self._words = mask_words(vocabulary)
        self._rows: dict[tuple[int, int], _Row] = {}
        self._turn = 0  # forward passes so far: another row comes first in each
        # tokens that were issued and not consumed, with who gets them: (rank, row, matcher)
        self._issued: list[tuple[jax.Array, list[tuple[int, int, TokenMatcher]]]] = []

    def admit(self, admits: Sequence[SlotAdmit], grows: Sequence[SlotGrow]) -> None:
        """Slots get other sequences or more pages, from here on."""
        for admit in admits:
            self._rows.pop((admit.rank, admit.slot), None)
            sampling = admit.sample.sampling
            if sampling.grammar is not None:
                # counts and log-probabilities are of tokens that were chosen, each by a row
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
        """The runs that the next forward pass takes, of two tokens or more; none where that would
        not pay. `room`: rows beside those of `slots[rank]`, on each rank, which go to another slot
        first in each step; what does not fit is left to later ones."""
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
        """For the choice of a step's tokens, which `issued` must follow. Waits for the tokens
        before these, where they were not forced. uint32 [ranks, width, W] in the order of
        `slots[rank]`."""
        self._consume()
        masks = np.full((len(slots), width, self._words), ALL, np.uint32)
        for rank, row in enumerate(slots):
            for index, slot in enumerate(row):
                if (found := self._rows.get((rank, slot))) is not None and found.active:
                    self._fill_next(masks[rank, index], found)
        return masks

    def issued(self, slots: Slots, token: jax.Array) -> None:
        """The step's choice is under way: token [ranks, width]."""
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
        """Fills mask [W] for a sequence that a prefill samples."""
        mask[:] = ALL
        if spec.sampling.grammar is not None:
            self._fill(mask, self._matcher(spec))

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """Masks that allow everything: uint32 [*shape, W]."""
        return np.full((*shape, self._words), ALL, np.uint32)

    def _consume(self) -> None:
        issued, self._issued = self._issued, []
        for token, rows in issued:
            # beside `start_reading`, which has begun the copy, the one place that reads back
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
            return None  # the row is stuck, and its worker says so

    def _fill_next(self, mask: np.ndarray, row: _Row) -> None:
        """What may come behind the slot's token."""
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
