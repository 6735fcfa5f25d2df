"""Masks of the rows that have a grammar: what the dispatch thread asks between a step's forward
pass and its choice of tokens.

A slot's matcher stands where the tokens that were read back have brought it. Steps run ahead: the
forward pass of step n + 1 is issued, then the tokens of step n are waited for, and their masks are
made while the device computes. So rows without a grammar lose no run-ahead, and the device waits
for a mask only where making it takes longer than a forward pass.

Every process of an instance makes the same masks from the same commands and tokens."""

from collections.abc import Sequence

import jax
import numpy as np

from jdisagg.errors import JdisaggError
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.grammar.matcher import TokenMatcher, mask_words
from jdisagg.messages.step_commands import SampleSpec, SlotAdmit

ALL = np.uint32(0xFFFFFFFF)
Slots = tuple[tuple[int, ...], ...]


class GrammarRows:
    """Called by the dispatch thread alone. `compiler`: None where the model has no tokenizer; a
    grammar then allows nothing (workers refuse it before that)."""

    def __init__(self, vocabulary: int) -> None:
        self.compiler: GrammarCompiler | None = None
        self._words = mask_words(vocabulary)
        # None: of a grammar that could not be compiled
        self._matchers: dict[tuple[int, int], TokenMatcher | None] = {}
        # tokens that were issued and not consumed, with who gets them: (rank, row, matcher)
        self._issued: list[tuple[jax.Array, list[tuple[int, int, TokenMatcher]]]] = []

    def admit(self, admits: Sequence[SlotAdmit]) -> None:
        """Slots get other sequences, from here on."""
        for admit in admits:
            self._matchers.pop((admit.rank, admit.slot), None)
            if admit.sample.sampling.grammar is not None:
                self._matchers[admit.rank, admit.slot] = self._matcher(admit.sample)

    def masks(self, slots: Slots, width: int) -> np.ndarray:
        """Waits for the tokens before these. uint32 [ranks, width, W] in the order of
        `slots[rank]`."""
        self._consume()
        masks = np.full((len(slots), width, self._words), ALL, np.uint32)
        for rank, row in enumerate(slots):
            for index, slot in enumerate(row):
                if (rank, slot) in self._matchers:
                    self._fill(masks[rank, index], self._matchers[rank, slot])
        return masks

    def issued(self, slots: Slots, token: jax.Array) -> None:
        """The step's choice is under way: token [ranks, width]."""
        rows = [
            (rank, index, matcher)
            for rank, row in enumerate(slots)
            for index, slot in enumerate(row)
            if (matcher := self._matchers.get((rank, slot))) is not None
        ]
        if rows:
            self._issued.append((token, rows))

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

    def _fill(self, mask: np.ndarray, matcher: TokenMatcher | None) -> None:
        if matcher is None:
            mask[:] = 0
        else:
            matcher.fill(mask)
