"""What gates a feed-forward block (`ops/mlp.py`). Plain: a model's configuration is read where
there is no JAX."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Of experts whose gate is at most `limit` and whose other half lies within it on both sides:
    (up + 1) * gate * sigmoid(alpha * gate), as gpt-oss has it."""

    limit: float
    alpha: float
