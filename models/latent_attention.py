"""Multi-head latent attention of DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash and Mistral 4, with
the indexer of DeepSeek-V3.2 and GLM-5, without rotary positions in Kimi Linear, and with a gate for
each head in Ling 3.0.
`jdisagg/ops/latent_attention.py` describes the cache and the computation.

The projection to the cached vector is replicated, and heads are sharded over tp."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.model_api import Attend, Latent, Shards
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from jdisagg.ops.rope import query_growth, rope_angles, rotate
from jdisagg.ops.scaled_kv import scaled_attend
from models.decoder_config import DecoderConfig, LayerConfig
from models.indexer import Indexer
from models.kv_scales import scale_parameters
from models.linear import Linear, Norm, rows_of

# Epsilon of two norms for which transformers uses a fixed value.
_EPSILON = 1e-6


class MultiHeadLatentAttention(nnx.Module):
    """Latent attention. For each head, `keys` maps the latent to the part of the key without rotary
    positions, and `values` maps the latent to the value."""

    def __init__(
        self, make: Make, config: DecoderConfig, layer: LayerConfig, form: KernelForm
    ) -> None:
        attention, latent = config.attention, config.attention.latent
        assert latent is not None
        width, heads, bias = config.width, attention.query_heads, attention.qkv_bias
        q_size = heads * attention.head_dim
        if latent.query_rank:
            rank = latent.query_rank
            self.q_a = Linear(make, (width, rank), ("embed", "latent"), bias=bias, form=form)
            self.q_norm = Norm(make, rank, ("latent",), _EPSILON)
            self.q_b = Linear(make, (rank, q_size), ("latent", "q_heads"), form=form)
        else:
            self.q = Linear(make, (width, q_size), ("embed", "q_heads"), form=form)
        self.kv_a = Linear(
            make, (width, latent.rank + latent.rope_dim), ("embed", "latent"), bias=bias, form=form
        )
        self.kv_norm = Norm(make, latent.rank, ("latent",), _EPSILON)
        axes = ("q_heads", "latent", "head")
        self.keys = parameter(
            make((heads, latent.rank, latent.nope_dim), "matrix", latent.rank), axes
        )
        self.values = parameter(
            make((heads, latent.rank, latent.value_dim), "matrix", latent.rank), axes
        )
        self.o = Linear(
            make,
            (heads * latent.value_dim, width),
            ("q_heads", "embed"),
            bias=attention.output_bias,
            form=form,
        )
        self.gate = (
            Linear(make, (width, heads), ("embed", "q_heads"), form=form.plain())
            if attention.head_gates
            else None
        )
        self.index = (
            Indexer(make, latent.index, width, latent.query_rank, attention.rope, form)
            if latent.index and layer.selects == "own"
            else None
        )
        self.follows = latent.index is not None and self.index is None
        self.config, self.rope = latent, attention.rope if layer.rotated else None
        self.scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
        self.window = layer.window
        self.kv_scales = scale_parameters(make, config, latent=0)

    def __call__(
        self,
        x_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        rows_R: jax.Array | None = None,
    ) -> jax.Array:
        x_RD, positions_R = rows_of(x_TD, rows_R), rows_of(positions_T, rows_R)
        of_R = shards.of_rows(rows_R)
        latent_RC = self.q_norm(self.q_a(x_RD, of_R)) if self.config.query_rank else x_RD
        q_RNH = self._queries(latent_RC, positions_R, of_R)
        if self.kv_scales is not None:
            scale_1 = self.kv_scales["latent"][...]
            attend = scaled_attend(attend, scale_1, scale_1)
        index = self.index and self.index(x_TD, latent_RC, positions_T, rows_R, shards)
        o_RNV = attend(
            q_RNH,
            self._cached(x_TD, positions_T, shards),
            None,
            scale=self.scale,
            window=self.window,
            latent=Latent(self.keys[...], self.values[...]),
            index=index,
            follows=self.follows,
        )
        if not o_RNV.shape[0]:
            return x_RD  # nothing to project, and no collective over nothing
        if self.gate is not None:
            gate_RN = jax.nn.sigmoid(self.gate(x_RD, of_R).astype(jnp.float32))
            o_RNV = o_RNV * gate_RN[..., None].astype(o_RNV.dtype)
        return self.o.summed(o_RNV.reshape(o_RNV.shape[0], -1), of_R)

    def _queries(self, latent_RC: jax.Array, positions_R: jax.Array, shards: Shards) -> jax.Array:
        q = (self.q_b if self.config.query_rank else self.q)(latent_RC, shards)
        nope, head = self.config.nope_dim, self.config.nope_dim + self.config.rope_dim
        q_RNH = q.reshape(q.shape[0], q.shape[1] // head, head)
        turned_RNR = self._turned(q_RNH[..., nope:], positions_R)
        q_RNH = jnp.concatenate((q_RNH[..., :nope], turned_RNR), axis=-1)
        if self.rope is None or not self.rope.query_beta:
            return q_RNH
        how = self.rope.query_beta, self.rope.original_tokens
        return q_RNH * query_growth(positions_R, *how).astype(q_RNH.dtype)

    def _cached(self, x_TD: jax.Array, positions_T: jax.Array, shards: Shards) -> jax.Array:
        rank = self.config.rank
        both = self.kv_a(x_TD, shards)
        turned_T1R = self._turned(both[:, None, rank:], positions_T)
        return jnp.concatenate((self.kv_norm(both[:, :rank])[:, None], turned_T1R), axis=-1)

    def _turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        if self.rope is None:
            return x
        angles = rope_angles(positions, self.rope)
        return rotate(x, angles, interleaved=self.rope.interleaved)
