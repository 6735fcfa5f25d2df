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

If a row has a grammar, a step is two programs. The first is the forward pass, which returns
logits. The second chooses the tokens. It is issued while the forward pass runs, when the grammar
masks are available. The forward pass may compute several positions of one slot at once, if the
grammar forces these tokens (a run). All rows write their KV before any row attends, and each row
attends up to its own position. So a run gives the same result as successive steps. The last row
of each run is the slot's own row. Own rows come first in the batch, and only own rows have
logits and choose a token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.choose import Chosen, Variant, choose, logits
from jdisagg.executor.grammar_rows import GrammarRows, Runs, Slots, rows_for_runs
from jdisagg.executor.page_pool import Kept, LayerPages, PagePool, Pools
from jdisagg.executor.prefill_program import RANK
from jdisagg.executor.programs import Programs
from jdisagg.executor.slot_state import BatchRows, RowFormat
from jdisagg.executor.state_access import recur_over
from jdisagg.executor.weights import Weights
from jdisagg.messages.step_commands import SlotAdmit, SlotGrow
from jdisagg.model_api import Attend, Latent, Shards
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


class SlotState(NamedTuple):
    """The state of all decode slots as device arrays, with the columns of `slot_state`."""

    hot: jax.Array  # int32 [ranks, slots, 2]
    ints: jax.Array  # int32 [ranks, slots, I]
    floats: jax.Array  # float32 [ranks, slots, F]
    counts: jax.Array  # int32 [ranks, slots, V]


class Stepped(NamedTuple):
    """The result of a step: the chosen tokens, and the forced tokens before each of them by (rank,
    row)."""

    chosen: Chosen
    forced: dict[tuple[int, int], list[int]]


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
        for grow in grows:
            self._rows.pack_pages(self._ints[grow.rank, grow.slot], grow.pages, grow.limit)
        for changed in _per_rank_groups([*admits, *grows], ROWS_PER_UPDATE):
            self._write_rows(changed)
        penalised = [admit for admit in admits if admit.sample.sampling.penalised]
        for changed in _per_rank_groups(penalised, 1):
            self._write_counts(changed)

    def step(self, slots: Slots, variant: Variant) -> Stepped:
        """Issues one decode step. Returns the chosen tokens [ranks, b] and log-probabilities, with
        rows in the order of `slots[rank]`."""
        width = max(1, max(len(row) for row in slots))
        bucket = next(size for size in self._limits.batch_buckets if size >= width)
        batch = self._batch_array(slots, bucket)
        if variant.masked:
            return self._step_in_two(slots, batch, variant)
        hot, ints, floats, counts = self._state
        kept, hot, chosen, counts_out = self._program(bucket, variant)(
            *self._model(), hot, counts if variant.shaped else (), ints, floats, batch
        )
        self._pools.put(0, kept)
        self._state = SlotState(hot, ints, floats, counts_out if variant.shaped else counts)
        return Stepped(chosen, {})

    def _step_in_two(self, slots: Slots, batch: jax.Array, variant: Variant) -> Stepped:
        bucket = batch.shape[1]
        runs = self._grammars.runs(slots, rows_for_runs(bucket))
        logits_BV = self._forward_runs(slots, bucket, runs) if runs else self._forward(batch)
        hot, ints, floats, counts = self._state
        mask = self._programs.argument(self._grammars.masks(slots, bucket))
        arguments = (hot, counts if variant.shaped else (), ints, floats, logits_BV, batch, mask)
        # The call may transfer the mask.
        with jax.transfer_guard_host_to_device("allow"):
            hot, chosen, counts_out = self._choice(arguments, variant)
        self._state = SlotState(hot, ints, floats, counts_out if variant.shaped else counts)
        self._grammars.issued(slots, chosen.token)
        return Stepped(chosen, {row: run[1:] for row, run in runs.items()})

    def _forward(self, batch: jax.Array) -> jax.Array:
        """Issues the forward pass of a step that runs as two programs. Returns logits [ranks, b,
        V]."""
        hot, ints, floats, _ = self._state
        program = self._program(batch.shape[1], None)
        kept, logits_BV = program(*self._model(), hot, (), ints, floats, batch)
        self._pools.put(0, kept)
        return logits_BV

    def _forward_runs(self, slots: Slots, bucket: int, runs: Runs) -> jax.Array:
        """Issues the forward pass of a step in which some slots compute a run of several forced
        tokens. These slots advance to the last token of their run. Returns the same as
        `_forward`."""
        rows = run_rows(slots, bucket, runs, nobody=self._limits.slots_per_rank)
        hot, ints, floats, _ = self._state
        arguments = (*self._model(), hot, (), ints, floats, self._programs.argument(rows))
        # The call may transfer the rows.
        with jax.transfer_guard_host_to_device("allow"):
            kept, hot, logits_BV = self._runs_program(bucket, arguments)(*arguments)
        self._pools.put(0, kept)
        self._state = self._state._replace(hot=hot)
        return logits_BV

    def warm_runs(self, bucket: int) -> None:
        """Compiles the forward pass with runs of forced tokens, for one batch size."""
        nobody = ((),) * self._limits.ranks
        self._forward_runs(nobody, bucket, {}).block_until_ready()

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

    def _program(self, bucket: int, variant: Variant | None) -> Any:
        """Returns the program of a whole step. For variant None, returns the program of the forward
        pass alone, whose result includes the logits [ranks, b, V]."""

        def build() -> Any:
            hot, ints, floats, counts = self._state
            shaped = variant is not None and variant.shaped
            batch = jax.ShapeDtypeStruct((self._limits.ranks, bucket), jnp.int32)
            kept_specs = self._pools.specs()
            layer_specs = [layer.specs for layer in self._weights.layers]
            counts_spec = RANK if shaped else ()
            in_specs = (self._weights.stem.specs, layer_specs, kept_specs, RANK, counts_spec)
            out_specs = (
                (kept_specs, RANK)
                if variant is None
                else (kept_specs, RANK, Chosen.specs(variant, self._programs), counts_spec)
            )
            return self._programs.compile(
                self._step_body(variant),
                (*self._model(), hot, counts if shaped else (), ints, floats, batch),
                (*in_specs, RANK, RANK, RANK),
                out_specs,
                donate=(2,) if variant is None else (2, 3, 4),
            )

        return self._programs.get(("decode", bucket, variant), build)

    def _runs_program(self, bucket: int, arguments: tuple[Any, ...]) -> Any:
        """Returns the program of the forward pass over the rows of `run_rows`. The program returns
        the page pools, `hot`, and the logits [ranks, b, V] of the first `bucket` rows."""

        def build() -> Any:
            kept_specs = self._pools.specs()
            layer_specs = [layer.specs for layer in self._weights.layers]
            in_specs = (self._weights.stem.specs, layer_specs, kept_specs, RANK, (), RANK, RANK)
            return self._programs.compile(
                self._step_body(None, chosen_rows=bucket),
                arguments,
                (*in_specs, RANK),
                (kept_specs, RANK, RANK),
                donate=(2, 3),
            )

        return self._programs.get(("decode runs", bucket), build)

    def _choice(self, arguments: tuple[Any, ...], variant: Variant) -> Any:
        """Issues the second program of a step that runs as two programs. This program chooses the
        tokens. Its arguments are hot, counts, ints, floats, logits, batch and mask (uint32 [ranks,
        b, W]). It returns hot, the choice, and counts."""
        programs, rows, ending = self._programs, self._rows, self._ending(variant)
        counts_spec = RANK if variant.shaped else ()

        def body(
            hot: Any, counts: Any, ints: Any, floats: Any, logits_BV: Any, batch: Any, mask: Any
        ) -> Any:
            row = rows.batch(batch[0], hot[0], ints[0], floats[0])
            return ending(row, hot, counts, logits_BV[0], WHOLE, mask[0])

        def build() -> Any:
            return programs.compile(
                body,
                arguments,
                (RANK, counts_spec, *(RANK,) * 5),
                (RANK, Chosen.specs(variant, programs), counts_spec),
                donate=(0, 1),
            )

        bucket = arguments[-1].shape[1]
        return programs.get(("choice", bucket, variant), build)(*arguments)

    def _ending(self, variant: Variant) -> Any:
        """Returns the end of a step's program: a function from logits to the new `hot`, the choice
        and the new counts."""
        rows, programs, platform = self._rows, self._programs, self._shards.platform

        def end(
            row: BatchRows,
            hot: Any,
            counts: Any,
            logits_BV: jax.Array,
            shard: VocabularyShard,
            mask_BW: jax.Array | None = None,
        ) -> tuple[Any, Chosen, Any]:
            chosen = choose(
                variant,
                rows,
                logits_BV,
                row.ints,
                row.floats,
                row.at + 1,
                row.active,
                jnp.take(counts[0], row.slot, axis=0, mode="clip") if variant.shaped else None,
                shard,
                platform,
                mask_BW,
            )
            counts_out = (
                counts[0].at[row.slot].set(chosen.counts, mode="drop")[None]
                if chosen.counts is not None
                else ()
            )
            hot_S2 = row.advance(hot[0], chosen.token)
            return hot_S2[None], chosen.on_rank(programs), counts_out

        return end

    def _step_body(self, variant: Variant | None, chosen_rows: int | None = None) -> Any:
        """Returns the function that `shard_map` runs for a step.

        Args:
            variant: Features that the rows need. None computes only the forward pass.
            chosen_rows: Number of leading rows of `run_rows` that have logits. None if the batch
                has one row for each slot, all with logits.
        """
        weights, shards, rows = self._weights, self._shards, self._rows
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
        ) -> Any:
            row: BatchRows
            if chosen_rows is None:
                row = rows.batch(batch[0], hot[0], ints[0], floats[0])
            else:
                row = rows.run_batch(batch[0], hot[0], ints[0], floats[0])
            _, table_BN = rows.limit_and_table(row.ints)
            at_B, slot_B = row.at, rows.state(row.ints)
            in_pages = _places(table_BN, row, pools.pages)
            in_rings = _places(_ring_table(slot_B, table_BN.shape[1], ring), row, pools.rings)
            state_B = jnp.where(row.active, slot_B, nowhere)
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
                ) -> jax.Array:
                    sealed = seal(k_TKH, v_TKH)
                    written = tuple(
                        write_tokens(pages, part, places.page_B, places.slot_B, unique=True)
                        for pages, part in zip(layer_pages, sealed, strict=True)
                    )
                    keep.append(written)
                    return paged_attention(
                        q_TNH,
                        written[0],
                        None if latent else written[1],
                        places.table_BN,
                        at_B,
                        scale=scale,
                        window=window,
                        cap=cap,
                        sinks_N=sinks_N,
                        latent=latent,
                        platform=shards.platform,
                    )

                return attend

            stem: Any = weights.stem.merge(stem_leaves)
            x_BD = stem.embed(row.token, shards)
            for part, leaves, layer_pages, layer_states, layer_rings in zip(
                weights.layers, layer_leaves, *kept, strict=True
            ):
                layer: Any = part.merge(leaves)
                attend = (
                    attend_with(layer_rings, in_rings, new_rings)
                    if layer_rings
                    else attend_with(layer_pages, in_pages, new_pages)
                )
                recur = recur_over(layer_states, state_B, None, None, new_states.append)
                x_BD = layer(x_BD, at_B, attend, shards, row.active, recur=recur)
                # A layer does not call `attend` or `recur` for what it does not keep.
                if not layer_pages:
                    new_pages.append(())
                if not layer_states:
                    new_states.append(())
                if not layer_rings:
                    new_rings.append(())
            logits_BV, shard = logits(
                variant or Variant.MASKED,
                stem,
                reveal(x_BD if chosen_rows is None else x_BD[:chosen_rows]),
                shards,
                rows.vocabulary,
            )
            kept = (new_pages, new_states, new_rings)
            if chosen_rows is not None:
                hot_S2 = row.stand_at(hot[0], chosen_rows)
                return kept, hot_S2[None], logits_BV[None]
            if ending is None:
                return kept, logits_BV[None]
            return kept, *ending(row, hot, counts, logits_BV, shard)

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


def run_rows(slots: Slots, bucket: int, runs: Runs, nobody: int) -> np.ndarray:
    """Returns the rows of a forward pass with runs of forced tokens, as int32 [ranks, bucket + rows
    for runs, 3]. The columns are the slot, the offset of the row's position from the slot's
    position, and the token (-1: the slot's token). The first rows are those of `slots`, each with
    the last token of its run. The other tokens of the runs follow."""
    rows = np.full((len(slots), bucket + rows_for_runs(bucket), 3), (nobody, 0, -1), np.int32)
    used = [bucket] * len(slots)
    for rank, rank_slots in enumerate(slots):
        rows[rank, : len(rank_slots), 0] = rank_slots
    for (rank, index), run in runs.items():
        slot, ahead, first = slots[rank][index], len(run) - 1, used[rank]
        used[rank] = end = first + ahead
        rows[rank, index, 1:] = ahead, run[-1]
        rows[rank, first:end, 0] = slot
        rows[rank, first:end, 1] = np.arange(ahead)
        rows[rank, first:end, 2] = run[:-1]
    return rows


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
