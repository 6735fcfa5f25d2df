"""Reading and writing KV pages: `pages_PKSH`, one component (K or V) of one layer on one dp rank.

Page P, kv head K, slot S, head size H: heads before slots, so that a page's bytes of one head are
one run. All functions take LOCAL shards and are pure; the caller's jit donates the pages, and each
of these then writes in place (a copy of the pool would cost more than the whole step). They know
nothing of sequences beyond the coordinates given.

Invariants: a page id of `P` or more means "nowhere": the row is dropped (padding). Negative ids are
not allowed: they would count from the end. Pages must only ever hold finite values: attention
multiplies stale slots by zero.

Pages may be of a narrower type than the model computes in (fp8, as bytes). What is written is
rounded to it first (`as_kept`), and what is read, from pages or from the chunk at hand, is what was
kept (`as_read`): so tokens do not depend on how a prompt is cut, nor on where it is computed. On a
CPU pages of bfloat16 are kept as their bits (`kept_dtype`)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.ops.quantize import FP8_LARGEST
from jdisagg.ops.quarantine import MARKER, SHOWS


def kept_dtype(dtype: str, platform: str) -> jnp.dtype:
    """The type of the arrays in which KV of `dtype` is kept: bfloat16 as its bits on a CPU. XLA of
    JAX before 0.12 computes there in float32 what it is asked for in bfloat16, writes too: one of a
    row converted the whole pool, and converted it back."""
    return jnp.dtype("uint16" if (dtype, platform) == ("bfloat16", "cpu") else dtype)


def as_kept(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Finite values in the type of pages. 16 bits are bfloat16's (`kept_dtype`). Bytes are fp8
    (e4m3fn: 3 bits of mantissa, 2^-9 the smallest), in which values beyond +-448 are 448, and the
    marker of a broken sequence, which it has no room for, is its NaN. They are kept as bytes for
    XLA widens arrays of fp8 for nearly all that it does with them: a write of one row was a copy of
    the pool."""
    if values.dtype == dtype:
        return values
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(values.astype(jnp.bfloat16), dtype)
    if dtype != jnp.uint8:
        return values.astype(dtype)
    limited = jnp.clip(values, -FP8_LARGEST, FP8_LARGEST)
    limited = jnp.where(jnp.abs(values) > SHOWS, jnp.nan, limited)
    return lax.bitcast_convert_type(limited.astype(jnp.float8_e4m3fn), jnp.uint8)


def as_read(kept: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What attention takes of kept values: finite, in `dtype`."""
    if kept.dtype == jnp.uint16:
        return lax.bitcast_convert_type(kept, jnp.bfloat16).astype(dtype)
    if kept.dtype != jnp.uint8:
        return kept
    values = lax.bitcast_convert_type(kept, jnp.float8_e4m3fn).astype(dtype)
    return jnp.where(jnp.isnan(values), jnp.asarray(MARKER, dtype), values)


class PastPages(NamedTuple):
    """The earlier tokens of the sequences of a prefill chunk. Rows 0..count-1 have a past, of
    lengths_R tokens; 0 is allowed. Of latent attention there are no `v_pages_PKSH`."""

    k_pages_PKSH: jax.Array
    v_pages_PKSH: jax.Array | None
    table_RN: jax.Array
    lengths_R: jax.Array
    count: jax.Array


def token_coordinates(
    table_RN: jax.Array, row_T: jax.Array, positions_T: jax.Array, *, pages: int, slots: int
) -> tuple[jax.Array, jax.Array]:
    """Page and slot of each token: row `row_T` of the page table, absolute position `positions_T`.

    Tokens with a negative row (padding), or with a position beyond the table, get page `pages`:
    nowhere."""
    columns = table_RN.shape[1]
    column_T = positions_T // slots
    inside_T = (row_T >= 0) & (positions_T >= 0) & (column_T < columns)
    page_T = table_RN.at[jnp.maximum(row_T, 0), jnp.where(inside_T, column_T, 0)].get(mode="clip")
    return jnp.where(inside_T, page_T, pages).astype(jnp.int32), jnp.where(
        inside_T, positions_T % slots, 0
    ).astype(jnp.int32)


def decode_coordinates(
    table_BN: jax.Array, positions_B: jax.Array, *, slots: int
) -> tuple[jax.Array, jax.Array]:
    """Page and slot of one new token a sequence. Positions must lie inside the table (padding rows
    own dummy pages)."""
    page_B = jnp.take_along_axis(table_BN, (positions_B // slots)[:, None], axis=1, mode="clip")[
        :, 0
    ]
    return page_B, positions_B % slots


def write_tokens(
    pages_PKSH: jax.Array, kv_TKH: jax.Array, page_T: jax.Array, slot_T: jax.Array, *, unique: bool
) -> jax.Array:
    """Writes one row a token, for any coordinates.

    `unique=True` promises that all coordinates are in range and differ from each other (decode:
    padding rows of the batch own distinct dummy rows). `unique=False` drops rows whose page is out
    of range; of rows that share a coordinate any one wins."""
    kv_TKH = as_kept(kv_TKH, pages_PKSH.dtype)
    rows = pages_PKSH.at[page_T, :, slot_T]
    if unique:
        return rows.set(kv_TKH, mode="promise_in_bounds", unique_indices=True)
    return rows.set(kv_TKH, mode="drop")


def insert_block(
    pages_PKSH: jax.Array, block_KTH: jax.Array, page_T: jax.Array, slot_T: jax.Array
) -> jax.Array:
    """Inserts a heads-first block [K, T, H], as it is received; any coordinates, rows out of range
    are dropped. By rows of H values: on a CPU a third as fast as `insert_run`."""
    head_K1 = jnp.arange(pages_PKSH.shape[1], dtype=jnp.int32)[:, None]
    return pages_PKSH.at[page_T[None, :], head_K1, slot_T[None, :]].set(
        as_kept(block_KTH, pages_PKSH.dtype), mode="drop"
    )


def insert_run(
    pages_PKSH: jax.Array, run_KTH: jax.Array, page: jax.Array, slot: jax.Array
) -> jax.Array:
    """Inserts heads-first rows [K, T, H] into slots [slot, slot + T) of one page; both must be in
    range."""
    return lax.dynamic_update_slice(
        pages_PKSH, as_kept(run_KTH, pages_PKSH.dtype)[None], (page, 0, slot, 0)
    )


def read_run(pages_PKSH: jax.Array, page: jax.Array, slot: jax.Array, tokens: int) -> jax.Array:
    """What `insert_run` wrote: [K, T, H]."""
    return lax.dynamic_slice(
        pages_PKSH, (page, 0, slot, 0), (1, pages_PKSH.shape[1], tokens, pages_PKSH.shape[3])
    )[0]


def copy_pages(pages_PKSH: jax.Array, source_C: jax.Array, destination_C: jax.Array) -> jax.Array:
    """Copies whole pages (copy-on-write). Sources are read before any destination is written; a
    destination out of range is dropped."""
    return pages_PKSH.at[destination_C].set(pages_PKSH.at[source_C].get(mode="clip"), mode="drop")


def gather_tokens(pages_PKSH: jax.Array, page_T: jax.Array, slot_T: jax.Array) -> jax.Array:
    """The rows at these coordinates, heads first: [K, T, H]. For tests and for looking at a
    cache."""
    return pages_PKSH.at[page_T, :, slot_T].get(mode="clip").swapaxes(0, 1)


def gather_columns(
    pages_PKSH: jax.Array, table_BN: jax.Array, column: jax.Array | int, count: int
) -> jax.Array:
    """`count` columns of the page table from `column` on, as one contiguous [B, K, count * S, H].

    Rows of (page, head) are gathered, so that the result needs no transpose.
    """
    pages, heads, slots, width = pages_PKSH.shape
    batch = table_BN.shape[0]
    table_BC = lax.dynamic_slice(table_BN, (0, column), (batch, count))
    row_BKC = table_BC[:, None, :] * heads + jnp.arange(heads, dtype=table_BN.dtype)[None, :, None]
    rows = (
        pages_PKSH.reshape(pages * heads, slots * width).at[row_BKC].get(mode="promise_in_bounds")
    )
    return rows.reshape(batch, heads, count * slots, width)


class SpanRows(NamedTuple):
    """Pages of one component as rows, one for each head's part of a page that a span of `length`
    positions reads: made once, outside the loop over spans."""

    rows_RW: jax.Array
    length: int
    heads: int
    slots: int
    pages_PKSH: jax.Array


def span_rows(pages_PKSH: jax.Array, length: int) -> SpanRows:
    """`length` is a multiple of the page size, or divides it."""
    pages, heads, slots, width = pages_PKSH.shape
    run = min(length, slots)
    assert length % run == 0 and slots % run == 0
    return SpanRows(
        pages_PKSH.reshape(pages * heads * (slots // run), run * width),
        length,
        heads,
        slots,
        pages_PKSH,
    )


def gather_span(span: SpanRows, table_BN: jax.Array, index: jax.Array) -> jax.Array:
    """Positions [index * length, (index + 1) * length) of each sequence, as one contiguous [B, K,
    length, H].

    On CPU this is a decode step's costliest copy, hence its form. A gather as one sees it, rows
    straight into [B, K, length, H], has an inner loop over H, which XLA unrolls wholly into scalar
    moves: half the speed of memory in float32, a quarter in bfloat16. So rows stay rows on either
    side (the pages' are made outside the loop, a barrier keeps the result's), and a choice that is
    always the same makes a fusion of it, which runs on all cores; a gather of its own runs on one.
    A single sequence is gathered plainly: there is little to copy, and with so few rows XLA lays
    the pages' rows out anew, a copy of the whole pool in every step."""
    heads, slots, length = span.heads, span.slots, span.length
    batch, columns, parts = table_BN.shape[0], max(1, length // slots), max(1, slots // length)
    table_BC = lax.dynamic_slice(table_BN, (0, index // parts * columns), (batch, columns))
    row_BKC = table_BC[:, None, :] * heads + jnp.arange(heads, dtype=table_BN.dtype)[None, :, None]
    row_BKC = row_BKC * parts + (index % parts).astype(table_BN.dtype)
    shape = (batch, heads, length, span.rows_RW.shape[1] * columns // length)
    if batch == 1:
        # here: made outside the loop, they are what would be laid out anew
        rows_RW = span.pages_PKSH.reshape(span.rows_RW.shape)
        return rows_RW.at[row_BKC].get(mode="promise_in_bounds").reshape(shape)
    row_R = row_BKC.reshape(-1)
    found_RW = span.rows_RW.at[row_R].get(mode="promise_in_bounds")
    found_RW = lax.optimization_barrier(
        jnp.where((row_R >= 0)[:, None], found_RW, jnp.zeros((), found_RW.dtype))
    )
    return found_RW.reshape(shape)
