"""Configuration of a decoder-only transformer as frozen plain data. Each family's file builds it
from config.json.

Layers with equal `LayerConfig` have equal structure and share one compiled program. Holds no JAX
arrays."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.costs.model_geometry import CostGeometry, Experts, GroupedAttention, LatentAttention
from jdisagg.errors import LayoutError
from jdisagg.layout.axes import Layout, ModelGeometry
from jdisagg.layout.kv_spec import KEPT_DTYPES, KVComponent, KVLayer, KVSpec, latent_layer
from jdisagg.ops.activations import UNGATED, Activation, ExpertGate
from jdisagg.ops.rope_frequencies import Rope
from models.vision_config import VisionConfig

if TYPE_CHECKING:
    from models.drafter_config import AssistantConfig, EagleConfig


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Sizes of an indexer, which selects the `top` positions that a token attends to. For each
    token the indexer has `heads` queries and one key, of `dim` values each. The first values of
    queries and keys have rotary positions, in pairs of neighbours if `interleaved`, else in
    halves."""

    heads: int
    dim: int
    top: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class BlockIndexConfig:
    """Sizes of an indexer that selects, for each kv head, the `top` blocks of `block` positions
    that a token attends to. The last `local` blocks up to the token's own are always selected. For
    each token the indexer has one query for each kv head, and one key, of `dim` values each."""

    dim: int
    block: int
    top: int
    local: int


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention. The cache holds `rank` latent values and `rope_dim`
    values with rotary positions per token, shared by all heads. A head's key has `nope_dim` +
    `rope_dim` values, and its value has `value_dim`. Queries are computed by two projections with
    `query_rank` values between them, or by one projection if `query_rank` is 0. `index` is the
    indexer, or None if a token attends to all positions."""

    query_rank: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    index: IndexConfig | None = None


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of a Gated DeltaNet layer. Each of `key_heads` key heads is used by a group of value
    heads. A convolution covers the last `taps` tokens.

    Attributes:
        by_channel: Whether the layer is Kimi Delta Attention: each channel of a key has a gate, and
            outputs are gated by a sigmoid instead of a SiLU.
        rank: If not 0, gates are computed by two projections with `rank` values between them.
        bound: If not 0, a gate's logarithm is `bound` times a sigmoid instead of a softplus (Ling
            3.0).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_channel: bool = False
    rank: int = 0
    bound: float = 0.0

    @property
    def values_per_key(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def group_channels(self) -> int:
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    def state(self) -> tuple[KVComponent, ...]:
        inputs = KVComponent("inputs", self.key_heads, (self.taps - 1) * self.group_channels)
        size = self.key_dim * self.value_dim
        return inputs, KVComponent("recurrent", self.value_heads, size, "float32")


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes of a Mamba-2 layer. Each of `heads` heads has `head_dim` values and a state [state_dim,
    head_dim]. The heads of a group share write and read vectors (B and C in the paper). A
    convolution covers the last `taps` tokens.

    Attributes:
        copies: 0 if the groups are sharded like the heads. Otherwise each shard computes the write
            and read vectors of all groups, and the convolution state of these vectors is stored
            `copies` times, once per kv head of the cache, so that each shard holds one copy.
        step_limits: Smallest and largest step size; steps are clipped after the softplus.
    """

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
        return 2 * self.state_dim

    def own_units(self, heads: int) -> tuple[int, int]:
        """Splits a device's `heads` neighbouring heads into the largest equal units that each lie
        within one group. Returns the number of units and the number of heads per unit."""
        size = math.gcd(heads, self.group_heads)
        return heads // size, size

    def state(self) -> tuple[KVComponent, ...]:
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
class ConvolutionConfig:
    """Sizes of a gated short convolution over the last `taps` tokens. The number of `channels`
    equals the model's width. Channels are sharded in up to `heads` parts. `bias`: whether the
    projections and the convolution have biases."""

    heads: int
    channels: int
    taps: int
    bias: bool = False

    def state(self) -> tuple[KVComponent, ...]:
        size = (self.taps - 1) * self.channels // self.heads
        return (KVComponent("inputs", self.heads, size),)


@dataclass(frozen=True, slots=True)
class LightningConfig:
    """Sizes of lightning attention: linear attention whose state, a matrix [dim, dim] for each of
    `heads` heads, decays by a constant of the head and layer."""

    heads: int
    dim: int

    def state(self) -> tuple[KVComponent, ...]:
        return (KVComponent("recurrent", self.heads, self.dim**2, "float32"),)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Configuration of a layer's attention.

    Attributes:
        qk_norm: Norm of q and k before rope, over each head (Qwen3) or all heads together (OLMo 2).
            "own" means over each head, with weights for each head (Command R+). "unit" means over
            each head, without a weight, and only in layers with rotary positions.
        norm_after_rope: Whether the norms of q and k follow rope instead.
        value_dim, value_scale: Head size of v, if it differs from q and k, and factor of v
            (MiMo-V2).
        growth: Factor and number of positions by which queries grow with their position in layers
            without rotary positions (Llama 4), or None.
        scale: Factor of the attention scores. None means 1 / sqrt(head size).
        cap: Bound of the attention scores, as cap * tanh(score / cap). 0 means no bound.
        sinks: Whether each head has a sink: a learned score in the softmax without a value.
        latent: Sizes of latent attention, or None for ordinary attention. With latent attention
            there is one kv head, and queries have `head_dim` values.
        gated: Whether attention outputs are multiplied by the sigmoid of a learned gate.
        head_gates: Whether a head's output is multiplied by the sigmoid of one learned gate (Step
            3.5).
        softplus_gates: Whether the function of gates is softplus instead of the sigmoid (Laguna).
        keys_are_values: Whether v equals k before norms and rope, so that no separate matrix for v
            exists.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["", "head", "all", "own", "unit"] = ""
    scale: float | None = None
    cap: float = 0.0
    sinks: bool = False
    latent: LatentConfig | None = None
    gated: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    norm_after_rope: bool = False
    value_dim: int = 0
    value_scale: float = 1.0
    growth: tuple[float, int] | None = None
    head_gates: bool = False
    softplus_gates: bool = False

    @property
    def value_size(self) -> int:
        return self.value_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Experts of a layer and their routing.

    Attributes:
        normalised: Whether the weights of a token's chosen experts are divided by their sum (plus
            `not_zero`) before they are multiplied by `scaling`.
        shared_ffn: Width of the shared expert, which every token uses. 0 means that there is none.
        shared_gate: Whether the shared expert's output is multiplied by the sigmoid of a learned
            gate.
        correction: Whether a learned bias is added to the scores when experts are chosen. The
            experts' weights use scores without this bias.
        groups, groups_per_token: Number of expert groups, and number of best groups from which a
            token's experts are chosen.
        wide: Whether softmax routing computes router logits in float32. Sigmoid routing always
            does.
        wide_router: Whether the router's weights are stored in float32.
        clamp: Gate function of the experts. None means silu.
        latent: Width of the experts' inputs and outputs, to which activations are projected. 0
            means the model's width.
        scaled_inputs: Whether a token's weight multiplies its expert's input instead of the output
            (Llama 4). Only with one expert for each token.
        beside: Whether a dense block of width `shared_ffn` runs in parallel with the experts, each
            with its own norms, and the router reads the residual stream (Gemma 4).
        halved: Whether the sum of the chosen and the shared experts is halved (Command A+).
    """

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
    scaled_inputs: bool = False
    beside: bool = False
    halved: bool = False
    not_zero: float = 1e-20
    wide_router: bool = False


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Configuration of one layer.

    Attributes:
        window: Number of latest positions that a token attends to, its own position included. None
            means all.
        rope, attention: Configuration for this layer. None means the configuration of the whole
            model.
        parts: Whether the layer has a mixer (attention or a recurrent layer), a feed-forward block,
            or both. Nemotron's layers have only one of the two.
        selects: Whether a layer of a model with indexers of positions has its own ("own"), or
            attends to the positions that the last such layer before it selected ("shared").
        source: Index of the earlier layer whose keys and values this layer attends to. None if it
            has its own.
        ffn: Width of the dense block. 0 means the width of the whole model.
        factors: If not None, the residual stream continues from the normalised input of each block
            (MiniMax-Text-01). It is the sum of the input times the first factor and the output
            times the second. There is a pair of factors for the mixer, and one for the feed-forward
            block.
    """

    window: int | None = None
    experts: ExpertConfig | None = None
    rotated: bool = True
    rope: Rope | None = None
    attention: AttentionConfig | None = None
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    convolution: ConvolutionConfig | None = None
    lightning: LightningConfig | None = None
    index: BlockIndexConfig | None = None
    gate: ExpertGate | None = None
    parts: Literal["both", "mixer", "ffn"] = "both"
    selects: Literal["own", "shared"] = "own"
    source: int | None = None
    ffn: int = 0
    factors: tuple[tuple[float, float], tuple[float, float]] | None = None

    @property
    def recurrent(self) -> DeltaConfig | MambaConfig | ConvolutionConfig | LightningConfig | None:
        return self.delta or self.mamba or self.convolution or self.lightning


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Configuration of a decoder-only transformer.

    Attributes:
        norms: Place of the norms: before attention and feed-forward, after them, or both.
        norms_above_one: Whether norms multiply by 1 + weight instead of weight. Applies to the
            norms of q and k too.
        norms_centred: Whether norms subtract the mean (LayerNorm without a bias).
        side_by_side: Whether attention and feed-forward read the same normalised input, and both
            outputs are added to the residual stream. Layers then have one norm.
        embedding_scale, residual_scale: Factor by which token embeddings are multiplied, and factor
            of each block's contribution to the residual stream.
        logits_cap: Bound of the logits, as cap * tanh(logit / cap). 0 means no bound.
        token_inputs: Number of values of a token that each layer reads from a table by the token's
            id (Gemma 4 E2B). 0 means that layers read no tokens.
        left_aside, mtp_aside: Describe the multi-token prediction layers that the checkpoint has in
            addition to its layers. `left_aside` is their number if they are stored after the last
            layer. `mtp_aside` is whether a part of their tensor names starts with "mtp".
        next_token: Whether the first multi-token prediction layer is read, to draft tokens. Further
            ones are ignored.
    """

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
    norms_centred: bool = False
    side_by_side: bool = False
    activation: Activation = "silu"
    gate: ExpertGate | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float = 0.0
    layer_scales: bool = False
    token_inputs: int = 0
    left_aside: int = 0
    mtp_aside: bool = False
    next_token: bool = False
    eagle: "EagleConfig | None" = None
    assistant: "AssistantConfig | None" = None
    kv_dtype: str = ""
    vision: VisionConfig | None = None

    def with_sections(self, sections: tuple[int, int, int]) -> "DecoderConfig":
        attention = self.attention
        rope = replace(attention.rope, sections=sections)
        return replace(self, attention=replace(attention, rope=rope))

    def attention_of(self, layer: LayerConfig) -> AttentionConfig:
        return layer.attention or self.attention

    @property
    def kv_heads(self) -> int:
        """Largest number of shards that divides the number of kv heads of every layer. With latent
        attention, which has no kv heads, it is the largest number of shards of the recurrent
        state."""
        if self.attention.latent and self.delta:
            return self.kv_spec("float32").row_heads
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
        """Sizes that a parallel layout must divide. `ffn` is 0 if no layer is dense."""
        dense = any(layer.experts is None and layer.parts != "mixer" for layer in self.layers)
        experts, linear = self.experts, self._linear
        return ModelGeometry(
            query_heads=math.gcd(*(self.attention_of(each).query_heads for each in self.layers)),
            kv_heads=self.kv_heads,
            ffn=self.ffn if dense else 0,
            experts=experts.experts if experts else 0,
            expert_ffn=experts.ffn if experts else 0,
            shared_ffn=experts.shared_ffn if experts else 0,
            state_key_heads=linear.sharded_key_heads if linear else 0,
            state_value_heads=linear.value_heads if linear else 0,
        )

    def check(self, layout: Layout) -> None:
        """Raises LayoutError if a layout cannot shard the model, or its separate drafter."""
        layout.check(self.geometry)
        if (drafter := self.eagle or self.assistant) is None:
            return
        try:
            replace(layout, ep=1).check(drafter.config.geometry)  # it has no experts
        except LayoutError as error:
            raise LayoutError(f"the drafter of --draft: {error.message}") from None

    def cost_geometry(self, name: str) -> CostGeometry:
        experts = self.experts
        return CostGeometry(
            name=name,
            width=self.width,
            layers=len(self.layers),
            vocabulary=self.vocabulary,
            attention=self._attention_costs,
            ffn=self.ffn,
            gated=self.activation not in UNGATED,
            tied=self.tied,
            experts=(
                Experts(
                    experts.experts,
                    experts.experts_per_token,
                    experts.ffn,
                    experts.shared_ffn,
                    experts.shared_gate,
                    experts.latent,
                    experts.groups_per_token if experts.groups > 1 else 0,
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
            next_token_layers=int(self.can_draft),
            images=self.vision.costs if self.vision else None,
            token_inputs=self.token_inputs,
            doubled_ffn=sum(layer.ffn == 2 * self.ffn for layer in self.layers),
        )

    @property
    def _attention_costs(self) -> GroupedAttention | LatentAttention:
        attention = self.attention
        if latent := attention.latent:
            return LatentAttention(
                attention.query_heads,
                latent.query_rank,
                latent.rank,
                latent.rope_dim,
                latent.nope_dim,
                latent.value_dim,
                *((index.heads, index.dim, index.top) if (index := latent.index) else (0, 0, 0)),
                sum(layer.selects == "shared" for layer in self.layers),
                attention.head_gates,
            )
        windows = [layer.window for layer in self.layers if layer.window]
        full = next((layer.attention for layer in self.layers if layer.attention), None)
        indexed = [layer.index for layer in self.layers if layer.index]
        blocks = indexed[0] if indexed else None
        return GroupedAttention(
            attention.query_heads,
            attention.kv_heads,
            attention.head_dim,
            windows[0] if windows else None,
            len(windows),
            attention.gated,
            full.kv_heads if full else 0,
            full.head_dim if full else 0,
            full.keys_are_values if full else attention.keys_are_values,
            len(indexed),
            *((blocks.dim, blocks.top * blocks.block) if blocks else (0, 0)),
            attention.value_dim,
            full.query_heads if full else 0,
            attention.head_gates,
            sum(layer.source is not None for layer in self.layers),
            sum(layer.source is not None and layer.window is not None for layer in self.layers),
        )

    @property
    def _linear(self) -> LinearAttention | None:
        layers = sum(layer.recurrent is not None for layer in self.layers)
        if delta := self.delta:
            keys, values = delta.key_heads, delta.value_heads
            sizes = layers, keys, values, delta.key_dim, delta.value_dim, delta.taps
            gates = {"gate_rank": delta.rank, "channel_gates": delta.by_channel}
            return LinearAttention(*sizes, **gates)
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
        if short := next((one.convolution for one in self.layers if one.convolution), None):
            heads = self.attention.query_heads
            sizes = layers, short.heads, heads, 0, short.channels // heads, short.taps
            return LinearAttention(*sizes, corrects=False, short=True)
        if lightning := next((one.lightning for one in self.layers if one.lightning), None):
            heads, dim = lightning.heads, lightning.dim
            return LinearAttention(layers, heads, heads, dim, dim, taps=1, corrects=False)
        return None

    def kv_spec(self, dtype: str) -> KVSpec:
        kept, layers = KEPT_DTYPES.get(self.kv_dtype, ""), self.stored_layers
        stored = [self._kept_of(layer, kept) for layer in layers]
        for at, layer in enumerate(self.layers):
            if own := layer.experts:
                stored[at] = replace(stored[at], experts=(own.experts_per_token, own.experts))
        return KVSpec(tuple(stored), dtype)

    @property
    def stored_layers(self) -> tuple[LayerConfig, ...]:
        """The layers, followed by the layer that drafts tokens, if any: the next-token layer, which
        has the form of `draft_layer`, or the layer of an EAGLE-3 head."""
        if self.eagle is not None:
            own = self.eagle.config
            return (*self.layers, replace(own.layers[0], attention=own.attention))
        return (*self.layers, self.draft_layer) if self.next_token else self.layers

    @property
    def draft_layer(self) -> LayerConfig:
        """The configuration of a next-token layer: that of the last layer with attention, with an
        indexer of its own if the model has indexers."""
        attending = [one for one in self.layers if not one.recurrent and one.parts == "both"]
        return replace(attending[-1] if attending else self.layers[-1], selects="own")

    @property
    def can_draft(self) -> bool:
        """Whether the checkpoint has a next-token layer that jdisagg supports for drafting. Models
        with indexers of blocks are not supported."""
        return self.left_aside > 0 and not any(one.index for one in self.layers)

    def _kept_of(self, layer: LayerConfig, kept: str) -> KVLayer:
        if layer.recurrent:
            return KVLayer((), state=layer.recurrent.state())
        if layer.parts == "ffn":
            return KVLayer(())
        if layer.source is not None:
            return KVLayer((), source=layer.source)
        attention = self.attention_of(layer)
        if latent := attention.latent:
            index = latent.index.dim if latent.index and layer.selects == "own" else 0
            return latent_layer(latent.rank + latent.rope_dim, kept, index)
        sizes = (("k", attention.head_dim), ("v", attention.value_size))
        parts = [KVComponent(name, attention.kv_heads, size, kept) for name, size in sizes]
        if layer.index:  # in the model's type, so that `kept` does not change the selection
            parts.append(KVComponent("index", 0, layer.index.dim))
        return KVLayer(tuple(parts), layer.window)
