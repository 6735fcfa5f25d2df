"""Sizes of layers with Gated DeltaNet in place of attention (arXiv 2412.06464), and what they cost:
weights, the state that a sequence keeps, arithmetic of a step and of a chunk.

What is kept does not grow with the sequence: of each value head a float32 matrix, and the last
inputs of a short convolution. Knows no hardware and no layout."""

from jdisagg.plain import Message

# A chunk goes through the recurrence by so many tokens at once (`ops/gated_delta.py`).
RUN_TOKENS = 64
STATE_VALUE_BYTES = 4


class LinearAttention(Message, frozen=True):
    """`layers` have it. Each of `key_heads` serves value_heads / key_heads value heads; the
    convolution sees the last `taps` tokens."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def parameters(self, width: int) -> int:
        """Of one layer: what goes in, two scalars a value head, gate, the way out, convolution."""
        into = self.channels + 2 * self.value_heads + self.values
        return width * (into + self.values) + self.channels * self.taps

    def state_bytes(self, value_bytes: int) -> int:
        """What one layer keeps of a sequence."""
        matrices = self.value_heads * self.key_dim * self.value_dim * STATE_VALUE_BYTES
        return matrices + (self.taps - 1) * self.channels * value_bytes

    def step_flops(self) -> int:
        """Of one layer and token: the state meets a key, is written to, and meets a query."""
        return 6 * self.value_heads * self.key_dim * self.value_dim

    def chunk_flops(self) -> int:
        """The same where tokens go by in runs: beside it, products of the run's tokens with each
        other and the triangular system's."""
        within = 2 * RUN_TOKENS * (3 * self.key_dim + 2 * self.value_dim)
        return self.step_flops() + self.value_heads * within
