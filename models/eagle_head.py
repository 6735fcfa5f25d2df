"""An EAGLE-3 head (Li et al., 2025, arXiv:2503.01840): a decoder layer with its own weights that
drafts tokens. Its hidden state is computed from the model's activations before three of its layers.
The attention's input is the concatenation of the normed embedding of a token and the normed hidden
state of the position before. The head's output is the hidden state for the next draft. Its output
vocabulary, the draft tokens, is a part of the model's vocabulary. Embeddings are the model's.

As in `next_token.py`, the KV of a position is computed from the token at this position and the
hidden state of the position before."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.model_api import Attend, Shards
from jdisagg.ops.embedding import gather_logits
from jdisagg.ops.linear import project
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from models.blocks import Attention
from models.decoder_config import DecoderConfig
from models.feed_forward import ParallelMLP, feed_forward
from models.linear import Linear, Norm, rows_of


class EagleHead(nnx.Module):
    """The layer and output head of an EAGLE-3 head, which drafts tokens. Implements
    `model_api.DraftLayer`."""

    source, reads = "eagle", ()

    def __init__(self, make: Make, config: DecoderConfig, form: KernelForm, padded: int) -> None:
        eagle, width = config.eagle, config.width
        assert eagle is not None
        own, form = eagle.config, form.plain()
        layer = own.layers[0]

        def norm() -> Norm:
            return Norm(make, width, ("embed",), own.norm_epsilon)

        def linear(into: int) -> Linear:
            return Linear(make, (into, width), ("embed", "embed"), form=form)

        self.fuse = linear(len(eagle.taps) * width)
        self.embedding_norm, self.hidden_norm, self.mlp_norm = norm(), norm(), norm()
        self.attention = Attention(make, replace(own, width=2 * width), layer, form)
        heads = own.attention.query_heads * own.attention.head_dim
        self.attention.o = Linear(make, (heads, width), ("q_heads", "embed"), form=form)
        self.mlp = feed_forward(make, own, layer, form)
        self.norm = norm()
        self.head = Linear(make, (width, padded), ("embed", "vocab"), form=form)
        # The model's token id of each draft token. float32 represents these ids exactly.
        self.targets = (
            parameter(make((eagle.vocabulary,), "float32", 1), ("head",)) if eagle.mapped else None
        )
        self.taps, self.drafts = eagle.taps, eagle.vocabulary
        self.vocabulary, self.residual_after_norm = config.vocabulary, eagle.residual_after_norm

    def fused(self, y_TD: jax.Array, shards: Shards) -> jax.Array:
        return self.fuse(y_TD, shards)

    def __call__(
        self,
        embedded_TD: jax.Array,
        y_TD: jax.Array,
        positions_T: jax.Array,
        attend: Attend,
        shards: Shards,
        valid_T: jax.Array | None = None,
        rows_R: jax.Array | None = None,
    ) -> jax.Array:
        normed_TD = self.hidden_norm(y_TD)
        into_TD = jnp.concatenate((self.embedding_norm(embedded_TD), normed_TD), axis=-1)
        mixed_RD = self.attention(into_TD, positions_T, attend, shards, rows_R)
        if not mixed_RD.shape[0]:
            return y_TD[:0]
        x_RD = mixed_RD + rows_of(normed_TD if self.residual_after_norm else y_TD, rows_R)
        valid_R = valid_T if rows_R is None else rows_R >= 0
        assert not isinstance(self.mlp, ParallelMLP)
        return x_RD + self.mlp(self.mlp_norm(x_RD), shards.of_rows(rows_R), valid_R)

    def carried(self, y_RD: jax.Array, shards: Shards) -> jax.Array:
        return y_RD

    def logits(self, y_RD: jax.Array, shards: Shards) -> jax.Array:
        """Ids that are not draft tokens have -inf."""
        out = project(
            self.norm(y_RD),
            self.head.kernel[...],
            transposed=self.head.transposed,
            platform=shards.platform,
            out_dtype=jnp.dtype("float32"),
        )
        logits_RV = gather_logits(out, self.drafts, shards.tp)[:, : self.drafts]
        if self.targets is None:
            return logits_RV
        every_RV = jnp.full((y_RD.shape[0], self.vocabulary), -jnp.inf, jnp.float32)
        return every_RV.at[:, self.targets[...].astype(jnp.int32)].set(logits_RV)
