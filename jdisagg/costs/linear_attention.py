"""Sizes and costs of recurrent layers: Gated DeltaNet (arXiv 2412.06464), Kimi Delta Attention
(arXiv 2510.26692), Mamba-2 (arXiv 2405.21060), short convolutions (LFM2) and lightning attention
(arXiv 2501.08313).

This module must not depend on hardware or layout."""

from jdisagg.plain import Message

# Tokens of a chunk that the recurrence processes together (`ops/gated_delta.py`,
# `ops/state_space.py`).
RUN_TOKENS = 64
STATE_VALUE_BYTES = 4


class LinearAttention(Message, frozen=True):
    """Sizes of the recurrent layers of a model.

    Attributes:
      key_heads: Number of key heads, which Mamba-2 calls groups. Each serves value_heads /
        key_heads value heads.
      taps: Number of tokens that the convolution covers. 1 in lightning attention, which has
        neither a convolution nor scalars.
      corrects: Whether an update of the state first reads the value at the key and corrects it
        (delta rule). If not, an update only adds, as in Mamba-2.
      key_copies: Number of shards that each hold all key heads and their convolution inputs; 0 if
        key heads are sharded.
      gate_rank: Number of values between the two projections of the gates, and between those of the
        output gate (Kimi Linear); 0 for one projection each.
      channel_gates: Whether each channel of a key has a gate, instead of each value head (Kimi
        Delta Attention).
      short: Whether a layer is a gated short convolution, whose state has no matrix. It has no keys
        (`key_dim` 0), and one gate before and one after the convolution.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    corrects: bool = True
    key_copies: int = 0
    gate_rank: int = 0
    short: bool = False
    channel_gates: bool = False

    @property
    def channels(self) -> int:
        return self.key_channels + self.values

    @property
    def key_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim

    @property
    def sharded_key_heads(self) -> int:
        return 0 if self.key_copies else self.key_heads

    @property
    def scalars(self) -> int:
        """Number of scalars that a layer computes for each token. Each value head has an update
        strength and a gate (Gated DeltaNet), or a step size (Mamba-2)."""
        if self.short or self.taps == 1:
            return 0
        return (self.corrects + (self.key_dim if self.channel_gates else 1)) * self.value_heads

    @property
    def convolution(self) -> int:
        return self.channels * self.taps if self.taps > 1 else 0

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def parameters(self, width: int) -> int:
        into = (1 + self.short) * self.channels + self.scalars + self.values
        if rank := self.gate_rank:
            into = self.channels + self.value_heads + 2 * rank
            gates = rank * (self.value_heads * self.key_dim + self.values)
            return width * (into + self.values) + gates + self.convolution
        return width * (into + self.values) + self.convolution

    def state_bytes(self, value_bytes: int) -> int:
        matrices = self.value_heads * self.key_dim * self.value_dim * STATE_VALUE_BYTES
        channels = self.values + self.key_channels * (self.key_copies or 1)
        return matrices + (self.taps - 1) * channels * value_bytes

    def step_flops(self) -> int:
        """Returns the FLOP of one token in one layer when tokens run one by one: the update of the
        state, the product of the state with a query and, for the delta rule, with a key."""
        return (4 + 2 * self.corrects) * self.value_heads * self.key_dim * self.value_dim

    def chunk_flops(self) -> int:
        """Returns the FLOP of one token in one layer when tokens run in blocks of RUN_TOKENS
        tokens. A block adds products of its tokens with each other, and a triangular solve."""
        if self.short:
            return 2 * self.taps * self.channels
        if not self.corrects:
            within = self.key_heads * self.key_dim + self.values
            return self.step_flops() + 2 * RUN_TOKENS * within
        within = 2 * RUN_TOKENS * (3 * self.key_dim + 2 * self.value_dim)
        return self.step_flops() + self.value_heads * within
