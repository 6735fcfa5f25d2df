"""Dense causal attention over whole sequences without a cache, for tests (as an oracle) and
training.

The tokens must be one sequence, in order. The softmax is in float32. Memory is T x T per head, so
this is not for serving."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.model_api import Attend, AttendOptions, Index, Latent
from jdisagg.ops.block_attention import block_maxima, select_blocks
from jdisagg.ops.latent_attention import expand
from jdisagg.ops.online_softmax import capped, grouped_sinks
from jdisagg.ops.sparse_attention import index_scores, select


def dense_causal_attend(
    q_TNH: jax.Array,
    k_TKH: jax.Array | None,
    v_TKH: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
    latent: Latent | None = None,
    index: Index | None = None,
    follows: bool = False,
    source: int | None = None,
) -> jax.Array:
    """Implements `model_api.Attend` for one sequence: token t attends to tokens max(0, t - window +
    1) ... t. A layer that `follows` an indexer, or reads the KV of an earlier layer, needs
    `Following`. The caller gives the keys and values of a `source`."""
    assert k_TKH is not None
    if latent is not None:
        k_TKH, v_TKH = expand(k_TKH, latent)
    assert v_TKH is not None
    tokens, heads, head_dim = q_TNH.shape
    kv_heads = k_TKH.shape[1]
    q_TKGH = q_TNH.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    scores_KGTS = (
        jnp.einsum("tkgh,skh->kgts", q_TKGH, k_TKH, preferred_element_type=jnp.float32) * scale
    )
    distance_TS = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    seen_TS = jnp.asarray((distance_TS >= 0) & (distance_TS < (window or tokens)))
    seen_KTS = seen_TS[None]
    if index is not None and index.positions < tokens:
        seen_KTS = seen_KTS & selected(index, seen_TS)
    scores_KGTS = jnp.where(seen_KTS[:, None], capped(scores_KGTS, cap), -jnp.inf)
    if (sinks_KG11 := grouped_sinks(sinks_N, kv_heads)) is not None:  # as if of one more token
        sinks_KGT1 = jnp.broadcast_to(sinks_KG11, (*scores_KGTS.shape[:3], 1))
        scores_KGTS = jnp.concatenate((scores_KGTS, sinks_KGT1), axis=-1)
    mix_KGTS = jax.nn.softmax(scores_KGTS, axis=-1)[..., :tokens].astype(v_TKH.dtype)
    return jnp.einsum("kgts,skh->tkgh", mix_KGTS, v_TKH).reshape(tokens, heads, v_TKH.shape[2])


class Following:
    """Wraps `dense_causal_attend` for a forward pass through all layers. A layer that follows an
    earlier layer's indexer attends by this indexer, and a layer without keys and values reads those
    of its source."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._index: Index | None = None
        self._made: dict[int, tuple[jax.Array | None, jax.Array | None]] = {}  # by layer

    def over(self, layer: int, source: int | None) -> Attend:
        def attend(
            q_TNH: jax.Array,
            k_TKH: jax.Array | None,
            v_TKH: jax.Array | None,
            **how: Unpack[AttendOptions],
        ) -> jax.Array:
            if (index := how.get("index")) is not None:
                self._index = index
            elif how.pop("follows", False):
                how["index"] = self._index
            if source is not None:
                k_TKH, v_TKH = self._made[source]
            self._made[layer] = (k_TKH, v_TKH)
            return self._attend(q_TNH, k_TKH, v_TKH, **how)

        return attend


def selected(index: Index, seen_TS: jax.Array) -> jax.Array:
    """Returns the positions that an indexer selects for each token from `seen_TS`: bool [K, T, T],
    where K is the number of kv heads, or 1 if all kv heads share the selection."""
    keys_SD = index.keys_T1D[:, 0]
    if not index.block:
        assert index.weights_TH is not None
        scores_TS = index_scores(index.queries_THD, index.weights_TH, keys_SD)
        return select(jnp.where(seen_TS, scores_TS, -jnp.inf), index.top)[None]
    tokens = keys_SD.shape[0]
    scores_KTB = block_maxima(index.queries_THD, keys_SD, seen_TS, index.block)
    chosen_KTB = select_blocks(scores_KTB, jnp.arange(tokens), index)
    return jnp.repeat(chosen_KTB, index.block, axis=2)[..., :tokens]
