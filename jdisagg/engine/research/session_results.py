"""Result classes of the methods of `Session`."""

from dataclasses import dataclass

from jdisagg.engine.research.kv_cache import NextToken
from jdisagg.layout.axes import Layout
from jdisagg.request import FinishReason


@dataclass(frozen=True, slots=True)
class Move:
    """Result of one push.

    Attributes:
        bytes_per_pair: Number of transferred bytes by (source device id, destination device id),
            after packing by the codec. Includes scales, checksums, and padding to blocks of 16
            tokens. Copies within a device are not counted.
        planned: The same table, computed from the transfer plans instead of the transferred arrays.
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
    """Result of one `append`. `seconds` is the time to compute the tokens' KV and to choose
    `next_token`."""

    token_ids: tuple[int, ...]
    next_token: NextToken
    seconds: float


@dataclass(frozen=True, slots=True)
class Generation:
    """Result of one call that generates tokens. `step_seconds[i]` is the time of the decode step
    that wrote the KV of token i and chose the next token. The first token was chosen by the
    prefill. So a request's time to first token is `kv.seconds` plus the time between the two
    calls."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    step_seconds: tuple[float, ...]
    next_token: NextToken

    @property
    def tpot_seconds(self) -> float:
        """Mean seconds per decode step. 0 without generated tokens."""
        return sum(self.step_seconds) / len(self.step_seconds) if self.step_seconds else 0.0
