"""Decides which draft tokens a decode step verifies.

A draft costs extra rows in a step and saves a step if it is accepted. The number of drafts depends
only on measurements: the acceptance rates of each sequence and of all sequences, and the times of
steps with and without drafts in a batch of this size (`draft_worth.py`).

Drafts never change the tokens that are generated (`executor/draft_rows.py`), so wrong predictions
or estimates cost only time."""

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any, NamedTuple, Protocol

from jdisagg.messages.step_commands import NO_TOKEN, DraftRow
from jdisagg.scheduler.draft_worth import OVERALL_FADE, Acceptance, DraftWorth
from jdisagg.scheduler.executor import LONGEST_RUN, MeshLimits
from jdisagg.scheduler.ngram import SIZES, NgramSearch
from jdisagg.scheduler.sequences import Sequence

# Number of tokens that a mesh drafts for a sequence in each step with the next-token layer.
CHAIN = 3
# Number of tokens before a snapshot in which a step computes one token of the sequence. It is at
# least the number of tokens in flight when the snapshot is planned, so that the sequence's position
# is then known.
SURE_TOKENS = 2
# Assumed host time of one sequence's prediction before any is measured, and the weight of each
# measurement in the running mean.
PREDICTION_SECONDS = 40e-6
_WEIGHT = 0.1


def rows_before_snapshot(position: Any, snapshot_tokens: int) -> Any:
    """Returns the largest number of rows of a step from `position` on. A step ends `SURE_TOKENS`
    before the next multiple of `snapshot_tokens`, at which the recurrent state is copied, or
    computes one row. 0 sets no limit."""
    if not snapshot_tokens:
        return LONGEST_RUN
    return snapshot_tokens - SURE_TOKENS - position % snapshot_tokens


class Draft(NamedTuple):
    """Predicted tokens after a sequence's known tokens. Acceptance is measured separately for each
    `kind` of prediction that the drafter makes."""

    kind: int
    tokens: tuple[int, ...]


class Drafter(Protocol):
    """Predicts the next tokens of sequences.

    Attributes:
        on_mesh: Whether the decode step itself drafts, so that the scheduler does not know the
            tokens.
    """

    source: str
    kinds: int
    on_mesh: bool

    def draft(self, child: Sequence, most: int) -> Draft | None:
        """Returns a prediction of up to `most` tokens after the tokens of `child.generated`, or
        None if there is no prediction."""
        ...


class NgramDrafter:
    """Predicts tokens from the sequence's own tokens (`ngram.py`)."""

    source = "ngram"
    kinds = len(SIZES)
    on_mesh = False

    def draft(self, child: Sequence, most: int) -> Draft | None:
        if child.ngrams is None:
            child.ngrams = NgramSearch(child.group.request.prompt_token_ids)
        found = child.ngrams.predict(child.generated, most)
        return None if found is None else Draft(*found)


class NextTokenDrafter:
    """Plans drafts that the mesh itself computes with a next-token layer, an EAGLE-3 head or an
    assistant (`executor/next_tokens.py`). The scheduler does not know these tokens and uses
    placeholders. Each step with drafts computes the drafts of the next step."""

    kinds = 1
    on_mesh = True

    def __init__(self, source: str) -> None:
        self.source = source

    def draft(self, child: Sequence, most: int) -> Draft | None:
        return Draft(0, (NO_TOKEN,) * CHAIN)


class Planned(NamedTuple):
    """The planned drafts of one sequence in a step: the drafts to verify, the kind of prediction,
    and the expected number of accepted drafts."""

    drafts: DraftRow
    kind: int
    expected: float


# (rank and row of a sequence, the sequence, its prediction, its number of extra rows, the expected
# number of accepted drafts)
Share = tuple[tuple[int, int], Sequence, Draft, int, float]
StepKind = tuple[int, bool]  # batch size, and whether some row has a grammar


class Speculation:
    """Plans the drafts of decode steps on one mesh."""

    def __init__(
        self, limits: MeshLimits, drafter: Drafter, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._limits, self._drafter, self._clock = limits, drafter, clock
        self._predicting = PREDICTION_SECONDS  # running mean of seconds per sequence
        self._worth = defaultdict[StepKind, DraftWorth](DraftWorth)
        self._overall = self._unmeasured()
        self.drafted = self.accepted = 0
        # For the step whose result is being read: the expected and the accepted number of drafts,
        # and the share of time per token that drafts saved, summed over sequences.
        self._expected, self._came, self._relief = 0.0, 0, 0.0
        self._looked = self._skips = 0  # length of the last pause, and steps left of this pause
        self._steps = 0  # number of planned steps

    @staticmethod
    def of(limits: MeshLimits, clock: Callable[[], float]) -> "Speculation | None":
        runs = limits.speculates and limits.longest_run > 1
        drafter = NextTokenDrafter(limits.draft_layer) if limits.draft_layer else NgramDrafter()
        return Speculation(limits, drafter, clock) if runs else None

    @property
    def source(self) -> str:
        return self._drafter.source

    def kind(self, active: Rows[Rows[Sequence]], masked: bool) -> StepKind:
        """Returns the kind of a step. Times are measured separately for each kind."""
        width = max(1, *map(len, active))
        bucket = next(size for size in self._limits.batch_buckets if size >= width)
        return bucket, masked

    def rests(self) -> bool:
        """Returns whether speculation pauses for the next step. The step then has no predictions
        and no drafts and is not measured, so that speculation costs no time. Must be called once
        per step."""
        self._steps += 1
        rests = self._skips > 0
        self._skips -= rests
        return rests

    def plan(self, active: Rows[Rows[Sequence]], kind: StepKind) -> dict[tuple[int, int], Planned]:
        """Returns the drafts of the next step by (rank, row). Empty if drafts are not worth their
        time. Must not be called for a step for which speculation pauses.

        Args:
            active: Running sequences of each rank.
            kind: Kind of the step.
        """
        worth, sequences, began = self._worth[kind], sum(map(len, active)), self._clock()
        if self._drafter.on_mesh and worth.due:
            self._forget(active)
        shares, gain = self._shares(
            active, self._limits.extra_rows(self._limits.pair_batch(kind[0]))
        )
        if not (shares and worth.pays(gain)):
            # Predictions that are used have a cost, too, but it is small beside what they save.
            mean = (self._clock() - began) / sequences
            self._predicting += (mean - self._predicting) * _WEIGHT
            rest = worth.rest(sequences * self._predicting)
            self._looked = self._skips = min(2 * self._looked or 1, rest)
            worth.earn(1 + self._skips)
            return {}
        self._looked = 0
        rows: dict[tuple[int, int], Planned] = {}
        for share in shares:
            rows |= self._planned(*share)
        if self._drafter.on_mesh:
            for child in (child for children in active for child in children):
                child.drafted = self._steps
        return rows

    def _shares(self, active: Rows[Rows[Sequence]], room: int) -> tuple[list[Share], float]:
        shares: list[Share] = []
        token_time = 0.0
        for rank, children in enumerate(active):
            found = [self._draft(child) for child in children]
            if not any(found):
                token_time += len(children)
                continue
            counts, gains = self._share(found, list(map(self._ahead, children)), room)
            token_time += sum([1 / (1 + gain) for gain in gains])
            shares += [
                ((rank, row), children[row], one[1], counts[row], gains[row])
                for row, one in enumerate(found)
                if one is not None
            ]
        return shares, sum(map(len, active)) / token_time

    def _unmeasured(self) -> list[Acceptance]:
        return [Acceptance() for _ in range(self._drafter.kinds)]

    def _planned(
        self, at: tuple[int, int], child: Sequence, draft: Draft, count: int, gain: float
    ) -> dict[tuple[int, int], Planned]:
        if not self._drafter.on_mesh:
            drafts = DraftRow(*at, child.position + 1, draft.tokens, count)
            return {at: Planned(drafts, draft.kind, gain)} if count else {}
        if child.drafted != self._steps - 1:
            count, gain = 0, 0.0
        return {at: Planned(DraftRow(*at, 0, (), count), draft.kind, gain)}

    def _ahead(self, child: Sequence) -> int:
        """Returns the number of tokens in flight that a prediction must have guessed before its
        drafts. The drafts are useless if one of these tokens is wrong. 0 if the mesh drafts,
        because it drafts after the actual tokens."""
        if self._drafter.on_mesh:
            return 0
        return child.issued_position - child.position + child.drafting

    def _forget(self, active: Rows[Rows[Sequence]]) -> None:
        """Resets the acceptance rates, because they are outdated. The mesh's drafts were not
        counted while no step verified them."""
        self._overall = self._unmeasured()
        for child in (child for children in active for child in children):
            child.acceptance = self._unmeasured()

    def _draft(self, child: Sequence) -> tuple[float, Draft] | None:
        left = child.issued_limit - 1 - child.issued_position
        if left < 1:
            return None
        if not child.acceptance:
            child.acceptance = self._unmeasured()
        self._count(child)
        draft = self._drafter.draft(child, 2 * self._limits.longest_run - 1)
        if draft is None:
            return None
        if child.predicted is None and not self._drafter.on_mesh:
            child.predicted = (draft.kind, len(child.generated), draft.tokens)
        own = child.acceptance[draft.kind]
        return own.estimate(self._overall[draft.kind].estimate()), draft

    def _count(self, child: Sequence) -> None:
        if child.predicted is None:
            return
        kind, first, tokens = child.predicted
        came = child.generated[first : first + len(tokens)]
        if came:
            hits = 0
            while hits < len(came) and came[hits] == tokens[hits]:
                hits += 1
            tries = min(hits + 1, len(came))
            child.acceptance[kind].add(hits, tries)
            self._overall[kind].add(hits, tries, OVERALL_FADE)
            child.predicted = None

    def _share(
        self, found: Rows[tuple[float, Draft] | None], ahead: Rows[int], room: int
    ) -> tuple[list[int], list[float]]:
        longest = self._limits.longest_run - 1
        values: list[tuple[float, float, int]] = []
        for index, one in enumerate(found):
            if one is not None:
                chance, tokens = one[0] ** ahead[index], 1.0
                for _ in range(min(longest, len(one[1].tokens))):
                    chance *= one[0]
                    values.append((chance / (tokens * (tokens + chance)), chance, index))
                    tokens += chance
        values.sort(reverse=True)
        counts, gains = [0] * len(found), [0.0] * len(found)
        for _, chance, index in values[:room]:
            counts[index] += 1
            gains[index] += chance
        return counts, gains

    def verified(self, child: Sequence, planned: Planned, accepted: int) -> None:
        count = planned.drafts.count
        accepted = max(0, min(accepted, count))
        self.drafted += count
        self.accepted += accepted
        self._expected += planned.expected
        self._came += accepted
        self._relief += accepted / (1 + accepted)
        if self._drafter.on_mesh and count:
            tries = min(accepted + 1, count)
            child.acceptance[planned.kind].add(accepted, tries)
            self._overall[planned.kind].add(accepted, tries, OVERALL_FADE)

    def took(self, kind: StepKind, seconds: float, drafts: bool, sequences: int) -> None:
        """`verified` must have been called for all drafts of the step."""
        left = sequences - self._relief
        self._worth[kind].took(
            seconds,
            self._expected if drafts else None,
            self._came,
            self._relief / left if left else 0.0,
        )
        self._expected, self._came, self._relief = 0.0, 0, 0.0
