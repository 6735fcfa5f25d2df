"""Computes the attention of a prefill chunk's layers on one dp rank. Each layer first writes the
chunk's keys and values to the layer's pages. Then the layer's queries attend to the chunk. Rows
that continue an earlier chunk also attend to their pages.

Traced inside the program of a layer group (`prefill_program.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Unpack, cast

import jax
import jax.numpy as jnp

from jdisagg.executor.expert_reader import experts_as_values
from jdisagg.executor.page_pool import LayerPages
from jdisagg.model_api import Attend, AttendOptions, AttentionOptions, Index, Shards
from jdisagg.ops.kv_pages import as_kept, as_read, token_coordinates, write_tokens
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.prefill_attention import Chosen, PastPages, choose_in_chunk, prefill_attention
from jdisagg.ops.quarantine import seal


@dataclass(frozen=True)
class RankChunk:
    """One dp rank's part of a prefill chunk: T tokens of up to R rows (sequences) with N pages
    each.

    Attributes:
        segment_T: Index of each token's row; -1 for padding.
        past_R: Number of tokens (past) that are in each row's pages before this chunk.
        continuing: Number of rows that have a past. These rows come first.
    """

    positions_T: jax.Array
    segment_T: jax.Array
    table_RN: jax.Array
    past_R: jax.Array
    continuing: jax.Array
    sampling_R: jax.Array
    packed: bool


class _Selection(NamedTuple):
    """The last selection of positions: the indexer's inputs and pages, and the positions of each
    block of queries, None for all."""

    index: Index
    pages_PKSH: jax.Array
    chosen: Chosen | None


class _Places(NamedTuple):
    table_RN: jax.Array
    page_T: jax.Array
    slot_T: jax.Array


class _Stored(NamedTuple):
    """What a layer stored: its pages, and the chunk's part of them as attention reads it."""

    pages: LayerPages
    seen: Sequence[jax.Array]
    places: _Places


class ChunkAttention:
    """Builds the attention functions of one layer group. Called once for each layer, in order.

    Args:
        windows: Page table [R, N] of the sliding-window layers whose KV is in pages of their own,
            and the number of these pages of a dp rank. None without such layers.
    """

    def __init__(
        self,
        chunk: RankChunk,
        rank_rows: int,
        page_size: int,
        shards: Shards,
        windows: tuple[jax.Array, int] | None = None,
    ) -> None:
        self.pages: list[LayerPages] = []
        self.sent: list[tuple[jax.Array, ...]] = []
        self._chunk, self._shards = chunk, shards
        self._layer: tuple[int, LayerPages, bool] = (0, (), False)  # the number of earlier ones
        self._selection: _Selection | None = None
        self._stored: dict[int, _Stored] = {}  # by place in the group
        self._recorded = 0  # components of a layer that are written by `recording`
        self._in_pages, *in_windows = [
            _Places(
                table_RN,
                *token_coordinates(
                    table_RN, chunk.segment_T, chunk.positions_T, pages=pages, slots=page_size
                ),
            )
            for table_RN, pages in ((chunk.table_RN, rank_rows), *([windows] if windows else []))
        ]
        self._in_windows = in_windows[0] if in_windows else self._in_pages

    def without_kv(self) -> None:
        self.pages.append(())
        self.sent.append(())

    def over(
        self, layer_pages: LayerPages, rows_alone: bool, sends: bool, windowed: bool = False
    ) -> Attend:
        """Returns the attention function of the next layer.

        Args:
            rows_alone: Whether queries are computed only for the last token of each row that
                samples, instead of for all tokens.
        """
        places = self._in_windows if windowed else self._in_pages
        self._layer = (len(self.pages), layer_pages, sends)

        def attend(
            q_TNH: jax.Array,
            k_TKH: jax.Array | None,
            v_TKH: jax.Array | None,
            **how: Unpack[AttendOptions],
        ) -> jax.Array:
            assert k_TKH is not None
            parts = seal(k_TKH, v_TKH, how.get("index"))
            own, others = layer_pages[: len(parts)], layer_pages[len(parts) :]
            assert len(others) <= self._recorded, "a layer stores what it has pages for"
            kept = tuple(as_kept(part, pages.dtype) for part, pages in zip(parts, own, strict=True))
            written = self._write(own, kept, places)
            stored = _Stored(written, [as_read(part, k_TKH.dtype) for part in kept], places)
            self._stored[len(self.pages)] = stored
            self.pages.append(written + others)
            self.sent.append(tuple(part.swapaxes(0, 1) for part in kept if sends))
            return self._attended(q_TNH, stored, how, rows_alone)

        return attend

    def recording(self, shards: Shards) -> Shards:
        """Returns `shards` with which layers write the experts that they choose to their pages."""

        def record(experts_TJ: jax.Array) -> None:
            earlier, pages, sends = self._layer
            if len(self.pages) == earlier:  # a layer that does not attend
                self.pages.append(pages)
                self.sent.append(())
            part = as_kept(experts_as_values(experts_TJ, pages[-1].shape[-1]), pages[-1].dtype)
            written = self._write(pages[-1:], (part,), self._in_pages)
            self.pages[-1] = self.pages[-1][:-1] + written
            self.sent[-1] += (part.swapaxes(0, 1),) * sends

        self._recorded = 1
        return replace(shards, record=record)

    def reading(self, source: int, rows_alone: bool) -> Attend:
        """Returns the attention function of a layer that reads what an earlier layer stored, the
        layer at place `source` of the group."""

        def attend(
            q_TNH: jax.Array,
            k_TKH: jax.Array | None,
            v_TKH: jax.Array | None,
            **how: Unpack[AttendOptions],
        ) -> jax.Array:
            return self._attended(q_TNH, self._stored[source], how, rows_alone)

        return attend

    def _attended(
        self, q_TNH: jax.Array, stored: _Stored, how: AttendOptions, rows_alone: bool
    ) -> jax.Array:
        pages, seen, places = stored
        index, platform = how.get("index"), self._shards.platform
        v_TKH, v_pages = (None, None) if how.get("latent") else (seen[1], pages[1])
        i_pages = None if index is None else pages[-1]
        chunk, rows = self._chunk, self._chunk.sampling_R.shape[0]
        if rows_alone and not q_TNH.shape[0]:
            return q_TNH
        follows = how.pop("follows", False)
        options = cast(AttentionOptions, how)
        options["index"] = index and index._replace(keys_T1D=seen[-1])
        if rows_alone:
            if follows:
                options["index"], i_pages = self._index_of_rows()
            at_R = jnp.take(chunk.positions_T, chunk.sampling_R, mode="clip")
            return paged_attention(
                q_TNH,
                pages[0],
                v_pages,
                places.table_RN[:rows],
                at_R,
                index_pages_PKSH=i_pages,
                platform=platform,
                **options,
            )
        where = chunk.segment_T, chunk.positions_T
        past = self._past(places.table_RN, pages[0], v_pages, i_pages)
        if (index := options["index"]) is not None and not index.block:
            assert i_pages is not None
            chosen = choose_in_chunk(index, *where, past, platform=platform)
            self._selection = _Selection(index, i_pages, chosen)
            options["index"], follows = None, True
        return prefill_attention(
            q_TNH,
            seen[0],
            v_TKH,
            *where,
            past,
            chosen=self._selection.chosen if follows and self._selection else None,
            packed=chunk.packed,
            rows=chunk.table_RN.shape[0],
            platform=platform,
            device_kind=self._shards.device_kind,
            **options,
        )

    def _index_of_rows(self) -> tuple[Index, jax.Array]:
        """Returns the last indexer's inputs for the last tokens of the rows that sample, and its
        pages."""
        assert self._selection is not None, "a layer group begins with a layer that selects"
        index, pages_PKSH, _ = self._selection
        rows_R = self._chunk.sampling_R
        return index.of_queries(lambda x_TX: jnp.take(x_TX, rows_R, 0, mode="clip")), pages_PKSH

    def _write(
        self, layer_pages: LayerPages, kept: Sequence[jax.Array], places: _Places
    ) -> LayerPages:
        """Writing before any read makes XLA run the scatter before the loop over pages, so that XLA
        copies no pages."""
        return tuple(
            write_tokens(
                pages,
                part,
                places.page_T,
                places.slot_T,
                unique=False,
                platform=self._shards.platform,
            )
            for pages, part in zip(layer_pages, kept, strict=True)
        )

    def _past(
        self,
        table_RN: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array | None,
        i_pages: jax.Array | None,
    ) -> PastPages:
        chunk = self._chunk
        return PastPages(k_pages, v_pages, table_RN, chunk.past_R, chunk.continuing, i_pages)
