"""Defines the attention module and the decoder layer that all model families share.
`models/feed_forward.py` has the feed-forward blocks.

These Flax NNX modules run on local shards inside `shard_map` (`Shards` names the axes) or on whole
arrays. They derive local head and expert counts from the shapes of the weights. Each layer sums
over devices (psum) twice: after the attention output projection and after the feed-forward block.
Biases are added after the psum. Layers do not store their index, so layers of equal configuration
have equal structure and share one compiled program."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jdisagg.model_api import AdapterSize, Attend, GivenTokens, MakeStack, Recur, Shards
from jdisagg.ops.norm import rms_norm
from jdisagg.ops.parameters import LogicalAxis, Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.rope import query_growth, rope_angles, rotate
from jdisagg.ops.scaled_kv import scaled_attend
from models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig
from models.feed_forward import ParallelMLP, SparseMLP, feed_forward
from models.gated_delta import GatedDeltaNet
from models.indexer import BlockIndexer
from models.kv_scales import scale_parameters
from models.latent_attention import MultiHeadLatentAttention
from models.lightning import LightningAttention
from models.linear import AdapterStack, Linear, Norm, own_heads, rows_of
from models.mamba2 import Mamba2
from models.short_convolution import ShortConvolution
from models.token_inputs import TokenInputs

Recurrent = GatedDeltaNet | Mamba2 | ShortConvolution | LightningAttention


class Attention(nnx.Module):
    """Grouped-query attention with rope. The caller's `attend` function writes keys and values to
    the cache and computes the attention."""

    def __init__(
        self, make: Make, config: DecoderConfig, layer: LayerConfig, form: KernelForm
    ) -> None:
        attention: AttentionConfig = config.attention_of(layer)
        width, head = config.width, attention.head_dim
        q_size, kv_size = attention.query_heads * head, attention.kv_heads * head
        v_size = attention.kv_heads * attention.value_size
        bias = attention.qkv_bias
        # `config.kv_heads` is the largest number of kv shards that all layers support. In a layer
        # with more kv heads, queries are sharded like kv heads: a device computes the queries of
        # all its kv heads and keeps the outputs of its own query heads.
        queries: LogicalAxis = "q_heads" if attention.kv_heads == config.kv_heads else "kv_heads"
        self.q = Linear(make, (width, q_size), ("embed", queries), bias=bias, form=form)
        own = layer.source is None  # else the layer has neither keys nor values

        def made(size: int) -> Linear:
            return Linear(make, (width, size), ("embed", "kv_heads"), bias=bias, form=form)

        self.k = made(kv_size) if own else None
        self.v = made(v_size) if own and not attention.keys_are_values else None
        self.o = Linear(
            make,
            (attention.query_heads * attention.value_size, width),
            ("q_heads", "embed"),
            bias=attention.output_bias,
            form=form,
        )
        self.heads = heads = attention.query_heads
        self.gate = (
            Linear(make, (width, gates), ("embed", "q_heads"), form=form)
            if (gates := q_size if attention.gated else attention.head_gates * heads)
            else None
        )
        self.gated_by = _softplus if attention.softplus_gates else jax.nn.sigmoid
        self.norm_all = attention.qk_norm == "all"
        self.norm_late = attention.norm_after_rope
        unit = attention.qk_norm == "unit" and layer.rotated
        self.unit_epsilon = config.norm_epsilon if unit else None
        self.growth = None if layer.rotated else attention.growth

        def norm(count: int, axis: LogicalAxis) -> Norm | None:
            if attention.qk_norm in ("", "unit"):
                return None
            how = {"above_one": config.norms_above_one, "centred": config.norms_centred}
            if self.norm_all:
                return Norm(make, count * head, (axis,), config.norm_epsilon, **how)
            if attention.qk_norm == "own":
                return Norm(make, (count, head), (axis, "head"), config.norm_epsilon, **how)
            return Norm(make, head, ("head",), config.norm_epsilon, **how)

        self.q_norm = norm(heads, queries)
        self.k_norm = norm(attention.kv_heads, "kv_heads") if own else None
        self.rope = (layer.rope or attention.rope) if layer.rotated else None
        self.head_dim, self.value_dim = head, attention.value_size
        self.value_scale = attention.value_scale
        self.scale = head**-0.5 if attention.scale is None else attention.scale
        self.window = layer.window
        self.cap = attention.cap
        self.sinks = (
            parameter(make((heads,), "bias", heads), (queries,)) if attention.sinks else None
        )
        self.value_epsilon = config.norm_epsilon if attention.value_norm else None
        kv_heads = attention.kv_heads
        self.index = BlockIndexer(make, config, layer, form) if layer.index else None
        self.kv_scales = scale_parameters(make, config, k=kv_heads, v=kv_heads)

    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        rows_R: jax.Array | None = None,
    ) -> jax.Array:
        """With `rows_R`, computes the output [R, D] of these tokens only, but caches keys and
        values of all tokens."""
        x_RD, positions_R = rows_of(x_TD, rows_R), rows_of(positions_T, rows_R)
        of_R = shards.of_rows(rows_R)
        q_RNH = self._prepared(self.q(x_RD, of_R), self.q_norm, positions_R, shards)
        k_TKH, v_TKH = self._keys_and_values(x_TD, positions_T, shards)
        if self.rope is not None and self.rope.query_beta:
            growth = query_growth(positions_R, self.rope.query_beta, self.rope.original_tokens)
            q_RNH = q_RNH * growth.astype(q_RNH.dtype)
        if self.growth is not None:  # counts from one, unlike the above
            q_RNH = q_RNH * query_growth(positions_R + 1, *self.growth).astype(q_RNH.dtype)
        if self.kv_scales is not None:
            attend = scaled_attend(attend, self.kv_scales["k"][...], self.kv_scales["v"][...])
        o_RNH = attend(
            q_RNH,
            k_TKH,
            v_TKH,
            scale=self.scale,
            window=self.window,
            cap=self.cap,
            sinks_N=None if self.sinks is None else self.sinks[...],
            index=self.index and self.index(x_TD, positions_T, rows_R, shards),
        )
        if not o_RNH.shape[0]:
            return x_RD  # nothing to project, and no collective over nothing
        own = self.heads // math.prod(lax.axis_size(axis) for axis in shards.tp)
        o_RNH = own_heads(o_RNH, own, shards)
        if self.gate is not None:
            gate_RC = self.gated_by(self.gate(x_RD, of_R))
            o_RNH = o_RNH * gate_RC.reshape(*o_RNH.shape[:2], -1)
        return self.o.summed(o_RNH.reshape(o_RNH.shape[0], -1), of_R)

    def _keys_and_values(
        self, x_TD: jax.Array, positions_T: jax.Array, shards: Shards
    ) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
        if self.k is None:
            return None, None
        k_TC = self.k(x_TD, shards)
        v_TC = k_TC if self.v is None else self.v(x_TD, shards)
        v_TKH = v_TC.reshape(v_TC.shape[0], v_TC.shape[1] // self.value_dim, self.value_dim)
        if self.value_scale != 1:
            v_TKH = v_TKH * jnp.asarray(self.value_scale, v_TKH.dtype)
        if self.value_epsilon is not None:
            v_TKH = rms_norm(v_TKH, None, self.value_epsilon)
        return self._prepared(k_TC, self.k_norm, positions_T, shards), v_TKH

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], x.shape[1] // self.head_dim, self.head_dim)

    def _prepared(
        self, x: jax.Array, norm: Norm | None, positions: jax.Array, shards: Shards
    ) -> jax.Array:
        if self.unit_epsilon is not None:
            return rms_norm(self._turned(self._heads(x), positions), None, self.unit_epsilon)
        if self.norm_late:
            turned = self._turned(self._heads(x), positions)
            return turned if norm is None else norm(turned)
        return self._turned(self._normal(x, norm, shards), positions)

    def _normal(self, x: jax.Array, norm: Norm | None, shards: Shards) -> jax.Array:
        if norm is None:
            return self._heads(x)
        return self._heads(norm(x, shards.tp)) if self.norm_all else norm(self._heads(x))

    def _turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        if self.rope is None:
            return x
        angles = rope_angles(positions, self.rope)
        return rotate(x, angles, interleaved=self.rope.interleaved)


def _mixer(
    make: Make, config: DecoderConfig, layer: LayerConfig, form: KernelForm
) -> Attention | MultiHeadLatentAttention | Recurrent:
    if layer.delta:
        return GatedDeltaNet(make, config, layer.delta, form)
    if layer.mamba:
        return Mamba2(make, config, layer.mamba, form)
    if layer.convolution:
        return ShortConvolution(make, config, layer.convolution, form)
    if layer.lightning:
        return LightningAttention(make, config, layer.lightning, form)
    kind = MultiHeadLatentAttention if config.attention.latent else Attention
    return kind(make, config, layer, form)


class DecoderLayer(nnx.Module):
    """Decoder layer: a mixer (attention or a recurrent module) and a feed-forward block, or only
    one of the two. Each has a residual connection. Norms come before it, after it, or both."""

    def __init__(
        self,
        make: Make,
        config: DecoderConfig,
        layer: LayerConfig,
        form: KernelForm,
        padded: int = 0,
    ) -> None:
        """`padded`: padded size of the vocabulary, if the layer reads tokens."""
        mixes, feeds = layer.parts != "ffn", layer.parts != "mixer"

        def norm(where: str, wanted: bool) -> Norm | None:
            if not wanted or config.norms not in (where, "both"):
                return None
            how = {"above_one": config.norms_above_one, "centred": config.norms_centred}
            return Norm(make, config.width, ("embed",), config.norm_epsilon, **how)

        self.attention_norm = norm("before", mixes)
        self.attention = _mixer(make, config, layer, form) if mixes else None
        self.attention_post_norm = norm("after", mixes)
        self.side_by_side = config.side_by_side
        self.mlp_norm = norm("before", feeds and not self.side_by_side)
        self.mlp = feed_forward(make, config, layer, form) if feeds else None
        self.mlp_post_norm = norm("after", feeds)
        self.inputs = TokenInputs(make, config, padded, form) if config.token_inputs else None
        self.scale, self.factors = config.residual_scale, layer.factors
        self.layer_scale = (
            parameter(make((1,), "norm", 1), ("head",)) if config.layer_scales else None
        )

    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        valid_T: jax.Array | None = None,
        rows_R: jax.Array | None = None,
        recur: Recur | None = None,
        given: GivenTokens | None = None,
    ) -> jax.Array:
        x_RD = rows_of(x_TD, rows_R)
        normed_RD = None
        if self.attention is not None:
            into_TD = _normed(x_TD, self.attention_norm)
            y_RD = self._mixed(into_TD, positions_T, attend, shards, rows_R, recur)
            if not y_RD.shape[0]:
                return y_RD
            normed_RD = rows_of(into_TD, rows_R) if self.side_by_side else None
            y_RD = self._added(y_RD, self.attention_post_norm)
            if self.factors is None:
                x_RD = x_RD + y_RD
            else:
                x_RD = _combined(rows_of(into_TD, rows_R), y_RD, self.factors[0])
        if self.mlp is None or not x_RD.shape[0]:
            return self._scaled(x_RD)
        valid_R = valid_T if rows_R is None else rows_R >= 0
        into_RD = _normed(x_RD, self.mlp_norm) if normed_RD is None else normed_RD
        of_R = shards.of_rows(rows_R)
        if isinstance(self.mlp, ParallelMLP):
            y_RD = self.mlp(into_RD, x_RD, of_R, valid_R)
        else:
            y_RD = self.mlp(into_RD, of_R, valid_R)
        if self.factors is not None:
            return _combined(into_RD, y_RD, self.factors[1])
        x_RD = x_RD + self._added(y_RD, self.mlp_post_norm)
        if self.inputs is not None:
            assert given is not None, "layers that read tokens need `given`"
            x_RD = x_RD + self.inputs(x_RD, given.of_rows(rows_R), of_R)
        return self._scaled(x_RD)

    def adapted(self, adapters: AdapterSize, make: MakeStack) -> "DecoderLayer":
        slots, rank = adapters.slots, adapters.rank
        layer = nnx.merge(*nnx.split(self))
        for part in (layer.attention, layer.mlp):
            if part is None or isinstance(part, Recurrent):
                continue
            for _, module in nnx.iter_modules(part):
                if isinstance(module, Linear):
                    module.adapter = AdapterStack(make, slots, rank, *module.ends)
                elif isinstance(module, SparseMLP) and adapters.experts:
                    module.adapt(slots, rank, make)
        return layer

    def _mixed(
        self,
        into_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        rows_R: jax.Array | None,
        recur: Recur | None,
    ) -> jax.Array:
        assert self.attention is not None, "this layer has a mixer"
        if isinstance(self.attention, Recurrent):
            assert recur is not None, "layers with recurrent state need `recur`"
            return self.attention(into_TD, recur, shards, rows_R)
        return self.attention(into_TD, positions_T, attend, shards, rows_R)

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.layer_scale is None else x * self.layer_scale[...][None, :]

    def _added(self, y: jax.Array, norm: Norm | None) -> jax.Array:
        y = _normed(y, norm)
        return y if self.scale == 1 else (y.astype(jnp.float32) * self.scale).astype(y.dtype)


def _softplus(x: jax.Array) -> jax.Array:
    return jax.nn.softplus(x.astype(jnp.float32)).astype(x.dtype)


def _combined(x: jax.Array, y: jax.Array, factors: tuple[float, float]) -> jax.Array:
    first, second = (jnp.asarray(factor, jnp.float32) for factor in factors)
    return (x.astype(jnp.float32) * first + y.astype(jnp.float32) * second).astype(x.dtype)


def _normed(x: jax.Array, norm: Norm | None) -> jax.Array:
    return x if norm is None else norm(x)
