"""Sizes of layers with Gated DeltaNet (arXiv 2412.06464) or Mamba-2 (arXiv 2405.21060) in place of
attention, and what they cost: weights, the state that a sequence keeps, arithmetic of a step and of
a chunk.

What is kept does not grow with the sequence: of each value head a float32 matrix, and the last
inputs of a short convolution. Knows no hardware and no layout."""

from jdisagg.plain import Message

# A chunk goes through the recurrence by so many tokens at once (`ops/gated_delta.py`,
# `ops/state_space.py`).
RUN_TOKENS = 64
STATE_VALUE_BYTES = 4


class LinearAttention(Message, frozen=True):
    """`layers` have it. Each of `key_heads` serves value_heads / key_heads value heads; the
    convolution sees the last `taps` tokens. `corrects`: what a state holds of a key is read before
    it is written to (the delta rule); else it is only added to (Mamba-2, whose groups are key
    heads). `key_copies`: 0 where key heads are sharded; else each kv shard has all of them, and the
    convolution's last inputs of all are kept so many times."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    corrects: bool = True
    key_copies: int = 0

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return self.key_channels + self.values

    @property
    def key_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim

    @property
    def sharded_key_heads(self) -> int:
        """0 where each shard has all of them."""
        return 0 if self.key_copies else self.key_heads

    @property
    def scalars(self) -> int:
        """Made of each token: strength and gate of each value head, or a step."""
        return (1 + self.corrects) * self.value_heads

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def parameters(self, width: int) -> int:
        """Of one layer: what goes in, scalars of value heads, gate, the way out, convolution."""
        into = self.channels + self.scalars + self.values
        return width * (into + self.values) + self.channels * self.taps

    def state_bytes(self, value_bytes: int) -> int:
        """What one layer keeps of a sequence."""
        matrices = self.value_heads * self.key_dim * self.value_dim * STATE_VALUE_BYTES
        channels = self.values + self.key_channels * (self.key_copies or 1)
        return matrices + (self.taps - 1) * channels * value_bytes

    def step_flops(self) -> int:
        """Of one layer and token: the state meets a key where it is corrected, is written to, and
        meets a query."""
        return (4 + 2 * self.corrects) * self.value_heads * self.key_dim * self.value_dim

    def chunk_flops(self) -> int:
        """The same where tokens go by in runs: beside it, products of the run's tokens with each
        other and the triangular system's."""
        if not self.corrects:
            within = self.key_heads * self.key_dim + self.values
            return self.step_flops() + 2 * RUN_TOKENS * within
        within = 2 * RUN_TOKENS * (3 * self.key_dim + 2 * self.value_dim)
        return self.step_flops() + self.value_heads * within
