"""Per-layer inputs of Gemma 4 E2B and E4B: a layer adds a small vector of each token, which is read
from a table of the layer by the token's id, and computed from the token's embedding.

The tables of all layers are one tensor in a checkpoint. They are sharded like the embedding; the
matrices are small, and each device computes them whole."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdisagg.model_api import GivenTokens, Shards
from jdisagg.ops.embedding import embed_tokens
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from models.decoder_config import DecoderConfig
from models.linear import Linear, Norm


class TokenInputs(nnx.Module):
    """The block after a layer's feed-forward block. `padded`: rows of the table."""

    def __init__(self, make: Make, config: DecoderConfig, padded: int, form: KernelForm) -> None:
        width, size, plain = config.width, config.token_inputs, form.plain()
        self.table = parameter(make((padded, size), "embedding", size), ("vocab", "embed"))
        self.context = Linear(make, (width, size), ("embed", "latent"), form=plain)
        self.context_norm = Norm(make, size, ("latent",), config.norm_epsilon)
        self.gate = Linear(make, (width, size), ("embed", "latent"), form=plain)
        self.out = Linear(make, (size, width), ("latent", "embed"), form=plain)
        self.norm = Norm(make, width, ("embed",), config.norm_epsilon)
        self.scale = width**-0.5

    def __call__(self, x_TD: jax.Array, given: GivenTokens, shards: Shards) -> jax.Array:
        """Returns what is added to the activations."""
        size = self.table.shape[1]
        own_TP = embed_tokens(self.table[...], given.tokens_T, shards.tp)
        made_TP = self.context(given.embedded_TD, shards)
        made_TP = self.context_norm(made_TP * jnp.asarray(self.scale, made_TP.dtype))
        both_TP = made_TP + own_TP * jnp.asarray(size**0.5, own_TP.dtype)
        gate_TP = jax.nn.gelu(self.gate(x_TD, shards), approximate=True)
        inner_TP = gate_TP * (both_TP * jnp.asarray(2**-0.5, both_TP.dtype))
        return self.norm(self.out(inner_TP, shards))
