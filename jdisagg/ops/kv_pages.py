"""Reads and writes KV pages.

All functions have no side effects, and take a device's local shards. The caller's jit must donate
the pages, so that writes are in place: a copy of the pool would cost more than the whole step.

Invariants: a page id of `P` or more marks padding, and writes to it are dropped. Negative ids are
not allowed, because indexing would count them from the end. Pages must hold finite values only,
because attention multiplies stale slots by zero.

Values are rounded to the narrower type first (`as_kept`), and attention reads rounded values both
from pages and from the current chunk (`as_read`). Output tokens thus do not depend on how a prompt
is divided into chunks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.ops.quantize import FP8_LARGEST
from jdisagg.ops.quarantine import MARKER, SHOWS


def kept_dtype(dtype: str, platform: str) -> jnp.dtype:
    """Returns the array type in which KV of `dtype` is stored: bfloat16 as its bits on a CPU.
    XLA:CPU of JAX before 0.12 emulates bfloat16 in float32, writes included, so that a write of one
    row would convert the whole pool twice."""
    bits = dtype == "bfloat16" and traits_of(platform).stores_bits
    return jnp.dtype("uint16" if bits else dtype)


def as_kept(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts finite values to the array type in which pages store them.

    uint16 holds the bits of bfloat16 (`kept_dtype`). uint8 holds fp8 (e4m3fn: 3 bits of mantissa,
    smallest 2^-9): values beyond +-448 are clipped, and the marker of a sequence with non-finite
    values (`ops/quarantine.py`) becomes NaN. Bytes are used because XLA widens fp8 arrays, which
    turned a write of one row into a copy of the pool."""
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
    """Converts stored values to finite values in `dtype`, the inputs of attention."""
    if kept.dtype == jnp.uint16:
        return lax.bitcast_convert_type(kept, jnp.bfloat16).astype(dtype)
    if kept.dtype != jnp.uint8:
        return kept
    values = lax.bitcast_convert_type(kept, jnp.float8_e4m3fn).astype(dtype)
    return jnp.where(jnp.isnan(values), jnp.asarray(MARKER, dtype), values)


# Largest number of pages that are read one by one. For a gather of few pages, XLA for TPUs copies a
# small pool to VMEM as a whole.
MOST_SLICES = 32


class PastPages(NamedTuple):
    """Pages with the earlier ("past") tokens of the sequences in a prefill chunk. Row r is one
    sequence with `lengths_R[r]` past tokens, possibly 0. Rows from `count` on have no past tokens.
    `v_pages_PKSH` is None for latent attention. `index_pages_PKSH` holds the keys of an indexer, if
    any."""

    k_pages_PKSH: jax.Array
    v_pages_PKSH: jax.Array | None
    table_RN: jax.Array
    lengths_R: jax.Array
    count: jax.Array
    index_pages_PKSH: jax.Array | None = None


def token_coordinates(
    table_RN: jax.Array, row_T: jax.Array, positions_T: jax.Array, *, pages: int, slots: int
) -> tuple[jax.Array, jax.Array]:
    """Returns page and slot of each token, from row `row_T` of the page table and absolute position
    `positions_T`. Tokens with a negative row (padding) or a position beyond the table get the page
    id `pages`, which is out of range, so that writes drop them."""
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
    """Returns page and slot of one new token per sequence. Positions must lie inside the table.
    Padding rows of the table must name dummy pages."""
    page_B = jnp.take_along_axis(table_BN, (positions_B // slots)[:, None], axis=1, mode="clip")[
        :, 0
    ]
    return page_B, positions_B % slots


def write_tokens(
    pages_PKSH: jax.Array,
    kv_TKH: jax.Array,
    page_T: jax.Array,
    slot_T: jax.Array,
    *,
    unique: bool,
    platform: str = "cpu",
) -> jax.Array:
    """Writes each token's keys or values at the token's page and slot.

    With `unique=True` the caller guarantees that all coordinates are in range and distinct, as in
    decode, where each padding row has its own dummy page. With `unique=False` tokens whose page is
    out of range are dropped. If tokens share a coordinate, an arbitrary one is written."""
    if not unique and traits_of(platform).whole_pages:
        # Heads are indexed too. For many rows whose index omits the heads, XLA would transpose the
        # pool to [.., K, H] and back.
        return insert_block(pages_PKSH, kv_TKH.swapaxes(0, 1), page_T, slot_T)
    kv_TKH = as_kept(kv_TKH, pages_PKSH.dtype)
    rows = pages_PKSH.at[page_T, :, slot_T]
    if unique:
        return rows.set(kv_TKH, mode="promise_in_bounds", unique_indices=True)
    return rows.set(kv_TKH, mode="drop")


def insert_block(
    pages_PKSH: jax.Array, block_KTH: jax.Array, page_T: jax.Array, slot_T: jax.Array
) -> jax.Array:
    """Inserts a received block [K, T, H], heads first, at each token's page and slot. Tokens out of
    range are dropped. On a CPU this is a third as fast as `insert_run`, because it writes single
    rows of H values."""
    head_K1 = jnp.arange(pages_PKSH.shape[1], dtype=jnp.int32)[:, None]
    return pages_PKSH.at[page_T[None, :], head_K1, slot_T[None, :]].set(
        as_kept(block_KTH, pages_PKSH.dtype), mode="drop"
    )


def insert_run(
    pages_PKSH: jax.Array, run_KTH: jax.Array, page: jax.Array, slot: jax.Array
) -> jax.Array:
    """Inserts [K, T, H], heads first, into slots [slot, slot + T) of one page. Page and slots must
    be in range."""
    return lax.dynamic_update_slice(
        pages_PKSH, as_kept(run_KTH, pages_PKSH.dtype)[None], (page, 0, slot, 0)
    )


def read_run(pages_PKSH: jax.Array, page: jax.Array, slot: jax.Array, tokens: int) -> jax.Array:
    """Reads slots [slot, slot + tokens) of one page: [K, T, H]. Inverse of `insert_run`."""
    return lax.dynamic_slice(
        pages_PKSH, (page, 0, slot, 0), (1, pages_PKSH.shape[1], tokens, pages_PKSH.shape[3])
    )[0]


def copy_pages(pages_PKSH: jax.Array, source_C: jax.Array, destination_C: jax.Array) -> jax.Array:
    """All sources are read before any destination is written. Destinations out of range are
    dropped."""
    return pages_PKSH.at[destination_C].set(pages_PKSH.at[source_C].get(mode="clip"), mode="drop")


def gather_tokens(pages_PKSH: jax.Array, page_T: jax.Array, slot_T: jax.Array) -> jax.Array:
    """Reads the keys or values at each token's page and slot, heads first: [K, T, H]."""
    return pages_PKSH.at[page_T, :, slot_T].get(mode="clip").swapaxes(0, 1)


def gather_block(
    pages_PKSH: jax.Array, page_T: jax.Array, slot_T: jax.Array, platform: str
) -> jax.Array:
    """Returns the same as `gather_tokens` for tokens at consecutive positions, in the form that is
    fast on the platform. Tokens whose page is out of range get unspecified finite values."""
    if not traits_of(platform).whole_pages:
        return gather_tokens(pages_PKSH, page_T, slot_T)
    _, heads, slots, width = pages_PKSH.shape
    tokens = page_T.shape[0]
    first_C = jnp.arange(-(-tokens // slots) + 1, dtype=jnp.int32) * slots - slot_T[0]
    page_C = page_T[jnp.clip(first_C, 0, tokens - 1)]
    if page_C.shape[0] > MOST_SLICES:
        found_CKSH = pages_PKSH.at[page_C].get(mode="clip")
        rows_KTH = found_CKSH.swapaxes(0, 1).reshape(heads, -1, width)
    else:
        found_KSH = (lax.dynamic_index_in_dim(pages_PKSH, page, keepdims=False) for page in page_C)
        rows_KTH = jnp.concatenate(list(found_KSH), axis=1)
    return lax.dynamic_slice_in_dim(rows_KTH, slot_T[0], tokens, 1)


def gather_columns(
    pages_PKSH: jax.Array, table_BN: jax.Array, column: jax.Array | int, count: int
) -> jax.Array:
    """Gathers the pages in `count` columns of the page table, from `column` on, into one contiguous
    [B, K, count * S, H]."""
    pages, heads, slots, width = pages_PKSH.shape
    batch = table_BN.shape[0]
    table_BC = lax.dynamic_slice(table_BN, (0, column), (batch, count))
    row_BKC = table_BC[:, None, :] * heads + jnp.arange(heads, dtype=table_BN.dtype)[None, :, None]
    rows = (
        pages_PKSH.reshape(pages * heads, slots * width).at[row_BKC].get(mode="promise_in_bounds")
    )
    return rows.reshape(batch, heads, count * slots, width)


def gather_pages(
    pages_PKSH: jax.Array, table_BN: jax.Array, column: jax.Array | int, count: int
) -> jax.Array:
    """Returns the same as `gather_columns` by whole pages. On a TPU an array is stored in tiles of
    its last two axes, so that reading rows of another width would copy the pool."""
    _, heads, slots, width = pages_PKSH.shape
    table_BC = lax.dynamic_slice(table_BN, (0, column), (table_BN.shape[0], count))
    found_BCKSH = pages_PKSH.at[table_BC].get(mode="promise_in_bounds")
    return found_BCKSH.swapaxes(1, 2).reshape(-1, heads, count * slots, width)


class SpanRows(NamedTuple):
    """Pages of one component, reshaped to rows for `gather_span`, which reads a span of `length`
    positions at a time. Each row is one head's part of a page within a span."""

    rows_RW: jax.Array
    length: int
    heads: int
    slots: int
    pages_PKSH: jax.Array


def span_rows(pages_PKSH: jax.Array, length: int) -> SpanRows:
    """Reshapes pages to rows for `gather_span`. The span's `length` must be a multiple or a divisor
    of the page size."""
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
    """Gathers positions [index * length, (index + 1) * length) of each sequence: contiguous [B, K,
    length, H].

    On CPU this is the costliest copy of a decode step. The source's rows are created outside the
    loop, and a barrier keeps XLA from reshaping the result early. A `where` that always selects one
    side turns the gather into a fusion, which runs on all cores instead of one. For a single
    sequence a plain gather is used, because with few rows XLA would change the layout of the
    source, a copy of the whole pool in every step."""
    heads, slots, length = span.heads, span.slots, span.length
    batch, columns, parts = table_BN.shape[0], max(1, length // slots), max(1, slots // length)
    table_BC = lax.dynamic_slice(table_BN, (0, index // parts * columns), (batch, columns))
    row_BKC = table_BC[:, None, :] * heads + jnp.arange(heads, dtype=table_BN.dtype)[None, :, None]
    row_BKC = row_BKC * parts + (index % parts).astype(table_BN.dtype)
    shape = (batch, heads, length, span.rows_RW.shape[1] * columns // length)
    if batch == 1:
        # Reshaped inside the loop, because XLA would copy rows that are made outside of it to
        # another layout.
        rows_RW = span.pages_PKSH.reshape(span.rows_RW.shape)
        return rows_RW.at[row_BKC].get(mode="promise_in_bounds").reshape(shape)
    row_R = row_BKC.reshape(-1)
    found_RW = span.rows_RW.at[row_R].get(mode="promise_in_bounds")
    found_RW = lax.optimization_barrier(
        jnp.where((row_R >= 0)[:, None], found_RW, jnp.zeros((), found_RW.dtype))
    )
    return found_RW.reshape(shape)
