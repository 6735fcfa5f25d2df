"""Attention of the layers of a prefill chunk on one dp rank: each layer's keys and values are first
written to its pages. Then its queries attend to the chunk and, for rows that continue, to their
pages.

Traced inside a layer group's program (`prefill_program.py`). Collects the updated pages of each
layer and the rows that a hand-off sends."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jdisagg.executor.page_pool import LayerPages
from jdisagg.model_api import Attend, Latent, Shards
from jdisagg.ops.kv_pages import as_kept, as_read, token_coordinates, write_tokens
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.prefill_attention import PastPages, prefill_attention
from jdisagg.ops.quarantine import seal


@dataclass(frozen=True)
class RankChunk:
    """A rank's part of a chunk: T tokens of up to R rows with N pages each.

    Attributes:
        positions_T: Position of each token in its sequence.
        segment_T: Row of each token; -1 for padding.
        table_RN: Page table.
        past_R: Number of tokens (past) that each row has in pages already.
        continuing: Number of rows with a past, which come first.
        sampling_R: Index of the last token of each row that samples.
        columns: Number of table columns that earlier positions may use; 0 is all of them, None
            means that every row is new.
        packed: Whether the chunk may have several rows.
    """

    positions_T: jax.Array
    segment_T: jax.Array
    table_RN: jax.Array
    past_R: jax.Array
    continuing: jax.Array
    sampling_R: jax.Array
    columns: int | None
    packed: bool


class ChunkAttention:
    """Attention of the layers of one group, called in their order."""

    def __init__(self, chunk: RankChunk, rank_rows: int, page_size: int, shards: Shards) -> None:
        self.pages: list[LayerPages] = []
        self.sent: list[tuple[jax.Array, ...]] = []
        self._chunk, self._shards = chunk, shards
        self._page_T, self._slot_T = token_coordinates(
            chunk.table_RN, chunk.segment_T, chunk.positions_T, pages=rank_rows, slots=page_size
        )

    def without_kv(self) -> None:
        """Records a layer without KV."""
        self.pages.append(())
        self.sent.append(())

    def over(self, layer_pages: LayerPages, rows_alone: bool, sends: bool) -> Attend:
        """Returns the attention of the next layer.

        Args:
            layer_pages: The layer's pages.
            rows_alone: Whether queries come only from the tokens that sample.
            sends: Whether the layer's KV is handed off with the chunk.
        """

        def attend(
            q_TNH: jax.Array,
            k_TKH: jax.Array,
            v_TKH: jax.Array | None,
            *,
            scale: float,
            window: int | None,
            cap: float = 0.0,
            sinks_N: jax.Array | None = None,
            latent: Latent | None = None,
        ) -> jax.Array:
            kept = tuple(
                as_kept(part, pages.dtype)
                for part, pages in zip(seal(k_TKH, v_TKH), layer_pages, strict=True)
            )
            written = self._write(layer_pages, kept)
            self.pages.append(written)
            self.sent.append(tuple(part.swapaxes(0, 1) for part in kept if sends))
            seen = [as_read(part, k_TKH.dtype) for part in kept]
            v_TKH, v_pages = (None, None) if latent else (seen[1], written[1])
            how = {"scale": scale, "window": window, "platform": self._shards.platform}
            how |= {"cap": cap, "sinks_N": sinks_N, "latent": latent}
            chunk, rows = self._chunk, self._chunk.sampling_R.shape[0]
            if rows_alone and not rows:
                return q_TNH
            if rows_alone:
                at_R = jnp.take(chunk.positions_T, chunk.sampling_R, mode="clip")
                return paged_attention(
                    q_TNH, written[0], v_pages, chunk.table_RN[:rows], at_R, **how
                )
            return prefill_attention(
                q_TNH,
                seen[0],
                v_TKH,
                chunk.segment_T,
                chunk.positions_T,
                self._past(written[0], v_pages),
                packed=chunk.packed,
                rows=chunk.table_RN.shape[0],
                device_kind=self._shards.device_kind,
                **how,
            )

        return attend

    def _write(self, layer_pages: LayerPages, kept: Sequence[jax.Array]) -> LayerPages:
        """Writes a layer's KV to its pages. It is written before any read, so that XLA runs the
        scatter before the loop over pages and copies nothing."""
        return tuple(
            write_tokens(pages, part, self._page_T, self._slot_T, unique=False)
            for pages, part in zip(layer_pages, kept, strict=True)
        )

    def _past(self, k_pages: jax.Array, v_pages: jax.Array | None) -> PastPages | None:
        chunk = self._chunk
        if chunk.columns is None:
            return None
        table = chunk.table_RN[:, : chunk.columns or None]
        return PastPages(k_pages, v_pages, table, chunk.past_R, chunk.continuing)
