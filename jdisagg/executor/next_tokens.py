"""Drafts tokens with the checkpoint's next-token layer, an EAGLE-3 head or an assistant, at the end
of a decode step.

A draft is sampled like the model's token at the same position, with the same random numbers and
filters. It then equals the model's token more often than the layer's most likely token would
(docs/speculation.md). Drafts never change the tokens of a stream, so leftover drafts of an earlier
sequence are harmless."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jdisagg.executor.choose import Chosen, RowsToChoose, choose, logits
from jdisagg.executor.draft_rows import DraftRows
from jdisagg.executor.page_pool import LayerPages, Pools
from jdisagg.executor.slot_state import BatchRows, RowFormat
from jdisagg.executor.step_attention import StepAttention
from jdisagg.executor.weights import Weights
from jdisagg.model_api import Attend, AttendOptions, DraftLayer, Shards
from jdisagg.ops.logit_shaping import update_counts
from jdisagg.scheduler.speculation import CHAIN

LayerKv = tuple[list[LayerPages], list[LayerPages], list[LayerPages]]


class NextTokens:
    def __init__(
        self, weights: Weights, shards: Shards, pools: Pools, rows: RowFormat, ring_pages: int
    ) -> None:
        self._weights, self._shards, self._pools = weights, shards, pools
        self._rows, self._ring_pages = rows, ring_pages

    @property
    def layers(self) -> range:
        return self._weights.draft_layers

    def draft(
        self,
        model: tuple[Any, Any],
        kept: LayerKv,
        y_TD: jax.Array,
        step: DraftRows,
        chosen: Chosen,
        drafts_SG: jax.Array,
        counts_SV: jax.Array,
    ) -> tuple[LayerKv, jax.Array]:
        """Drafts the tokens that follow the tokens of a step.

        Args:
            y_TD: The model's hidden states of the step's rows (see `DraftLayer.taps`).
            drafts_SG: Drafts of all slots: position of the first, and `CHAIN` tokens.
        """
        token_T = step.by_row(chosen.token)
        rows, slots = self._advanced(step.all, token_T), drafts_SG.shape[0]
        step, part = step._replace(all=rows), self._part(model)
        y_TD = part.fused(y_TD, self._shards)
        if not part.reads:
            y_TD, kept = self._layer(model, kept, y_TD, step, rows.token)
        count_B = step.by_slot(rows.active).astype(jnp.int32).sum(1, dtype=jnp.int32)
        last_B = jnp.take_along_axis(step.index_BQ, jnp.maximum(count_B - 1, 0)[:, None], 1)[:, 0]
        own: BatchRows = jax.tree.map(lambda x: jnp.take(x, last_B, axis=0), rows)
        y_BD, first = jnp.take(y_TD, last_B, axis=0), own
        index_B = jnp.arange(own.slot.shape[0], dtype=jnp.int32)
        tokens: list[jax.Array] = []
        for number in range(CHAIN):
            if number:
                own, y_BD = self._advanced(own, tokens[-1]), part.carried(y_BD, self._shards)
            if number or part.reads:
                at = first if part.reads else own
                alone = DraftRows(at, index_B, jnp.zeros_like(index_B), index_B[:, None])
                y_BD, kept = self._layer(model, kept, y_BD, alone, own.token)
            counts = partial(_counts_after, counts_SV, own.slot, tuple(tokens))
            draft = self._choose(model, y_BD, own, counts)
            tokens.append(draft.token)
        drafts_BG = jnp.stack((first.position + 1, *tokens), axis=1)
        slot_B = jnp.where(first.active, first.slot, slots)
        return kept, drafts_SG.at[slot_B].set(drafts_BG, mode="drop")

    def _advanced(self, rows: BatchRows, token_T: jax.Array) -> BatchRows:
        limit_T, _ = self._rows.limit_and_table(rows.ints)
        position_T = rows.position + 1
        active_T = rows.active & (token_T >= 0) & (position_T < limit_T)
        return rows._replace(
            token=jnp.where(active_T, token_T, 0), position=position_T, active=active_T
        )

    def _part(self, model: tuple[Any, Any]) -> DraftLayer:
        part = self._weights.next_token
        assert part is not None
        return part.merge(model[1])  # type: ignore[return-value]

    def _layer(
        self,
        model: tuple[Any, Any],
        kept: LayerKv,
        y_TD: jax.Array,
        step: DraftRows,
        token_T: jax.Array,
    ) -> tuple[jax.Array, LayerKv]:
        stem, layer, rows = self._weights.stem.merge(model[0]), self._part(model), step.all
        if layer.reads:  # the model has no KV of the newest token yet
            step = step._replace(all=rows._replace(position=rows.position - 1))
        attention = StepAttention(
            step, self._rows, self._pools, self._ring_pages, self._shards.platform
        )
        written: list[LayerPages] = []
        if layer.reads:
            attend = self._reading(attention, kept)
        else:
            (pages,), _, (rings,) = kept
            attend = attention.over(pages, rings, (written, written), None)
        y_TD = layer(
            stem.embed(token_T, self._shards),  # type: ignore[attr-defined]
            y_TD,
            self._rows.turned(rows),
            attend,
            self._shards,
            rows.active,
        )
        if written:
            pages, states, rings = kept
            kept = (pages, states, written) if rings[0] else (written, states, rings)
        return y_TD, kept

    def _reading(self, attention: StepAttention, kept: LayerKv) -> Attend:
        """Returns an attention function that reads KV of the model's layers."""
        pages, _, rings = kept

        def attend(
            q_TNH: jax.Array,
            k_TKH: jax.Array | None,
            v_TKH: jax.Array | None,
            **how: Unpack[AttendOptions],
        ) -> jax.Array:
            place = how.pop("source") - self.layers.start
            return attention.over((), (), (pages, rings), place)(q_TNH, None, None, **how)

        return attend

    def _choose(
        self,
        model: tuple[Any, Any],
        y_BD: jax.Array,
        own: BatchRows,
        counts: Callable[[], jax.Array],
    ) -> Chosen:
        logits_BV = self._part(model).logits(y_BD, self._shards)
        if logits_BV is None:
            stem: Any = self._weights.stem.merge(model[0])
            logits_BV = logits(stem, y_BD, self._shards, self._rows.vocabulary, apart=True)
        return choose(
            self._rows,
            logits_BV,
            RowsToChoose(own.ints, own.floats, own.at + 1, own.active),
            counts,
            self._shards,
        )


def _counts_after(
    counts_SV: jax.Array, slot_B: jax.Array, drafts: Sequence[jax.Array]
) -> jax.Array:
    counts_BV = jnp.take(counts_SV, slot_B, axis=0, mode="clip")
    for token_B in drafts:
        counts_BV = update_counts(counts_BV, token_B)
    return counts_BV
