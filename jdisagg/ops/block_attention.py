"""Block-sparse attention of MiniMax M3 (arXiv 2606.13392): an indexer selects the blocks of
positions that each token attends to, for each kv head.

The selection is exact: it consists of the `top` blocks with the largest scores.

Prefill computes the scores of a block of queries over all earlier positions and masks ordinary
attention. Decode gathers keys and values of the selected blocks: the selection is a page table for
each kv head, so that the bytes that a step reads do not grow with the context beyond the indexer's
keys."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.model_api import Index
from jdisagg.ops.kv_pages import PastPages, as_read
from jdisagg.ops.online_softmax import MASKED
from jdisagg.ops.quarantine import SHOWS
from jdisagg.ops.selection import largest
from jdisagg.ops.sparse_attention import own_keys, page_scores, past_scores, select


def key_scores(queries_QKD: jax.Array, keys_SD: jax.Array) -> jax.Array:
    """Computes the score of each of S keys for Q queries of K kv heads, float32 [K, Q, S]. A key
    that is the marker of `ops/quarantine.py` has the score infinity."""
    scores_KQS = jnp.einsum(
        "qkd,sd->kqs",
        queries_QKD,
        keys_SD,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return jnp.where((keys_SD[:, 0] > SHOWS)[None, None], jnp.inf, scores_KQS)


def block_maxima(
    queries_QKD: jax.Array, keys_SD: jax.Array, seen_QS: jax.Array, block: int
) -> jax.Array:
    """Computes the largest score of each block of keys, float32 [K, Q, blocks]. Keys outside
    `seen_QS` are ignored."""
    scores_KQS = jnp.where(seen_QS[None], key_scores(queries_QKD, keys_SD), -jnp.inf)
    lacking = -keys_SD.shape[0] % block
    scores_KQS = jnp.pad(scores_KQS, ((0, 0), (0, 0), (0, lacking)), constant_values=-jnp.inf)
    return scores_KQS.reshape(*scores_KQS.shape[:2], -1, block).max(axis=-1)


def _with_local(scores: jax.Array, own: jax.Array, local: int) -> jax.Array:
    number = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None]
    return jnp.where((number <= own) & (number > own - local), jnp.inf, scores)


def select_blocks(
    scores_KQB: jax.Array, positions_Q: jax.Array, index: Index, *, at_once: bool = False
) -> jax.Array:
    """Selects the blocks that tokens at `positions_Q` attend to, by the blocks' scores: bool [K, Q,
    blocks]."""
    own_1Q1 = (positions_Q // index.block)[None, :, None]
    scores_KQB = _with_local(scores_KQB, own_1Q1, index.local)
    flat = scores_KQB.reshape(-1, scores_KQB.shape[2])
    return select(flat, index.top, at_once=at_once).reshape(scores_KQB.shape)


def chosen_from_blocks(
    index: Index,
    low: int,
    high: int,
    start_T: jax.Array,
    segment_T: jax.Array,
    positions_T: jax.Array,
    past: PastPages | None,
    *,
    at_once: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Selects positions for the tokens low..high of a prefill chunk. The arguments are those of
    `chosen_positions`. Returns which of the chunk's tokens 0..high each token attends to, bool [K,
    Q, high], and which positions in its row's pages, bool [K, Q, columns * slots] or None."""
    q_QKD, keys_SD = index.queries_THD[low:high], index.keys_T1D[:high, 0]
    block, earlier = index.block, 0
    if past is not None:
        assert past.index_pages_PKSH is not None
        earlier = past.table_RN.shape[1] * past.index_pages_PKSH.shape[2]
    blocks = -(-(earlier + positions_T.shape[0]) // block)
    seen_QS = own_keys(low, high, start_T)
    scores_KQS = jnp.where(seen_QS[None], key_scores(q_QKD, keys_SD), -jnp.inf)
    block_S = positions_T[:high] // block
    scores_KQB = jax.ops.segment_max(scores_KQS.transpose(2, 0, 1), block_S, blocks)
    scores_KQB = scores_KQB.transpose(1, 2, 0)
    if past is not None:

        def measure(keys_SD: jax.Array, seen_1S: jax.Array) -> jax.Array:
            return block_maxima(q_QKD, keys_SD, seen_1S, block)

        how = {"dtype": q_QKD.dtype, "unit": block, "at_once": at_once}
        earlier_KQB = past_scores(measure, q_QKD.shape[1], segment_T[low:high], past, **how)
        lacking = blocks - earlier_KQB.shape[2]
        earlier_KQB = jnp.pad(earlier_KQB, ((0, 0), (0, 0), (0, lacking)), constant_values=-jnp.inf)
        scores_KQB = jnp.maximum(scores_KQB, earlier_KQB)
    chosen_KQB = select_blocks(scores_KQB, positions_T[low:high], index, at_once=at_once)
    own_KQS = jnp.take(chosen_KQB, block_S, axis=2, mode="clip")
    if past is None:
        return own_KQS, None
    return own_KQS, jnp.repeat(chosen_KQB, block, axis=2)[..., :earlier]


def attention_to_blocks(
    q_TNH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    index_pages_PKSH: jax.Array,
    table_BN: jax.Array,
    positions_BQ: jax.Array,
    index: Index,
    *,
    scale: float,
    at_once: bool,
) -> jax.Array:
    """Computes the attention of each new token over the blocks that the indexer selects among
    blocks up to the token's own. The arguments are those of `paged_attention`. `table_BN` must be
    in range and have more than `index.top` blocks. Returns o [T, N, H]."""
    (batch, per), heads = positions_BQ.shape, index.queries_THD.shape[1]
    of_row = index.of_queries(lambda of_T: of_T.reshape(batch, per, *of_T.shape[1:]))

    def measure(keys_BSD: jax.Array, seen_BQS: jax.Array) -> jax.Array:
        maxima = jax.vmap(lambda q, keys, seen: block_maxima(q, keys, seen, index.block))
        return maxima(of_row.queries_THD, keys_BSD, seen_BQS).swapaxes(1, 2)

    how = {"dtype": index.queries_THD.dtype, "unit": index.block, "at_once": at_once}
    scores_TKB = page_scores(measure, heads, index_pages_PKSH, table_BN, positions_BQ, **how)
    position_T = positions_BQ.reshape(-1)
    scores_TKB = _with_local(scores_TKB, (position_T // index.block)[:, None, None], index.local)
    found, block = largest(scores_TKB.reshape(-1, scores_TKB.shape[2]), index.top)
    block_TKC = block.reshape(-1, heads, index.top)
    table_TN = jnp.repeat(table_BN, per, axis=0) if per > 1 else table_BN
    k_TKSH, v_TKSH = (
        as_read(_gather_blocks(pages, table_TN, block_TKC, index.block), q_TNH.dtype)
        for pages in (k_pages_PKSH, v_pages_PKSH)
    )
    offset = jnp.arange(index.block, dtype=jnp.int32)[None, None, None]
    seen = (block_TKC[..., None] * index.block + offset) <= position_T[:, None, None, None]
    seen &= (found > -jnp.inf).reshape(block_TKC.shape)[..., None]
    seen_TKS = seen.reshape(*block_TKC.shape[:2], -1)
    tokens, query_heads, width = q_TNH.shape
    q_TKGH = q_TNH.reshape(tokens, heads, query_heads // heads, width)
    scores = jnp.einsum("tkgh,tksh->tkgs", q_TKGH, k_TKSH, preferred_element_type=jnp.float32)
    mix_TKGS = jax.nn.softmax(jnp.where(seen_TKS[:, :, None], scores * scale, MASKED), axis=-1)
    mixed_TKGH = jnp.einsum(
        "tkgs,tksh->tkgh", mix_TKGS.astype(v_TKSH.dtype), v_TKSH, preferred_element_type=jnp.float32
    )
    return mixed_TKGH.astype(q_TNH.dtype).reshape(q_TNH.shape)


def _gather_blocks(
    pages_PKSH: jax.Array, table_TN: jax.Array, block_TKC: jax.Array, block: int
) -> jax.Array:
    pages, heads, slots, width = pages_PKSH.shape
    run = math.gcd(block, slots)  # consecutive positions in one page
    first_C = jnp.arange(0, block, run, dtype=jnp.int32)[None, None, None]
    at_TKR = (block_TKC[..., None] * block + first_C).reshape(*block_TKC.shape[:2], -1)
    page_TKR = jnp.take_along_axis(table_TN[:, None], at_TKR // slots, axis=2, mode="clip")
    runs_PKRSH = pages_PKSH.reshape(pages, heads, slots // run, run, width)
    head_1K1 = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
    found = runs_PKRSH.at[page_TKR, head_1K1, at_TKR % slots // run].get(mode="promise_in_bounds")
    return found.reshape(*block_TKC.shape[:2], -1, width)
