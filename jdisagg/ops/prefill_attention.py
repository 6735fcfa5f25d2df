"""Prefill attention of a packed chunk, which holds tokens of several sequences. Tokens attend to
the chunk itself, and to KV pages with earlier tokens of the same sequence.

`segment_T` is -1 for padding, whose output is 0. Two parts share one online softmax: *self* is
causal attention among the chunk's tokens of the same segment, and *past* is attention to the
sequence's earlier tokens in pages.

On CPU *self* is cut into query blocks. On GPU both parts use cuDNN (`prefill_attention_cudnn`), on
TPU one kernel (`prefill_attention_tpu`).

Latent attention takes the expanded form among the chunk's tokens and the absorbed form for the
past, whose keys would otherwise be recomputed for each chunk (`ops/latent_attention.py`). On a GPU
*past* then covers the whole page table in unrolled steps, without a loop. The same form is used for
models with capped scores, which cuDNN does not support, and for *self* in packed chunks of models
with sinks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.model_api import Index, Latent
from jdisagg.ops import prefill_attention_cudnn, prefill_attention_tpu
from jdisagg.ops.block_attention import chosen_from_blocks
from jdisagg.ops.kv_pages import PastPages as PastPages
from jdisagg.ops.kv_pages import as_read, gather_columns, gather_pages
from jdisagg.ops.latent_attention import absorb, expand
from jdisagg.ops.online_softmax import (
    MASKED,
    Softmax,
    capped,
    empty,
    finish,
    first,
    fold,
    grouped_sinks,
    merge,
)
from jdisagg.ops.quarantine import seen_scores
from jdisagg.ops.sparse_attention import chosen_positions

# Largest chunk for which scores are dense over the causal prefix. Scores of larger chunks leave the
# CPU's cache (measured).
DENSE_TOKENS = 1024
DENSE_TOKENS_PACKED = 512  # a packed chunk gains earlier from skipping key blocks
KEY_BLOCK = 256
QUERY_BLOCK = 128
PAST_QUERIES = 512  # query rows that share one gather of pages
PAST_POSITIONS = 128
UNROLLED_POSITIONS = 4096  # positions of an unrolled step, whose scores are in memory
# For each block of queries of a chunk, the masks [K, Q, S] of the tokens that an indexer selects:
# those of the chunk, and those of the pages (None without earlier tokens).
Chosen = tuple[tuple[jax.Array, jax.Array | None], ...]


def prefill_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    segment_T: jax.Array,
    positions_T: jax.Array,
    past: PastPages | None = None,
    *,
    scale: float,
    window: int | None = None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
    latent: Latent | None = None,
    index: Index | None = None,
    chosen: Chosen | None = None,
    platform: str = "cpu",
    device_kind: str = "",
    query_block: int = QUERY_BLOCK,
    packed: bool = True,
    rows: int = 16,
) -> jax.Array:
    """Computes the attention of a prefill chunk to itself and to earlier tokens in pages.

    Args:
        segment_T: Sequence of each token, as its row in the step's page table; -1 for padding.
        positions_T: Absolute positions. Used only if both `past` and `window` are given.
        past: Pages with earlier tokens. None if no sequence has earlier tokens. On a GPU only row
            0, which comes first in the chunk, may have earlier tokens.
        cap, sinks_N, latent, index: See `model_api.AttendOptions`.
        chosen: Result of `choose_in_chunk` with the same `query_block`, in place of `index`.
        packed: Whether the chunk may hold several sequences. If False, all valid tokens must belong
            to row 0 and come first.

    Returns:
        o_TNH in q's dtype, 0 for padding.
    """
    if latent is not None:
        k_TKH, v_TKH = expand(k_TKH, latent)
    assert v_TKH is not None
    if index is not None:
        where = segment_T, positions_T, past
        chosen = choose_in_chunk(index, *where, platform=platform, query_block=query_block)
    by_cudnn = latent is None and not cap and chosen is None
    by_cudnn = by_cudnn and prefill_attention_cudnn.applies(
        q_TNH, platform=platform, device_kind=device_kind
    )
    chunk = (q_TNH, k_TKH, v_TKH, segment_T)
    how: dict[str, Any] = {"scale": scale, "window": window, "sinks_N": sinks_N}
    if by_cudnn:
        o_TNH = prefill_attention_cudnn.attend(*chunk, past, packed=packed, rows=rows, **how)
    elif chosen is None and prefill_attention_tpu.applies(
        q_TNH, k_TKH, past, platform=platform, device_kind=device_kind, latent=latent is not None
    ):
        start_T, marked = first_key(segment_T, window), latent is not None
        o_TNH = prefill_attention_tpu.attend(
            *chunk, positions_T, start_T, past, cap=cap, marked=marked, **how
        )
    else:
        o_TNH = _blocks(
            *chunk,
            positions_T,
            past,
            latent,
            chosen,
            cap=cap,
            query_block=query_block,
            packed=packed,
            at_once=traits_of(platform).without_loops,
            gather=gather_pages if traits_of(platform).whole_pages else gather_columns,
            **how,
        )
    return jnp.where((segment_T >= 0)[:, None, None], o_TNH, jnp.zeros((), q_TNH.dtype))


def choose_in_chunk(
    index: Index,
    segment_T: jax.Array,
    positions_T: jax.Array,
    past: PastPages | None,
    *,
    platform: str,
    query_block: int = QUERY_BLOCK,
) -> Chosen | None:
    """Selects the positions that each token of a prefill chunk attends to. The arguments are those
    of `prefill_attention`. Returns None if each token attends to all positions."""
    tokens = segment_T.shape[0]
    earlier = 0 if past is None else past.table_RN.shape[1] * past.k_pages_PKSH.shape[2]
    if tokens + earlier <= index.positions:
        return None
    choose = chosen_from_blocks if index.block else chosen_positions
    rest = first_key(segment_T, None), segment_T, positions_T, past
    at_once = traits_of(platform).without_loops
    return tuple(
        choose(index, low, high, *rest, at_once=at_once)
        for low, high in _groups(tokens, _group_size(query_block))
    )


def _group_size(query_block: int) -> int:
    return PAST_QUERIES // query_block * query_block or query_block


def _groups(tokens: int, size: int) -> list[tuple[int, int]]:
    return [(low, min(low + size, tokens)) for low in range(0, tokens, size)]


def _blocks(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    segment_T: jax.Array,
    positions_T: jax.Array,
    past: PastPages | None,
    latent: Latent | None,
    chosen_of: Chosen | None,
    *,
    scale: float,
    window: int | None,
    cap: float,
    sinks_N: jax.Array | None,
    query_block: int,
    packed: bool,
    at_once: bool,
    gather: Callable[..., jax.Array],
) -> jax.Array:
    """`at_once` unrolls all loops, for GPUs, where the host would drive them."""
    tokens, query_heads, width = q_TNH.shape
    heads = k_TKH.shape[1]
    q_KGTH = q_TNH.reshape(tokens, heads, query_heads // heads, width).transpose(1, 2, 0, 3)
    k_KTH, v_KTH = k_TKH.swapaxes(0, 1), v_TKH.swapaxes(0, 1)
    start_T = first_key(segment_T, window)
    masked = packed or window is not None
    q_past_TNH = absorb(q_TNH, latent) if latent is not None and past is not None else q_TNH
    past_heads = heads if latent is None else 1
    q_past_KGTH = q_past_TNH.reshape(tokens, past_heads, query_heads // past_heads, -1).transpose(
        1, 2, 0, 3
    )
    marked = latent is not None
    how = {"scale": scale, "window": window, "cap": cap, "marked": marked, "at_once": at_once}
    sinks_KG11 = grouped_sinks(sinks_N, heads)
    whole = past is None and chosen_of is None
    chosen: tuple[jax.Array | None, jax.Array | None] = (None, None)
    outputs: list[jax.Array] = []
    for number, (low, high) in enumerate(
        _groups(tokens, tokens if whole else _group_size(query_block))
    ):
        if chosen_of is not None:
            chosen = chosen_of[number]
        blocks = [
            _self_block(
                q_KGTH,
                k_KTH,
                v_KTH,
                start_T,
                a,
                min(a + query_block, high),
                chosen_KQS=None if chosen[0] is None else chosen[0][:, a - low :][:, :query_block],
                packed=packed,
                masked=masked,
                **how,
            )
            for a in range(low, high, query_block)
        ]
        if past is not None:
            state = Softmax(
                *(jnp.concatenate(parts, axis=2) for parts in zip(*blocks, strict=True))
            )
            span = slice(low, high)
            rest = (q_past_KGTH[:, :, span], segment_T[span], positions_T[span], past)
            if latent is None:
                blocks = [_fold_past(state, *rest, chosen_KQS=chosen[1], gather=gather, **how)]
            else:
                rank = latent.keys_NRH.shape[1]
                nothing = empty((*rest[0].shape[:3], rank))
                cached = _fold_past(nothing, *rest, chosen_KQS=chosen[1], gather=gather, **how)
                blocks = [merge(state, _released(cached, latent))]
        outputs += [finish(block, sinks_KG11).astype(q_TNH.dtype) for block in blocks]
    o_TKGH = jnp.concatenate(outputs, axis=2).transpose(2, 0, 1, 3)
    return o_TKGH.reshape(tokens, query_heads, -1)


def _released(cached: Softmax, latent: Latent) -> Softmax:
    mixed_NQV = jnp.einsum("nqr,nrv->nqv", cached.mixed[0], latent.values_NRH.astype(jnp.float32))
    top, total = (part.swapaxes(0, 1) for part in (cached.top, cached.total))
    return Softmax(top, total, mixed_NQV[:, None])


def first_key(segment_T: jax.Array, window: int | None) -> jax.Array:
    """Returns the chunk index of the first key that each token attends to. The index never
    decreases along the chunk."""
    index_T = jnp.arange(segment_T.shape[0], dtype=jnp.int32)
    new_T = jnp.concatenate([jnp.ones(1, bool), segment_T[1:] != segment_T[:-1]])
    start_T = lax.cummax(jnp.where(new_T, index_T, 0))
    return start_T if window is None else jnp.maximum(start_T, index_T - (window - 1))


def _self_block(
    q_KGTH: jax.Array,
    k_KTH: jax.Array,
    v_KTH: jax.Array,
    start_T: jax.Array,
    low: int,
    high: int,
    *,
    chosen_KQS: jax.Array | None,
    scale: float,
    window: int | None,
    cap: float,
    packed: bool,
    masked: bool,
    marked: bool,
    at_once: bool,
) -> Softmax:
    tokens = k_KTH.shape[1]
    q_KGQH, start_Q1 = q_KGTH[:, :, low:high], start_T[low:high, None]
    # Keys outside the window of every row of this block.
    hidden = 0 if window is None else max(0, low - window + 1)
    dense = at_once or tokens <= (DENSE_TOKENS_PACKED if packed else DENSE_TOKENS)
    begin = hidden if dense else max(hidden, low // KEY_BLOCK * KEY_BLOCK)
    key_1S = jnp.arange(begin, high, dtype=jnp.int32)[None, :]
    seen_QS = key_1S <= jnp.arange(low, high, dtype=jnp.int32)[:, None]
    if masked:
        seen_QS &= key_1S >= start_Q1
    if chosen_KQS is not None:
        seen_QS = seen_QS[None] & chosen_KQS[:, :, begin:high]
    state = first(
        _scores(q_KGQH, k_KTH[:, begin:high], seen_QS, scale, cap, marked),
        partial(_mix, v_KSH=v_KTH[:, begin:high]),
    )
    if begin == hidden:
        return state

    def body(index: jax.Array, state: Softmax) -> Softmax:
        # Keys and values of latent attention differ in width.
        k_KSH, v_KSH = (
            lax.dynamic_slice_in_dim(part, index * KEY_BLOCK, KEY_BLOCK, 1)
            for part in (k_KTH, v_KTH)
        )
        key_1S = (index * KEY_BLOCK + jnp.arange(KEY_BLOCK, dtype=jnp.int32))[None, :]
        seen_QS = key_1S >= start_Q1 if masked else None
        if chosen_KQS is not None:
            some_KQS = lax.dynamic_slice_in_dim(chosen_KQS, index * KEY_BLOCK, KEY_BLOCK, axis=2)
            seen_QS = some_KQS if seen_QS is None else seen_QS[None] & some_KQS
        scores = _scores(q_KGQH, k_KSH, seen_QS, scale, cap, marked)
        return fold(state, scores, partial(_mix, v_KSH=v_KSH))

    # The first trip is traced even for one long sequence: loops of known length are unrolled, and
    # then all of their scores live at once (measured: 1.6 times the time at 2048 tokens).
    return lax.fori_loop(start_T[low] // KEY_BLOCK, begin // KEY_BLOCK, body, state)


def _fold_past(
    state: Softmax,
    q_KGQH: jax.Array,
    segment_Q: jax.Array,
    positions_Q: jax.Array,
    past: PastPages,
    *,
    chosen_KQS: jax.Array | None,
    scale: float,
    window: int | None,
    cap: float,
    marked: bool,
    at_once: bool,
    gather: Callable[..., jax.Array],
) -> Softmax:
    pages, _, slots, _ = past.k_pages_PKSH.shape
    positions = UNROLLED_POSITIONS if at_once else PAST_POSITIONS
    columns = max(1, min(positions // slots, past.table_RN.shape[1]))
    step = columns * slots
    table_RN = jnp.clip(
        jnp.pad(past.table_RN, ((0, 0), (0, -past.table_RN.shape[1] % columns))), 0, pages - 1
    )

    if chosen_KQS is not None:
        lacking = table_RN.shape[1] * slots - chosen_KQS.shape[2]
        chosen_KQS = jnp.pad(chosen_KQS, ((0, 0), (0, 0), (0, lacking)))

    def row(index: jax.Array, state: Softmax) -> Softmax:
        table_1N = lax.dynamic_slice(table_RN, (index, 0), (1, table_RN.shape[1]))
        length = past.lengths_R[index]
        mine_Q1 = (segment_Q == index)[:, None]

        def some(pages_PKSH: jax.Array, number: jax.Array) -> jax.Array:
            found = gather(pages_PKSH, table_1N, number * columns, columns)[0]
            return as_read(found, q_KGQH.dtype)

        def column(number: jax.Array, state: Softmax) -> Softmax:
            k_KSH = some(past.k_pages_PKSH, number)
            if past.v_pages_PKSH is None:
                v_KSH = k_KSH[..., : state.mixed.shape[-1]]
            else:
                v_KSH = some(past.v_pages_PKSH, number)
            position_1S = (number * step + jnp.arange(step, dtype=jnp.int32))[None, :]
            seen_QS = mine_Q1 & (position_1S < length)
            if window is not None:
                seen_QS &= position_1S > positions_Q[:, None] - window
            if chosen_KQS is not None:
                some_KQS = lax.dynamic_slice_in_dim(chosen_KQS, number * step, step, axis=2)
                seen_QS = seen_QS[None] & some_KQS
            scores = _scores(q_KGQH, k_KSH, seen_QS, scale, cap, marked)
            return fold(state, scores, partial(_mix, v_KSH=v_KSH))

        if at_once:
            for number in range(table_RN.shape[1] // columns):
                # Without the barrier the scores of all steps may live at once.
                table_1N, state = lax.optimization_barrier((table_1N, state))
                state = column(jnp.int32(number), state)
            return state
        begin = 0 if window is None else jnp.maximum(length - window + 1, 0) // step
        end = jnp.where(
            jnp.any(mine_Q1),
            jnp.minimum((length + step - 1) // step, table_RN.shape[1] // columns),
            0,
        )
        return lax.fori_loop(begin, end, column, state)

    if at_once:
        return row(jnp.int32(0), state)
    return lax.fori_loop(0, past.count, row, state)


def _scores(
    q_KGQH: jax.Array,
    k_KSH: jax.Array,
    seen_QS: jax.Array | None,
    scale: float,
    cap: float,
    marked: bool,
) -> jax.Array:
    s_KGQS = jnp.einsum("kgqh,ksh->kgqs", q_KGQH, k_KSH, preferred_element_type=jnp.float32) * scale
    s_KGQS = capped(seen_scores(s_KGQS) if marked else s_KGQS, cap)
    if seen_QS is None:
        return s_KGQS
    seen_KQS = seen_QS if seen_QS.ndim == 3 else seen_QS[None]
    return jnp.where(seen_KQS[:, None], s_KGQS, MASKED)


def _mix(p_KGQS: jax.Array, v_KSH: jax.Array) -> jax.Array:
    return jnp.einsum(
        "kgqs,ksh->kgqh", p_KGQS.astype(v_KSH.dtype), v_KSH, preferred_element_type=jnp.float32
    )
