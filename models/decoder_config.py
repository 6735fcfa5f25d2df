"""What a decoder-only transformer of our families is made of: plain, frozen data that a family's
file reads from config.json.

Layers whose `LayerConfig` is equal have equal structure, so that one compiled program serves them
all. Knows no JAX arrays."""

import math
from dataclasses import dataclass
from typing import Literal

from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.costs.model_geometry import CostGeometry, Experts, GroupedAttention, LatentAttention
from jdisagg.layout.axes import ModelGeometry
from jdisagg.layout.kv_spec import KEPT_DTYPES, KVComponent, KVLayer, KVSpec
from jdisagg.ops.activations import Activation, ExpertGate
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
class MambaConfig:
    """Mamba-2: `heads` of `head_dim` values with a state of `state_dim` each, in `groups` that
    share what writes to it and reads from it; a convolution over the last `taps` tokens.
    `step_limits`: of the steps after the softplus. `bias`: of all that goes in and of the way out.
    `copies`: 0 where groups are sharded with the heads; else what groups share is computed by each
    kv shard, and its convolution's state kept so many times, once a kv head, so that it is at hand
    whatever heads are sharded over."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    copies: int = 0
    convolution_bias: bool = True
    bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def group_heads(self) -> int:
        return self.heads // self.groups

    @property
    def group_channels(self) -> int:
        """What a group shares: what writes and what reads."""
        return 2 * self.state_dim

    def own_units(self, heads: int) -> tuple[int, int]:
        """Of so many neighbouring heads, the first of which may be any multiple of it: (units,
        heads in each), the largest that lie within one group each."""
        size = math.gcd(heads, self.group_heads)
        return heads // size, size

    def state(self) -> tuple[KVComponent, ...]:
        """What is kept of a sequence."""
        kept, shared = self.taps - 1, self.groups * self.group_channels
        return (
            KVComponent("inputs", self.heads, kept * self.head_dim),
            KVComponent(
                "shared_inputs",
                self.copies or self.groups,
                kept * (shared if self.copies else self.group_channels),
            ),
            KVComponent("recurrent", self.heads, self.state_dim * self.head_dim, "float32"),
        )


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """`latent`: of attention whose heads share what is cached: one kv head, and `head_dim` values
    in a query. `qk_norm`: a norm over each head of q and k before rope (Qwen3), or over all heads
    together (OLMo 2). `value_norm`: one without a weight over each head of v. `keys_are_values`: v
    is made by the matrix of k, before norms and rope. `scale` of the scores: None is one over the
    root of the head size; `cap` bounds them through a tanh (0: not). `sinks`: each head has a score
    that takes its part of the softmax. `gated`: what heads give is multiplied with the sigmoid of a
    gate."""

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
    value_norm: bool = False
    keys_are_values: bool = False


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Routing: scores by softmax over all experts, or by sigmoid of each (`wide`: in float32 from
    the product on, as all by sigmoid are); with `correction`, a bias for the choice alone; of
    `groups` of experts only the best `groups_per_token` are looked at. `normalised`: the chosen
    experts' weights are scaled to sum to one; then `scaling` holds. `shared_ffn`: the width of an
    expert that every token takes (0: none), behind a gate of its own where `shared_gate`. `biased`:
    experts and router have biases; `clamp`: experts are gated by it, not by silu. `latent`: experts
    work on so many values, made of a token's, and back (0: on the token's own). `beside`: they
    stand beside a dense block of `shared_ffn`, which are normalised each for itself, and are chosen
    by what the residual stream holds (Gemma 4)."""

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
    clamp: ExpertGate | None = None
    latent: int = 0
    beside: bool = False


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """`experts` is None in a dense layer. `window`: positions seen, the token's own included; None
    is all of them. `rotated`: whether it has rotary positions; `rope`, `attention`: where they are
    not the model's. `delta`, `mamba`: of a layer that has it in place of attention. `parts`: what
    it is made of, a mixer (attention, or what it has in its place) and a feed-forward block, or one
    of them (Nemotron)."""

    window: int | None = None
    experts: ExpertConfig | None = None
    rotated: bool = True
    rope: Rope | None = None
    attention: AttentionConfig | None = None
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    parts: Literal["both", "mixer", "ffn"] = "both"

    @property
    def recurrent(self) -> DeltaConfig | MambaConfig | None:
        """What keeps state in place of attention."""
        return self.delta or self.mamba


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """`ffn` is the width of dense layers; `context_tokens` the longest sequence that the positions
    were built for. `norms`: before attention and feed-forward, after them (on what they add), or
    both; `norms_above_one`: their weights are what is added to one, those of q and k, too. Scales:
    of embeddings, of what a block adds to the residual stream, and what logits are divided by;
    `logits_cap`: logits are bounded by it through a tanh (0: not). `layer_scales`: what a layer
    gives is multiplied with a number of its own. `left_aside`: layers behind the last one, for
    predicting several tokens, that a checkpoint may hold and that are not read; `mtp_aside`: the
    same, under names of their own. `kv_dtype`: what KV is kept in (`KEPT_DTYPES`); "": in the type
    of the weights."""

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
    layer_scales: bool = False
    left_aside: int = 0
    mtp_aside: bool = False
    kv_dtype: str = ""

    def attention_of(self, layer: LayerConfig) -> AttentionConfig:
        return layer.attention or self.attention

    @property
    def kv_heads(self) -> int:
        """Over how many shards kv heads can lie at most: what those of all layers have in
        common."""
        return math.gcd(*(self.attention_of(layer).kv_heads for layer in self.layers))

    @property
    def delta(self) -> DeltaConfig | None:
        return next((layer.delta for layer in self.layers if layer.delta), None)

    @property
    def mamba(self) -> MambaConfig | None:
        return next((layer.mamba for layer in self.layers if layer.mamba), None)

    @property
    def experts(self) -> ExpertConfig | None:
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def geometry(self) -> ModelGeometry:
        """The sizes a layout must divide; `ffn` is 0 where no layer is dense."""
        dense = any(layer.experts is None and layer.parts != "mixer" for layer in self.layers)
        experts, linear = self.experts, self._linear
        return ModelGeometry(
            query_heads=self.attention.query_heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn if dense else 0,
            experts=experts.experts if experts else 0,
            expert_ffn=experts.ffn if experts else 0,
            shared_ffn=experts.shared_ffn if experts else 0,
            state_key_heads=linear.sharded_key_heads if linear else 0,
            state_value_heads=linear.value_heads if linear else 0,
        )

    def cost_geometry(self, name: str) -> CostGeometry:
        """The sizes that its cost depends on."""
        attention, experts = self.attention, self.experts
        windows = [layer.window for layer in self.layers if layer.window]
        full = next((layer.attention for layer in self.layers if layer.attention), None)
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
                    full.kv_heads if full else 0,
                    full.head_dim if full else 0,
                    full.keys_are_values if full else attention.keys_are_values,
                )
            ),
            ffn=self.ffn,
            gated=self.activation != "relu2",
            tied=self.tied,
            experts=(
                Experts(
                    experts.experts,
                    experts.experts_per_token,
                    experts.ffn,
                    experts.shared_ffn,
                    experts.shared_gate,
                    experts.latent,
                )
                if experts
                else None
            ),
            expert_layers=sum(layer.experts is not None for layer in self.layers),
            context_tokens=self.context_tokens,
            linear=self._linear,
            without_mixer=sum(layer.parts == "ffn" for layer in self.layers),
            without_ffn=sum(layer.parts == "mixer" for layer in self.layers),
            kv_dtype=KEPT_DTYPES.get(self.kv_dtype, ""),
        )

    @property
    def _linear(self) -> LinearAttention | None:
        layers = sum(layer.recurrent is not None for layer in self.layers)
        if delta := self.delta:
            keys, values = delta.key_heads, delta.value_heads
            return LinearAttention(layers, keys, values, delta.key_dim, delta.value_dim, delta.taps)
        if mamba := self.mamba:
            return LinearAttention(
                layers,
                mamba.groups,
                mamba.heads,
                mamba.state_dim,
                mamba.head_dim,
                mamba.taps,
                corrects=False,
                key_copies=mamba.copies,
            )
        return None

    def kv_spec(self, dtype: str) -> KVSpec:
        kept = KEPT_DTYPES.get(self.kv_dtype, "")
        if latent := self.attention.latent:
            return KVSpec.latent(len(self.layers), latent.rank + latent.rope_dim, dtype, kept)
        return KVSpec(tuple(self._kept_of(layer, kept) for layer in self.layers), dtype)

    def _kept_of(self, layer: LayerConfig, kept: str) -> KVLayer:
        """`kept`: the type of keys and values, where it is not the state's."""
        if layer.recurrent:
            return KVLayer((), state=layer.recurrent.state())
        if layer.parts == "ffn":
            return KVLayer(())
        attention = self.attention_of(layer)
        parts = (KVComponent(name, attention.kv_heads, attention.head_dim, kept) for name in "kv")
        return KVLayer(tuple(parts), layer.window)
