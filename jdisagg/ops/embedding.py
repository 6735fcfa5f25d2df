"""Token embedding and logits with the vocabulary sharded over tensor-parallel axes.

The table is padded to a multiple of tp. Padded rows are never looked up, and padded logits are
-inf, so that sampling never chooses a padded id. Works on local shards inside `shard_map`, or on a
whole table without axes."""

import jax
import jax.numpy as jnp
from jax import lax


def embed_tokens(table_VD: jax.Array, tokens_T: jax.Array, tp: tuple[str, ...]) -> jax.Array:
    """Returns the embeddings x [T, D], replicated over tp."""
    if not tp:
        return jnp.take(table_VD, tokens_T, axis=0, mode="clip")
    rows = table_VD.shape[0]
    local_T = tokens_T - lax.axis_index(tp) * rows
    here_T1 = ((local_T >= 0) & (local_T < rows))[:, None]
    x_TD = jnp.take(table_VD, local_T, axis=0, mode="clip")
    return lax.psum(jnp.where(here_T1, x_TD, jnp.zeros_like(x_TD)), tp)


def gather_logits(
    logits_RV: jax.Array, vocabulary: int, tp: tuple[str, ...], *, apart: bool = False
) -> jax.Array:
    """Gathers the local logits into float32 [R, V_padded] on every device of tp. Columns from
    `vocabulary` on are -inf.

    Args:
        apart: Whether each device gets an equal share of the rows instead of all: [R / tp,
            V_padded]. The devices exchange a tp-th of the bytes.
    """
    logits_RV = logits_RV.astype(jnp.float32)
    if tp and apart:
        logits_RV = lax.all_to_all(logits_RV, tp, 0, 1, tiled=True)
    elif tp:
        logits_RV = lax.all_gather(logits_RV, tp, axis=1, tiled=True)
    if logits_RV.shape[1] == vocabulary:
        return logits_RV
    real_1V = (jnp.arange(logits_RV.shape[1]) < vocabulary)[None, :]
    return jnp.where(real_1V, logits_RV, -jnp.inf)
