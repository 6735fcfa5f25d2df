"""Decides which draft tokens a decode step verifies. Pure: times are given as measured.

A draft costs extra rows in a step and saves a step if it is accepted. The number of drafts depends
only on measurements: the acceptance rates of each sequence and of all sequences, and the seconds of
steps with and without drafts in a batch of this size. If the expected gain is too small, the step
has no drafts and runs the ordinary program.

Draft tokens change no stream (`executor/draft_rows.py`), so wrong predictions or estimates cost
only time."""

import statistics
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from jdisagg.messages.step_commands import NO_TOKEN, DraftRow
from jdisagg.scheduler.acceptance import OVERALL_FADE, Acceptance
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.ngram import SIZES, NgramIndex
from jdisagg.scheduler.sequences import Sequence

LEAST_GAIN = 1.03  # expected tokens a second with drafts, relative to without
SAMPLES = 9  # step times of which the median counts
LEAST_SAMPLES = 3
# Steps after which a step of the other kind is measured again.
REMEASURE = 256
# Tokens that a mesh drafts for a sequence in each step, with the checkpoint's next-token layer.
CHAIN = 3
# In a large batch, predictions cost the host time. After a step that takes no drafts, the next
# steps make none: as many as a quarter of the batch, and at most this number.
MOST_SKIPPED = 16


class Draft(NamedTuple):
    """Predicted tokens after a sequence's known tokens. `kind` numbers the drafter's kinds of
    predictions, whose acceptance is measured separately."""

    kind: int
    tokens: tuple[int, ...]


class Drafter(Protocol):
    """Predicts the next tokens of sequences.

    Attributes:
        source: Name of the drafter in metrics.
        kinds: Number of kinds of predictions.
        on_mesh: Whether the decode step itself drafts, so that the tokens are not known here.
    """

    source: str
    kinds: int
    on_mesh: bool

    def draft(self, child: Sequence, most: int) -> Draft | None:
        """Returns a prediction of up to `most` tokens after the tokens of `child.generated`, or
        None."""
        ...


class NgramDrafter:
    """Predicts tokens from the sequence's own tokens (`ngram.py`)."""

    source = "ngram"
    kinds = len(SIZES)
    on_mesh = False

    def draft(self, child: Sequence, most: int) -> Draft | None:
        if child.ngrams is None:
            child.ngrams = NgramIndex(child.group.request.prompt_token_ids)
        found = child.ngrams.predict(child.generated, most)
        return None if found is None else Draft(*found)


class NextTokenDrafter:
    """Stands for the drafts of the checkpoint's next-token layer (`executor/next_tokens.py`). Each
    step with drafts makes those of the next one."""

    source = "mtp"
    kinds = 1
    on_mesh = True

    def draft(self, child: Sequence, most: int) -> Draft | None:
        return Draft(0, (NO_TOKEN,) * CHAIN)


class Planned(NamedTuple):
    """Drafts of one sequence in a step: those to verify, and the kind of their prediction."""

    drafts: DraftRow
    kind: int


@dataclass
class _Seconds:
    """Measured times of steps of one batch size and variant, without and with drafts."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    since_plain: int = 0
    since_drafted: int = 0

    def add(self, seconds: float, drafts: bool) -> None:
        (self.drafted if drafts else self.plain).append(seconds)
        self.since_plain = self.since_plain + 1 if drafts else 0
        self.since_drafted = 0 if drafts else self.since_drafted + 1

    def pays(self, gain: float) -> bool:
        """Returns whether a step with drafts is worth its time, if it is expected to yield `gain`
        times the tokens of a step without drafts. From time to time the choice measures steps with
        or without drafts instead."""
        if len(self.drafted) < LEAST_SAMPLES:
            return gain > LEAST_GAIN
        if len(self.plain) < LEAST_SAMPLES or self.since_plain >= REMEASURE:
            return False
        if self.since_drafted >= REMEASURE and gain > LEAST_GAIN:
            return True
        plain, drafted = statistics.median(self.plain), statistics.median(self.drafted)
        return gain * plain > LEAST_GAIN * drafted


StepKind = tuple[int, bool, bool, bool]  # batch size, and variant: shaped, sampled, masked


class Speculation:
    """Plans the drafts of decode steps on one mesh.

    Attributes:
        drafted, accepted: Number of drafts verified and accepted so far.
    """

    def __init__(self, limits: MeshLimits, drafter: Drafter) -> None:
        self._limits, self._drafter = limits, drafter
        self._seconds: dict[StepKind, _Seconds] = {}
        self._overall = [Acceptance() for _ in range(drafter.kinds)]
        self.drafted = self.accepted = 0
        self._taken = (0, 0)
        self._skips = 0
        self._steps = self._last = 0  # steps planned, and the last one with drafts

    @staticmethod
    def of(limits: MeshLimits) -> "Speculation | None":
        """Returns the speculation of a mesh; None if it verifies no drafts."""
        runs = limits.speculates and limits.longest_run > 1
        drafter = NextTokenDrafter() if limits.draft_layer else NgramDrafter()
        return Speculation(limits, drafter) if runs else None

    @property
    def source(self) -> str:
        return self._drafter.source

    def kind(
        self, active: Rows[Rows[Sequence]], shaped: bool, sampled: bool, masked: bool
    ) -> StepKind:
        """Returns the key under which the times of a step are measured."""
        width = max(1, *map(len, active))
        bucket = next(size for size in self._limits.batch_buckets if size >= width)
        return bucket, shaped, sampled, masked

    def plan(self, active: Rows[Rows[Sequence]], kind: StepKind) -> dict[tuple[int, int], Planned]:
        """Returns the drafts of the next step for the running sequences `active` of each rank, by
        rank and row. Empty if they are not worth their time."""
        self._steps += 1
        if self._skips:
            self._skips -= 1
            return {}
        self._forget()
        rows: dict[tuple[int, int], Planned] = {}
        gain, sequences = 0.0, sum(map(len, active))
        for rank, children in enumerate(active):
            found = [self._draft(child) for child in children]
            counts, of_rank = self._share(
                found, list(map(self._ahead, children)), self._limits.extra_rows(kind[0])
            )
            gain += of_rank
            for row, (child, one, count) in enumerate(zip(children, found, counts, strict=True)):
                if one is not None and (planned := self._planned(rank, row, child, one[1], count)):
                    rows[rank, row] = planned
        seconds = self._seconds.setdefault(kind, _Seconds())
        if rows and seconds.pays(1 + gain / sequences):
            self._last = self._steps
            if self._drafter.on_mesh:
                for child in (child for children in active for child in children):
                    child.drafted = self._steps
            return rows
        self._skips = min(sequences // 4, MOST_SKIPPED)
        return {}

    def _planned(
        self, rank: int, row: int, child: Sequence, draft: Draft, count: int
    ) -> Planned | None:
        """Returns the drafts of a sequence in a step, of which `count` are to be verified. A step
        in which the mesh drafts makes those of the next step, too, even if it has none itself."""
        if not self._drafter.on_mesh:
            drafts = DraftRow(rank, row, child.position + 1, draft.tokens, count)
            return Planned(drafts, draft.kind) if count else None
        made = child.drafted == self._steps - 1
        return Planned(DraftRow(rank, row, 0, (), count if made else 0), draft.kind)

    def _ahead(self, child: Sequence) -> int:
        """Returns the number of tokens in steps in flight that must come as predicted, too. The
        mesh itself drafts after the tokens that came."""
        if self._drafter.on_mesh:
            return 0
        return child.issued_position - child.position + child.drafting

    def _forget(self) -> None:
        """Forgets an acceptance that was measured long ago, because drafts of the mesh can only be
        counted if they are verified."""
        if self._drafter.on_mesh and self._steps - self._last >= REMEASURE:
            self._overall = [Acceptance() for _ in self._overall]

    def _draft(self, child: Sequence) -> tuple[float, Draft] | None:
        """Returns a prediction for a sequence, and the probability that a predicted token is
        correct if all earlier ones are."""
        left = child.issued_limit - 1 - child.issued_position
        if left < 1:
            return None
        long_ago = self._drafter.on_mesh and self._steps - child.drafted >= REMEASURE
        if not child.acceptance or long_ago:
            child.acceptance = [Acceptance() for _ in range(self._drafter.kinds)]
        self._count(child)
        draft = self._drafter.draft(child, 2 * self._limits.longest_run - 1)
        if draft is None:
            return None
        if child.predicted is None and not self._drafter.on_mesh:
            child.predicted = (draft.kind, len(child.generated), draft.tokens)
        own = child.acceptance[draft.kind]
        return own.estimate(self._overall[draft.kind].estimate()), draft

    def _count(self, child: Sequence) -> None:
        """Compares the latest prediction with the tokens generated since then."""
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
    ) -> tuple[list[int], float]:
        """Divides a rank's extra rows among its sequences by the probability that each row's token
        is chosen. Returns the number of rows of each sequence, and the expected number of accepted
        drafts."""
        longest = self._limits.longest_run - 1
        chances = sorted(
            (
                (one[0] ** (ahead[index] + number), index)
                for index, one in enumerate(found)
                if one is not None
                for number in range(1, min(longest, len(one[1].tokens)) + 1)
            ),
            reverse=True,
        )[:room]
        counts = [0] * len(found)
        for _, index in chances:
            counts[index] += 1
        return counts, sum(chance for chance, _ in chances)

    def verified(self, child: Sequence, planned: Planned, accepted: int) -> None:
        """Counts the drafts of a sequence in a step."""
        count = planned.drafts.count
        accepted = max(0, min(accepted, count))
        self.drafted += count
        self.accepted += accepted
        if self._drafter.on_mesh and count:
            tries = min(accepted + 1, count)
            child.acceptance[planned.kind].add(accepted, tries)
            self._overall[planned.kind].add(accepted, tries, OVERALL_FADE)

    def take(self) -> tuple[int, int]:
        """Returns the numbers of drafts verified and accepted since the last call."""
        (drafted, accepted), self._taken = self._taken, (self.drafted, self.accepted)
        return self.drafted - drafted, self.accepted - accepted

    def took(self, kind: StepKind, seconds: float, drafts: bool) -> None:
        """Records the seconds of a step."""
        self._seconds.setdefault(kind, _Seconds()).add(seconds, drafts)
