"""Runs a prefill chunk and one decode step in one program.

Embedding, projections, MLPs, experts and norms are computed once over the T tokens of the chunk
followed by the B rows of the step, so that weights are read once. KV of both is written before
either attends.

A chunk does not change the step's tokens, because each row has its own sums."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jdisagg.executor.choose import logits
from jdisagg.executor.chunk_attention import ChunkAttention, RankChunk
from jdisagg.executor.decode_program import DecodePrograms
from jdisagg.executor.draft_rows import DraftRows, Slots
from jdisagg.executor.page_pool import LayerPages, Pools
from jdisagg.executor.prefill_program import (
    ChunkArrays,
    ChunkForm,
    asks_of_prompts,
    compute_draft_kv,
)
from jdisagg.executor.programs import RANK, Programs
from jdisagg.executor.results import StepChoice
from jdisagg.executor.slot_state import RowFormat
from jdisagg.executor.step_attention import StepAttention
from jdisagg.executor.weights import LayerCalls, Part, Weights
from jdisagg.messages.step_commands import PrefillChunk
from jdisagg.model_api import AdapterRows, Attend, AttendOptions, GivenTokens, Index, Shards
from jdisagg.ops.quarantine import reveal
from jdisagg.scheduler.executor import MeshLimits

_FORM = ChunkForm(packed=True)


class MixedPrograms:
    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        pools: Pools,
        shards: Shards,
        limits: MeshLimits,
        rows: RowFormat,
        decode: DecodePrograms,
    ) -> None:
        self._programs, self._weights, self._shards, self._pools = programs, weights, shards, pools
        self._limits, self._rows, self._decode = limits, rows, decode

    def arrays(self, command: PrefillChunk) -> ChunkArrays | None:
        """Returns the arrays of a chunk, or None if no mixed program runs this chunk."""
        limits, platform = self._limits, self._shards.platform
        if command.chunk_tokens not in limits.mixed_buckets or asks_of_prompts(command):
            return None
        if any(row.images for row in command.rows):
            return None
        return ChunkArrays.build(command, limits, _FORM, platform)

    def warm_up(self, width: int) -> None:
        slots = ((self._limits.slots_per_rank,),) * self._limits.ranks
        chunk = ChunkArrays.build(PrefillChunk(-1, width, ()), self._limits, _FORM)
        self.run(chunk, slots, False)[1].parts[0].token.block_until_ready()

    def run(self, chunk: ChunkArrays, slots: Slots, masked: bool) -> tuple[jax.Array, StepChoice]:
        """Issues the programs of a chunk and a decode step.

        Returns:
            Activations after the last layer, [ranks, R, D], as from `PrefillPrograms.run`, and the
                step's tokens, as from `DecodePrograms.step`.
        """
        arrays = self._programs.argument(chunk.arguments)
        ends: list[jax.Array] = []

        def forward(arguments: tuple[Any, ...], bucket: int) -> Any:
            stem, layers, kept, hot, _, ints, floats, batch, *_ = arguments
            step = (stem, layers, kept, hot, ints, floats, batch, arrays, *self._drafting)
            new_pages, logits_BV, x_RD, drafted = self._program(chunk, bucket, step)(*step)
            self._pools.pages.put(len(new_pages), drafted)
            ends.append(x_RD)
            return (new_pages, *kept[1:]), logits_BV

        chosen = self._decode.step_with(slots, masked, forward)
        return ends[0], StepChoice((chosen,))

    @property
    def _drafting(self) -> tuple[Any, list[LayerPages]]:
        part, pages = self._drafter, self._pools.pages.layers[self._draft_layers]
        return () if part is None else part.leaves, pages

    @property
    def _drafter(self) -> Part | None:
        """The layer that drafts tokens, if it has KV."""
        return self._weights.next_token if self._pools.pages.layers[self._draft_layers] else None

    @property
    def _draft_layers(self) -> slice:
        return slice(len(self._weights.layers), None)

    def _program(self, chunk: ChunkArrays, bucket: int, arguments: tuple[Any, ...]) -> Any:
        def build() -> Any:
            stem_specs, layer_specs, kept_specs = self._decode.model_specs()
            part = self._drafter
            draft_specs = self._pools.pages.specs()[self._draft_layers]
            in_specs = (stem_specs, layer_specs, kept_specs, *(RANK,) * 4, chunk.specs)
            in_specs += (() if part is None else part.specs, draft_specs)
            return self._programs.compile(
                self._body(),
                arguments,
                in_specs,
                (kept_specs[0], RANK, RANK, draft_specs),
                donate=(2, 9),
            )

        return self._programs.get(("mixed", chunk.tokens.shape[1]), build)

    def _body(self) -> Any:
        weights, common, rows, pools = self._weights, self._shards, self._rows, self._pools
        sizes, spec = (pools.pages.rank_rows, pools.pages.page_size), self._limits.kv_spec

        def body(
            stem_leaves: Any,
            layer_leaves: Any,
            kept: Any,
            hot: Any,
            ints: Any,
            floats: Any,
            batch: Any,
            arrays: Any,
            draft_leaves: Any,
            draft_pages: Any,
        ) -> Any:
            *arrays, spatial = arrays
            tokens_T, positions_T, segment_T, table_RN, past_R, continuing, states, last_R = (
                array[0] for array in arrays
            )
            step = DraftRows.of(rows, batch[0], None, (1, 0), hot[0], ints[0], floats[0])
            row, tokens = step.all, tokens_T.shape[0]
            shards = common
            if rows.adapters:
                own_T = jnp.take(states[:, 3], segment_T, mode="clip")
                slot_T = jnp.concatenate((own_T, rows.adapter(row.ints)))
                shards = dataclasses.replace(common, adapters=AdapterRows(slot_T))
            own = (positions_T, segment_T, table_RN, past_R, continuing, last_R)
            chunk = ChunkAttention(RankChunk(*own, True), *sizes, shards)
            of_step = StepAttention(step, rows, pools, 0, shards.platform)
            both = _MixedAttention(chunk, of_step, tokens, row.slot.shape[0])

            stem: Any = weights.stem.merge(stem_leaves)
            if isinstance(spatial, tuple):
                at_T = jnp.concatenate((positions_T, row.at))
            else:
                at_B3 = jnp.repeat(rows.turned(row)[:, None], 3, axis=1)
                at_T = jnp.concatenate((spatial[0], at_B3))
            valid_T = jnp.concatenate((segment_T >= 0, row.active))
            own_B = tokens + jnp.arange(row.slot.shape[0], dtype=jnp.int32)
            asked_R = jnp.concatenate((last_R, own_B))
            tokens_TB = jnp.concatenate((tokens_T, row.token))
            x_TD = stem.embed(tokens_TB, shards)
            given = GivenTokens(tokens_TB, x_TD) if weights.reads_tokens else None
            count, drafter, alone = len(layer_leaves), self._drafter, False
            tapped: list[jax.Array] = []

            def compute(
                part: Part,
                form: tuple[bool, bool, int | None],
                leaves: Any,
                layer_pages: LayerPages,
                x_TD: jax.Array,
            ) -> tuple[jax.Array, LayerPages]:
                ends, rows_alone, source = form
                layer: Any = part.merge(leaves)
                attend = both.over(layer_pages, rows_alone, source)
                more = {} if given is None else {"given": given}
                now_R = asked_R if ends else None
                x_TD = layer(x_TD, at_T, attend, shards, valid_T, now_R, **more)
                # A layer without KV does not call `attend`.
                if not layer_pages:
                    chunk.without_kv()
                return x_TD, chunk.pages.pop()

            calls = LayerCalls(compute, spec.selects or spec.shares)
            for number, (part, leaves, layer_pages) in enumerate(
                zip(weights.layers, layer_leaves, kept[0], strict=True)
            ):
                tapped += [x_TD[:tokens]] * weights.taps.count(number)
                ends = number == spec.last_stored
                alone |= ends
                form = ends, alone, spec.layers[number].source
                x_TD, written = calls(part, form, leaves, layer_pages, x_TD)
                chunk.pages.append(written)
                if ends:  # layers after this one have these rows alone
                    at_T, valid_T = jnp.take(at_T, asked_R, axis=0, mode="clip"), asked_R >= 0
                    shards, given = shards.of_rows(asked_R), given and given.of_rows(asked_R)
            if drafter is not None:
                attend = chunk.over(draft_pages[0], True, False)
                rows_T = (tokens_T, at_T[:tokens], segment_T)
                layer: Any = drafter.merge(draft_leaves)
                hidden = jnp.concatenate(tapped, -1) if tapped else stem.normed(x_TD[:tokens])
                compute_draft_kv(stem, layer, hidden, rows_T, attend, common)
                x_TD = jnp.take(x_TD, asked_R, axis=0, mode="clip")
            x_RD, x_BD = jnp.split(x_TD, (last_R.shape[0],))
            y_BD = stem.normed(reveal(x_BD))
            logits_BV = logits(stem, y_BD, shards, rows.vocabulary)
            return chunk.pages[:count], logits_BV[None], x_RD[None], chunk.pages[count:]

        return body


class _MixedAttention:
    """`tokens` of a chunk, followed by `rows` of a step."""

    def __init__(self, chunk: ChunkAttention, step: StepAttention, tokens: int, rows: int) -> None:
        self._chunk, self._step, self._tokens, self._rows = chunk, step, tokens, rows

    def over(self, layer_pages: LayerPages, rows_alone: bool, source: int | None) -> Attend:
        chunk, step, tokens = self._chunk, self._step, self._tokens

        def attend(
            q_TNH: jax.Array,
            k_TKH: jax.Array | None,
            v_TKH: jax.Array | None,
            **how: Unpack[AttendOptions],
        ) -> jax.Array:
            queries = q_TNH.shape[0] - self._rows
            of_chunk, of_step = _split(how.get("index"), queries, tokens)
            if source is not None:
                pages = chunk.pages[source]
                attend_chunk, k_part, v_part = chunk.reading(source, rows_alone), None, None
            else:
                assert k_TKH is not None
                k_part = k_TKH[:tokens]
                v_parts = (None, None) if v_TKH is None else (v_TKH[:tokens], v_TKH[tokens:])
                v_part, v_own = v_parts
                # The KV of chunk and step is written before any KV is read, so that XLA copies no
                # pages.
                pages = step.write(layer_pages, k_TKH[tokens:], v_own, of_step)
                attend_chunk = chunk.over(pages, rows_alone, False)
            how["index"] = of_chunk
            o_chunk = attend_chunk(q_TNH[:queries], k_part, v_part, **how)
            how["index"] = of_step
            pages = pages if source is not None else chunk.pages[-1]
            return jnp.concatenate((o_chunk, step.read(q_TNH[queries:], pages, how)))

        return attend


def _split(index: Index | None, queries: int, tokens: int) -> tuple[Index | None, Index | None]:
    if index is None:
        return None, None
    of_chunk = index.of_queries(lambda of_T: of_T[:queries])
    of_step = index.of_queries(lambda of_T: of_T[queries:])
    k_T1D = index.keys_T1D
    return of_chunk._replace(keys_T1D=k_T1D[:tokens]), of_step._replace(keys_T1D=k_T1D[tokens:])
