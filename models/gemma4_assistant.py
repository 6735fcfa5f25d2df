"""A Gemma 4 assistant: a small Gemma 4 that drafts tokens. Its layers have queries only. They
attend to the keys and values of the model's last layer of the same kind (with or without a window),
so that the assistant has no KV: a prefill computes nothing for it, and a hand-off sends nothing.

A draft is computed from the embedding of the newest token, by the model, and the model's hidden
state at the position before. Every draft of a chain attends to the positions that the model has
computed, and has the rotary position of the newest token. The next draft is computed from the
embedding of the draft and the assistant's own output.

E2B and E4B divide the vocabulary into clusters. Only tokens of the clusters whose centroids have
the largest products with the output are drafted."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jdisagg.model_api import Attend, Shards
from jdisagg.ops.embedding import gather_logits
from jdisagg.ops.linear import project
from jdisagg.ops.parameters import Make, parameter
from jdisagg.ops.quantized_weights import KernelForm
from models.blocks import DecoderLayer
from models.decoder_config import DecoderConfig
from models.linear import Linear, Norm


class Gemma4Assistant(nnx.Module):
    """Implements `model_api.DraftLayer`."""

    source, taps = "assistant", ()

    def __init__(self, make: Make, config: DecoderConfig, form: KernelForm, padded: int) -> None:
        assistant = config.assistant
        assert assistant is not None
        own, form = replace(assistant.config, kv_dtype=config.kv_dtype), form.plain()

        def linear(into: int, out: int) -> Linear:
            return Linear(make, (into, out), ("embed", "embed"), form=form)

        self.into = linear(2 * config.width, own.width)
        self.layers = nnx.List([DecoderLayer(make, own, layer, form) for layer in own.layers])
        self.norm = Norm(make, own.width, ("embed",), own.norm_epsilon)
        self.out = linear(own.width, config.width)
        self.head = parameter(make((padded, own.width), "embedding", own.width), ("vocab", "embed"))
        total, vocabulary = assistant.centroids, own.vocabulary
        self.centroids = linear(own.width, total) if total else None
        # The cluster of each token. float32 represents these numbers exactly.
        self.clusters = parameter(make((vocabulary,), "float32", 1), ("head",)) if total else None
        self.reads, self.chosen = assistant.reads, assistant.chosen
        self.vocabulary = vocabulary

    def fused(self, y_TD: jax.Array, shards: Shards) -> jax.Array:
        return y_TD

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
        assert rows_R is None, "there are no keys and values to compute for other tokens"
        x_TD = self.into(jnp.concatenate((embedded_TD, y_TD), axis=-1), shards)
        for layer, source in zip(self.layers, self.reads, strict=True):
            of_source = partial(attend, source=source)
            x_TD = layer(x_TD, positions_T, of_source, shards, valid_T)  # type: ignore[arg-type]
        return self.norm(x_TD)

    def carried(self, y_RD: jax.Array, shards: Shards) -> jax.Array:
        return self.out(y_RD, shards)

    def logits(self, y_RD: jax.Array, shards: Shards) -> jax.Array:
        """Ids outside the chosen clusters have -inf."""
        out = project(
            y_RD,
            self.head[...],
            transposed=True,
            platform=shards.platform,
            out_dtype=jnp.dtype("float32"),
        )
        logits_RV = gather_logits(out, self.vocabulary, shards.tp)[:, : self.vocabulary]
        if self.centroids is None or self.clusters is None:
            return logits_RV
        scores_RC = self.centroids(y_RD, shards)
        _, chosen_RJ = lax.top_k(scores_RC, self.chosen)
        rows_R1 = jnp.arange(y_RD.shape[0], dtype=jnp.int32)[:, None]
        seen_RC = jnp.zeros(scores_RC.shape, bool).at[rows_R1, chosen_RJ].set(True)
        cluster_V = self.clusters[...].astype(jnp.int32)
        return jnp.where(jnp.take(seen_RC, cluster_V, axis=1), logits_RV, -jnp.inf)
