"""Where one sequence stands in its grammar, and which tokens may come next.

A function of the compiled grammar and the accepted ids (rule 9 of the design): another worker makes
the same matcher by consuming the same ids.

A stop id may come where the text may end. Where a request wants to go on (`ignore_eos`,
`min_tokens`) stop ids are kept out as long as anything else is allowed: a complete text has nothing
to go on with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np

from jdisagg.request import SamplingParams

BITS = 32


@dataclass(frozen=True, slots=True)
class Endings:
    """The ids that end an answer: the model's own, and all of the request's, those included."""

    eos_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]


class TokenMatcher:
    """`inner` is this sequence's own. `words`: of a mask over the tokenizer's ids."""

    def __init__(
        self, inner: llguidance.LLMatcher, words: int, sampling: SamplingParams, endings: Endings
    ) -> None:
        self._inner = inner
        self._words = words
        self._min_tokens = sampling.min_tokens
        self._generated = 0
        self._ended = False
        # None: nothing is kept out
        self._at_first = _bits(endings.stop_ids, words) if sampling.min_tokens else None
        self._always = _bits(endings.eos_ids, words) if sampling.ignore_eos else None
        self._stop_ids = frozenset(endings.stop_ids)

    def consume(self, token_ids: Iterable[int]) -> None:
        """The sequence goes on with these. What comes behind a stop id is nothing of it: a mesh
        runs ahead."""
        for token_id in token_ids:
            if self._ended or token_id < 0:
                return
            self._generated += 1
            if token_id in self._stop_ids:
                self._ended = True
            else:
                self._inner.consume_token(token_id)

    def forced(self, most: int, vocabulary: int) -> list[int]:
        """Goes on as long as one id alone may come next, a stop id aside.

        Args:
          most: this many ids are enough.
          vocabulary: ids from here on are none of the model's.
        Returns: those ids, consumed. `fill` would have allowed each of them alone
          (tests/end_to_end/test_schemas.py).
        """
        found: list[int] = []
        while len(found) < most and not self._ended:
            ids = self._inner.compute_ff_tokens()
            if not ids or ids[0] in self._stop_ids or ids[0] >= vocabulary:
                break
            # one at a time: llguidance may cut the rest otherwise once this one is known
            self.consume(ids[:1])
            found.append(ids[0])
        return found

    def fill(self, mask: np.ndarray) -> None:
        """Writes a bit for each id that may come next, the first id in the lowest bit of the first
        word.

        Args:
          mask: uint32 [words of the model's vocabulary], without gaps. All zero where the ids so
            far are not of the grammar, or it broke its compiler's limits.
        """
        words = self._words
        # written in place, but where a model knows fewer ids than its tokenizer
        ours = mask if len(mask) >= words else np.empty(words, np.uint32)
        self._inner.unsafe_compute_mask_ptr(ours.ctypes.data, words * ours.itemsize)
        if self._inner.is_error():
            ours[:words] = 0
        if self._always is not None:
            _keep_out(self._always, ours[:words])
        if self._at_first is not None and self._generated < self._min_tokens:
            _keep_out(self._at_first, ours[:words])
        if ours is mask:
            mask[words:] = 0
        else:
            mask[:] = ours[: len(mask)]

    @property
    def error(self) -> str:
        """Why nothing can come next; empty where something can."""
        return self._inner.get_error() if self._inner.is_error() else ""


def _keep_out(endings: np.ndarray, mask: np.ndarray) -> None:
    """Takes these ids out, as long as others are left."""
    others = mask & ~endings
    if others.any():
        mask[:] = others


def mask_words(vocabulary: int) -> int:
    """How many words a mask over so many ids has."""
    return -(-vocabulary // BITS)


def _bits(token_ids: Sequence[int], words: int) -> np.ndarray:
    bits = np.zeros(words, np.uint32)
    for token_id in token_ids:
        if token_id < words * BITS:
            bits[token_id // BITS] |= np.uint32(1 << (token_id % BITS))
    return bits
