"""A layer that drafts tokens by predicting the token after the next one (multi-token prediction,
MTP), in the form of the DeepSeek-V3 technical report, section 2.2. It is a projection of
`[norm(embedding); norm(hidden)]`, one decoder layer, and a norm. Embedding and head are the
model's.

The KV of a position is computed from the token at this position and the hidden state of the
position before, so that cached KV depends on no later token."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.model_api import Attend, Shards
from jdisagg.ops.parameters import Make
from jdisagg.ops.quantized_weights import KernelForm
from models.blocks import DecoderLayer
from models.decoder_config import DecoderConfig, LayerConfig
from models.linear import Linear, Norm


class NextTokenLayer(nnx.Module):
    """The checkpoint's own multi-token prediction layer, which drafts tokens. Implements
    `model_api.DraftLayer`."""

    source, taps, reads = "mtp", (), ()

    def __init__(
        self, make: Make, config: DecoderConfig, layer: LayerConfig, form: KernelForm
    ) -> None:
        width, above_one = config.width, config.norms_above_one

        def norm() -> Norm:
            return Norm(make, width, ("embed",), config.norm_epsilon, above_one=above_one)

        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.join = Linear(make, (2 * width, width), ("embed", "embed"), form=form.plain())
        self.layer = DecoderLayer(make, config, layer, form)

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
        both_TD = (self.embedding_norm(embedded_TD), self.hidden_norm(y_TD))
        x_TD = self.join(jnp.concatenate(both_TD, axis=-1), shards)
        x_TD = self.layer(x_TD, positions_T, attend, shards, valid_T, rows_R)
        return self.norm(x_TD)

    def fused(self, y_TD: jax.Array, shards: Shards) -> jax.Array:
        """Returns the model's hidden states `y_TD` unchanged, because the layer has the model's
        width."""
        return y_TD

    def carried(self, y_RD: jax.Array, shards: Shards) -> jax.Array:
        return y_RD

    def logits(self, y_RD: jax.Array, shards: Shards) -> jax.Array | None:
        """Returns None, because the model's own output head computes the logits."""
        return None
