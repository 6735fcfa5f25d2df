"""The host side of a stream's text: token ids in, text out, cut before a stop string.

`TokenStream` is what the request path uses; `IncrementalDetokenizer` and `StopStrings` are its two
halves. They know a `Detokenizer` (ids -> text) and nothing of requests, transports or JAX.

Invariants:
- State is a function of the prompt and the tokens pushed, whatever spans they came in (rule 9): a
  stream is rebuilt by pushing the accepted ids into a new one, and its text so far is then the text
  that was delivered.
- The pieces concatenate to what decoding prompt and output at once adds to the prompt's own text,
  although decoding is not additive: a leading space may depend on what comes before, and a
  character may lie in several tokens.
- No piece ends within a character: U+FFFD at the end may be an unfinished one and is held back,
  three of them at most (a character has up to four bytes), so that bytes that are truly invalid
  come out too.
- Work per token is bounded: only a window of the last tokens is decoded, of which the first are
  context.
- No piece holds any part of a stop string that is completed later.

One exception: a byte-fallback decoder turns a whole run of byte tokens into U+FFFD when one byte of
it is invalid. Characters of the run that were complete have been delivered by then and stay."""

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
        """The text of these tokens; what is not UTF-8 becomes U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push gave. `tokens_kept` of the pushed ids belong to the output: all, or, where a
    stop string ended it, those up to and including the one that completed it (they were generated
    and are counted); the rest is overrun."""

    text: str
    tokens_kept: int
    stopped: bool


class TokenStream:
    """Text of one output. Push only ids that are delivered (not the stop id that ends it), in
    order.

    A stop string ends the output where it is first completed; where several are completed by the
    same character, the longest counts. Those that any of the first `min_tokens` tokens had a part
    in do not count.

    include_stop: the text ends after the stop string instead of before it. keep_special: special
    tokens are text, too."""

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
        """The text of one child of a request."""
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
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Adds tokens; once stopped, keeps none."""
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
        """The text still held back, at the end of an output (none if a stop string ended it). The
        stream is then used up.

        An unfinished character is text only now, so that even here a stop string may be completed:
        see `stopped`."""
        if self.stopped:
            return ""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()


class IncrementalDetokenizer:
    """Text of each next token. The window is the last tokens, prompt included; `_given` is the part
    of its text that is the prompt's or was returned; up to token `_settled` of the window all was
    returned, `_given_since` after it."""

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = _context(decode, prompt_token_ids)
        # A prompt may end within a character. If the output finishes it, it is the output's; if
        # not, it is nobody's.
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
        """What is new and certain in the window's text; marks it as given."""
        text, given = self._decode(self._window), self._given
        alone = not text.startswith(given)
        if alone:  # new bytes have spoilt the run that the context ends with: read them without it
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
        """Forgets all but the last tokens, from a place between characters. Those kept must have
        text, to be a context."""
        full = len(self._window) >= MAX_WINDOW_TOKENS
        context = self._window[-CONTEXT_TOKENS if full else self._next_start :]
        text = self._decode(context)
        if text or full:
            self._window, self._given = context, text
            self._settled = self._next_start = len(context)

    def _last_whole(self) -> int:
        """The last place in the window before which its text does not end in an unfinished
        character."""
        for end in range(len(self._window), 0, -1):
            if not self._decode(self._window[:end]).endswith(UNFINISHED):
                return end
        return 0


class StopStrings:
    """Passes text through until a stop string is complete, holding back what may be the beginning
    of one.

    One Knuth-Morris-Pratt matcher per stop string: a step per character and string, however long
    they are. `include`: the stop string that ends the text is part of it."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self.matched = False
        self._include = include
        self._stops = tuple(stop)
        self._fallbacks = [_fallbacks(text) for text in self._stops]
        self._lengths = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be delivered; once `matched`, nothing more."""
        if self.matched or not self._stops:
            return "" if self.matched else text
        for index, character in enumerate(text):
            longest = max(
                (
                    len(stop)
                    for which, stop in enumerate(self._stops)
                    if self._step(which, stop, character)
                ),
                default=0,
            )
            if longest:
                self.matched = True
                known, self._held = self._held + text[: index + 1], ""
                return known if self._include else known[: len(known) - longest]
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
    """For each prefix of the text, the length of the longest proper prefix of it that it also ends
    with."""
    lengths = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[length] != text[end]:
            length = lengths[length - 1]
        length += text[length] == text[end]
        lengths[end] = length
    return lengths


def _context(decode: Decode, prompt_token_ids: Sequence[int]) -> list[int]:
    """The last tokens of the prompt, enough to have text and to begin between characters, where
    that can be had."""
    end = len(prompt_token_ids)
    few = range(MAX_HELD_CHARACTERS + 1)
    for count in (CONTEXT_TOKENS, 4 * CONTEXT_TOKENS, 12 * CONTEXT_TOKENS):
        for skipped, unfinished in itertools.product(few, few):
            start = max(0, end - count) + skipped
            text = decode(prompt_token_ids[start : max(start, end - unfinished)])
            if text and not text.startswith(UNFINISHED):
                return list(prompt_token_ids[start:])
    return list(prompt_token_ids[-CONTEXT_TOKENS:])
