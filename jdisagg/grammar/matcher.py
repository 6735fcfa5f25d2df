"""The grammar state of one sequence, which determines the tokens that may come next.

The state depends only on the compiled grammar and the accepted token ids. Another worker therefore
restores the state by consuming the same ids.

A stop id is allowed at every position where the text may end. If `ignore_eos` or `min_tokens`
forbid the end, stop ids are masked out as long as any other token is allowed. When the grammar
allows no further token, only stop ids are allowed."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np

from jdisagg.grammar.thought import ThoughtTracker
from jdisagg.request import SamplingParams

BITS = 32
ALL = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Endings:
    """Ids that end an answer."""

    eos_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]


class TokenMatcher:
    """The grammar state of one sequence. `consume` appends tokens, and `fill` writes the mask of
    the tokens that may come next.

    Args:
        inner: llguidance's matcher, which no other sequence uses, or None if any text is allowed.
        words: Length of a mask over all ids of the tokenizer, in 32-bit words.
        thought: State of the answer's reasoning, if it is limited.
    """

    def __init__(
        self,
        inner: llguidance.LLMatcher | None,
        words: int,
        sampling: SamplingParams,
        endings: Endings,
        thought: ThoughtTracker | None = None,
    ) -> None:
        self._inner = inner
        self._thought = thought
        self._words = words
        self._min_tokens = sampling.min_tokens
        self._generated = 0
        self._ended = False
        # Masks of the ids that are forbidden while the answer must continue, or None.
        self._at_first = _bits(endings.stop_ids, words) if sampling.min_tokens else None
        restricted = sampling.ignore_eos and inner is not None
        self._always = _bits(endings.eos_ids, words) if restricted else None
        self._stop_ids = frozenset(endings.stop_ids)

    def copy(self) -> "TokenMatcher":
        """Returns an independent matcher in the same state."""
        other = copy.copy(self)
        other._inner = self._inner and self._inner.deep_copy()
        other._thought = copy.copy(self._thought)
        return other

    def consume(self, token_ids: Iterable[int]) -> None:
        """Ids after a stop id are ignored. A mesh may generate such ids, because it runs decode
        steps in advance of this check."""
        for token_id in token_ids:
            if self._ended or token_id < 0:
                return
            self._generated += 1
            if token_id in self._stop_ids:
                self._ended = True
                continue
            if self._inner is not None:
                self._inner.consume_token(token_id)
            if self._thought is not None:
                self._thought.consume(token_id)

    def forced(self, most: int, vocabulary: int) -> list[int]:
        """Appends the token ids that the grammar determines, or the limit of reasoning. They need
        no decode step. Stops when
        more than one id is allowed, or when the allowed id is a stop id. `vocabulary`: size of the
        model's vocabulary. An id of this size or more also ends the search. Returns the appended
        ids. For each of them, `fill` would allow no other id (tests/grammar/test_grammars.py)."""
        found: list[int] = []
        while len(found) < most and not self._ended:
            ids = self._determined()
            if not ids or ids[0] in self._stop_ids or ids[0] >= vocabulary:
                break
            # One at a time, because llguidance may tokenize the rest differently after this one.
            self.consume(ids[:1])
            found.append(ids[0])
        return found

    def _determined(self) -> Sequence[int]:
        if self._thought is not None and self._thought.closing:
            return self._thought.closing
        return [] if self._inner is None else self._inner.compute_ff_tokens()

    def fill(self, mask: np.ndarray) -> None:
        """Writes the mask of the ids that may come next, one bit per id. Id 0 is the lowest bit of
        the first word. `mask`: uint32 [words of the model's vocabulary], contiguous. It is set to
        zeros if the consumed ids do not match the grammar, or if the grammar exceeded llguidance's
        limits."""
        words = self._words
        if self._thought is not None and self._thought.closing:
            mask[:] = _bits(self._thought.closing[:1], len(mask))
            return
        # The mask is written in place. If the model has fewer ids than its tokenizer, it is copied.
        ours = mask if len(mask) >= words else np.empty(words, np.uint32)
        if self._inner is None:
            ours[:] = ALL
        else:
            self._inner.unsafe_compute_mask_ptr(ours.ctypes.data, words * ours.itemsize)
        if self._inner is not None and self._inner.is_error():
            ours[:words] = 0
        if self._always is not None:
            _keep_out(self._always, ours[:words])
        if self._at_first is not None and self._generated < self._min_tokens:
            _keep_out(self._at_first, ours[:words])
        if ours is mask:
            if self._inner is not None:
                mask[words:] = 0
        else:
            mask[:] = ours[: len(mask)]

    @property
    def error(self) -> str:
        """The reason why the grammar allows no token id any more, or "" if there is no error."""
        return self._inner.get_error() if self._inner and self._inner.is_error() else ""


def _keep_out(endings: np.ndarray, mask: np.ndarray) -> None:
    others = mask & ~endings
    if others.any():
        mask[:] = others


def mask_words(vocabulary: int) -> int:
    return -(-vocabulary // BITS)


def _bits(token_ids: Sequence[int], words: int) -> np.ndarray:
    bits = np.zeros(words, np.uint32)
    for token_id in token_ids:
        if token_id < words * BITS:
            bits[token_id // BITS] |= np.uint32(1 << (token_id % BITS))
    return bits
