"""Counts the reasoning tokens of an answer, including the markers around the reasoning. Also splits
the text of an answer by tokens, for this count."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jdisagg.chat.answer import AnswerDelta, AnswerParser, joined_calls

_REACH = 8  # most characters of tokens without own text that may precede a token's text


@runtime_checkable
class Thinker(Protocol):
    """An `AnswerParser` that reports whether it is inside reasoning."""

    @property
    def reasons(self) -> bool:
        """Whether the next text is reasoning, or the marker that ends it."""
        ...

    @property
    def undecided(self) -> bool:
        """Whether the parser needs more text to decide if reasoning begins."""
        ...


class CountingParser:
    """Wraps a parser and counts the reasoning tokens of the answer.

    `tokens` is the count, or None if the parser does not report reasoning."""

    def __init__(self, parser: AnswerParser) -> None:
        self.parser = parser
        self.tokens: int | None = 0 if isinstance(parser, Thinker) else None
        self._undecided = 0

    def push(self, texts: Sequence[str]) -> AnswerDelta:
        deltas = [self._push(text) for text in texts]
        return AnswerDelta(
            "".join([delta.content for delta in deltas]),
            "".join([delta.reasoning for delta in deltas]),
            joined_calls([call for delta in deltas for call in delta.calls]),
        )

    def _push(self, text: str) -> AnswerDelta:
        parser = self.parser
        if not isinstance(parser, Thinker) or self.tokens is None:
            return parser.push(text)
        before, undecided = parser.reasons, parser.undecided
        delta = parser.push(text)
        if before or parser.reasons or delta.reasoning:
            self.tokens += 1 + self._undecided
            self._undecided = 0
        elif delta.content or delta.calls:
            self._undecided = 0
        else:
            self._undecided += undecided
        return delta


def token_places(pieces: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Finds the text of each token in the text of an answer. Returns start and end of each token's
    text in `text`, in characters. A token without text of its own (a special token, or a part of a
    character) has an empty range."""
    places: list[tuple[int, int]] = []
    at = 0
    for piece in pieces:
        found = text.find(piece, at, at + len(piece) + _REACH) if piece else -1
        begin = at if found < 0 else found
        at = at if found < 0 else found + len(piece)
        places.append((begin, at))
    return places


def cut_by_token(pieces: Sequence[str], text: str) -> list[str]:
    """Splits `text`, the text of all tokens decoded together, into one part per token. `pieces` are
    the texts of the tokens, each decoded alone. Text at the end that matches no token is in the
    part of the last token."""
    if len(pieces) <= 1:
        return [text] * len(pieces)
    ends = [end for _, end in token_places(pieces, text)[:-1]]
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]
