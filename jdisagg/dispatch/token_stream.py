"""Detokenizes one stream: converts token ids to text and ends the text at a stop string.

Invariants:
- The state depends only on the prompt and the pushed tokens. It does not depend on how the tokens
  were split into spans. A new stream that is given the accepted ids has the same state and returns
  the same text.
- The returned pieces, joined, equal the text that decoding prompt and output at once adds to the
  prompt's text. Decoding is not additive: a leading space may depend on the previous token, and a
  character may consist of several tokens.
- No piece ends within a character. U+FFFD at the end may be an unfinished character and is held
  back. A character has up to four bytes, so at most three U+FFFD are held back, and invalid bytes
  are delivered in the end.
- Work per token is bounded: only a window of the last tokens is decoded. The first tokens of the
  window are context.
- No piece contains any part of a stop string that is completed later.
"""

import functools
import itertools
import os.path
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from jdisagg.request import Request

UNFINISHED = "\ufffd"
MAX_HELD_CHARACTERS = 3
CONTEXT_TOKENS = 8
MAX_WINDOW_TOKENS = 128

Decode = Callable[[Sequence[int]], str]


class Detokenizer(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Invalid UTF-8 becomes U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a stream, and whether a stop string ended the output. `tokens_kept` is the number
    of pushed tokens that belong to the output. It is smaller than the number of pushed tokens only
    if a stop string ended the output, because later tokens are dropped."""

    text: str
    tokens_kept: int
    stopped: bool


class TokenStream:
    """Converts one output's token ids to text. The ids must be pushed in order, without the final
    stop id.

    A stop string ends the output where it is first completed. If one character completes several
    stop strings, the longest one is used. A stop string that contains text of the first
    `min_tokens` tokens is ignored."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
        keep_special: bool = False,
    ) -> None:
        decode = detokenizer.decode
        if keep_special:
            decode = functools.partial(decode, skip_special_tokens=False)
        self._detokenizer = IncrementalDetokenizer(decode, prompt_token_ids)
        self._stops = StopStrings(stop, include_stop)
        self._unguarded_tokens = min_tokens

    @classmethod
    def of(cls, detokenizer: Detokenizer, request: Request) -> Self:
        sampling = request.sampling
        return cls(
            detokenizer,
            request.prompt_token_ids,
            sampling.stop,
            sampling.min_tokens,
            include_stop=sampling.include_stop_str_in_output,
            keep_special=not sampling.skip_special_tokens,
        )

    @property
    def stopped(self) -> bool:
        return bool(self._stops.matched)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the output, or "" if none did."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Adds tokens and returns the new text. Drops all tokens after a stop string."""
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            if self.stopped:
                return TextDelta("".join(pieces), index, True)
            piece = self._detokenizer.push(token_id)
            if self._unguarded_tokens > 0:
                self._unguarded_tokens -= 1
            elif piece:
                piece = self._stops.push(piece)
            pieces.append(piece)
        return TextDelta("".join(pieces), len(token_ids), self.stopped)

    def finish(self) -> str:
        """An unfinished character becomes text only at the end, and may then complete a stop
        string."""
        if self.stopped:
            return ""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()


class IncrementalDetokenizer:
    """Returns the text that each new token adds.

    `_window` holds the last tokens of prompt and output. `_given` is the part of the window's text
    that was returned or belongs to the prompt. The text of the window's first `_settled` tokens was
    returned completely. `_given_since` is the returned part of the remaining tokens' text."""

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = _context(decode, prompt_token_ids)
        # A prompt may end within a character. The character belongs to the output if the output
        # completes it. Otherwise it is dropped.
        self._settled = self._last_whole()
        unsettled = self._decode(self._window[self._settled :])
        self._given_since = unsettled.rstrip(UNFINISHED)
        self._prompt_unfinished = len(unsettled) - len(self._given_since)
        self._given = self._decode(self._window[: self._settled]) + self._given_since
        self._next_start = self._settled

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        piece = self._take(MAX_HELD_CHARACTERS)
        if len(self._window) >= MAX_WINDOW_TOKENS:
            piece += self._take(0)
        if (
            self._settled == len(self._window)
            and self._settled - self._next_start >= CONTEXT_TOKENS
        ):
            self._slide()
        return piece

    def finish(self) -> str:
        return self._take(0)

    def _take(self, may_hold: int) -> str:
        text, given = self._decode(self._window), self._given
        alone = not text.startswith(given)
        if alone:  # new bytes made the context's last byte run invalid: decode without the context
            text, given = self._decode(self._window[self._settled :]), self._given_since
            given = os.path.commonprefix([text, given])
        held = min(may_hold, len(text) - len(text.rstrip(UNFINISHED)), len(text) - len(given))
        new = text[len(given) : len(text) - held]
        if not new and (held or alone):
            return ""
        if alone:
            del self._window[: self._settled]
            self._settled = self._next_start = 0
        self._given = given + new
        self._given_since += new
        if not held:
            self._settled, self._given_since = len(self._window), ""
        return self._less_the_prompts(new) if new and self._prompt_unfinished else new

    def _less_the_prompts(self, new: str) -> str:
        rest = new.lstrip(UNFINISHED)
        prompts = min(self._prompt_unfinished, len(new) - len(rest))
        self._prompt_unfinished = 0 if rest else self._prompt_unfinished - prompts
        return new[prompts:]

    def _slide(self) -> None:
        full = len(self._window) >= MAX_WINDOW_TOKENS
        context = self._window[-CONTEXT_TOKENS if full else self._next_start :]
        text = self._decode(context)
        if text or full:
            self._window, self._given = context, text
            self._settled = self._next_start = len(context)

    def _last_whole(self) -> int:
        for end in range(len(self._window), 0, -1):
            if not self._decode(self._window[:end]).endswith(UNFINISHED):
                return end
        return 0


class StopStrings:
    """Passes text through until a stop string is complete. Holds back text that may be the
    beginning of a stop string.

    Uses one Knuth-Morris-Pratt matcher per stop string, so the work per character does not depend
    on the length of the stop strings. If `include` is set, the text includes the stop string that
    ends it. `matched` is the stop string that was completed, or ""."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self.matched = ""
        self._include = include
        self._stops = tuple(stop)
        self._fallbacks = [_fallbacks(text) for text in self._stops]
        # Matched characters of each stop string at the end of the text.
        self._lengths = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> str:
        if self.matched or not self._stops:
            return "" if self.matched else text
        for index, character in enumerate(text):
            completed = [
                stop for which, stop in enumerate(self._stops) if self._step(which, stop, character)
            ]
            if completed:
                self.matched = max(completed, key=len)
                known, self._held = self._held + text[: index + 1], ""
                return known if self._include else known[: len(known) - len(self.matched)]
        known, held = self._held + text, max(self._lengths)
        self._held = known[len(known) - held :]
        return known[: len(known) - held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _step(self, which: int, stop: str, character: str) -> bool:
        length = self._lengths[which]
        while length and stop[length] != character:
            length = self._fallbacks[which][length - 1]
        self._lengths[which] = length = length + (stop[length] == character)
        return length == len(stop)


def _fallbacks(text: str) -> list[int]:
    lengths = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[length] != text[end]:
            length = lengths[length - 1]
        length += text[length] == text[end]
        lengths[end] = length
    return lengths


def _context(decode: Decode, prompt_token_ids: Sequence[int]) -> list[int]:
    end = len(prompt_token_ids)
    few = range(MAX_HELD_CHARACTERS + 1)
    for count in (CONTEXT_TOKENS, 4 * CONTEXT_TOKENS, 12 * CONTEXT_TOKENS):
        for skipped, unfinished in itertools.product(few, few):
            start = max(0, end - count) + skipped
            text = decode(prompt_token_ids[start : max(start, end - unfinished)])
            if text and not text.startswith(UNFINISHED):
                return list(prompt_token_ids[start:])
    return list(prompt_token_ids[-CONTEXT_TOKENS:])
