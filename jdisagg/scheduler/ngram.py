"""Predicts the next tokens of a sequence by prompt lookup. If the last tokens occurred before in
the sequence, the tokens that followed them are the prediction. Needs no weights. Works well for
text that repeats its prompt, edited code, tables and loops.

An index maps each n-gram to its latest occurrence. Each call adds a bounded number of new tokens to
the index, so that a long prompt delays no step for long. Only the end of a long prompt is indexed,
because an index takes about 300 bytes of host memory per token."""

from collections.abc import Sequence

SIZES = (4, 2)  # lengths of n-grams, longest first; a longer match predicts better
MOST_INDEXED = 4096  # tokens indexed in one call
MOST_OF_PROMPT = 8192  # tokens of a prompt that are indexed


class NgramIndex:
    """The n-grams of one sequence.

    Args:
        prompt: Prompt tokens, the first tokens of the sequence.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        self._prompt_tokens = len(prompt)
        self._ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in SIZES)
        # The n-grams that end before this token are in the index.
        self._indexed = max(0, len(prompt) - MOST_OF_PROMPT)

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
        tokens += generated[len(tokens) - self._prompt_tokens :]
        self._index(len(tokens) - 1)
        for kind, size in enumerate(SIZES):
            end = self._ends[kind].get(tuple(tokens[-size:]))
            if end is not None:
                found = tokens[end : end + most]
                period = len(tokens) - end
                while len(found) < most:
                    found.append(found[len(found) - period])
                return kind, tuple(found)
        return None

    def _index(self, stop: int) -> None:
        """Adds the n-grams that end before token number `stop`."""
        tokens, first = self._tokens, self._indexed
        last = min(stop, first + MOST_INDEXED)
        for kind, size in enumerate(SIZES):
            begin = max(size, first + 1)
            part = tokens[begin - size : last]
            # in one call, because a loop takes five times as long
            grams = zip(*(part[offset:] for offset in range(size)), strict=False)
            self._ends[kind].update(zip(grams, range(begin, last + 1), strict=False))
        self._indexed = last
