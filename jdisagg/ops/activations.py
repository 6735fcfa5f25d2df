"""What gates a feed-forward block (`ops/mlp.py`). Plain: a model's configuration is read where
there is no JAX."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Of experts whose gate is at most `limit` and whose other half lies within it on both sides:
    (up + 1) * gate * sigmoid(alpha * gate), as gpt-oss has it."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class SquaredRelu:
    """Of experts that have no gate: relu(up)^2 (So et al., 2021, arXiv 2109.08668), as Nemotron has
    it. Written as a gate it is relu(up) * up."""


@dataclass(frozen=True, slots=True)
class GeluGate:
    """Of experts gated by gelu, in its tanh form (Gemma 4)."""


ExpertGate = ClampedGate | SquaredRelu | GeluGate
