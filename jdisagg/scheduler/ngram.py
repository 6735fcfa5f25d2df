"""Predicts the next tokens of a sequence by prompt lookup: it searches the sequence for an earlier
occurrence of its last tokens, and predicts the tokens that followed there. Needs no weights.

The sequence's newest tokens are kept as bytes, because a search for bytes runs in C: 1 us for each
1,000 tokens. An index from n-grams to positions would be faster to search, but costs 0.4 us and 300
bytes per token, even while no prediction is made."""

from array import array
from collections.abc import Sequence

SIZES = (4, 2)  # lengths of n-grams, longest first; a longer match predicts better
MOST_SEARCHED = 8192  # newest tokens of a sequence that are searched
_WIDTH = array("i").itemsize


class NgramSearch:
    """The newest tokens of one sequence."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = bytearray(array("i", prompt[-MOST_SEARCHED:]))
        self._generated = 0  # generated tokens among `_tokens`, or dropped from them

    def predict(self, generated: Sequence[int], most: int) -> tuple[int, tuple[int, ...]] | None:
        """Predicts the tokens after `generated`, the tokens after the prompt.

        Args:
            generated: All generated tokens. They begin with the generated tokens of the previous
                call.

        Returns:
            The index in `SIZES` of the n-gram that occurred before, and `most` tokens. If the
                earlier occurrence is near the sequence's end, the prediction continues with its own
                first tokens. None if no n-gram occurred before.
        """
        tokens = self._tokens
        tokens += array("i", generated[self._generated :]).tobytes()
        self._generated = len(generated)
        del tokens[: -MOST_SEARCHED * _WIDTH]
        found = None
        # A longer n-gram can only have occurred where a shorter one did.
        for kind in reversed(range(len(SIZES))):
            end = self._end_of_latest(SIZES[kind] * _WIDTH)
            if end < 0:
                break
            found = kind, end
        if found is None:
            return None
        kind, end = found
        after = array("i", bytes(tokens[end : end + most * _WIDTH])).tolist()
        period = (len(tokens) - end) // _WIDTH
        while len(after) < most:
            after.append(after[len(after) - period])
        return kind, tuple(after)

    def _end_of_latest(self, size: int) -> int:
        tokens = self._tokens
        gram = bytes(tokens[-size:])
        at = tokens.rfind(gram, 0, len(tokens) - _WIDTH)
        while at > 0 and at % _WIDTH:  # bytes that begin within a token
            at = tokens.rfind(gram, 0, at + size - 1)
        return at + size if at >= 0 else -1
