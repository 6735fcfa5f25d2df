"""Activations of feed-forward blocks (`ops/mlp.py`) as plain data."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu2", "xielu"]
# Names of the activations of blocks without a gate.
UNGATED: tuple[Activation, ...] = ("relu2", "xielu")


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Expert gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit`
    and up within +-`limit`."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class SquaredRelu:
    """Marks experts without a gate, which compute relu(up)^2 (So et al., 2021, arXiv 2109.08668),
    as in Nemotron. Kernels that need a gate use up as the gate: relu(up) * up."""


@dataclass(frozen=True, slots=True)
class GeluGate:
    """Expert gate of Gemma 4: gelu(gate) * up, with the tanh form of gelu."""


@dataclass(frozen=True, slots=True)
class BoundedGate:
    """Gate of Step 3.5: silu(gate) * up, with silu(gate) at most `limit` and up within
    +-`limit`."""

    limit: float


ExpertGate = ClampedGate | SquaredRelu | GeluGate | BoundedGate
