"""Decode over cached latents (the absorbed form of `ops/latent_attention.py`) as a GPU kernel:
Pallas, Triton backend, with the splits of `paged_attention_pallas`.

The latent and the rotary part are read separately, because Triton's blocks are powers of two.
`interpret=True` runs the kernel on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jdisagg.ops.kv_pages import as_read
from jdisagg.ops.online_softmax import MASKED
from jdisagg.ops.optional_kernels import LATENT_ATTENTION, usable
from jdisagg.ops.paged_attention_pallas import (
    LONG_SPLITS,
    PROGRAMS,
    ROWS,
    SHARE,
    STAGES,
    STEP_BYTES,
    WARPS,
    Ref,
    merged,
    shares,
    triton,
)
from jdisagg.ops.quarantine import SHOWS


def applies(q_TNH: jax.Array, pages_P1SH: jax.Array, rank: int) -> bool:
    """Whether the kernel supports the sizes of latent and rotary part: Triton's blocks are powers
    of two."""
    turned = q_TNH.shape[-1] - rank
    return (
        triton is not None
        and usable(LATENT_ATTENTION)
        and pages_P1SH.dtype in (q_TNH.dtype, jnp.uint8)
        and q_TNH.dtype != jnp.float32  # its blocks would not fit a multiprocessor
        and 16 <= rank <= 512
        and turned >= 16
        and rank & (rank - 1) == turned & (turned - 1) == 0
    )


def latent_attention(
    q_TNH: jax.Array,
    pages_P1SH: jax.Array,
    rank: int,
    table_BN: jax.Array,
    positions_BQ: jax.Array,
    *,
    scale: float,
    window: int | None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns each head's attention-weighted sum of latents, [T, N, rank] in q's dtype, for queries
    of the absorbed form. Other arguments are as in `ops.paged_attention.paged_attention`."""
    assert triton is not None, "ask `applies` first"
    (batch, per), (_, heads, width) = positions_BQ.shape, q_TNH.shape
    pages, _, slots, _ = pages_P1SH.shape
    last_B = positions_BQ.max(axis=1)
    blocks = -(-per * heads // ROWS)
    step = max(16, min(64, STEP_BYTES // (rank * q_TNH.dtype.itemsize)))
    steps = -(-table_BN.shape[1] * slots // step)
    even = splits or max(1, min(steps, PROGRAMS // (batch * blocks)))
    longest = -(-table_BN.shape[1] * slots // SHARE)
    splits = min(steps, max(even, min(LONG_SPLITS, longest)))
    out = lambda *tail: jax.ShapeDtypeStruct((batch, blocks, splits, ROWS, *tail), jnp.float32)  # noqa: E731
    # Each program writes its rows of one split.
    own = lambda *tail: pl.BlockSpec(  # noqa: E731
        (None, None, None, ROWS, *tail), lambda b, k, i: (b, k, i, 0, *(0 for _ in tail))
    )
    mixed_BKIRH, top_BKIR, total_BKIR = pl.pallas_call(
        partial(
            _kernel, rank=rank, scale=scale, window=window, even=even, splits=splits, size=step
        ),
        grid=(batch, blocks, splits),
        in_specs=[
            pl.BlockSpec((None, per * heads, width), lambda b, k, i: (b, 0, 0)),
            pl.BlockSpec((pages, None, slots, width), lambda b, k, i: (0, 0, 0, 0)),
            pl.BlockSpec((None, table_BN.shape[1]), lambda b, k, i: (b, 0)),
            pl.BlockSpec((None, per), lambda b, k, i: (b, 0)),
            pl.BlockSpec((None,), lambda b, k, i: (b,)),
            pl.BlockSpec((None,), lambda b, k, i: (b,)),
        ],
        out_specs=[own(rank), own(), own()],
        out_shape=[out(rank), out(), out()],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="jdisagg_latent_attention",
    )(
        q_TNH.reshape(batch, per * heads, width),
        pages_P1SH,
        table_BN,
        positions_BQ,
        positions_BQ[:, 0],
        last_B,
    )
    low_B, high_B, share_B = shares(positions_BQ[:, 0], last_B, window, even, splits, step)
    o_BKRH = merged(mixed_BKIRH, top_BKIR, total_BKIR, high_B - low_B, share_B)
    o_BRH = o_BKRH.astype(q_TNH.dtype).reshape(batch, blocks * ROWS, rank)[:, : per * heads]
    return o_BRH.reshape(batch * per, heads, rank)


def _kernel(
    q_ref: Ref,
    pages_ref: Ref,
    table_ref: Ref,
    positions_ref: Ref,
    first_ref: Ref,
    last_ref: Ref,
    mixed_ref: Ref,
    top_ref: Ref,
    total_ref: Ref,
    *,
    rank: int,
    scale: float,
    window: int | None,
    even: int,
    splits: int,
    size: int,
) -> None:
    (heads, width), rows, per = q_ref.shape, ROWS, positions_ref.shape[0]
    pages, slots, _ = pages_ref.shape
    (columns,) = table_ref.shape
    row_R, inner_H = jnp.arange(rows, dtype=jnp.int32), jnp.arange(rank, dtype=jnp.int32)
    turned_H = rank + jnp.arange(width - rank, dtype=jnp.int32)
    grid = lambda first, last: (  # noqa: E731
        jnp.broadcast_to(first[:, None], (first.shape[0], last.shape[0])),
        jnp.broadcast_to(last[None, :], (first.shape[0], last.shape[0])),
    )
    at_RH, mine_R = grid(row_R, inner_H), pl.program_id(1) * rows + row_R

    def queries(values_H: jax.Array) -> jax.Array:
        head_RH, at_RH = grid(mine_R, values_H)
        return triton.load(q_ref.at[head_RH, at_RH], mask=head_RH < heads, other=0.0)

    q_RH, turned_RH = queries(inner_H), queries(turned_H)
    first, last = first_ref[...], last_ref[...]
    at_own_R = (
        triton.load(positions_ref.at[jnp.minimum(mine_R // (heads // per), per - 1)])
        if per > 1
        else jnp.broadcast_to(last, (rows,))
    )
    oldest = 0 if window is None else jnp.maximum(first - (window - 1), 0)
    low, high, share = shares(first, last, window, even, splits, size)
    begin = low + pl.program_id(2) * share

    def body(
        step: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top_R, total_R, mixed_RH = state
        key_S = step * size + jnp.arange(size, dtype=jnp.int32)
        seen_S = (key_S <= last) & (key_S >= oldest)
        seen_RS = key_S[None, :] <= at_own_R[:, None]
        if window is not None:
            seen_RS &= key_S[None, :] > at_own_R[:, None] - window
        page_S = triton.load(
            table_ref.at[jnp.minimum(key_S // slots, columns - 1)], mask=seen_S, other=0
        )
        page_S = jnp.clip(page_S, 0, pages - 1)

        def cached(values_H: jax.Array) -> jax.Array:
            page_SH, at_SH = grid(page_S, values_H)
            slot_SH, _ = grid(key_S % slots, values_H)
            seen_SH = jnp.broadcast_to(seen_S[:, None], at_SH.shape)
            kept_SH = triton.load(pages_ref.at[page_SH, slot_SH, at_SH], mask=seen_SH, other=0.0)
            return as_read(kept_SH, q_ref.dtype)

        inner_SH = cached(inner_H)
        s_RS = triton.dot(q_RH, inner_SH, trans_b=True)
        s_RS = (s_RS + triton.dot(turned_RH, cached(turned_H), trans_b=True)) * scale
        s_RS = jnp.where(jnp.abs(s_RS) <= SHOWS, s_RS, 0.0)  # as `quarantine.seen_scores`
        s_RS = jnp.where(seen_RS, s_RS, MASKED)
        new_top_R = jnp.maximum(top_R, s_RS.max(axis=-1))
        fade_R, p_RS = jnp.exp(top_R - new_top_R), jnp.exp(s_RS - new_top_R[:, None])
        o_RH = triton.dot(p_RS.astype(inner_SH.dtype), inner_SH)
        return new_top_R, total_R * fade_R + p_RS.sum(axis=-1), mixed_RH * fade_R[:, None] + o_RH

    @pl.when(begin < high)
    def _() -> None:
        state = (
            jnp.full((rows,), MASKED, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, rank), jnp.float32),
        )
        end = jnp.minimum(begin + share, high)
        top_R, total_R, mixed_RH = lax.fori_loop(begin, end, body, state)
        triton.store(mixed_ref.at[at_RH], mixed_RH)
        triton.store(top_ref.at[row_R], top_R)
        triton.store(total_ref.at[row_R], total_R)
