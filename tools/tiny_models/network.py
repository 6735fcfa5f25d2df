"""The two tiny models, Llama and Qwen3-MoE, implemented for training.

It computes whole batches of packed rows, without cache or sharding. Every expert is computed for
every token, and unchosen experts have weight zero, so that gradients exist. The serving
implementation (`models/blocks.py`) routes tokens in loops that have no gradients. The two are
separate on purpose: a test that compares their logits checks both. Axis letters: R rows of T
tokens, and G query heads per kv head.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

Family = Literal["llama", "qwen3_moe"]
_QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a tiny model. They can be divided by tp in {1, 2, 4} and ep in {1, 2, 4, 8}.
    `experts` is 0 for the dense model."""

    family: Family
    layers: int
    width: int = 128
    ffn: int = 320
    query_heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    experts: int = 0
    experts_per_token: int = 2
    expert_ffn: int = 64
    vocabulary: int = 1280
    context_tokens: int = 1024
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5


SHAPES: dict[str, TinyShape] = {
    "llama": TinyShape("llama", layers=4, ffn=320),
    "qwen3_moe": TinyShape("qwen3_moe", layers=4, experts=8),
}


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of concatenated whole documents: int32 [R, T] each. A token attends only to its own
    document, from position 0. `documents` holds each token's document number, or 0 for padding.
    `targets` holds the next token, or -1 where none is to be predicted."""

    tokens: jax.Array
    targets: jax.Array
    documents: jax.Array
    positions: jax.Array


jax.tree_util.register_dataclass(PackedRows, ["tokens", "targets", "documents", "positions"], [])


class Block(nnx.Module):
    """One layer. Weight matrices are [in, out]. Matrices of all experts are concatenated, expert
    after expert: [D, E * F] and [E * F, D]."""

    def __init__(self, shape: TinyShape, rngs: nnx.Rngs) -> None:
        width, head = shape.width, shape.head_dim
        q_size, kv_size = shape.query_heads * head, shape.kv_heads * head
        ffn = shape.experts * shape.expert_ffn or shape.ffn
        # Projections into the residual stream start small, as in GPT-2.
        small = (2 * shape.layers) ** -0.5
        self.attention_norm = nnx.Param(jnp.ones((width,)))
        self.q, self.k, self.v = (_matrix(rngs, width, size) for size in (q_size, kv_size, kv_size))
        self.o = _matrix(rngs, q_size, width, small)
        self.q_norm = nnx.Param(jnp.ones((head,))) if shape.experts else None
        self.k_norm = nnx.Param(jnp.ones((head,))) if shape.experts else None
        self.mlp_norm = nnx.Param(jnp.ones((width,)))
        self.router = _matrix(rngs, width, shape.experts) if shape.experts else None
        self.gate, self.up = _matrix(rngs, width, ffn), _matrix(rngs, width, ffn)
        self.down = _matrix(
            rngs, shape.expert_ffn if shape.experts else ffn, width, small, rows=ffn
        )
        self.shape = shape

    def __call__(self, x_RTD: jax.Array, rows: PackedRows) -> tuple[jax.Array, jax.Array]:
        """Returns the layer's output, and the router's load imbalance: 1 if all experts are used
        equally, E / k at worst, and 0 in a dense layer."""
        epsilon = self.shape.norm_epsilon
        x_RTD = x_RTD + self._attention(_norm(x_RTD, self.attention_norm[...], epsilon), rows)
        y_RTD = _norm(x_RTD, self.mlp_norm[...], epsilon)
        hidden_RTF = jax.nn.silu(y_RTD @ self.gate[...]) * (y_RTD @ self.up[...])
        imbalance = jnp.zeros(())
        if self.router is not None:
            mix_RTE, imbalance = self._route(y_RTD, self.router[...], rows.documents > 0)
            hidden_RTF = hidden_RTF * jnp.repeat(mix_RTE, self.shape.expert_ffn, axis=-1)
        return x_RTD + hidden_RTF @ self.down[...], imbalance

    def _attention(self, y_RTD: jax.Array, rows: PackedRows) -> jax.Array:
        shape = self.shape
        R, T, _ = y_RTD.shape
        q_RTNH, k_RTKH, v_RTKH = (
            (y_RTD @ kernel[...]).reshape(R, T, -1, shape.head_dim)
            for kernel in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_RTNH = _norm(q_RTNH, self.q_norm[...], shape.norm_epsilon)
            k_RTKH = _norm(k_RTKH, self.k_norm[...], shape.norm_epsilon)
        q_RTNH, k_RTKH = (
            _rotate(q_RTNH, rows.positions, shape.rope_theta),
            _rotate(k_RTKH, rows.positions, shape.rope_theta),
        )
        # Row by row and recomputed in the backward pass, so that scores stay in the CPU's cache
        # (3.3 times as fast as all rows at once).
        o_RTNH = jax.lax.map(
            jax.checkpoint(_attend_row),
            (q_RTNH * shape.head_dim**-0.5, k_RTKH, v_RTKH, rows.documents),
        )
        return o_RTNH.reshape(R, T, -1) @ self.o[...]

    def _route(
        self, y_RTD: jax.Array, router_DE: jax.Array, valid_RT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns each token's expert weights, and the load imbalance of Fedus et al. (2021),
        equation 4. The weights of a token's chosen experts sum to one, and other weights are
        zero."""
        chosen, experts = self.shape.experts_per_token, self.shape.experts
        share_RTE = jax.nn.softmax(y_RTD @ router_DE, axis=-1)
        _, top_RTC = jax.lax.top_k(share_RTE, chosen)
        taken_RTE = jax.nn.one_hot(top_RTC, experts).sum(axis=-2)
        mix_RTE = share_RTE * taken_RTE
        mix_RTE = mix_RTE / mix_RTE.sum(axis=-1, keepdims=True)
        valid_RT1 = valid_RT[..., None].astype(jnp.float32)
        load_E, mean_E = (
            ((each * valid_RT1).sum((0, 1)) / valid_RT1.sum())
            for each in (taken_RTE / chosen, share_RTE)
        )
        return mix_RTE, experts * jnp.sum(load_E * mean_E)


class TinyNetwork(nnx.Module):
    """Embedding, blocks and final norm. The head is the embedding."""

    joins = False

    def __init__(self, shape: TinyShape, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (shape.vocabulary, shape.width)) * shape.width**-0.5
        )
        self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.layers)])
        self.norm = nnx.Param(jnp.ones((shape.width,)))
        self.shape = shape

    @property
    def context_tokens(self) -> int:
        return self.shape.context_tokens

    def __call__(self, rows: PackedRows) -> tuple[jax.Array, jax.Array]:
        """Returns logits, float32 [R, T, V], and the load imbalance of the router, averaged over
        layers."""
        x_RTD = self.embedding[...][rows.tokens]
        imbalance = jnp.zeros(())
        for block in self.blocks:
            x_RTD, uneven = block(x_RTD, rows)
            imbalance = imbalance + uneven / self.shape.layers
        y_RTD = _norm(x_RTD, self.norm[...], self.shape.norm_epsilon)
        return y_RTD @ self.embedding[...].T, imbalance


def _matrix(
    rngs: nnx.Rngs, fan_in: int, columns: int, scale: float = 1.0, rows: int | None = None
) -> nnx.Param[jax.Array]:
    return nnx.Param(
        jax.random.normal(rngs.params(), (rows or fan_in, columns)) * (scale * fan_in**-0.5)
    )


def _attend_row(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Computes attention of one row, causal and within documents: q [T, N, H] (scaled), k and v [T,
    K, H], documents [T] -> [T, N, H]. Queries are processed in blocks, so that little of the masked
    upper triangle is computed."""
    q_TNH, k_TKH, v_TKH, documents_T = row
    T, K, H = k_TKH.shape
    q_KGTH = q_TNH.reshape(T, K, -1, H).transpose(1, 2, 0, 3)
    k_KHS, v_KSH = k_TKH.transpose(1, 2, 0), v_TKH.transpose(1, 0, 2)
    order_T = jnp.arange(T)
    mixed = []
    for start in range(0, T, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, T)
        q_KQH = q_KGTH[:, :, start:stop].reshape(K, -1, H)
        own_TS = documents_T[start:stop, None] == documents_T[None, :stop]
        seen_TS = own_TS & (order_T[start:stop, None] >= order_T[None, :stop])
        scores_KGTS = (q_KQH @ k_KHS[:, :, :stop]).reshape(K, -1, stop - start, stop)
        scores_KGTS = scores_KGTS + jnp.where(seen_TS, 0.0, -1e9)[None, None]
        weights_KGTS = jnp.exp(
            scores_KGTS - jax.lax.stop_gradient(scores_KGTS.max(axis=-1, keepdims=True))
        )
        o_KGTH = (weights_KGTS.reshape(K, -1, stop) @ v_KSH[:, :stop]).reshape(
            K, -1, stop - start, H
        )
        mixed.append(o_KGTH / weights_KGTS.sum(axis=-1, keepdims=True))
    return jnp.concatenate(mixed, axis=2).transpose(2, 0, 1, 3).reshape(T, -1, H)


def _norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    return x * scale * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def _rotate(x_RTNH: jax.Array, positions_RT: jax.Array, theta: float) -> jax.Array:
    """Applies rotary embedding: dimension i of a head pairs with dimension i + H / 2."""
    half = x_RTNH.shape[-1] // 2
    speed = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_RT[:, :, None, None].astype(jnp.float32) * speed[None, None, None, :]
    first, second = x_RTNH[..., :half], x_RTNH[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
