"""Predicts the next tokens of a sequence by prompt lookup. If the last tokens occurred before in
the sequence, the tokens that followed them are the prediction. Needs no weights. Works well for
text that repeats its prompt, edited code, tables and loops.

An index maps each n-gram to its latest occurrence. Each call adds a bounded number of new tokens to
the index, so that a long prompt delays no step for long. Only the newest tokens are indexed,
because an index takes about 300 bytes of host memory per token. The index has parts of `PART`
tokens each, so that its oldest tokens are dropped at once."""

from collections import deque
from collections.abc import Sequence
from itertools import count

SIZES = (4, 2)  # lengths of n-grams, longest first; a longer match predicts better
MOST_INDEXED = 1024  # tokens indexed in one call
MOST_OF_PROMPT = 8192  # tokens of a prompt that are indexed
PART = 2048
_PARTS = MOST_OF_PROMPT // PART + 1
MOST_BYTES = _PARTS * PART * 300  # of an index

_Ends = tuple[dict[tuple[int, ...], int], ...]


class NgramIndex:
    """The n-grams of one sequence.

    Args:
        prompt: Prompt tokens, the first tokens of the sequence.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt_tokens = len(prompt)
        # Tokens of the sequence from this number on are kept.
        self._first = max(0, len(prompt) - MOST_OF_PROMPT)
        self._tokens = list(prompt[self._first :])
        # The n-grams that end before this token are in the index, newest part first.
        self._indexed = self._first
        self._parts: deque[_Ends] = deque(maxlen=_PARTS)
        self._room = 0  # tokens that fit into the newest part

    def predict(self, generated: Sequence[int], most: int) -> tuple[int, tuple[int, ...]] | None:
        """Predicts the tokens after `generated`, the tokens after the prompt.

        Args:
            generated: All generated tokens. They begin with the generated tokens of the previous
                call.
            most: Number of tokens to predict.

        Returns:
            The index in `SIZES` of the n-gram that occurred before, and `most` tokens. If the
                earlier occurrence is near the sequence's end, the prediction continues with its own
                first tokens. None if no n-gram occurred before.
        """
        tokens = self._tokens
        tokens += generated[self._first + len(tokens) - self._prompt_tokens :]
        self._index(self._first + len(tokens) - 1)
        for kind, size in enumerate(SIZES):
            gram = tuple(tokens[-size:])
            for part in self._parts:
                if gram in part[kind]:
                    end = part[kind][gram] - self._first
                    found = tokens[end : end + most]
                    period = len(tokens) - end
                    while len(found) < most:
                        found.append(found[len(found) - period])
                    return kind, tuple(found)
        return None

    def _index(self, stop: int) -> None:
        """Adds the n-grams that end before token number `stop`, at most `MOST_INDEXED` of them."""
        left = min(stop - self._indexed, MOST_INDEXED)
        while left > 0:
            if not self._room:
                self._begin_part()
            tokens = min(left, self._room)
            first = self._indexed - self._first  # in `_tokens`
            for ends, size in zip(self._parts[0], SIZES, strict=True):
                begin = max(size, first + 1)
                part = self._tokens[begin - size : first + tokens]
                # in one call, because a loop takes five times as long
                grams = zip(*(part[offset:] for offset in range(size)), strict=False)
                ends.update(zip(grams, count(self._first + begin), strict=False))
            self._indexed += tokens
            self._room -= tokens
            left -= tokens

    def _begin_part(self) -> None:
        """Begins a part, and drops the oldest one, with the tokens before those that it indexes."""
        self._parts.appendleft(tuple({} for _ in SIZES))
        self._room = PART
        oldest = self._indexed - (len(self._parts) - 1) * PART
        del self._tokens[: oldest - self._first]
        self._first = oldest
