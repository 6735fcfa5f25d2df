"""Attention of a decode step over the KV pages: writes the keys and values of the step's rows, then
attends from each row up to its own position."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Unpack, cast

import jax
import jax.numpy as jnp

from jdisagg.executor.draft_rows import DraftRows
from jdisagg.executor.expert_reader import experts_as_values
from jdisagg.executor.page_pool import LayerPages, PagePool, Pools
from jdisagg.executor.slot_state import BatchRows, RowFormat
from jdisagg.model_api import Attend, AttendOptions, AttentionOptions, Index, Shards
from jdisagg.ops.kv_pages import decode_coordinates, write_tokens
from jdisagg.ops.paged_attention import paged_attention, paged_selection
from jdisagg.ops.quarantine import seal
from jdisagg.ops.sparse_attention import Selected


class _Places(NamedTuple):
    table_BN: jax.Array
    page_B: jax.Array
    slot_B: jax.Array


class StepAttention:
    def __init__(
        self, step: DraftRows, rows: RowFormat, pools: Pools, ring_pages: int, platform: str
    ) -> None:
        self._step, self._platform = step, platform
        row = step.all
        _, table_TN = rows.limit_and_table(row.ints)
        ring_TN = _ring_table(rows.state(row.ints), table_TN.shape[1], ring_pages)
        self._in_pages = _places(table_TN, row, pools.pages)
        self._in_rings = _places(ring_TN, row, pools.rings)
        self._positions_BQ = step.positions_BQ
        self._selected: Selected | None = None  # by the last layer with an indexer of positions
        # Pages of the present layer, those of earlier layers, and their number.
        self._layer: tuple[LayerPages, list[LayerPages], int] = ((), [], 0)
        self._recorded = 0  # components of a layer that are written by `recording`

    def over(
        self,
        pages: LayerPages,
        rings: LayerPages,
        new: tuple[list[LayerPages], list[LayerPages]],
        source: int | None,
    ) -> Attend:
        """Returns the attention function of the next layer. It appends the updated page arrays to
        one of the lists in `new`: that of pages or that of rings. The function of a layer that
        reads the KV of an earlier layer, at place `source` of these lists, only reads."""
        if source is not None:
            pages, rings = (of_layers[source] for of_layers in new)
        layer_pages, places = (rings, self._in_rings) if rings else (pages, self._in_pages)
        keep = new[1] if rings else new[0]
        self._layer = (layer_pages, keep, len(keep))

        def attend(
            q_TNH: jax.Array,
            k_TKH: jax.Array | None,
            v_TKH: jax.Array | None,
            **how: Unpack[AttendOptions],
        ) -> jax.Array:
            if source is not None:
                return self._attend(q_TNH, layer_pages, places, how)
            assert k_TKH is not None
            parts = seal(k_TKH, v_TKH, how.get("index"))
            own, others = layer_pages[: len(parts)], layer_pages[len(parts) :]
            assert len(others) <= self._recorded, "a layer stores what it has pages for"
            written = _write(own, places, parts)
            keep.append(written + others)
            return self._attend(q_TNH, written, places, how)

        return attend

    def recording(self, shards: Shards) -> Shards:
        """Returns `shards` with which layers write the experts that they choose to their pages."""

        def record(experts_TJ: jax.Array) -> None:
            pages, keep, earlier = self._layer
            if len(keep) == earlier:  # a layer that does not attend
                keep.append(pages)
            part = experts_as_values(experts_TJ, pages[-1].shape[-1])
            keep[-1] = keep[-1][:-1] + _write(pages[-1:], self._in_pages, (part,))

        self._recorded = 1
        return replace(shards, record=record)

    def write(
        self, pages: LayerPages, k_TKH: jax.Array, v_TKH: jax.Array | None, index: Index | None
    ) -> LayerPages:
        return _write(pages, self._in_pages, seal(k_TKH, v_TKH, index))

    def read(self, q_TNH: jax.Array, pages: LayerPages, how: AttendOptions) -> jax.Array:
        return self._attend(q_TNH, pages, self._in_pages, how)

    def _attend(
        self, q_TNH: jax.Array, written: LayerPages, places: _Places, how: AttendOptions
    ) -> jax.Array:
        step, positions_BQ, index = self._step, self._positions_BQ, how.get("index")
        options, table_BN = how.copy(), places.table_BN[: positions_BQ.shape[0]]
        follows = options.pop("follows", False)
        platform = self._platform
        if index is not None:
            options["index"] = index = index.of_queries(partial(_slot_rows, step))
        if index is not None and not index.block:
            where = written[-1], table_BN, positions_BQ
            self._selected = paged_selection(index, *where, platform=platform)
            options["index"], follows = None, True
        o_TNH = paged_attention(
            _slot_rows(step, q_TNH),
            written[0],
            None if how.get("latent") else written[1],
            table_BN,
            positions_BQ,
            index_pages_PKSH=None if index is None else written[-1],
            selected=self._selected if follows else None,
            platform=platform,
            **cast(AttentionOptions, options),
        )
        if not step.drafts:
            return o_TNH
        return step.by_row(o_TNH.reshape(*positions_BQ.shape, *o_TNH.shape[1:]))


def _write(layer_pages: LayerPages, places: _Places, parts: Sequence[jax.Array]) -> LayerPages:
    return tuple(
        write_tokens(pages, part, places.page_B, places.slot_B, unique=True)
        for pages, part in zip(layer_pages, parts, strict=True)
    )


def _places(table_BN: jax.Array, row: BatchRows, pool: PagePool) -> _Places:
    """Inactive rows write to the pool's dummy pages."""
    size, row_B = pool.page_size, jnp.arange(row.slot.shape[0], dtype=jnp.int32)
    page_B, slot_B = decode_coordinates(table_BN, row.at, slots=size)
    return _Places(
        table_BN,
        jnp.where(row.active, page_B, pool.pages_per_rank + row_B // size),
        jnp.where(row.active, slot_B, row_B % size),
    )


def _ring_table(slot_B: jax.Array, columns: int, ring_pages: int) -> jax.Array:
    turn_N = jnp.arange(columns, dtype=jnp.int32) % max(1, ring_pages)
    return slot_B[:, None] * ring_pages + turn_N[None, :]


def _slot_rows(step: DraftRows, of_T: jax.Array) -> jax.Array:
    return step.by_slot(of_T).reshape(-1, *of_T.shape[1:]) if step.drafts else of_T
