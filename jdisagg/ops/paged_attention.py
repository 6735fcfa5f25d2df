"""Decode attention over KV pages, for one or several new tokens per sequence. The k and v of the
new tokens must already be in the pages.

`paged_attention` is the op, and `platform` chooses the implementation:
- `loop`: a `fori_loop` over page columns with online softmax. The trip count is traced (the longest
  sequence), so there are no context buckets, and a block of pages stays in cache. The CPU's choice,
  and correct everywhere.
- `gather`: gathers the whole padded table and computes one softmax. Used on a GPU where the
  `pallas` kernel does not apply, because the host would have to drive a loop. Its cost grows with
  the table's width.
- `pages`: the loop with whole pages, a TPU's choice. A TPU stores arrays in tiles of the last two
  axes, so that reading the rows of `loop` would copy the pool.
- `pallas`: a split-K kernel (`paged_attention_pallas`), the GPU's choice.

Table entries beyond a sequence's length may hold anything: they are clipped into range and
masked."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.model_api import Index, Latent
from jdisagg.ops import latent_attention_pallas, paged_attention_pallas
from jdisagg.ops.block_attention import attention_to_blocks
from jdisagg.ops.kv_pages import as_read, gather_columns, gather_pages, gather_span, span_rows
from jdisagg.ops.latent_attention import absorb, release
from jdisagg.ops.online_softmax import (
    MASKED,
    Softmax,
    by_kv_head,
    by_token,
    capped,
    empty,
    finish,
    first,
    fold,
    grouped_sinks,
)
from jdisagg.ops.quarantine import seen_scores
from jdisagg.ops.sparse_attention import Selected, select_positions, selected_attention

Implementation = Literal["loop", "pages", "gather", "pallas"]

LONG_STEP, SHORT_STEP = 256, 128  # positions
# Largest number of bytes of the keys of a long step. More keys would leave the CPU's caches before
# use.
STEP_BYTES = 4 << 20
PARTS_PER_STEP = 4


def paged_attention(
    q_TNH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array | None,
    table_BN: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
    latent: Latent | None = None,
    index: Index | None = None,
    index_pages_PKSH: jax.Array | None = None,
    selected: Selected | None = None,
    platform: str = "cpu",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the attention of each new token over its sequence's positions up to its own, or with
    `window` over the last `window` of these positions.

    Args:
        q_TNH: Local query heads, a multiple of the pages' kv heads. T = B * Q, the Q new tokens of
            a sequence one after the other.
        k_pages_PKSH, v_pages_PKSH: Pages of keys and of values. With `latent`, the first array
            holds the cached vectors with one kv head, and the second is None.
        positions: int32 [B, Q], or [B] for one token per sequence. The first token of a sequence
            has the smallest position, and no position lies more than Q - 1 after it.
        cap, sinks_N, latent: See `model_api.AttendOptions`.
        selected: Result of `paged_selection`, in place of `index`.

    Returns:
        o_TNH in q's dtype.
    """
    traits, values = traits_of(platform), v_pages_PKSH
    positions_BQ = positions if positions.ndim == 2 else positions[:, None]
    table_BN = jnp.clip(table_BN, 0, k_pages_PKSH.shape[0] - 1)
    if index is not None and not index.block and index_pages_PKSH is not None:
        where = index_pages_PKSH, table_BN, positions_BQ
        selected = paged_selection(index, *where, platform=platform)
    if selected is not None:
        assert latent is not None and window is None and not cap and sinks_N is None
        return selected_attention(q_TNH, k_pages_PKSH, table_BN, selected, latent, scale=scale)
    if index is not None and index.block and _longer(table_BN, k_pages_PKSH, index):
        assert index_pages_PKSH is not None and window is None and not cap and sinks_N is None
        assert v_pages_PKSH is not None
        pages = (k_pages_PKSH, v_pages_PKSH, index_pages_PKSH)
        how = {"scale": scale, "at_once": traits.without_loops}
        return attention_to_blocks(q_TNH, *pages, table_BN, positions_BQ, index, **how)
    kernel = partial(paged_attention_pallas.paged_attention, cap=cap, sinks_N=sinks_N)
    applies = paged_attention_pallas.applies
    if latent is not None:
        assert not cap and sinks_N is None, "no family has both"
        q_TNH, values = absorb(q_TNH, latent), latent.keys_NRH.shape[1]
        kernel = latent_attention_pallas.latent_attention
        applies = partial(latent_attention_pallas.applies, rank=values)
    assert values is not None
    by_kernel = traits.kernels == "gpu" and applies(q_TNH, k_pages_PKSH)
    attend = {
        "loop": partial(_loop, cap=cap, sinks_N=sinks_N),
        "pages": partial(_loop, cap=cap, sinks_N=sinks_N, whole=True),
        "gather": partial(gather_attention, cap=cap, sinks_N=sinks_N),
        "pallas": kernel,
    }[implementation or ("pallas" if by_kernel else traits.decode_attention)]
    o_TNH = attend(q_TNH, k_pages_PKSH, values, table_BN, positions_BQ, scale=scale, window=window)
    return o_TNH if latent is None else release(o_TNH, latent)


def paged_selection(
    index: Index,
    index_pages_PKSH: jax.Array,
    table_BN: jax.Array,
    positions: jax.Array,
    *,
    platform: str,
) -> Selected | None:
    """Selects the positions that each new token attends to, by an indexer that selects positions.
    The arguments are those of `paged_attention`. Returns None if the page table has so few
    positions that each token attends to all of them."""
    if not _longer(table_BN, index_pages_PKSH, index):
        return None
    positions_BQ = positions if positions.ndim == 2 else positions[:, None]
    table_BN = jnp.clip(table_BN, 0, index_pages_PKSH.shape[0] - 1)
    how = {"at_once": traits_of(platform).without_loops}
    return select_positions(index, index_pages_PKSH, table_BN, positions_BQ, **how)


def _longer(table_BN: jax.Array, pages_PKSH: jax.Array, index: Index) -> bool:
    return table_BN.shape[1] * pages_PKSH.shape[2] > index.positions


def _loop(
    q_TNH: jax.Array,
    k_pages_PKSH: jax.Array,
    values: jax.Array | int,
    table_BN: jax.Array,
    positions_BQ: jax.Array,
    *,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
    whole: bool = False,
) -> jax.Array:
    """The end of the longest sequence is processed in fractions of a step, so that a nearly empty
    last page is not read whole."""
    batch, width = positions_BQ.shape[0], q_TNH.shape[-1]
    _, heads, slots, _ = k_pages_PKSH.shape
    positions = (
        LONG_STEP
        if batch * heads * LONG_STEP * width * k_pages_PKSH.dtype.itemsize <= STEP_BYTES
        else SHORT_STEP
    )
    columns = max(1, min(positions // slots, table_BN.shape[1]))
    step = columns * slots
    part = step if whole else max(1, step // PARTS_PER_STEP)
    if step % part or (slots % part and part % slots):  # neither whole pages nor even parts of one
        part = step
    table_BN = jnp.pad(table_BN, ((0, 0), (0, -table_BN.shape[1] % columns)))
    q_BKGH = by_kv_head(q_TNH, batch, heads)
    pools = [k_pages_PKSH, *([] if isinstance(values, int) else [values])]
    lengths = () if whole else (step, part)
    spans = {length: [span_rows(pages, length) for pages in pools] for length in lengths}
    mixed_width = values if isinstance(values, int) else values.shape[-1]

    def fold_span(length: int, index: jax.Array, state: Softmax) -> Softmax:
        found = (
            (gather_pages(pages, table_BN, index * columns, columns) for pages in pools)
            if whole
            else (gather_span(span, table_BN, index) for span in spans[length])
        )
        k_BKSH, *others = (as_read(kept, q_TNH.dtype) for kept in found)
        v_BKSH = others[0] if others else k_BKSH[..., :mixed_width]
        seen_BQS = _seen(index * length, length, positions_BQ, window)
        s_BKGS = _scores(q_BKGH, k_BKSH, seen_BQS, scale, cap, marked=not others)
        return fold(state, s_BKGS, partial(_mix, v_BKSH=v_BKSH))

    capacity = table_BN.shape[1] * slots
    end = jnp.clip(jnp.max(positions_BQ) + 1, 1, capacity)
    begin = 0 if window is None else jnp.clip(jnp.min(positions_BQ) - window + 1, 0, end - 1)
    steps = -(-end // step) if whole else end // step
    state = empty((*q_BKGH.shape[:3], mixed_width))
    state = lax.fori_loop(begin // step, steps, partial(fold_span, step), state)
    if not whole:
        state = lax.fori_loop(
            jnp.maximum(steps * step, begin) // part,
            -(-end // part),
            partial(fold_span, part),
            state,
        )
    mixed_BKGH = finish(state, _row_sinks(sinks_N, heads, positions_BQ.shape[1]))
    return by_token(mixed_BKGH.astype(q_TNH.dtype), q_TNH)


def gather_attention(
    q_TNH: jax.Array,
    k_pages_PKSH: jax.Array,
    values: jax.Array | int,
    table_BN: jax.Array,
    positions_BQ: jax.Array,
    *,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    heads, columns = k_pages_PKSH.shape[1], table_BN.shape[1]
    q_BKGH = by_kv_head(q_TNH, positions_BQ.shape[0], heads)
    k_BKSH = as_read(gather_columns(k_pages_PKSH, table_BN, 0, columns), q_TNH.dtype)
    latent = isinstance(values, int)
    v_BKSH = (
        k_BKSH[..., :values]
        if latent
        else as_read(gather_columns(values, table_BN, 0, columns), q_TNH.dtype)
    )
    seen_BQS = _seen(0, k_BKSH.shape[2], positions_BQ, window)
    s_BKGS = _scores(q_BKGH, k_BKSH, seen_BQS, scale, cap, marked=latent)
    state = first(s_BKGS, partial(_mix, v_BKSH=v_BKSH))
    mixed_BKGH = finish(state, _row_sinks(sinks_N, heads, positions_BQ.shape[1]))
    return by_token(mixed_BKGH.astype(q_TNH.dtype), q_TNH)


def _scores(
    q_BKGH: jax.Array,
    k_BKSH: jax.Array,
    seen_BQS: jax.Array,
    scale: float,
    cap: float,
    *,
    marked: bool,
) -> jax.Array:
    s_BKGS = (
        jnp.einsum("bkgh,bksh->bkgs", q_BKGH, k_BKSH, preferred_element_type=jnp.float32) * scale
    )
    if marked:
        s_BKGS = seen_scores(s_BKGS)
    per = seen_BQS.shape[1]
    if per > 1:
        seen_BQS = jnp.repeat(seen_BQS, q_BKGH.shape[2] // per, axis=1)
    return jnp.where(seen_BQS[:, None], capped(s_BKGS, cap), MASKED)


def _row_sinks(sinks_N: jax.Array | None, heads: int, per: int) -> jax.Array | None:
    sinks_KG11 = grouped_sinks(sinks_N, heads)
    return None if sinks_KG11 is None else jnp.tile(sinks_KG11[None, ..., 0], (1, 1, per, 1))


def _mix(p_BKGS: jax.Array, v_BKSH: jax.Array) -> jax.Array:
    return jnp.einsum(
        "bkgs,bksh->bkgh", p_BKGS.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
    )


def _seen(
    start: jax.Array | int, length: int, positions_BQ: jax.Array, window: int | None
) -> jax.Array:
    position_11S = (start + jnp.arange(length, dtype=jnp.int32))[None, None, :]
    at_BQ1 = positions_BQ[..., None]
    seen_BQS = position_11S <= at_BQ1
    return seen_BQS if window is None else seen_BQS & (position_11S > at_BQ1 - window)
