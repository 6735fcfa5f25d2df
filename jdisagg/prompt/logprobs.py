"""Log-probabilities of the tokens of a prompt, in packed arrays to save memory.

Each token but the first has a log-probability given the tokens before it, a rank in the vocabulary,
and the most likely tokens at its position. The values are those of the model itself. Bias,
penalties, grammar, temperature and filters apply to answers only."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jdisagg.plain import Message

# Cap on the log-probabilities of one prompt, including each token's own. With 8 bytes each, the
# message that contains them stays well below its size limit.
MAX_PROMPT_LOGPROBS = 1 << 20
# In place of the number of most likely tokens: the hidden state of the prompt's last token, or the
# sum of the hidden states of all tokens.
LAST, SUM = -1, -2
POOLINGS = {"last": LAST, "mean": SUM}


class PromptToken(NamedTuple):
    """Log-probability of one prompt token. `rank` is 1 if the token is the most likely one at its
    position. `top` has (token id, log-probability) of the most likely tokens, most likely first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(Message, frozen=True):
    """Log-probabilities of consecutive prompt tokens, without the prompt's first token.

    The fields are packed float32 and int32 numbers. `top_ids` and `top_logprobs` are arrays of
    shape [tokens, top]. Iteration yields one `PromptToken` for each token, and omits entries of
    `top` with the log-probability -inf.

    If `top` is LAST or SUM, there are no log-probabilities but a `hidden` state."""

    top: int
    logprobs: bytes = b""
    ranks: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    hidden: bytes = b""

    @classmethod
    def of(cls, top: int, tokens: Iterable[PromptToken]) -> "PromptLogprobs":
        """Packs `tokens`. The most likely tokens of each are padded to `top` entries with -inf."""
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
        if len(parts) == 1:
            return parts[0]
        if parts[0].top < 0:
            each = [memoryview(part.hidden).cast("f") for part in parts]
            return cls(parts[0].top, hidden=array("f", map(sum, zip(*each, strict=True))).tobytes())
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
        """Returns True, even without entries. A one-token prompt has an empty report, which must
        differ from None (no report)."""
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
