"""Applies grammars to decode slots.

Steps are pipelined: the forward pass of step n + 1 is issued, then the host waits for the tokens of
step n and makes the masks while the device computes.

Every process of an instance computes the same masks and runs, because these depend only on the
commands and the sampled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jdisagg.errors import JdisaggError
from jdisagg.executor.draft_rows import DraftPlan, Guess, Guesses, Slots
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.grammar.matcher import BITS, TokenMatcher, mask_words
from jdisagg.layout.platforms import traits_of
from jdisagg.messages.step_commands import NO_TOKEN, SampleSpec, SlotAdmit, SlotGrow
from jdisagg.scheduler.speculation import rows_before_snapshot

ALL = np.uint32(0xFFFFFFFF)


def pays(extra: int, rows: int, platform: str) -> bool:
    """Returns whether it saves time to compute `extra` forced tokens in a forward pass with `rows`
    rows. On an accelerator a few more rows are nearly free. On a CPU a few more rows made a step of
    eight rows 18 % longer (benchmarks/LOG.md)."""
    return extra > 0 and (traits_of(platform).spare_rows or 4 * extra >= rows)


@dataclass(slots=True)
class _Row:
    matcher: TokenMatcher | None
    position: int
    limit: int
    run: list[int] = field(default_factory=list)
    taken: int = 0
    guess: Guess | None = None
    drafted: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def active(self) -> bool:
        return self.position < self.limit


class GrammarRows:
    """Tracks the decode slots whose sequences have a grammar, and computes their masks and forced
    tokens. Used by the dispatch thread only."""

    def __init__(
        self, vocabulary: int, longest: int, platform: str, snapshot_tokens: int = 0
    ) -> None:
        self.compiler: GrammarCompiler | None = None
        self._vocabulary, self._longest, self._platform = vocabulary, longest, platform
        self._snapshot_tokens = snapshot_tokens
        self._words = mask_words(vocabulary)
        self._rows: dict[tuple[int, int], _Row] = {}
        self._turn = 0  # forward passes so far; each one begins with another row
        # Tokens and drafts that the matchers have not consumed yet, with their rows: (rank, index,
        # row, number of leading tokens that were forced).
        self._issued: list[
            tuple[jax.Array, jax.Array | None, list[tuple[int, int, _Row, int]]]
        ] = []

    def admit(self, admits: Sequence[SlotAdmit], grows: Sequence[SlotGrow]) -> None:
        for admit in admits:
            self._rows.pop((admit.rank, admit.slot), None)
            if admit.sample.sampling.grammar is not None:
                self._rows[admit.rank, admit.slot] = _Row(
                    self._matcher(admit.sample), admit.position, admit.limit
                )
        for grow in grows:
            if (row := self._rows.get((grow.rank, grow.slot))) is not None:
                row.limit = grow.limit

    def runs(self, slots: Slots, room: int, guesses: Guesses) -> Guesses:
        """Returns the drafts of the next step: runs of forced tokens, and `guesses` of slots
        without a run. Each dp rank has `room` extra rows. Slots get these rows in order, slots with
        a run first."""
        taken: dict[tuple[int, int], Guess] = {}
        left = [room] * len(slots)
        for rank, rank_slots in enumerate(slots):
            for turn in range(len(rank_slots)):
                index = (turn + self._turn) % len(rank_slots)
                row = self._rows.get((rank, rank_slots[index]))
                if row is None:
                    continue
                row.taken, row.guess = 0, None
                if len(row.run) < 2:
                    continue
                room_of_row = min(self._longest - 1, self._room(row))
                count = min(len(row.run) - 1, room_of_row, left[rank])
                if count > 0:
                    run = tuple(row.run[1 : count + 1])
                    taken[rank, index] = Guess(row.position + 1, run, count)
                    left[rank] -= count
        self._turn += 1
        extra = sum(guess.count for guess in taken.values())
        if not pays(extra, sum(map(len, slots)), self._platform):
            taken, left = {}, [room] * len(slots)
        for (rank, index), guess in taken.items():
            self._rows[rank, slots[rank][index]].taken = guess.count
        for (rank, index), guess in guesses.items():
            row = self._rows.get((rank, slots[rank][index]))
            if row is not None and not guess.tokens and not row.drafted:
                guess = guess._replace(count=0)  # drafts whose masks cannot be made
            if left[rank] and (row is None or len(row.run) < 2):
                count = min(guess.count, left[rank])
                taken[rank, index] = guess = guess._replace(count=count)
                left[rank] -= guess.count
                if row is not None and guess.count:
                    row.guess = guess
        return taken

    def masks(self, slots: Slots, width: int, plan: DraftPlan | None = None) -> np.ndarray:
        """Computes the masks of allowed tokens for a step, uint32 [ranks, width, W] with one bit
        for each token of the vocabulary, for the rows of `slots[rank]` and of their drafts. Blocks
        until the tokens of earlier steps are read back, but does not wait for tokens that the
        grammar forced. The caller must call `issued` afterwards."""
        self._consume()
        masks = np.full((len(slots), width, self._words), ALL, np.uint32)
        for rank, rank_slots in enumerate(slots):
            for index, slot in enumerate(rank_slots):
                row = self._rows.get((rank, slot))
                if row is None or not row.active:
                    continue
                drafts = row.taken or (row.guess.count if row.guess else 0)
                places = [
                    plan.place(rank, index, offset) if plan else index
                    for offset in range(drafts + 1)
                ]
                self._fill_row(row, [masks[rank, place] for place in places])
        return masks

    def issued(self, slots: Slots, token: jax.Array, drafts: jax.Array | None = None) -> None:
        """Records the tokens that the step chooses, `token` [ranks, rows, Q], and the drafts that
        the mesh makes, which may not be computed yet."""
        unknown: list[tuple[int, int, _Row, int]] = []
        for rank, rank_slots in enumerate(slots):
            for index, slot in enumerate(rank_slots):
                row = self._rows.get((rank, slot))
                if row is None or not row.active:
                    continue
                row.position += row.taken
                # Tokens that the grammar forced are known already. They are not read back, and
                # neither are the drafts after them.
                row.drafted = drafts is not None and not row.run
                if row.run:
                    row.position += 1
                else:
                    unknown.append((rank, index, row, row.taken))
        if unknown:
            self._issued.append((token, drafts, unknown))

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
        for token, drafts, rows in issued:
            # Only this code and `start_reading`, which started the copy, read from devices.
            with jax.transfer_guard_device_to_host("allow"):
                host = np.asarray(token).tolist()
                drafted = None if drafts is None else np.asarray(drafts).tolist()
            for rank, index, row, forced in rows:
                row.drafts = () if drafted is None else tuple(drafted[rank][index])
                tokens = [token for token in host[rank][index][forced:] if token >= 0]
                row.position += len(tokens)
                if row.matcher is not None:
                    row.matcher.consume(tokens)

    def _matcher(self, spec: SampleSpec) -> TokenMatcher | None:
        params = spec.sampling
        assert params.grammar is not None
        if self.compiler is None:
            return None
        try:
            return self.compiler.matcher(params.grammar, params, spec.stop_ids, spec.output_history)
        except JdisaggError:
            return None  # the row gets STUCK_TOKEN, and its worker reports it

    def _fill_row(self, row: _Row, masks: list[np.ndarray]) -> None:
        del row.run[:1]
        for mask in masks[: row.taken]:
            self._allow(mask, row.run.pop(0))
        if row.guess is not None:
            return self._fill_guess(row, row.guess, masks)
        last = masks[row.taken]
        if not row.run and row.matcher is not None and self._longest > 1:
            row.run = row.matcher.forced(self._longest, self._vocabulary)
        if row.run:
            self._allow(last, row.run[0])
        else:
            self._fill(last, row.matcher)

    def _fill_guess(self, row: _Row, guess: Guess, masks: list[np.ndarray]) -> None:
        if row.matcher is None:
            return self._fill(masks[0], None)
        start, *tokens = (guess.start, *guess.tokens) if guess.tokens else row.drafts
        first = row.position + 1 - start
        count = min(guess.count, self._room(row))
        drafts = tokens[first : first + count] if first >= 0 else []
        run = row.matcher.forced(self._longest, self._vocabulary)
        for mask, token, draft in zip(masks, run, (*drafts, NO_TOKEN), strict=False):
            self._allow(mask, token)
            if token != draft:
                row.run = run[row.taken :]
                return
            row.taken += 1
        matcher, masks = row.matcher.copy(), masks[row.taken :]
        self._fill(masks[0], matcher)
        for token, mask, following in zip(drafts[row.taken :], masks, masks[1:], strict=False):
            if token < 0 or not mask[token // BITS] >> np.uint32(token % BITS) & np.uint32(1):
                return
            matcher.consume((token,))
            self._fill(following, matcher)

    def _room(self, row: _Row) -> int:
        """Returns how many rows may follow the row's own."""
        before = rows_before_snapshot(row.position, self._snapshot_tokens)
        return max(1, min(row.limit - row.position, before)) - 1

    def _allow(self, mask: np.ndarray, token: int) -> None:
        mask[:] = 0
        mask[token // BITS] = np.uint32(1 << token % BITS)

    def _fill(self, mask: np.ndarray, matcher: TokenMatcher | None) -> None:
        if matcher is None:
            mask[:] = 0
        else:
            matcher.fill(mask)
