"""What a decoder-only transformer of our families is made of: plain, frozen data that a family's
file reads from config.json.

Layers whose `LayerConfig` is equal have equal structure, so that one compiled program serves them
all. Knows no JAX arrays."""

from dataclasses import dataclass
from typing import Literal

from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.costs.model_geometry import CostGeometry, Experts, GroupedAttention, LatentAttention
from jdisagg.layout.axes import ModelGeometry
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec
from jdisagg.ops.activations import Activation, ClampedGate
from jdisagg.ops.rope_frequencies import Rope


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: what is cached of a token is `rank` values and `rope_dim` turned
    ones, which all heads share. A head's key has `nope_dim` + `rope_dim` values, its value
    `value_dim`. `query_rank`: queries are made of so many values, in two steps; 0: in one."""

    query_rank: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated DeltaNet: `key_heads`, each for a group of value heads, and a convolution over the last
    `taps` tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def values_per_key(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def group_channels(self) -> int:
        """Of one key head: its queries and keys, and the values of its group."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    def state(self) -> tuple[KVComponent, ...]:
        """What is kept of a sequence."""
        inputs = KVComponent("inputs", self.key_heads, (self.taps - 1) * self.group_channels)
        size = self.key_dim * self.value_dim
        return inputs, KVComponent("recurrent", self.value_heads, size, "float32")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """`latent`: of attention whose heads share what is cached: one kv head, and `head_dim` values
    in a query. `qk_norm`: a norm over each head of q and k before rope (Qwen3), or over all heads
    together (OLMo 2). `scale` of the scores: None is one over the root of the head size; `cap`
    bounds them through a tanh (0: not). `sinks`: each head has a score that takes its part of the
    softmax. `gated`: what heads give is multiplied with the sigmoid of a gate."""

    query_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    scale: float | None = None
    cap: float = 0.0
    sinks: bool = False
    latent: LatentConfig | None = None
    gated: bool = False


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Routing: scores by softmax over all experts, or by sigmoid of each (`wide`: in float32 from
    the product on, as all by sigmoid are); with `correction`, a bias
    for the choice alone; of `groups` of experts only the best `groups_per_token` are looked at.
    `normalised`: the chosen experts' weights are scaled to sum to one; then `scaling` holds.
    `shared_ffn`: the width of an expert that every token takes (0: none), behind a gate of its own
    where `shared_gate`. `biased`: experts and router have biases; `clamp`: experts are gated by
    it, not by silu."""

    experts: int
    experts_per_token: int
    ffn: int
    normalised: bool
    shared_ffn: int = 0
    shared_gate: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0
    wide: bool = False
    biased: bool = False
    clamp: ClampedGate | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """`experts` is None in a dense layer. `window`: positions seen, the token's own included; None
    is all of them. `rotated`: whether it has rotary positions; `rope` where they are not the
    model's. `delta`: of a layer that has it in place of attention."""

    window: int | None = None
    experts: ExpertConfig | None = None
    rotated: bool = True
    rope: Rope | None = None
    delta: DeltaConfig | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """`ffn` is the width of dense layers; `context_tokens` the longest sequence that the positions
    were built for. `norms`: before attention and feed-forward, after them (on what they add), or
    both; `norms_above_one`: their weights are what is added to one, those of q and k, too. Scales:
    of embeddings, of what a block adds to the residual stream, and what logits are divided by;
    `logits_cap`: logits are bounded by it through a tanh (0: not). `left_aside`: layers behind the
    last one, for predicting several tokens, that a checkpoint may hold and that are not read;
    `mtp_aside`: the same, under names of their own."""

    family: str
    vocabulary: int
    width: int
    ffn: int
    attention: AttentionConfig
    layers: tuple[LayerConfig, ...]
    norm_epsilon: float
    tied: bool
    context_tokens: int
    mlp_bias: bool = False
    norms: Literal["before", "after", "both"] = "before"
    norms_above_one: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float = 0.0
    left_aside: int = 0
    mtp_aside: bool = False

    @property
    def delta(self) -> DeltaConfig | None:
        return next((layer.delta for layer in self.layers if layer.delta), None)

    @property
    def experts(self) -> ExpertConfig | None:
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def geometry(self) -> ModelGeometry:
        """The sizes a layout must divide; `ffn` is 0 where no layer is dense."""
        dense = any(layer.experts is None for layer in self.layers)
        experts, delta = self.experts, self.delta
        return ModelGeometry(
            query_heads=self.attention.query_heads,
            kv_heads=self.attention.kv_heads,
            ffn=self.ffn if dense else 0,
            experts=experts.experts if experts else 0,
            expert_ffn=experts.ffn if experts else 0,
            shared_ffn=experts.shared_ffn if experts else 0,
            state_key_heads=delta.key_heads if delta else 0,
            state_value_heads=delta.value_heads if delta else 0,
        )

    def cost_geometry(self, name: str) -> CostGeometry:
        """The sizes that its cost depends on."""
        attention, experts, delta = self.attention, self.experts, self.delta
        windows = [layer.window for layer in self.layers if layer.window]
        latent = attention.latent
        return CostGeometry(
            name=name,
            width=self.width,
            layers=len(self.layers),
            vocabulary=self.vocabulary,
            attention=(
                LatentAttention(
                    attention.query_heads,
                    latent.query_rank,
                    latent.rank,
                    latent.rope_dim,
                    latent.nope_dim,
                    latent.value_dim,
                )
                if latent
                else GroupedAttention(
                    attention.query_heads,
                    attention.kv_heads,
                    attention.head_dim,
                    windows[0] if windows else None,
                    len(windows),
                    attention.gated,
                )
            ),
            ffn=self.ffn,
            tied=self.tied,
            experts=(
                Experts(
                    experts.experts,
                    experts.experts_per_token,
                    experts.ffn,
                    experts.shared_ffn,
                    experts.shared_gate,
                )
                if experts
                else None
            ),
            expert_layers=sum(layer.experts is not None for layer in self.layers),
            context_tokens=self.context_tokens,
            linear=(
                LinearAttention(
                    sum(layer.delta is not None for layer in self.layers),
                    delta.key_heads,
                    delta.value_heads,
                    delta.key_dim,
                    delta.value_dim,
                    delta.taps,
                )
                if delta
                else None
            ),
        )

    def kv_spec(self, dtype: str) -> KVSpec:
        attention = self.attention
        if latent := attention.latent:
            return KVSpec.latent(len(self.layers), latent.rank + latent.rope_dim, dtype)
        windows = tuple(layer.window for layer in self.layers)
        spec = KVSpec.attention(
            len(self.layers), attention.kv_heads, attention.head_dim, dtype, windows
        )
        kept = [
            KVLayer((), state=layer.delta.state()) if layer.delta else plain
            for layer, plain in zip(self.layers, spec.layers, strict=True)
        ]
        return KVSpec(tuple(kept), dtype)
