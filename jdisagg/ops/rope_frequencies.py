"""Parameters of rotary positions and their frequencies. Uses NumPy only, because processes without
JAX read model configurations."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of rotary positions. The class is hashable, because layers with equal parameters
    share a compiled program. Fields after `theta` apply only to some types.

    Attributes:
        head_dim: Number of rotated dimensions of a head. They are the head's first dimensions.
        interleaved: Whether neighbouring dimensions form pairs, instead of dimensions i and i +
            head_dim / 2.
        sections: Numbers of pairs that rotate by time, row and column of an image token, or none if
            all tokens have one position. Pairs of the three alternate (interleaved mrope).
    """

    head_dim: int
    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_tokens: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    interleaved: bool = False
    query_beta: float = 0.0
    divisors: tuple[float, ...] = ()
    turned_pairs: int = 0
    sections: tuple[int, ...] = ()

    def dimensions(self) -> np.ndarray:
        """Returns, for each rotated pair of dimensions, the index of the position (0 time, 1 row, 2
        column) by which the pair rotates: int32 [R / 2]."""
        pair = np.arange(self.head_dim // 2, dtype=np.int32)
        _, rows, columns = self.sections
        by_row = (pair % 3 == 1) & (pair < 3 * rows)
        by_column = (pair % 3 == 2) & (pair < 3 * columns)
        return np.where(by_row, 1, np.where(by_column, 2, 0)).astype(np.int32)

    def frequencies(self) -> np.ndarray:
        """Returns the rotation frequency of each pair of dimensions, in radians per position:
        float32 [R / 2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        plain = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        match self.type:
            case "default":
                return plain
            case "linear":
                return plain / np.float32(self.factor)
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(plain)
            case "longrope":
                return (plain / np.asarray(self.divisors, np.float32)).astype(np.float32)
            case "proportional":
                turned = np.arange(plain.size) < self.turned_pairs
                return np.where(turned, plain / np.float32(self.factor), np.float32(0))

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        # Number of rotations of each pair within the original context.
        turns = self.original_tokens * plain.astype(np.float64) / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        # Llama 4 Scout has no transition: both factors are equal.
        smooth = turns >= low if high == low else np.clip((turns - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * plain / self.factor + smooth * plain).astype(np.float32)

    def _yarn(self, plain: np.ndarray) -> np.ndarray:
        low, high = (self._dimension_of_turns(turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        width = high - low if high != low else 0.001
        divided = np.clip((np.arange(self.head_dim // 2) - low) / width, 0.0, 1.0)
        return (plain * (1 - divided) + plain / self.factor * divided).astype(np.float32)

    def _dimension_of_turns(self, turns: float) -> float:
        return (
            self.head_dim
            * math.log(self.original_tokens / (turns * 2 * math.pi))
            / (2 * math.log(self.theta))
        )
