"""Decode attention over KV pages as a GPU kernel (Pallas, Triton backend), on `pages [P, K, S, H]`.

Flash-decoding: a kernel program for each (sequence, kv head, split) loops over its share of the
sequence's positions with a running softmax, and XLA merges the splits. The number of splits depends
on each sequence's *own* length: as many as fill the GPU, or more as long as each has SHARE
positions, so that a single program need not process a long sequence among many short ones.
Positions hidden by length or window are not read.

Triton has been deprecated in Pallas since JAX 0.11 and works in 0.10.2 to 0.12. `interpret=True`
runs the same kernel on CPU, for tests."""

import importlib
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jdisagg.ops.kv_pages import as_read
from jdisagg.ops.online_softmax import MASKED, by_kv_head, by_token, capped
from jdisagg.ops.optional_kernels import PAGED_ATTENTION, usable

triton: Any
try:
    triton = importlib.import_module("jax.experimental.pallas.triton")
except ImportError:  # a JAX that has dropped it
    triton = None

ROWS = 16  # the smallest row count of a tensor-core product
Ref: TypeAlias = Any  # a Pallas reference; JAX has no public type for it
STEP_BYTES = 32768  # most bytes of keys in one step; four such buffers are in use
PROGRAMS = 528  # four for each multiprocessor of an H100 or H200
# For a sequence in a batch that fills the GPU: positions of a kernel program, and largest number of
# programs of the sequence.
SHARE, LONG_SPLITS = 512, 8
# Pipeline stages of Triton, which the load of page ids shares. With 5 stages, keys and values have
# two buffers each.
WARPS, STAGES = 4, 5


def applies(q_TNH: jax.Array, k_pages_PKSH: jax.Array) -> bool:
    """Whether the kernel is usable and supports the head size: Triton's blocks are powers of
    two."""
    width = q_TNH.shape[-1]
    return (
        triton is not None
        and usable(PAGED_ATTENTION)
        and k_pages_PKSH.dtype in (q_TNH.dtype, jnp.uint8)
        and 16 <= width <= 512
        and width & (width - 1) == 0
    )


def paged_attention(
    q_TNH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    table_BN: jax.Array,
    positions_BQ: jax.Array,
    *,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks_N: jax.Array | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes decode attention by the kernel. `ops.paged_attention.paged_attention` describes the
    arguments. `splits` is the number of kernel programs per (sequence, kv head)."""
    assert triton is not None, "ask `applies` first"
    (batch, per), (_, query_heads, width) = positions_BQ.shape, q_TNH.shape
    pages, heads, slots, _ = k_pages_PKSH.shape
    rows = per * query_heads // heads
    step = min(64, STEP_BYTES // (width * q_TNH.dtype.itemsize))
    steps = -(-table_BN.shape[1] * slots // step)
    even = splits or max(1, min(steps, PROGRAMS // (batch * heads)))
    longest = -(-table_BN.shape[1] * slots // SHARE)
    splits = min(steps, max(even, min(LONG_SPLITS, longest)))
    last_B = positions_BQ.max(axis=1)
    pool = pl.BlockSpec((pages, None, slots, width), lambda b, k, i: (0, k, 0, 0))
    mixed_BKIGH, top_BKIG, total_BKIG = pl.pallas_call(
        partial(_kernel, scale=scale, window=window, cap=cap, even=even, splits=splits, size=step),
        grid=(batch, heads, splits),
        in_specs=[
            pl.BlockSpec((None, None, rows, width), lambda b, k, i: (b, k, 0, 0)),
            pool,
            pool,
            pl.BlockSpec((None, table_BN.shape[1]), lambda b, k, i: (b, 0)),
            pl.BlockSpec((None, per), lambda b, k, i: (b, 0)),
            pl.BlockSpec((None,), lambda b, k, i: (b,)),
            pl.BlockSpec((None,), lambda b, k, i: (b,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, width), lambda b, k, i: (b, k, i, 0, 0)),
            pl.BlockSpec((None, None, None, rows), lambda b, k, i: (b, k, i, 0)),
            pl.BlockSpec((None, None, None, rows), lambda b, k, i: (b, k, i, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, splits, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, splits, rows), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, splits, rows), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="jdisagg_paged_attention",
    )(
        by_kv_head(q_TNH, batch, heads),
        k_pages_PKSH,
        v_pages_PKSH,
        table_BN,
        positions_BQ,
        positions_BQ[:, 0],
        last_B,
    )
    low_B, high_B, share_B = shares(positions_BQ[:, 0], last_B, window, even, splits, step)
    sinks_KG = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(heads, -1)
    if sinks_KG is not None and per > 1:
        sinks_KG = jnp.tile(sinks_KG, (1, per))
    o_BKGH = merged(mixed_BKIGH, top_BKIG, total_BKIG, high_B - low_B, share_B, sinks_KG)
    return by_token(o_BKGH.astype(q_TNH.dtype), q_TNH)


def merged(
    mixed_BKIGH: jax.Array,
    top_BKIG: jax.Array,
    total_BKIG: jax.Array,
    steps_B: jax.Array,
    share_B: jax.Array,
    sinks_KG: jax.Array | None = None,
) -> jax.Array:
    """Merges the partial softmax results of each sequence's splits (dimension I) into the attention
    output [B, K, G, H]. Splits without positions wrote nothing and are skipped. `sinks_KG` are
    additional scores in the softmax without a value."""
    first_I = jnp.arange(mixed_BKIGH.shape[2], dtype=jnp.int32)
    used_BI = first_I[None, :] * share_B[:, None] < steps_B[:, None]
    used_BKIG = used_BI[:, None, :, None]
    top_BKIG = jnp.where(used_BKIG, top_BKIG, MASKED)
    highest_BK1G = top_BKIG.max(2, keepdims=True)
    if sinks_KG is not None:
        highest_BK1G = jnp.maximum(highest_BK1G, sinks_KG[None, :, None, :])
    weight_BKIG = jnp.where(used_BKIG, jnp.exp(top_BKIG - highest_BK1G), 0.0)
    total_BKG = jnp.where(used_BKIG, total_BKIG * weight_BKIG, 0.0).sum(2)
    if sinks_KG is not None:
        total_BKG += jnp.exp(sinks_KG[None] - highest_BK1G[:, :, 0])
    mixed_BKIGH = jnp.where(used_BKIG[..., None], mixed_BKIGH * weight_BKIG[..., None], 0.0)
    return mixed_BKIGH.sum(2) / jnp.where(total_BKG > 0, total_BKG, 1.0)[..., None]


def shares(
    first: jax.Array, last: jax.Array, window: int | None, even: int, splits: int, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divides the positions that the tokens at `first` to `last` attend to among kernel programs,
    in steps of `size` positions. Returns the first step, the step after the last, and the number of
    steps per program. A program takes an even share of `even` programs, or SHARE positions if that
    needs at most `splits` programs."""
    oldest = jnp.zeros_like(first) if window is None else jnp.maximum(first - (window - 1), 0)
    low, high = oldest // size, last // size + 1
    steps = high - low
    share = jnp.minimum((steps + even - 1) // even, max(1, SHARE // size))
    return low, high, jnp.maximum(share, (steps + splits - 1) // splits)


def _kernel(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    table_ref: Ref,
    positions_ref: Ref,
    first_ref: Ref,
    last_ref: Ref,
    mixed_ref: Ref,
    top_ref: Ref,
    total_ref: Ref,
    *,
    scale: float,
    window: int | None,
    cap: float,
    even: int,
    splits: int,
    size: int,
) -> None:
    groups, width = q_ref.shape
    pages, slots, _ = k_ref.shape
    (columns,) = table_ref.shape
    row_R = jnp.arange(max(ROWS, pl.next_power_of_2(groups)), dtype=jnp.int32)
    own_R = row_R < groups
    rows, head_H = row_R.shape[0], jnp.arange(width, dtype=jnp.int32)
    at_RH = (
        jnp.broadcast_to(row_R[:, None], (rows, width)),
        jnp.broadcast_to(head_H[None, :], (rows, width)),
    )
    own_RH = jnp.broadcast_to(own_R[:, None], (rows, width))
    q_RH = triton.load(q_ref.at[at_RH], mask=own_RH, other=0.0)
    per = positions_ref.shape[0]
    first, last = first_ref[...], last_ref[...]
    at_R = (
        triton.load(positions_ref.at[jnp.minimum(row_R // (groups // per), per - 1)])
        if per > 1
        else jnp.broadcast_to(last, (rows,))
    )
    oldest = 0 if window is None else jnp.maximum(first - (window - 1), 0)
    low, high, share = shares(first, last, window, even, splits, size)
    begin = low + pl.program_id(2) * share
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    def body(
        step: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top_R, total_R, mixed_RH = state
        key_S = step * size + jnp.arange(size, dtype=jnp.int32)
        seen_S = (key_S <= last) & (key_S >= oldest)
        seen_RS = key_S[None, :] <= at_R[:, None]
        if window is not None:
            seen_RS &= key_S[None, :] > at_R[:, None] - window
        page_S = triton.load(
            table_ref.at[jnp.minimum(key_S // slots, columns - 1)], mask=seen_S, other=0
        )
        shape = size, width
        at_SH = (
            jnp.broadcast_to(jnp.clip(page_S, 0, pages - 1)[:, None], shape),
            jnp.broadcast_to((key_S % slots)[:, None], shape),
            jnp.broadcast_to(head_H[None, :], shape),
        )
        seen_SH = jnp.broadcast_to(seen_S[:, None], shape)
        k_SH, v_SH = (
            as_read(triton.load(pages.at[at_SH], mask=seen_SH, other=0.0), q_ref.dtype)
            for pages in (k_ref, v_ref)
        )
        s_RS = jnp.where(
            seen_RS,
            capped(triton.dot(q_RH, k_SH, trans_b=True, precision=precision) * scale, cap),
            MASKED,
        )
        new_top_R = jnp.maximum(top_R, s_RS.max(axis=-1))
        fade_R, p_RS = jnp.exp(top_R - new_top_R), jnp.exp(s_RS - new_top_R[:, None])
        o_RH = triton.dot(p_RS.astype(v_SH.dtype), v_SH, precision=precision)
        return new_top_R, total_R * fade_R + p_RS.sum(axis=-1), mixed_RH * fade_R[:, None] + o_RH

    @pl.when(begin < high)
    def _() -> None:
        state = (
            jnp.full((rows,), MASKED, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, width), jnp.float32),
        )
        end = jnp.minimum(begin + share, high)
        top_R, total_R, mixed_RH = lax.fori_loop(begin, end, body, state)
        triton.store(mixed_ref.at[at_RH], mixed_RH, mask=own_RH)
        triton.store(top_ref.at[row_R], top_R, mask=own_R)
        triton.store(total_ref.at[row_R], total_R, mask=own_R)
