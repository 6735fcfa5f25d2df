"""Sizes and costs of recurrent layers, Gated DeltaNet (arXiv 2412.06464) and Mamba-2 (arXiv
2405.21060): weights, state of a sequence, arithmetic of a step and of a chunk.

The state does not grow with the sequence. It is a float32 matrix for each value head, and the last
inputs of a short convolution. Knows no hardware and no layout."""

from jdisagg.plain import Message

# Tokens of a chunk that the recurrence processes together (`ops/gated_delta.py`,
# `ops/state_space.py`).
RUN_TOKENS = 64
STATE_VALUE_BYTES = 4


class LinearAttention(Message, frozen=True):
    """Sizes of the recurrent layers of a model.

    Attributes:
      layers: Number of recurrent layers.
      key_heads: Key heads; each serves value_heads / key_heads value heads. Mamba-2 calls them
        groups.
      taps: Tokens that the convolution covers.
      corrects: The state of a key is read before it is written (delta rule); Mamba-2 only adds.
      key_copies: 0 where key heads are sharded. Otherwise every kv shard has all of them, and the
        convolution's last inputs are held this many times.
    """

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
        """Channels of the convolution: queries, keys and values."""
        return self.key_channels + self.values

    @property
    def key_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim

    @property
    def sharded_key_heads(self) -> int:
        """Key heads that sharding divides; 0 where each shard has all of them."""
        return 0 if self.key_copies else self.key_heads

    @property
    def scalars(self) -> int:
        """Scalars computed for each token: strength and gate of each value head, or a step size."""
        return (1 + self.corrects) * self.value_heads

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def parameters(self, width: int) -> int:
        """Returns one layer's parameters: projections, scalars, gate and convolution."""
        into = self.channels + self.scalars + self.values
        return width * (into + self.values) + self.channels * self.taps

    def state_bytes(self, value_bytes: int) -> int:
        """Returns the bytes of one layer's state of a sequence."""
        matrices = self.value_heads * self.key_dim * self.value_dim * STATE_VALUE_BYTES
        channels = self.values + self.key_channels * (self.key_copies or 1)
        return matrices + (self.taps - 1) * channels * value_bytes

    def step_flops(self) -> int:
        """Returns FLOP of one layer and token: the state is multiplied by a key where it is
        corrected, is written, and is multiplied by a query."""
        return (4 + 2 * self.corrects) * self.value_heads * self.key_dim * self.value_dim

    def chunk_flops(self) -> int:
        """Returns FLOP a token where tokens run in blocks of RUN_TOKENS, which adds products of the
        block's tokens with each other and a triangular solve."""
        if not self.corrects:
            within = self.key_heads * self.key_dim + self.values
            return self.step_flops() + 2 * RUN_TOKENS * within
        within = 2 * RUN_TOKENS * (3 * self.key_dim + 2 * self.value_dim)
        return self.step_flops() + self.value_heads * within
