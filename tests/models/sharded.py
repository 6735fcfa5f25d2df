"""Runs a loaded model on its mesh with dense attention, one sequence per dp rank."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jdisagg.layout.axes import TP_AXES
from jdisagg.model_api import Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.parameters import param_specs
from models.checkpoint import LoadedModel


def sharded_logits(loaded: LoadedModel, tokens_BT: np.ndarray) -> np.ndarray:
    """Maps one sequence per dp rank to logits [dp, T, V] without padding."""
    layout, vocabulary = loaded.layout, loaded.model.vocabulary
    graphdef, state = nnx.split(loaded.model)
    leaves, treedef = jax.tree.flatten(state)
    shards = Shards(tp=TP_AXES, dp=("dp",), ep=layout.expert_axes(), platform="cpu")

    def forward(leaves: tuple[jax.Array, ...], tokens_T: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        return model(tokens_T, jnp.arange(tokens_T.shape[0]), dense_causal_attend, shards)

    specs = (param_specs(loaded.model, layout), PartitionSpec("dp"))
    run = jax.jit(
        jax.shard_map(
            forward,
            mesh=loaded.mesh,
            in_specs=specs,
            out_specs=PartitionSpec("dp"),
            check_vma=False,
        )
    )
    logits = np.asarray(run(tuple(leaves), jnp.asarray(tokens_BT.reshape(-1))))
    assert np.isneginf(logits[:, vocabulary:]).all()
    return logits.reshape(*tokens_BT.shape, -1)[:, :, :vocabulary]
