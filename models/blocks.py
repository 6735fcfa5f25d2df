"""The blocks that every family is assembled from: attention, dense and sparse feed-forward, layer.

Flax NNX modules over `jdisagg/ops`. They see local shards inside `shard_map` (`Shards` names the
axes) or whole arrays; local head and expert counts are read off the weights. One psum after the
attention output, one after the feed-forward; biases of these two are added once, after it. No layer
knows its index: layers of equal configuration have equal structure."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.model_api import Attend, Recur, Shards
from jdisagg.ops.activations import Activation
from jdisagg.ops.linear import project
from jdisagg.ops.mlp import gated
from jdisagg.ops.moe import ExpertWeights, Routing, route, routed_experts
from jdisagg.ops.parameters import Axes, Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.rope import query_growth, rope_angles, rotate
from jdisagg.ops.routing import route_by_scores
from models.decoder_config import AttentionConfig, DecoderConfig, ExpertConfig, LayerConfig
from models.gated_delta import GatedDeltaNet
from models.latent_attention import MultiHeadLatentAttention
from models.linear import Linear, Norm, rows_of


class Attention(nnx.Module):
    """Grouped-query attention with rope; what is cached, and how, is `attend`'s affair."""

    def __init__(
        self, make: Make, config: DecoderConfig, layer: LayerConfig, form: KernelForm
    ) -> None:
        attention: AttentionConfig = config.attention
        width, head = config.width, attention.head_dim
        q_size, kv_size = attention.query_heads * head, attention.kv_heads * head
        bias = attention.qkv_bias
        self.q = Linear(make, (width, q_size), ("embed", "q_heads"), bias=bias, form=form)
        self.k = Linear(make, (width, kv_size), ("embed", "kv_heads"), bias=bias, form=form)
        self.v = Linear(make, (width, kv_size), ("embed", "kv_heads"), bias=bias, form=form)
        self.o = Linear(
            make, (q_size, width), ("q_heads", "embed"), bias=attention.output_bias, form=form
        )
        self.gate = (
            Linear(make, (width, q_size), ("embed", "q_heads"), form=form)
            if attention.gated
            else None
        )
        self.norm_all = attention.qk_norm == "all"

        def norm(size: int, axes: Axes) -> Norm | None:
            if not attention.qk_norm:
                return None
            size, axes = (size, axes) if self.norm_all else (head, ("head",))
            return Norm(make, size, axes, config.norm_epsilon, above_one=config.norms_above_one)

        self.q_norm = norm(q_size, ("q_heads",))
        self.k_norm = norm(kv_size, ("kv_heads",))
        self.rope = (layer.rope or attention.rope) if layer.rotated else None
        self.head_dim = head
        self.scale = head**-0.5 if attention.scale is None else attention.scale
        self.window = layer.window
        self.cap = attention.cap
        heads = attention.query_heads
        self.sinks = (
            parameter(make((heads,), "bias", heads), ("q_heads",)) if attention.sinks else None
        )

    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        rows_R: jax.Array | None = None,
    ) -> jax.Array:
        """[T, D], or [R, D] of these rows: the others' keys and values are cached, and that is
        all."""
        x_RD, positions_R = rows_of(x_TD, rows_R), rows_of(positions_T, rows_R)
        q_RNH = self._normal(self.q(x_RD, shards), self.q_norm, shards)
        k_TKH = self._normal(self.k(x_TD, shards), self.k_norm, shards)
        v_TKH = self._heads(self.v(x_TD, shards))
        q_RNH, k_TKH = self._turned(q_RNH, positions_R), self._turned(k_TKH, positions_T)
        if self.rope is not None and self.rope.query_beta:
            q_RNH = q_RNH * query_growth(positions_R, self.rope).astype(q_RNH.dtype)
        o_RNH = attend(
            q_RNH,
            k_TKH,
            v_TKH,
            scale=self.scale,
            window=self.window,
            cap=self.cap,
            sinks_N=None if self.sinks is None else self.sinks[...],
        )
        if not o_RNH.shape[0]:
            return x_RD  # nothing to project, and no collective over nothing
        o_RC = o_RNH.reshape(o_RNH.shape[0], -1)
        if self.gate is not None:
            o_RC = o_RC * jax.nn.sigmoid(self.gate(x_RD, shards))
        return self.o.summed(o_RC, shards)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], x.shape[1] // self.head_dim, self.head_dim)

    def _normal(self, x: jax.Array, norm: Norm | None, shards: Shards) -> jax.Array:
        """In heads, each normalised or all of them together."""
        if norm is None:
            return self._heads(x)
        return self._heads(norm(x, shards.tp)) if self.norm_all else norm(self._heads(x))

    def _turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        if self.rope is None:
            return x
        angles = rope_angles(positions, self.rope)
        return rotate(x, angles, interleaved=self.rope.interleaved)


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)), its width sharded over tp."""

    def __init__(
        self, make: Make, config: DecoderConfig, form: KernelForm, ffn: int | None = None
    ) -> None:
        """`ffn` is the model's where None."""
        ffn = config.ffn if ffn is None else ffn
        into, out = (config.width, ffn), (ffn, config.width)
        bias = config.mlp_bias
        self.gate = Linear(make, into, ("embed", "ffn"), bias=bias, form=form)
        self.up = Linear(make, into, ("embed", "ffn"), bias=bias, form=form)
        self.down = Linear(make, out, ("ffn", "embed"), bias=bias, form=form)
        self.activation: Activation = config.activation

    def __call__(self, x_TD: jax.Array, shards: Shards, valid_T: jax.Array | None) -> jax.Array:
        inner_TF = gated(self.gate(x_TD, shards), self.up(x_TD, shards), self.activation)
        return self.down.summed(inner_TF, shards)


_INTO_EXPERTS: Axes = ("expert", "embed", "expert_ffn")
_OUT_OF_EXPERTS: Axes = ("expert", "expert_ffn", "embed")


def _experts(
    make: Make, shape: tuple[int, int, int], axes: Axes, form: KernelForm
) -> tuple[nnx.Param[jax.Array], nnx.Param[jax.Array] | None]:
    """A stack [E, in, out], and the scales [E, out] of its quantized values."""
    experts, into, out = shape
    kept = (experts, into // 2, out) if form.packed(experts=True) else shape
    stack = parameter(make(kept, form.role(experts=True), into), axes)
    if not form.weights:
        return stack, None
    return stack, parameter(make((experts, out), "float32", into), (axes[0], axes[2]))


class SparseMLP(nnx.Module):
    """A router and experts, each a gated MLP, perhaps with biases; experts whole on a device (ep >
    1) or split inside over tp. Beside them perhaps an expert that every token takes."""

    def __init__(
        self, make: Make, config: DecoderConfig, routed: ExpertConfig, form: KernelForm
    ) -> None:
        width, experts, ffn = config.width, routed.experts, routed.ffn
        self.router = parameter(make((width, experts), "matrix", width), ("embed", "router"))
        self.correction = (
            parameter(make((experts,), "float32", width), ("router",))
            if routed.correction
            else None
        )
        self.gate, self.gate_scale = _experts(make, (experts, width, ffn), _INTO_EXPERTS, form)
        self.up, self.up_scale = _experts(make, (experts, width, ffn), _INTO_EXPERTS, form)
        self.down, self.down_scale = _experts(make, (experts, ffn, width), _OUT_OF_EXPERTS, form)

        def bias(shape: tuple[int, ...], axes: Axes) -> nnx.Param[jax.Array] | None:
            return parameter(make(shape, "bias", width), axes) if routed.biased else None

        self.router_bias = bias((experts,), ("router",))
        self.gate_bias = bias((experts, ffn), ("expert", "expert_ffn"))
        self.up_bias = bias((experts, ffn), ("expert", "expert_ffn"))
        self.down_bias = bias((experts, width), ("expert", "embed"))
        self.shared = GatedMLP(make, config, form, routed.shared_ffn) if routed.shared_ffn else None
        self.shared_gate = (
            parameter(make((width, 1), "matrix", width), ("embed", "router"))
            if routed.shared_gate
            else None
        )
        self.config = routed

    def __call__(self, x_TD: jax.Array, shards: Shards, valid_T: jax.Array | None) -> jax.Array:
        scales = self.gate_scale, self.up_scale, self.down_scale
        biases = self.gate_bias, self.up_bias, self.down_bias
        more = (None if part is None else part[...] for part in (*scales, *biases))
        weights = ExpertWeights(self.gate[...], self.up[...], self.down[...], *more)
        y_TD = routed_experts(
            x_TD,
            self._route(x_TD, shards),
            weights,
            shards,
            experts=self.config.experts,
            valid_T=valid_T,
            clamp=self.config.clamp,
        )
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD, shards, valid_T)
        if self.shared_gate is not None:
            gate_T1 = project(x_TD, self.shared_gate[...], platform=shards.platform)
            shared_TD = jax.nn.sigmoid(gate_T1) * shared_TD
        return y_TD + shared_TD

    def _route(self, x_TD: jax.Array, shards: Shards) -> Routing:
        config, router_DE = self.config, self.router[...]
        if config.scores == "softmax" and not config.wide:
            bias_E = None if self.router_bias is None else self.router_bias[...]
            logits_TE = project(x_TD, router_DE, bias_E, platform=shards.platform)
            return route(logits_TE, config.experts_per_token, normalised=config.normalised)
        # In float32, as those models were trained: a choice hangs on small differences of scores.
        wide_TD, wide_DE = x_TD.astype(jnp.float32), router_DE.astype(jnp.float32)
        return route_by_scores(
            project(wide_TD, wide_DE, platform=shards.platform),
            None if self.correction is None else self.correction[...],
            config.experts_per_token,
            scores=config.scores,
            groups=config.groups,
            groups_per_token=config.groups_per_token,
            normalised=config.normalised,
            scaling=config.scaling,
        )


class DecoderLayer(nnx.Module):
    """Attention (or what a layer has in its place) and feed-forward, each with its residual, and
    norms before them, after them, or both."""

    def __init__(
        self, make: Make, config: DecoderConfig, layer: LayerConfig, form: KernelForm
    ) -> None:
        def norm(where: str) -> Norm | None:
            if config.norms not in (where, "both"):
                return None
            above_one = config.norms_above_one
            return Norm(make, config.width, ("embed",), config.norm_epsilon, above_one=above_one)

        self.attention_norm = norm("before")
        kind = MultiHeadLatentAttention if config.attention.latent else Attention
        self.attention = (
            GatedDeltaNet(make, config, layer.delta, form)
            if layer.delta
            else kind(make, config, layer, form)
        )
        self.attention_post_norm = norm("after")
        self.mlp_norm = norm("before")
        self.mlp = (
            SparseMLP(make, config, layer.experts, form)
            if layer.experts
            else GatedMLP(make, config, form)
        )
        self.mlp_post_norm = norm("after")
        self.scale = config.residual_scale

    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        valid_T: jax.Array | None = None,
        rows_R: jax.Array | None = None,
        recur: Recur | None = None,
    ) -> jax.Array:
        """See `model_api.Layer`."""
        into_TD = _normed(x_TD, self.attention_norm)
        if isinstance(self.attention, GatedDeltaNet):
            assert recur is not None, "a layer with state is given one"
            y_RD = self.attention(into_TD, recur, shards, rows_R)
        else:
            y_RD = self.attention(into_TD, positions_T, attend, shards, rows_R)
        if not y_RD.shape[0]:
            return y_RD
        x_RD = rows_of(x_TD, rows_R) + self._added(y_RD, self.attention_post_norm)
        valid_R = valid_T if rows_R is None else rows_R >= 0
        y_RD = self.mlp(_normed(x_RD, self.mlp_norm), shards, valid_R)
        return x_RD + self._added(y_RD, self.mlp_post_norm)

    def _added(self, y: jax.Array, norm: Norm | None) -> jax.Array:
        """What a block's output adds to the residual stream."""
        y = _normed(y, norm)
        return y if self.scale == 1 else (y.astype(jnp.float32) * self.scale).astype(y.dtype)


def _normed(x: jax.Array, norm: Norm | None) -> jax.Array:
    return x if norm is None else norm(x)
