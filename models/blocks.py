"""The blocks that every family is assembled from: linear, attention, dense and sparse feed-forward,
layer.

Flax NNX modules over `jdisagg/ops`. They see local shards inside `shard_map` (`Shards` names the
axes) or whole arrays; local head and expert counts are read off the weights. One psum after the
attention output, one after the feed-forward; biases of these two are added once, after it. No layer
knows its index: layers of equal configuration have equal structure."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jdisagg.model_api import Attend, Shards
from jdisagg.ops.linear import project
from jdisagg.ops.mlp import gated_silu
from jdisagg.ops.moe import ExpertWeights, route, routed_experts
from jdisagg.ops.norm import rms_norm
from jdisagg.ops.parameters import Axes, Make, parameter
from jdisagg.ops.rope import rope_angles, rotate
from models.decoder_config import AttentionConfig, DecoderConfig, ExpertConfig, LayerConfig


class Linear(nnx.Module):
    """A kernel [in, out], or [out, in] where `transposed`, and perhaps a bias [out]."""

    def __init__(
        self,
        make: Make,
        shape: tuple[int, int],
        axes: Axes,
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        order = slice(None, None, -1) if transposed else slice(None)
        self.kernel = parameter(make(shape[order], "matrix", shape[0]), axes[order])
        self.bias = parameter(make(shape[1:], "bias", shape[0]), axes[1:]) if bias else None
        self.transposed = transposed

    def __call__(self, x_TD: jax.Array, shards: Shards) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        return project(
            x_TD, self.kernel[...], bias, transposed=self.transposed, platform=shards.platform
        )

    def summed(self, x_TD: jax.Array, shards: Shards) -> jax.Array:
        """The product of a kernel whose input dimension is sharded over tp: summed over its shards,
        then the bias."""
        y_TD = project(x_TD, self.kernel[...], transposed=self.transposed, platform=shards.platform)
        if shards.tp:
            y_TD = lax.psum(y_TD, shards.tp)
        return y_TD if self.bias is None else y_TD + self.bias[...][None, :]


class Norm(nnx.Module):
    """Root mean square norm with a weight."""

    def __init__(self, make: Make, size: int, axes: Axes, epsilon: float) -> None:
        self.weight = parameter(make((size,), "norm", size), axes)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.epsilon)


class Attention(nnx.Module):
    """Grouped-query attention with rope; what is cached, and how, is `attend`'s affair."""

    def __init__(
        self, make: Make, config: DecoderConfig, window: int | None, transposed: bool
    ) -> None:
        attention: AttentionConfig = config.attention
        width, head = config.width, attention.head_dim
        q_size, kv_size = attention.query_heads * head, attention.kv_heads * head
        bias = attention.qkv_bias
        self.q = Linear(
            make, (width, q_size), ("embed", "q_heads"), bias=bias, transposed=transposed
        )
        self.k = Linear(
            make, (width, kv_size), ("embed", "kv_heads"), bias=bias, transposed=transposed
        )
        self.v = Linear(
            make, (width, kv_size), ("embed", "kv_heads"), bias=bias, transposed=transposed
        )
        self.o = Linear(
            make,
            (q_size, width),
            ("q_heads", "embed"),
            bias=attention.output_bias,
            transposed=transposed,
        )
        self.q_norm = (
            Norm(make, head, ("head",), config.norm_epsilon) if attention.qk_norm else None
        )
        self.k_norm = (
            Norm(make, head, ("head",), config.norm_epsilon) if attention.qk_norm else None
        )
        self.rope = attention.rope
        self.head_dim = head
        self.window = window

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
        x_RD, positions_R = _rows(x_TD, rows_R), _rows(positions_T, rows_R)
        q_RNH, k_TKH, v_TKH = (
            self._heads(self.q(x_RD, shards)),
            self._heads(self.k(x_TD, shards)),
            self._heads(self.v(x_TD, shards)),
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_RNH, k_TKH = self.q_norm(q_RNH), self.k_norm(k_TKH)
        q_RNH, k_TKH = (
            rotate(q_RNH, rope_angles(positions_R, self.rope)),
            rotate(k_TKH, rope_angles(positions_T, self.rope)),
        )
        o_RNH = attend(q_RNH, k_TKH, v_TKH, scale=self.head_dim**-0.5, window=self.window)
        if not o_RNH.shape[0]:
            return x_RD  # nothing to project, and no collective over nothing
        return self.o.summed(o_RNH.reshape(o_RNH.shape[0], -1), shards)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], x.shape[1] // self.head_dim, self.head_dim)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), its width sharded over tp."""

    def __init__(self, make: Make, config: DecoderConfig, transposed: bool) -> None:
        into, out = (config.width, config.ffn), (config.ffn, config.width)
        bias = config.mlp_bias
        self.gate = Linear(make, into, ("embed", "ffn"), bias=bias, transposed=transposed)
        self.up = Linear(make, into, ("embed", "ffn"), bias=bias, transposed=transposed)
        self.down = Linear(make, out, ("ffn", "embed"), bias=bias, transposed=transposed)

    def __call__(self, x_TD: jax.Array, shards: Shards, valid_T: jax.Array | None) -> jax.Array:
        return self.down.summed(gated_silu(self.gate(x_TD, shards), self.up(x_TD, shards)), shards)


class SparseMLP(nnx.Module):
    """A router and experts, each a gated MLP without biases; experts whole on a device (ep > 1) or
    split inside over tp."""

    def __init__(self, make: Make, width: int, config: ExpertConfig) -> None:
        experts, ffn = config.experts, config.ffn
        self.router = parameter(make((width, experts), "matrix", width), ("embed", "router"))
        self.gate = parameter(
            make((experts, width, ffn), "matrix", width), ("expert", "embed", "expert_ffn")
        )
        self.up = parameter(
            make((experts, width, ffn), "matrix", width), ("expert", "embed", "expert_ffn")
        )
        self.down = parameter(
            make((experts, ffn, width), "matrix", ffn), ("expert", "expert_ffn", "embed")
        )
        self.config = config

    def __call__(self, x_TD: jax.Array, shards: Shards, valid_T: jax.Array | None) -> jax.Array:
        logits_TE = project(x_TD, self.router[...], platform=shards.platform)
        routing = route(logits_TE, self.config.experts_per_token, normalised=self.config.normalised)
        weights = ExpertWeights(self.gate[...], self.up[...], self.down[...])
        return routed_experts(
            x_TD, routing, weights, shards, experts=self.config.experts, valid_T=valid_T
        )


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(
        self, make: Make, config: DecoderConfig, layer: LayerConfig, transposed: bool
    ) -> None:
        self.attention_norm = Norm(make, config.width, ("embed",), config.norm_epsilon)
        self.attention = Attention(make, config, layer.window, transposed)
        self.mlp_norm = Norm(make, config.width, ("embed",), config.norm_epsilon)
        self.mlp = (
            SparseMLP(make, config.width, layer.experts)
            if layer.experts
            else GatedMLP(make, config, transposed)
        )

    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        valid_T: jax.Array | None = None,
        rows_R: jax.Array | None = None,
    ) -> jax.Array:
        """See `model_api.Layer`."""
        y_RD = self.attention(self.attention_norm(x_TD), positions_T, attend, shards, rows_R)
        if not y_RD.shape[0]:
            return y_RD
        x_RD, valid_R = _rows(x_TD, rows_R) + y_RD, valid_T if rows_R is None else rows_R >= 0
        return x_RD + self.mlp(self.mlp_norm(x_RD), shards, valid_R)


def _rows(of_T: jax.Array, rows_R: jax.Array | None) -> jax.Array:
    """The rows asked for (token 0 stands in for padding), or all."""
    return of_T if rows_R is None else jnp.take(of_T, rows_R, axis=0, mode="clip")
