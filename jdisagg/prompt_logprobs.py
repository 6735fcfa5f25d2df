"""Log-probabilities of a prompt's own tokens, in packed arrays to save memory.

Each token but the first has a log-probability given the tokens before it, a rank in the vocabulary,
and the most likely tokens at its position. The values are the model's own, before bias, penalties,
grammar, temperature and filters, which apply to answers only."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jdisagg.plain import Message

# Cap on the entries of one prompt, each token's own included. At 8 bytes each they stay well below
# the message limit.
MAX_PROMPT_LOGPROBS = 1 << 20


class PromptToken(NamedTuple):
    """One prompt token. `rank` 1 is the most likely. `top` holds (token id, log-probability), most
    likely first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(Message, frozen=True):
    """Consecutive tokens of a prompt from its second one on, as packed float32 and int32 numbers.
    Each has `top` most likely tokens, in arrays [tokens, top]. Impossible tokens (-inf) are left
    out when read."""

    top: int
    logprobs: bytes = b""
    ranks: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @classmethod
    def of(cls, top: int, tokens: Iterable[PromptToken]) -> "PromptLogprobs":
        """Packs these tokens and pads each `top` that is too short."""
        logprobs, ranks = array("f"), array("i")
        top_ids, top_logprobs = array("i"), array("f")
        for token in tokens:
            padding = ((-1, -math.inf),) * (top - len(token.top))
            logprobs.append(token.logprob)
            ranks.append(token.rank)
            for token_id, logprob in (*token.top, *padding):
                top_ids.append(token_id)
                top_logprobs.append(logprob)
        packed = (part.tobytes() for part in (logprobs, ranks, top_ids, top_logprobs))
        return cls(top, *packed)

    @classmethod
    def joined(cls, parts: Sequence["PromptLogprobs"]) -> "PromptLogprobs":
        """Joins consecutive parts of one prompt, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            parts[0].top,
            b"".join([part.logprobs for part in parts]),
            b"".join([part.ranks for part in parts]),
            b"".join([part.top_ids for part in parts]),
            b"".join([part.top_logprobs for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def __bool__(self) -> bool:
        """Always true, also for a prompt of one token, which has no entries."""
        return True

    def __iter__(self) -> Iterator[PromptToken]:
        ids, values = memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f")
        own = zip(
            memoryview(self.logprobs).cast("f"), memoryview(self.ranks).cast("i"), strict=True
        )
        for index, (logprob, rank) in enumerate(own):
            span = slice(index * self.top, (index + 1) * self.top)
            pairs = zip(ids[span].tolist(), values[span].tolist(), strict=True)
            yield PromptToken(logprob, rank, tuple([pair for pair in pairs if pair[1] > -math.inf]))
