"""Results of the calls of a session."""

from dataclasses import dataclass

from jdisagg.engine.research.kv_cache import NextToken
from jdisagg.layout.axes import Layout
from jdisagg.request import FinishReason


@dataclass(frozen=True, slots=True)
class Move:
    """One push.

    Attributes:
        bytes_per_pair: Transferred bytes by (source device id, destination device id), as packed by
            the codec, including its scales and sums and the padding to blocks of 16 tokens. Bytes
            that a device held already are not counted.
        planned: The same by the reshard plans.
        seconds: Time including the writing into pages and, on the first push of a kind,
            compilation.
    """

    tokens: int
    source: Layout
    target: Layout
    codec: str
    bytes_per_pair: dict[tuple[int, int], int]
    planned: dict[tuple[int, int], int]
    seconds: float

    @property
    def bytes(self) -> int:
        return sum(self.bytes_per_pair.values())


@dataclass(frozen=True, slots=True)
class Append:
    """Tokens that were added behind those of a session. `seconds` covers their KV and the choice of
    `next_token`."""

    token_ids: tuple[int, ...]
    next_token: NextToken
    seconds: float


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call generated. `step_seconds[i]` is the decode step that wrote token i's KV and
    chose the token after it. The first token was chosen by the prefill, so that a request's TTFT is
    `kv.seconds` plus the time in between."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    step_seconds: tuple[float, ...]
    next_token: NextToken

    @property
    def tpot_seconds(self) -> float:
        """Mean time of a step; 0 without generated tokens."""
        return sum(self.step_seconds) / len(self.step_seconds) if self.step_seconds else 0.0
