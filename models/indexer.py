"""Indexers, which select the positions that each token attends to. In DeepSeek Sparse Attention
(DeepSeek-V3.2, GLM-5), `Indexer` selects single positions (`jdisagg/ops/sparse_attention.py`). In
MiniMax M3, `BlockIndexer` selects blocks of positions for each kv head
(`jdisagg/ops/block_attention.py`).

All parameters are replicated, except the queries of a kv head."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.model_api import Index, Shards
from jdisagg.ops.norm import layer_norm
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.rope import rope_angles, rotate
from jdisagg.ops.rope_frequencies import Rope
from models.decoder_config import DecoderConfig, IndexConfig, LayerConfig
from models.linear import Linear, Norm, rows_of

_EPSILON = 1e-6


class Indexer(nnx.Module):
    """Computes, for each token, queries from the query latent of the attention, and one key and the
    heads' weights from the layer's input. The first values of queries and keys have rotary
    positions."""

    def __init__(
        self, make: Make, config: IndexConfig, width: int, rank: int, rope: Rope, form: KernelForm
    ) -> None:
        size = config.dim
        self.q = Linear(make, (rank, config.heads * size), ("latent", "latent"), form=form)
        self.k = Linear(make, (width, size), ("embed", "latent"), form=form.plain())
        self.k_norm = LayerNorm(make, size)
        # In float32, as in training.
        self.weights = parameter(make((width, config.heads), "float32", width), ("embed", "latent"))
        self.config, self.rope = config, rope

    def __call__(
        self,
        x_TD: jax.Array,
        latent_RC: jax.Array,
        positions_T: jax.Array,
        rows_R: jax.Array | None,
        shards: Shards,
    ) -> Index:
        """Returns the inputs of the selection: keys of all tokens, and queries and weights of the
        tokens `rows_R`. `latent_RC` are the query latents of these tokens."""
        heads, size = self.config.heads, self.config.dim
        of_R = shards.of_rows(rows_R)
        q_RHD = self.q(latent_RC, of_R).reshape(latent_RC.shape[0], heads, size)
        k_T1D = self.k_norm(self.k(x_TD, shards))[:, None]
        x_RD = rows_of(x_TD, rows_R).astype(jnp.float32)
        weights_RH = jnp.matmul(x_RD, self.weights[...]) * (heads * size) ** -0.5
        return Index(
            self._turned(q_RHD, rows_of(positions_T, rows_R)),
            self._turned(k_T1D, positions_T),
            weights_RH,
            self.config.top,
        )

    def _turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        turned = self.rope.head_dim
        first = rotate(
            x[..., :turned], rope_angles(positions, self.rope), interleaved=self.config.interleaved
        )
        return jnp.concatenate((first, x[..., turned:]), axis=-1)


class BlockIndexer(nnx.Module):
    """Computes, for each token, one query per kv head and one key from the layer's input. Queries
    and keys each have a norm, and then rotary positions with the parameters of the layer's
    attention."""

    def __init__(
        self, make: Make, config: DecoderConfig, layer: LayerConfig, form: KernelForm
    ) -> None:
        assert layer.index is not None
        width, size, heads = config.width, layer.index.dim, config.attention.kv_heads
        self.q = Linear(make, (width, heads * size), ("embed", "kv_heads"), form=form.plain())
        self.k = Linear(make, (width, size), ("embed", "latent"), form=form.plain())
        above_one = config.norms_above_one
        self.q_norm, self.k_norm = (
            Norm(make, size, ("latent",), config.norm_epsilon, above_one=above_one)
            for _ in range(2)
        )
        self.config, self.rope = layer.index, layer.rope or config.attention.rope

    def __call__(
        self, x_TD: jax.Array, positions_T: jax.Array, rows_R: jax.Array | None, shards: Shards
    ) -> Index:
        """Returns the inputs of the selection: keys of all tokens, and queries of the tokens
        `rows_R` for the device's kv heads."""
        size = self.config.dim
        q_RC = self.q(rows_of(x_TD, rows_R), shards.of_rows(rows_R))
        q_RKD = self.q_norm(q_RC.reshape(q_RC.shape[0], q_RC.shape[1] // size, size))
        k_T1D = self.k_norm(self.k(x_TD, shards))[:, None]
        return Index(
            self._turned(q_RKD, rows_of(positions_T, rows_R)),
            self._turned(k_T1D, positions_T),
            None,
            self.config.top,
            self.config.block,
            self.config.local,
        )

    def _turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return rotate(x, rope_angles(positions, self.rope), interleaved=self.rope.interleaved)


class LayerNorm(nnx.Module):
    """Norm to zero mean and unit variance, with a weight and a bias."""

    def __init__(self, make: Make, size: int) -> None:
        self.weight = parameter(make((size,), "norm", size), ("latent",))
        self.bias = parameter(make((size,), "bias", size), ("latent",))

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, self.weight[...], self.bias[...], _EPSILON)
