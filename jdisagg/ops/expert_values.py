"""Stores the numbers of chosen experts as values of the KV cache's type, which every type
represents exactly (`layout/kv_spec.py`)."""

import jax
import jax.numpy as jnp

from jdisagg.layout.kv_spec import EXACT


def experts_as_values(experts_TJ: jax.Array, width: int) -> jax.Array:
    """Returns the numbers as [T, 1, width]: the remainders by `EXACT`, then the quotients, as far
    as the width goes. A layer of at most `EXACT` experts has quotients of zero."""
    low_TJ, high_TJ = experts_TJ % EXACT, experts_TJ // EXACT
    values_TW = jnp.concatenate((low_TJ, high_TJ), axis=1)[:, :width]
    padding = ((0, 0), (0, width - values_TW.shape[1]))
    return jnp.pad(values_TW, padding)[:, None].astype(jnp.float32)


def values_as_experts(values: jax.Array, chosen: int) -> jax.Array:
    """Returns the numbers int32 [..., chosen] from their values [..., width]."""
    numbers = values.astype(jnp.int32)
    low, high = numbers[..., :chosen], numbers[..., chosen : 2 * chosen]
    missing = [(0, 0)] * (low.ndim - 1) + [(0, chosen - high.shape[-1])]
    return low + EXACT * jnp.pad(high, missing)
