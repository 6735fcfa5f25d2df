"""Runs decode steps and owns the state of the decode slots. One step serves the batches of all dp
ranks.

The slot state stays on the device between steps. Each step updates the token and position of its
slots. The host can therefore issue the next step before it has read the last step's tokens. A batch
is any subset of the slots, padded to a compiled batch size (bucket). Padding rows write to dummy
pages and yield no token. A slot at its limit does not advance. Pages, hot state and counts are
donated and updated in place.

One step is one program over the whole mesh (`shard_map`). Each dp rank has its own slots, page
table and loop counts. The model's collectives exchange data between experts. Layers are unrolled,
because a scan would copy each layer's weights. The page table of a layer with a ring buffer is
computed from the slot. The buffer's pages repeat, so a new position overwrites one that is outside
every window.

If a row has a grammar or drafts, a step is two programs. The first is the forward pass, which
returns logits. The second chooses the tokens. With a grammar it is issued while the forward pass
runs, when the grammar masks are available. The forward pass may compute several positions of one
slot (`draft_rows.py`). All rows write their KV before any row attends, and each row attends up to
its own position. So a step with drafts gives the same tokens as successive steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.choose import Chosen, Variant, choose, logits
from jdisagg.executor.draft_rows import DraftPlan, DraftRows, Guesses, Slots
from jdisagg.executor.grammar_rows import GrammarRows
from jdisagg.executor.page_pool import Kept, LayerPages, PagePool, Pools
from jdisagg.executor.prefill_program import RANK
from jdisagg.executor.programs import Programs
from jdisagg.executor.slot_state import BatchRows, RowFormat
from jdisagg.executor.state_access import recur_over
from jdisagg.executor.weights import Weights
from jdisagg.messages.step_commands import SlotAdmit, SlotGrow
from jdisagg.model_api import AdapterRows, Attend, Index, Latent, Shards
from jdisagg.ops.kv_pages import decode_coordinates, write_tokens
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.quarantine import reveal, seal
from jdisagg.ops.sampling import WHOLE, VocabularyShard
from jdisagg.scheduler.executor import MeshLimits

ROWS_PER_UPDATE = 8


class _Places(NamedTuple):
    """Page table, and the page and offset that each row writes, in one page pool."""

    table_BN: jax.Array
    page_B: jax.Array
    slot_B: jax.Array


def _places(table_BN: jax.Array, row: BatchRows, pool: PagePool) -> _Places:
    """Returns where each row writes its KV. Inactive rows write to the pool's dummy pages."""
    size, row_B = pool.page_size, jnp.arange(row.slot.shape[0], dtype=jnp.int32)
    page_B, slot_B = decode_coordinates(table_BN, row.at, slots=size)
    return _Places(
        table_BN,
        jnp.where(row.active, page_B, pool.pages_per_rank + row_B // size),
        jnp.where(row.active, slot_B, row_B % size),
    )


def _ring_table(slot_B: jax.Array, columns: int, ring_pages: int) -> jax.Array:
    """Returns a page table in which the ring-buffer pages of each row's slot repeat."""
    turn_N = jnp.arange(columns, dtype=jnp.int32) % max(1, ring_pages)
    return slot_B[:, None] * ring_pages + turn_N[None, :]


def _slot_rows(step: DraftRows, of_T: jax.Array) -> jax.Array:
    """Orders values of a step's rows by slot, the rows of one slot in the order of positions."""
    return step.by_slot(of_T).reshape(-1, *of_T.shape[1:]) if step.drafts else of_T


class SlotState(NamedTuple):
    """The state of all decode slots as device arrays, with the columns of `slot_state`."""

    hot: jax.Array  # int32 [ranks, slots, 2]
    ints: jax.Array  # int32 [ranks, slots, I]
    floats: jax.Array  # float32 [ranks, slots, F]
    counts: jax.Array  # int32 [ranks, slots, V]


class DecodePrograms:
    """Builds and runs the decode programs, and owns the slot state. Used by the dispatch thread
    only."""

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        shards: Shards,
        pools: Pools,
        limits: MeshLimits,
        rows: RowFormat,
        grammars: GrammarRows,
    ) -> None:
        self._programs, self._weights, self._shards, self._pools = programs, weights, shards, pools
        self._limits, self._rows, self._grammars = limits, rows, grammars
        ranks, slots = limits.ranks, limits.slots_per_rank
        # The host keeps a copy, because growth changes part of a row.
        self._ints = np.zeros((ranks, slots, rows.ints), np.int32)
        self._floats = np.zeros((ranks, slots, rows.floats), np.float32)
        hot, counts = (
            np.zeros((ranks, slots, 2), np.int32),
            np.zeros((ranks, slots, rows.vocabulary), np.int32),
        )
        self._state = SlotState(*programs.put((hot, self._ints, self._floats, counts)))
        self._batch: tuple[Slots, jax.Array] | None = None

    def update(self, admits: Sequence[SlotAdmit], grows: Sequence[SlotGrow]) -> None:
        """Admits sequences to slots and extends the page tables of running sequences."""
        for admit in admits:
            ints, floats = self._ints[admit.rank, admit.slot], self._floats[admit.rank, admit.slot]
            self._rows.pack(ints, floats, admit.sample, admit.pages, admit.limit, admit.state)
            self._rows.pack_adapter(ints, admit.adapter)
        for grow in grows:
            self._rows.pack_pages(self._ints[grow.rank, grow.slot], grow.pages, grow.limit)
        for changed in _per_rank_groups([*admits, *grows], ROWS_PER_UPDATE):
            self._write_rows(changed)
        penalised = [admit for admit in admits if admit.sample.sampling.penalised]
        for changed in _per_rank_groups(penalised, 1):
            self._write_counts(changed)

    def step(self, slots: Slots, variant: Variant, guesses: Guesses | None = None) -> Chosen:
        """Issues one decode step. Returns the chosen tokens [ranks, b, Q] and log-probabilities,
        with rows in the order of `slots[rank]`. A row has more than one token if drafts of it were
        accepted, and NO_TOKEN after its last one. Q is 1 without drafts.

        Args:
            guesses: Drafts to verify. Those without an extra row are dropped.
        """
        width = max(1, max(len(row) for row in slots))
        bucket = next(size for size in self._limits.batch_buckets if size >= width)
        batch, guesses = self._batch_array(slots, bucket), guesses or {}
        if variant.masked:
            guesses = self._grammars.runs(slots, self._limits.extra_rows(bucket), guesses)
        if guesses or variant.masked:
            return self._step_in_two(slots, batch, variant, self._plan(guesses, bucket))
        hot, ints, floats, counts = self._state
        kept, hot, chosen, counts_out = self._program(bucket, variant)(
            *self._model(), hot, counts if variant.shaped else (), ints, floats, batch
        )
        self._pools.put(0, kept)
        self._state = SlotState(hot, ints, floats, counts_out if variant.shaped else counts)
        return chosen

    def _plan(self, guesses: Guesses, bucket: int) -> DraftPlan | None:
        limits = self._limits
        if not guesses:
            return None
        return DraftPlan.of(
            guesses, limits.ranks, bucket, limits.extra_rows(bucket), limits.longest_run
        )

    def _step_in_two(
        self, slots: Slots, batch: jax.Array, variant: Variant, plan: DraftPlan | None
    ) -> Chosen:
        """Issues a step as a forward pass and a choice. Calls may transfer the plan and masks."""
        bucket, drafts = batch.shape[1], self._programs.argument(plan.array) if plan else ()
        hot, ints, floats, counts = self._state
        with jax.transfer_guard_host_to_device("allow"):
            kept, logits_TV = self._forward(
                (*self._model(), hot, (), ints, floats, batch, drafts), bucket
            )
            self._pools.put(0, kept)
            mask: Any = ()
            if variant.masked:
                masks = self._grammars.masks(slots, logits_TV.shape[1], plan)
                mask = self._programs.argument(masks)
            state = (hot, counts if variant.shaped else (), ints, floats)
            hot, chosen, counts_out = self._choice(
                (*state, logits_TV, batch, drafts, mask), variant
            )
        self._state = SlotState(hot, ints, floats, counts_out if variant.shaped else counts)
        if variant.masked:
            self._grammars.issued(slots, chosen.token)
        return chosen

    def warm_drafts(self, bucket: int, variant: Variant) -> None:
        """Compiles the programs of a step with drafts, for one batch size."""
        nobody = (((self._limits.slots_per_rank,) * bucket),) * self._limits.ranks
        limits, rows = self._limits, self._batch_array(nobody, bucket)
        extra, longest = limits.extra_rows(bucket), limits.longest_run
        if longest > 1:
            plan = DraftPlan.of({}, limits.ranks, bucket, extra, longest)
            self._step_in_two(nobody, rows, variant, plan).token.block_until_ready()

    def _model(self) -> tuple[Any, Any, Kept]:
        return (
            self._weights.stem.leaves,
            [layer.leaves for layer in self._weights.layers],
            self._pools.kept(),
        )

    def warm_updates(self) -> None:
        """Compiles the programs of `update`, by running them without changes."""
        nothing: list[list[SlotAdmit | SlotGrow]] = [[] for _ in range(self._limits.ranks)]
        self._write_rows(nothing)
        self._write_counts(nothing)

    def _batch_array(self, slots: Slots, bucket: int) -> jax.Array:
        if self._batch is None or self._batch[0] != slots or self._batch[1].shape[1] != bucket:
            # A number out of range is no slot.
            rows = np.full((len(slots), bucket), self._limits.slots_per_rank, np.int32)
            for rank, row in enumerate(slots):
                rows[rank, : len(row)] = row
            self._batch = (slots, self._programs.put(rows))
        return self._batch[1]

    def _program(self, bucket: int, variant: Variant) -> Any:
        """Returns the program of a whole step."""

        def build() -> Any:
            hot, ints, floats, counts = self._state
            batch = jax.ShapeDtypeStruct((self._limits.ranks, bucket), jnp.int32)
            kept_specs, counts_spec = self._pools.specs(), RANK if variant.shaped else ()
            return self._programs.compile(
                self._step_body(variant),
                (*self._model(), hot, counts if variant.shaped else (), ints, floats, batch),
                (*self._model_specs(), RANK, counts_spec, RANK, RANK, RANK),
                (kept_specs, RANK, Chosen.specs(variant, self._programs), counts_spec),
                donate=(2, 3, 4),
            )

        return self._programs.get(("decode", bucket, variant), build)

    def _forward(self, arguments: tuple[Any, ...], bucket: int) -> Any:
        """Issues the forward pass of a step that runs as two programs. Its arguments are those of
        `_step_body`, the last one the array of a `DraftPlan`, or (). It returns the page pools and
        the logits [ranks, b + E, V]."""
        planned = RANK if len(arguments[-1]) else ()

        def build() -> Any:
            return self._programs.compile(
                self._step_body(None),
                arguments,
                (*self._model_specs(), RANK, (), RANK, RANK, RANK, planned),
                (self._pools.specs(), RANK),
                donate=(2,),
            )

        return self._programs.get(("forward", bucket, bool(planned)), build)(*arguments)

    def _choice(self, arguments: tuple[Any, ...], variant: Variant) -> Any:
        """Issues the second program of a step that runs as two programs. This program chooses the
        tokens. Its arguments are hot, counts, ints, floats, logits, batch, the array of a
        `DraftPlan` or (), and masks (uint32 [ranks, b + E, W]) or (). It returns hot, the choice,
        and counts."""
        programs, ending = self._programs, self._ending(variant)
        counts_spec = RANK if variant.shaped else ()
        *_, batch, plan, mask = arguments

        def body(hot: Any, counts: Any, ints: Any, floats: Any, logits_TV: Any, *rest: Any) -> Any:
            batch, plan, mask = rest
            rows = self._rows_of(batch, plan, hot, ints, floats)
            mask_TW = mask[0] if variant.masked else None
            return ending(rows, hot, counts, logits_TV[0], WHOLE, mask_TW)

        def build() -> Any:
            planned, masked = RANK if len(plan) else (), RANK if variant.masked else ()
            return programs.compile(
                body,
                arguments,
                (RANK, counts_spec, *(RANK,) * 4, planned, masked),
                (RANK, Chosen.specs(variant, programs), counts_spec),
                donate=(0, 1),
            )

        key = "choice", batch.shape[1], variant, len(plan) > 0
        return programs.get(key, build)(*arguments)

    def _rows_of(self, batch: Any, plan: Any, hot: Any, ints: Any, floats: Any) -> DraftRows:
        planned = plan[0] if len(plan) else None
        longest = self._limits.longest_run
        return DraftRows.of(self._rows, batch[0], planned, longest, hot[0], ints[0], floats[0])

    def _model_specs(self) -> tuple[Any, ...]:
        layers = [layer.specs for layer in self._weights.layers]
        return self._weights.stem.specs, layers, self._pools.specs()

    def _ending(self, variant: Variant) -> Any:
        """Returns the end of a step's program: a function from logits to the new `hot`, the choice
        and the new counts."""
        row_format, programs, platform = self._rows, self._programs, self._shards.platform

        def end(
            rows: DraftRows,
            hot: Any,
            counts: Any,
            logits_TV: jax.Array,
            shard: VocabularyShard,
            mask_TW: jax.Array | None = None,
        ) -> tuple[Any, Chosen, Any]:
            row = rows.all
            chosen = choose(
                variant,
                row_format,
                logits_TV,
                row.ints,
                row.floats,
                row.at + 1,
                row.active,
                rows.counts(counts[0]) if variant.shaped else None,
                shard,
                platform,
                mask_TW,
            )
            chosen, hot_S2, slot_B = rows.accept(chosen, hot[0])
            counts_out = (
                counts[0].at[slot_B].set(chosen.counts, mode="drop")[None]
                if chosen.counts is not None
                else ()
            )
            return hot_S2[None], chosen.on_rank(programs), counts_out

        return end

    def _step_body(self, variant: Variant | None) -> Any:
        """Returns the function that `shard_map` runs for a step. `variant` are the features that
        the rows need. None computes only the forward pass."""
        weights, common, rows = self._weights, self._shards, self._rows
        ending = None if variant is None else self._ending(variant)
        pools, nowhere, ring = self._pools, self._pools.states.rank_rows, self._limits.ring_pages

        def body(
            stem_leaves: Any,
            layer_leaves: Any,
            kept: Kept,
            hot: Any,
            counts: Any,
            ints: Any,
            floats: Any,
            batch: Any,
            plan: Any = (),
        ) -> Any:
            step = self._rows_of(batch, plan, hot, ints, floats)
            row, own, positions_BQ = step.all, batch.shape[1], step.positions_BQ
            _, table_TN = rows.limit_and_table(row.ints)
            at_T, slot_T = row.at, rows.state(row.ints)
            shards = common
            if rows.adapters:
                shards = replace(common, adapters=AdapterRows(rows.adapter(row.ints)))
            in_pages = _places(table_TN, row, pools.pages)
            in_rings = _places(_ring_table(slot_T, table_TN.shape[1], ring), row, pools.rings)
            state_T = jnp.where(row.active, slot_T, nowhere)
            new_pages: list[LayerPages] = []
            new_states: list[LayerPages] = []
            new_rings: list[LayerPages] = []

            def attend_with(
                layer_pages: LayerPages, places: _Places, keep: list[LayerPages]
            ) -> Attend:
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
                    index: Index | None = None,
                ) -> jax.Array:
                    sealed = seal(k_TKH, v_TKH, index)
                    written = tuple(
                        write_tokens(pages, part, places.page_B, places.slot_B, unique=True)
                        for pages, part in zip(layer_pages, sealed, strict=True)
                    )
                    keep.append(written)
                    drafts = step.drafts
                    if index is not None:
                        q_THD, w_TH = index.queries_THD, index.weights_TH
                        q_THD, w_TH = _slot_rows(step, q_THD), _slot_rows(step, w_TH)
                        index = index._replace(queries_THD=q_THD, weights_TH=w_TH)
                    o_TNH = paged_attention(
                        _slot_rows(step, q_TNH),
                        written[0],
                        None if latent else written[1],
                        places.table_BN[:own],
                        positions_BQ,
                        scale=scale,
                        window=window,
                        cap=cap,
                        sinks_N=sinks_N,
                        latent=latent,
                        index=index,
                        index_pages_PKSH=None if index is None else written[1],
                        platform=shards.platform,
                    )
                    if not drafts:
                        return o_TNH
                    return step.by_row(o_TNH.reshape(*positions_BQ.shape, *o_TNH.shape[1:]))

                return attend

            stem: Any = weights.stem.merge(stem_leaves)
            x_TD = stem.embed(row.token, shards)
            for part, leaves, layer_pages, layer_states, layer_rings in zip(
                weights.layers, layer_leaves, *kept, strict=True
            ):
                layer: Any = part.merge(leaves)
                attend = (
                    attend_with(layer_rings, in_rings, new_rings)
                    if layer_rings
                    else attend_with(layer_pages, in_pages, new_pages)
                )
                recur = recur_over(layer_states, state_T, None, None, new_states.append)
                x_TD = layer(x_TD, at_T, attend, shards, row.active, recur=recur)
                # A layer does not call `attend` or `recur` for what it does not keep.
                if not layer_pages:
                    new_pages.append(())
                if not layer_states:
                    new_states.append(())
                if not layer_rings:
                    new_rings.append(())
            logits_TV, shard = logits(
                variant or Variant.MASKED, stem, reveal(x_TD), shards, rows.vocabulary
            )
            kept = (new_pages, new_states, new_rings)
            if ending is None:
                return kept, logits_TV[None]
            return kept, *ending(step, hot, counts, logits_TV, shard)

        return body

    def _write_rows(self, changed: list[list[SlotAdmit | SlotGrow]]) -> None:
        ranks, slots = self._limits.ranks, self._limits.slots_per_rank
        # Column 0: slot whose row changes. Column 1: slot that gets a new sequence.
        where = np.full((ranks, ROWS_PER_UPDATE, 2), slots, np.int32)
        hot = np.zeros((ranks, ROWS_PER_UPDATE, 2), np.int32)
        ints = np.zeros((ranks, ROWS_PER_UPDATE, self._rows.ints), np.int32)
        floats = np.zeros((ranks, ROWS_PER_UPDATE, self._rows.floats), np.float32)
        for rank, rank_changes in enumerate(changed):
            for row, change in enumerate(rank_changes):
                where[rank, row, 0] = change.slot
                ints[rank, row], floats[rank, row] = (
                    self._ints[rank, change.slot],
                    self._floats[rank, change.slot],
                )
                if isinstance(change, SlotAdmit):
                    where[rank, row, 1] = change.slot
                    hot[rank, row] = change.token, change.position

        def body(state: Any, where: jax.Array, rows: Any) -> Any:
            hot_S2, ints_SI, floats_SF = (array[0] for array in state)
            hot_S2 = hot_S2.at[where[0, :, 1]].set(rows[0][0], mode="drop")
            ints_SI = ints_SI.at[where[0, :, 0]].set(rows[1][0], mode="drop")
            return (
                hot_S2[None],
                ints_SI[None],
                floats_SF.at[where[0, :, 0]].set(rows[2][0], mode="drop")[None],
            )

        state = tuple(self._state[:3])
        arguments = (state, *self._programs.put((where, (hot, ints, floats))))
        specs = ((RANK,) * 3, RANK, (RANK,) * 3)
        build = lambda: self._programs.compile(body, arguments, specs, (RANK,) * 3, donate=(0,))  # noqa: E731
        hot_array, ints_array, floats_array = self._programs.get(("rows",), build)(*arguments)
        self._state = SlotState(hot_array, ints_array, floats_array, self._state.counts)

    def _write_counts(self, changed: list[list[SlotAdmit | SlotGrow]]) -> None:
        where = np.full((self._limits.ranks, 1), self._limits.slots_per_rank, np.int32)
        counts = np.zeros((self._limits.ranks, 1, self._rows.vocabulary), np.int32)
        for rank, rank_changes in enumerate(changed):
            for row, change in enumerate(rank_changes):
                assert isinstance(change, SlotAdmit)
                where[rank, row] = change.slot
                counts[rank, row] = self._rows.pack_history(change.sample)

        def body(counts: jax.Array, where: jax.Array, new: jax.Array) -> jax.Array:
            return counts[0].at[where[0]].set(new[0], mode="drop")[None]

        arguments = (self._state.counts, *self._programs.put((where, counts)))
        build = lambda: self._programs.compile(body, arguments, (RANK,) * 3, RANK, donate=(0,))  # noqa: E731
        self._state = self._state._replace(
            counts=self._programs.get(("counts",), build)(*arguments)
        )


def _per_rank_groups(
    changes: Sequence[SlotAdmit | SlotGrow], size: int
) -> list[list[list[SlotAdmit | SlotGrow]]]:
    """Groups changes of slots into program calls with at most `size` changes per dp rank. Indexed
    by [call][rank][row]."""
    ranks = 1 + max((change.rank for change in changes), default=-1)
    by_rank: list[list[SlotAdmit | SlotGrow]] = [[] for _ in range(ranks)]
    for change in changes:
        by_rank[change.rank].append(change)
    calls = -(-max((len(rows) for rows in by_rank), default=0) // size)
    return [[rows[call * size : (call + 1) * size] for rows in by_rank] for call in range(calls)]
