"""DeepSeek Sparse Attention: an indexer selects the positions that each token attends to
(DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

The selection is exact: the `top` largest scores among the positions that the token may see, ties to
the smallest position.

Prefill computes the scores of a block of queries over all earlier positions and masks ordinary
attention (`chosen_positions`). Decode gathers the selected latents of each token, so that the bytes
that it reads do not grow with the context beyond the indexer's keys (`select_positions`,
`selected_attention`). Layers may share one selection (GLM-5.2)."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.model_api import Index, Latent
from jdisagg.ops.kv_pages import PastPages, as_read, gather_columns, gather_span, span_rows
from jdisagg.ops.latent_attention import absorb, release
from jdisagg.ops.quarantine import SHOWS, seen_scores
from jdisagg.ops.selection import largest, last_value, separating_value

KEYS_AT_ONCE = 1024  # keys of a chunk whose scores of all heads are in memory
PAST_POSITIONS = 128  # positions of one step of a loop over pages
UNROLLED_POSITIONS = 4096  # positions of an unrolled step

# Function from keys, and a mask of the keys that exist, to their scores.
Measure = Callable[[jax.Array, jax.Array], jax.Array]


class Selected(NamedTuple):
    """Positions that each token attends to, int32 [T, K]. Entries without `there_TK` are none."""

    position_TK: jax.Array
    there_TK: jax.Array


def index_scores(queries_QHD: jax.Array, weights_QH: jax.Array, keys_SD: jax.Array) -> jax.Array:
    """Computes the indexer's scores of all keys for all queries, float32 [Q, S]. A key that is the
    marker of `ops/quarantine.py` has the score infinity."""
    products_QHS = jnp.einsum(
        "qhd,sd->qhs",
        queries_QHD,
        keys_SD,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    weights_QH1 = weights_QH.astype(jnp.float32)[..., None]
    scores_QS = jnp.sum(jnp.maximum(products_QHS, 0) * weights_QH1, axis=1)
    return jnp.where((keys_SD[:, 0] > SHOWS)[None, :], jnp.inf, scores_QS)


def select(scores_QS: jax.Array, top: int, *, at_once: bool = False) -> jax.Array:
    """Selects the `top` largest scores of each row: bool [Q, S]. Of equal scores, the one with the
    smallest index is selected. Scores of -inf are never selected. `at_once` avoids loops, which the
    host would drive on a GPU."""
    scores_QS = jnp.where(scores_QS == 0, 0, scores_QS)  # -0 has an order key of its own
    rows, shape = scores_QS.shape[0], scores_QS.shape[:1]
    many_Q = jnp.sum((scores_QS > -jnp.inf).astype(jnp.int32), axis=1) > top
    if at_once:
        lowest_Q = last_value(
            lambda asked: [
                jnp.sum((scores_QS >= each_Q[:, None]).astype(jnp.int32), axis=1) >= top
                for each_Q in asked
            ],
            rows,
        )
        lowest_Q = jnp.where(many_Q, lowest_Q, -jnp.inf)
    else:
        lowest_Q = separating_value(scores_QS, jnp.full(shape, top, jnp.int32), many_Q)
    above_QS = scores_QS > lowest_Q[:, None]
    tied_QS = (scores_QS == lowest_Q[:, None]) & (scores_QS > -jnp.inf)
    room_Q1 = top - jnp.sum(above_QS.astype(jnp.int32), axis=1, keepdims=True)
    number_QS = jnp.cumsum(tied_QS.astype(jnp.int32), axis=1)
    return above_QS | (tied_QS & (number_QS <= room_Q1))


def chosen_positions(
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
    """Selects positions for the tokens low..high of a prefill chunk.

    Args:
        start_T: Chunk index of the first token of each token's sequence.

    Returns:
        Which of the chunk's tokens 0..high each token attends to, bool [1, Q, high], and which
        positions of its row's pages, bool [1, Q, columns * slots] or None.
    """
    assert index.weights_TH is not None
    q_QHD, w_QH = index.queries_THD[low:high], index.weights_TH[low:high]
    keys_SD = index.keys_T1D[:high, 0]
    scores_QS = jnp.concatenate(
        [
            index_scores(q_QHD, w_QH, keys_SD[begin : begin + KEYS_AT_ONCE])
            for begin in range(0, high, KEYS_AT_ONCE)
        ],
        axis=1,
    )
    seen_QS = own_keys(low, high, start_T)
    scores_QS = jnp.where(seen_QS, scores_QS, -jnp.inf)
    if past is None:
        return select(scores_QS, index.top, at_once=at_once)[None], None

    def measure(keys_SD: jax.Array, seen_1S: jax.Array) -> jax.Array:
        return jnp.where(seen_1S, index_scores(q_QHD, w_QH, keys_SD), -jnp.inf)[None]

    how = {"dtype": q_QHD.dtype, "at_once": at_once}
    earlier_QS = past_scores(measure, 1, segment_T[low:high], past, **how)[0]
    positions = earlier_QS.shape[1]
    both_QS = jnp.concatenate((earlier_QS, scores_QS), axis=1)
    chosen_1QS = select(both_QS, index.top, at_once=at_once)[None]
    return chosen_1QS[..., positions:], chosen_1QS[..., :positions]


def own_keys(low: int, high: int, start_T: jax.Array) -> jax.Array:
    """Returns a mask, bool [Q, high], of the chunk's tokens 0..high that each of the tokens
    low..high may attend to: tokens of its own sequence up to itself. `start_T` is the chunk index
    of the first token of each token's sequence."""
    key_1S = jnp.arange(high, dtype=jnp.int32)[None, :]
    seen_QS = key_1S <= jnp.arange(low, high, dtype=jnp.int32)[:, None]
    return seen_QS & (key_1S >= start_T[low:high, None])


def past_scores(
    measure: Measure,
    heads: int,
    segment_Q: jax.Array,
    past: PastPages,
    *,
    dtype: jnp.dtype,
    unit: int = 1,
    at_once: bool,
) -> jax.Array:
    """Computes scores of the positions in pages for each token of a chunk.

    Args:
        measure: Function from a row's keys [S, D], and a mask [1, S] of the existing keys, to
            scores [heads, Q, S / unit]; -inf where the mask is unset.
        at_once: Unrolls the loop. Only the first row may then have earlier tokens.

    Returns:
        float32 [heads, Q, units], -inf beyond the earlier tokens of each token's row.
    """
    pages_PKSH = past.index_pages_PKSH
    assert pages_PKSH is not None, "a layer with an indexer has pages of its keys"
    pages, _, slots, _ = pages_PKSH.shape
    width = past.table_RN.shape[1]
    columns = _columns(UNROLLED_POSITIONS if at_once else PAST_POSITIONS, slots, width, unit)
    units = -(-width * slots // unit)
    table_RN = jnp.pad(past.table_RN, ((0, 0), (0, -width % columns)))
    table_RN, step = jnp.clip(table_RN, 0, pages - 1), columns * slots
    shape = (heads, segment_Q.shape[0], table_RN.shape[1] * slots // unit)
    scores_KQU = jnp.full(shape, -jnp.inf, jnp.float32)

    def row(index: jax.Array, scores_KQU: jax.Array) -> jax.Array:
        table_1N = lax.dynamic_slice(table_RN, (index, 0), (1, table_RN.shape[1]))
        mine_Q1, length = (segment_Q == index)[:, None], past.lengths_R[index]

        def some(number: jax.Array, scores_KQU: jax.Array) -> jax.Array:
            found = gather_columns(pages_PKSH, table_1N, number * columns, columns)[0, 0]
            position_1S = (number * step + jnp.arange(step, dtype=jnp.int32))[None, :]
            new_KQU = measure(as_read(found, dtype), position_1S < length)
            first = number * (step // unit)
            old_KQU = lax.dynamic_slice_in_dim(scores_KQU, first, step // unit, axis=2)
            new_KQU = jnp.where(mine_Q1[None], new_KQU, old_KQU)
            return lax.dynamic_update_slice_in_dim(scores_KQU, new_KQU, first, axis=2)

        if at_once:
            for number in range(table_RN.shape[1] // columns):
                scores_KQU = some(jnp.int32(number), lax.optimization_barrier(scores_KQU))
            return scores_KQU
        end = jnp.where(jnp.any(mine_Q1), (length + step - 1) // step, 0)
        end = jnp.minimum(end, table_RN.shape[1] // columns)
        return lax.fori_loop(0, end, some, scores_KQU)

    if at_once:
        return row(jnp.int32(0), scores_KQU)[..., :units]
    return lax.fori_loop(0, past.count, row, scores_KQU)[..., :units]


def _columns(positions: int, slots: int, width: int, unit: int) -> int:
    least = math.lcm(slots, unit) // slots
    return max(1, min(positions // slots, width) // least) * least


def select_positions(
    index: Index,
    index_pages_PKSH: jax.Array,
    table_BN: jax.Array,
    positions_BQ: jax.Array,
    *,
    at_once: bool,
) -> Selected:
    """Selects positions up to each new token's own. `table_BN` must be in range and have more than
    `index.top` positions. The other arguments are those of `paged_attention`."""
    batch, per = positions_BQ.shape
    assert index.weights_TH is not None
    q_BQHD, w_BQH = (
        of_T.reshape(batch, per, *of_T.shape[1:]) for of_T in (index.queries_THD, index.weights_TH)
    )

    def measure(keys_BSD: jax.Array, seen_BQS: jax.Array) -> jax.Array:
        scores_BQS = jax.vmap(index_scores)(q_BQHD, w_BQH, keys_BSD)
        return jnp.where(seen_BQS, scores_BQS, -jnp.inf)[:, :, None]

    how = {"dtype": index.queries_THD.dtype, "at_once": at_once}
    scores_TS = page_scores(measure, 1, index_pages_PKSH, table_BN, positions_BQ, **how)[:, 0]
    found_TK, position_TK = largest(scores_TS, index.top)
    return Selected(position_TK, found_TK > -jnp.inf)


def selected_attention(
    q_TNH: jax.Array,
    latent_pages_PKSH: jax.Array,
    table_BN: jax.Array,
    selected: Selected,
    latent: Latent,
    *,
    scale: float,
) -> jax.Array:
    """Computes the attention of each new token over the selected positions. The arguments are those
    of `paged_attention`. `table_BN` must be in range. Returns o [T, N, value]."""
    position_TK, slots = selected.position_TK, latent_pages_PKSH.shape[2]
    per = q_TNH.shape[0] // table_BN.shape[0]
    table_TN = jnp.repeat(table_BN, per, axis=0) if per > 1 else table_BN
    page_TK = jnp.take_along_axis(table_TN, position_TK // slots, axis=1, mode="clip")
    rows_TKH = latent_pages_PKSH.at[page_TK, 0, position_TK % slots].get(mode="promise_in_bounds")
    rows_TKH = as_read(rows_TKH, q_TNH.dtype)
    q_TNR, rank = absorb(q_TNH, latent), latent.keys_NRH.shape[1]
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    s_TNK = seen_scores(product("tnr,tkr->tnk", q_TNR, rows_TKH) * scale)
    s_TNK = jnp.where(selected.there_TK[:, None], s_TNK, -jnp.inf)
    mix_TNK = jax.nn.softmax(s_TNK, axis=-1).astype(rows_TKH.dtype)
    mixed_TNR = product("tnk,tkr->tnr", mix_TNK, rows_TKH[..., :rank]).astype(q_TNH.dtype)
    return release(mixed_TNR, latent)


def page_scores(
    measure: Measure,
    heads: int,
    pages_PKSH: jax.Array,
    table_BN: jax.Array,
    positions_BQ: jax.Array,
    *,
    dtype: jnp.dtype,
    unit: int = 1,
    at_once: bool,
) -> jax.Array:
    """Computes scores of all positions of the page table for each token. `measure` maps keys [B, S,
    D] and a mask [B, Q, S] to scores [B, Q, heads, S / unit], -inf where the mask is unset. Returns
    float32 [T, heads, units], -inf beyond the token's own position. For `dtype` and `unit`, see
    `past_scores`."""
    batch, per = positions_BQ.shape
    slots, columns = pages_PKSH.shape[2], table_BN.shape[1]
    each = _columns(UNROLLED_POSITIONS if at_once else PAST_POSITIONS, slots, columns, unit)
    step, units = each * slots, -(-columns * slots // unit)
    table_BN = jnp.pad(table_BN, ((0, 0), (0, -columns % each)))
    shape = (batch, per, heads, table_BN.shape[1] * slots // unit)
    scores = jnp.full(shape, -jnp.inf, jnp.float32)

    def some(keys_BSD: jax.Array, number: jax.Array | int, scores: jax.Array) -> jax.Array:
        position_11S = (number * step + jnp.arange(step, dtype=jnp.int32))[None, None, :]
        new = measure(as_read(keys_BSD, dtype), position_11S <= positions_BQ[..., None])
        return lax.dynamic_update_slice_in_dim(scores, new, number * (step // unit), axis=3)

    if at_once:
        for number in range(table_BN.shape[1] // each):
            scores = lax.optimization_barrier(scores)
            found = gather_columns(pages_PKSH, table_BN, number * each, each)
            scores = some(found[:, 0], number, scores)
    else:
        span = span_rows(pages_PKSH, step)
        end = jnp.clip((jnp.max(positions_BQ) + step) // step, 1, table_BN.shape[1] // each)
        scores = lax.fori_loop(
            0,
            end,
            lambda number, scores: some(gather_span(span, table_BN, number)[:, 0], number, scores),
            scores,
        )
    return scores.reshape(batch * per, heads, -1)[..., :units]
