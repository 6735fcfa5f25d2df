"""Prefill attention as a TPU kernel: Pallas, Mosaic backend. One kernel computes *self* and *past*
(`ops/prefill_attention.py`) for all sequences of a packed chunk, in one online softmax.

The grid is (kv heads, items). An item is a block of queries and a block of keys that at least one
of these queries attends to: keys of the chunk, or some pages of one row. Key blocks in the future,
outside the window or of other sequences have no item, so they are not read and take no time.

Latent attention with a past is not supported, because its keys in pages have another width.
`interpret=True` runs the kernel on a CPU."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jdisagg.layout.platforms import traits_of
from jdisagg.ops.kv_pages import PastPages, as_read
from jdisagg.ops.online_softmax import MASKED, capped
from jdisagg.ops.optional_kernels import TPU_PREFILL, usable
from jdisagg.ops.quarantine import seen_scores

Ref = Any  # a Pallas reference; JAX has no public type for it

ROWS = 1024  # rows of a product: queries of a block times query heads of a kv head
LEAST_QUERIES = 16  # rows of a tile of bfloat16
LEAST_CHUNK = 128
KEY_BLOCK = 512  # keys of an item
MOST_PAGES = 16  # of an item
LARGEST_HEAD = 256
MOST_SCALARS = 1 << 17  # 512 KiB of scalar memory, half of what a core has


class _Items(NamedTuple):
    """For an operand that an item does not use, the index of the previous item is repeated, so that
    nothing is fetched."""

    block: jax.Array
    own: jax.Array
    row: jax.Array
    pages_row: jax.Array
    group: jax.Array
    table: jax.Array
    length: jax.Array


class _Sizes(NamedTuple):
    tokens: int
    queries: int
    keys: int
    pages: int
    groups: int
    slots: int


def applies(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    past: PastPages | None,
    *,
    platform: str,
    device_kind: str,
    latent: bool,
) -> bool:
    """Whether the kernel supports the device, the types and the sizes. Float32 is excluded, because
    Mosaic's compilation of the kernel's float32 products was not verified."""
    tpu = traits_of(platform).kernels == "tpu" and device_kind.startswith("TPU")
    half = q_TNH.dtype == jnp.bfloat16
    return tpu and half and usable(TPU_PREFILL) and supports(q_TNH, k_TKH, past, latent=latent)


def supports(q_TNH: jax.Array, k_TKH: jax.Array, past: PastPages | None, *, latent: bool) -> bool:
    groups, width = q_TNH.shape[1] // k_TKH.shape[1], q_TNH.shape[2]
    sizes = _sizes(q_TNH, k_TKH, past)
    fits = (
        q_TNH.dtype in (jnp.bfloat16, jnp.float32)
        and width % 64 == 0
        and width <= LARGEST_HEAD
        and groups * LEAST_QUERIES <= ROWS
    )
    if past is None:
        return fits
    items = _most_items(sizes, past.table_RN.shape[0])
    scalars = 5 * items + past.table_RN.shape[0] * sizes.groups * sizes.pages
    return (
        fits
        and not latent
        and past.k_pages_PKSH.dtype in (q_TNH.dtype, jnp.uint8)
        and sizes.slots % (32 // past.k_pages_PKSH.dtype.itemsize) == 0  # rows of a tile
        and scalars <= MOST_SCALARS
    )


def attend(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    segment_T: jax.Array,
    positions_T: jax.Array,
    start_T: jax.Array,
    past: PastPages | None,
    *,
    scale: float,
    window: int | None,
    cap: float,
    sinks_N: jax.Array | None,
    marked: bool,
    interpret: bool = False,
) -> jax.Array:
    """Computes the attention of a chunk like `ops.prefill_attention.prefill_attention`, except that
    the output for padding is undefined.

    Args:
        start_T: Index in the chunk of the first key that each token attends to.
        marked: Whether keys may contain the marker of `ops/quarantine.py`.
    """
    tokens, query_heads, width = q_TNH.shape
    heads, out_width = v_TKH.shape[1:]
    sizes = _sizes(q_TNH, k_TKH, past)
    room = sizes.tokens - tokens
    q_TNH, k_TKH, v_TKH = (
        jnp.pad(part, ((0, room), (0, 0), (0, 0))) for part in (q_TNH, k_TKH, v_TKH)
    )
    segment_T = jnp.pad(segment_T, (0, room), constant_values=-1)
    start_T = jnp.pad(start_T, (0, room), constant_values=tokens)
    positions_T = jnp.pad(positions_T, (0, room))
    items, count = _items(segment_T, positions_T, start_T, past, sizes, window)
    scalars = [*items, *([] if sinks_N is None else [sinks_N.astype(jnp.float32)])]
    columns = [start_T[:, None], segment_T[:, None], positions_T[:, None]]
    operands = _operands(columns, q_TNH, k_TKH, v_TKH, past, sizes)
    rows = (query_heads // heads, sizes.queries)
    out_shape = (heads, rows[0], sizes.tokens, out_width)
    o_KGTH = pl.pallas_call(
        partial(
            _kernel,
            sizes=sizes,
            scale=scale,
            window=window,
            cap=cap,
            marked=marked,
            sinks=sinks_N is not None,
        ),
        out_shape=jax.ShapeDtypeStruct(out_shape, q_TNH.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(heads, count),
            in_specs=[spec for _, spec in operands],
            out_specs=_by_query_block(*rows, out_width),
            scratch_shapes=[
                pltpu.VMEM((*rows, 1), jnp.float32),
                pltpu.VMEM((*rows, 1), jnp.float32),
                pltpu.VMEM((*rows, out_width), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(sizes, query_heads, width + out_width, q_TNH.dtype.itemsize),
        interpret=interpret,
        name="jdisagg_prefill_attention",
    )(*scalars, *(array for array, _ in operands))
    return o_KGTH.transpose(2, 0, 1, 3).reshape(sizes.tokens, query_heads, out_width)[:tokens]


def _operands(
    columns: list[jax.Array],
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    past: PastPages | None,
    sizes: _Sizes,
) -> list[tuple[jax.Array, pl.BlockSpec]]:
    heads, groups = k_TKH.shape[1], q_TNH.shape[1] // k_TKH.shape[1]
    q_KGTH = q_TNH.reshape(sizes.tokens, heads, groups, -1).transpose(1, 2, 0, 3)
    operands = [
        *((part, _spec((sizes.queries, 1), lambda k, i, s: (s.block[i], 0))) for part in columns),
        (q_KGTH, _by_query_block(groups, sizes.queries, q_TNH.shape[2])),
    ]
    for part in (k_TKH, v_TKH):
        own = _spec((None, sizes.keys, part.shape[2]), lambda k, i, s: (k, s.own[i], 0))
        operands.append((part.swapaxes(0, 1), own))

    def page(number: int, k: Any, i: Any, s: _Items) -> tuple[Any, ...]:
        column = s.group[i] * sizes.pages + number
        return s.table[s.pages_row[i] * (sizes.groups * sizes.pages) + column], k, 0, 0

    for pages_PKSH in () if past is None else (past.k_pages_PKSH, past.v_pages_PKSH):
        assert pages_PKSH is not None
        block = (None, None, *pages_PKSH.shape[2:])
        operands += [(pages_PKSH, _spec(block, partial(page, n))) for n in range(sizes.pages)]
    return operands


def _by_query_block(groups: int, queries: int, width: int) -> pl.BlockSpec:
    return _spec((None, groups, queries, width), lambda k, i, s: (k, 0, s.block[i], 0))


def _spec(shape: tuple[int | None, ...], index: Any) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda k, i, *s: index(k, i, _Items(*s[: len(_Items._fields)])))


def _sizes(q_TNH: jax.Array, k_TKH: jax.Array, past: PastPages | None) -> _Sizes:
    tokens, groups = q_TNH.shape[0], q_TNH.shape[1] // k_TKH.shape[1]
    # Mosaic unrolls a float32 product into six bfloat16 products.
    small = q_TNH.dtype.itemsize > 2
    rows, most = (ROWS // 4, KEY_BLOCK // 2) if small else (ROWS, KEY_BLOCK)
    padded = max(LEAST_CHUNK, 1 << (tokens - 1).bit_length())
    if tokens > most:
        padded = -(-tokens // most) * most
    keys = min(padded, most)
    several = 1 << max(0, (rows // groups).bit_length() - 1)
    queries = min(keys, max(LEAST_QUERIES, several))
    if past is None:
        return _Sizes(padded, queries, keys, 0, 0, 0)
    slots = past.k_pages_PKSH.shape[2]
    pages = max(1, min(most // slots, past.table_RN.shape[1], MOST_PAGES))
    column_groups = -(-past.table_RN.shape[1] // pages)
    return _Sizes(padded, queries, keys, pages, column_groups, slots)


def _most_own_items(sizes: _Sizes) -> int:
    lows = range(0, sizes.tokens, sizes.queries)
    return sum((low + sizes.queries - 1) // sizes.keys + 1 for low in lows)


def _most_items(sizes: _Sizes, rows: int) -> int:
    """Rows are contiguous in the chunk, so there are at most `blocks + rows - 1` pairs of a block
    and a row."""
    blocks = sizes.tokens // sizes.queries
    return _most_own_items(sizes) + (blocks + rows - 1) * sizes.groups


def _cost(sizes: _Sizes, query_heads: int, widths: int, itemsize: int) -> pl.CostEstimate:
    scores = _most_own_items(sizes) * sizes.queries * sizes.keys * query_heads
    moved = 2 * sizes.tokens * query_heads * widths * itemsize
    return pl.CostEstimate(flops=2 * scores * widths, transcendentals=scores, bytes_accessed=moved)


def _items(
    segment_T: jax.Array,
    positions_T: jax.Array,
    start_T: jax.Array,
    past: PastPages | None,
    sizes: _Sizes,
    window: int | None,
) -> tuple[_Items, jax.Array]:
    blocks, rows = sizes.tokens // sizes.queries, 0 if past is None else past.table_RN.shape[0]
    segment_BQ = segment_T.reshape(blocks, sizes.queries)
    valid_BQ = segment_BQ >= 0
    last_B = jnp.arange(1, blocks + 1, dtype=jnp.int32) * sizes.queries - 1
    first_B = jnp.where(valid_BQ, start_T.reshape(blocks, -1), sizes.tokens).min(1) // sizes.keys
    begin_BC, count_BC = first_B[:, None], last_B[:, None] // sizes.keys + 1 - first_B[:, None]
    count_BC = jnp.where(valid_BQ.any(1)[:, None], count_BC, 0)
    table_P, length_R = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    if past is not None:
        pages, columns = past.k_pages_PKSH.shape[0], past.table_RN.shape[1]
        wide = sizes.groups * sizes.pages - columns
        table_P = jnp.clip(jnp.pad(past.table_RN, ((0, 0), (0, wide))), 0, pages - 1).reshape(-1)
        row_R = jnp.arange(rows, dtype=jnp.int32)
        length_R = jnp.where(row_R < past.count, past.lengths_R, 0).astype(jnp.int32)
        mine_BRQ = segment_BQ[:, None, :] == row_R[None, :, None]
        step = sizes.pages * sizes.slots
        end_BR = jnp.where(mine_BRQ.any(2), (length_R + step - 1) // step, 0)
        begin_BR = jnp.zeros_like(end_BR)
        if window is not None:
            # The first position that the row's first token in this block attends to.
            oldest_BR = jnp.where(
                mine_BRQ, positions_T.reshape(blocks, 1, -1), jnp.iinfo(jnp.int32).max
            ).min(2)
            begin_BR = jnp.maximum(oldest_BR - (window - 1), 0) // step
        begin_BC = jnp.concatenate((begin_BR, begin_BC), 1)
        count_BC = jnp.concatenate((jnp.maximum(end_BR - begin_BR, 0), count_BC), 1)
    ends_C = jnp.cumsum(count_BC.reshape(-1), dtype=jnp.int32)
    at_I = jnp.arange(_most_items(sizes, rows), dtype=jnp.int32)
    cell_I = jnp.searchsorted(ends_C, at_I, side="right", method="compare_all").astype(jnp.int32)
    cell_I = jnp.minimum(cell_I, ends_C.size - 1)
    key_I = at_I - (ends_C - count_BC.reshape(-1))[cell_I] + begin_BC.reshape(-1)[cell_I]
    block_I, row_I = cell_I // (rows + 1), cell_I % (rows + 1)
    past_I = row_I < rows
    # For each item, the latest item up to it that reads pages.
    paged_I = lax.cummax(jnp.where(past_I, at_I, 0))
    some_I = past_I[paged_I]
    # On a dp rank without tokens, the list has one item of padding, that of the last cell.
    count, own_I = jnp.maximum(ends_C[-1], 1), jnp.where(past_I, first_B[block_I], key_I)
    items = _Items(
        block=jnp.where(at_I < count, block_I, -1),
        own=jnp.minimum(own_I, sizes.tokens // sizes.keys - 1),
        row=jnp.where(past_I, row_I, -1),
        pages_row=jnp.where(some_I, row_I[paged_I], 0),
        group=jnp.where(some_I, key_I[paged_I], 0),
        table=table_P,
        length=length_R,
    )
    return items, count


def _kernel(
    *refs: Ref,
    sizes: _Sizes,
    scale: float,
    window: int | None,
    cap: float,
    marked: bool,
    sinks: bool,
) -> None:
    scalars = len(_Items._fields)
    items, refs = _Items(*refs[:scalars]), refs[scalars:]
    sinks_ref, refs = (refs[0], refs[1:]) if sinks else (None, refs)
    start_ref, segment_ref, positions_ref, q_ref, k_ref, v_ref, *pages_refs = refs[:-4]
    o_ref, top_ref, total_ref, mixed_ref = refs[-4:]
    groups, queries, _ = q_ref.shape
    head, item = pl.program_id(0), pl.program_id(1)
    block, row = items.block[item], items.row[item]
    before = items.block[jnp.maximum(item - 1, 0)]
    after = items.block[jnp.minimum(item + 1, items.block.shape[0] - 1)]
    ends = (item + 1 == pl.num_programs(1)) | (after != block)

    @pl.when((item == 0) | (before != block))
    def _() -> None:
        mixed_ref[...] = jnp.zeros_like(mixed_ref)
        total_ref[...] = jnp.full_like(total_ref, float(sinks))
        top_ref[...] = jnp.full_like(top_ref, MASKED)
        if sinks_ref is not None:
            for group in range(groups):
                sink = sinks_ref[head * groups + group]
                top_ref[group] = jnp.full((queries, 1), sink, jnp.float32)

    def add(k_SH: jax.Array, v_SH: jax.Array, seen_QS: jax.Array) -> None:
        exact = lax.Precision.HIGHEST if k_SH.dtype == jnp.float32 else lax.Precision.DEFAULT
        product = partial(lax.dot_general, precision=exact, preferred_element_type=jnp.float32)
        q_RH = q_ref[...].reshape(groups * queries, -1)
        s_RS = product(q_RH, k_SH, (((1,), (1,)), ((), ()))) * scale
        s_GQS = capped(seen_scores(s_RS) if marked else s_RS, cap).reshape(groups, queries, -1)
        s_GQS = jnp.where(seen_QS[None], s_GQS, MASKED)
        top_GQ1 = top_ref[...]
        new_top_GQ1 = jnp.maximum(top_GQ1, s_GQS.max(axis=-1, keepdims=True))
        fade_GQ1, p_GQS = jnp.exp(top_GQ1 - new_top_GQ1), jnp.exp(s_GQS - new_top_GQ1)
        p_RS = p_GQS.reshape(groups * queries, -1).astype(v_SH.dtype)
        mixed_RH = product(p_RS, v_SH, (((1,), (0,)), ((), ())))
        top_ref[...] = new_top_GQ1
        total_ref[...] = total_ref[...] * fade_GQ1 + p_GQS.sum(axis=-1, keepdims=True)
        mixed_ref[...] = mixed_ref[...] * fade_GQ1 + mixed_RH.reshape(groups, queries, -1)

    def keys_from(first: jax.Array, count: int) -> jax.Array:
        return first + lax.broadcasted_iota(jnp.int32, (queries, count), 1)

    @pl.when(row < 0)
    def _() -> None:
        key_QS = keys_from(items.own[item] * sizes.keys, sizes.keys)
        at_QS = block * queries + lax.broadcasted_iota(jnp.int32, key_QS.shape, 0)
        add(k_ref[...], v_ref[...], (key_QS <= at_QS) & (key_QS >= start_ref[...]))

    if pages_refs:

        @pl.when(row >= 0)
        def _() -> None:
            step = sizes.pages * sizes.slots
            key_QS = keys_from(items.group[item] * step, step)
            seen_QS = (segment_ref[...] == row) & (key_QS < items.length[jnp.maximum(row, 0)])
            if window is not None:
                seen_QS &= key_QS > positions_ref[...] - window
            k_SH, v_SH = (
                as_read(jnp.concatenate([ref[...] for ref in part], axis=0), q_ref.dtype)
                for part in (pages_refs[: sizes.pages], pages_refs[sizes.pages :])
            )
            add(k_SH, v_SH, seen_QS)

    @pl.when(ends)
    def _() -> None:
        o_ref[...] = (mixed_ref[...] / total_ref[...]).astype(o_ref.dtype)
