"""What the calls of a session return."""

from dataclasses import dataclass

from jdisagg.engine.research.kv_cache import NextToken
from jdisagg.layout.axes import Layout
from jdisagg.request import FinishReason


@dataclass(frozen=True, slots=True)
class Move:
    """One push. `bytes_per_pair`: (source device id, destination device id) -> bytes, counted where
    they were moved: as the codec packs them, its scales and sums and the padding to blocks of 16
    tokens included; `planned` is what the reshard plans say. Bytes that a device held already are
    in neither. `seconds` includes the writing into pages, and on the first push of a kind the
    compilation of its programs."""

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
    """Tokens that were added behind what a session held. `seconds`: what computing their KV took,
    the choice of `next_token` included."""

    token_ids: tuple[int, ...]
    next_token: NextToken
    seconds: float


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call generated. `step_seconds[i]` is the decode step that wrote token i's KV and
    chose the token after it.

    The first token was chosen with the prefill, so that a request's TTFT is `kv.seconds`, plus
    whatever lay between."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    step_seconds: tuple[float, ...]
    next_token: NextToken

    @property
    def tpot_seconds(self) -> float:
        """Mean time of a step; 0 where no token was generated."""
        return sum(self.step_seconds) / len(self.step_seconds) if self.step_seconds else 0.0
