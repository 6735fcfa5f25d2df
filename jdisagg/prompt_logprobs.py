"""Log-probabilities of a prompt's own tokens, as they travel: packed numbers, for they are many.

Of each token but the first: how likely the model held it after those before it, its rank among the
vocabulary, and the most likely tokens there. They are the model's own: before bias, penalties,
grammar, temperature and filters, all of which are of answers."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jdisagg.plain import Message

# Of one prompt, each token's own among them: 8 bytes each, well below what a message may have.
MAX_PROMPT_LOGPROBS = 1 << 20


class PromptToken(NamedTuple):
    """`rank`: 1 is the most likely token; `top`: (token id, log-probability), the likeliest
    first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(Message, frozen=True):
    """Of consecutive tokens of a prompt, from its second one on: float32 and int32 numbers, packed.
    `top` of the most likely tokens each, whose arrays are [tokens, top]; of those that cannot come
    (-inf) there is none."""

    top: int
    logprobs: bytes = b""
    ranks: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @classmethod
    def of(cls, top: int, tokens: Iterable[PromptToken]) -> "PromptLogprobs":
        """Packs tokens one by one; of a short `top` the rest is padding."""
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
        """Those of one prompt's parts, in order."""
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
        """Also of a prompt of one token, of which there are none."""
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
