"""Runs decode steps and owns the state of the decode slots.

The slot state stays on the device between steps. The host can therefore issue the next step before
it has read the last step's tokens. Pages, hot state and counts are donated and updated in place.

Layers are unrolled, because a scan would copy each layer's weights. Layers of equal structure are
traced once (`weights.LayerCalls`).

All rows write their KV before any row attends, and each row attends up to its own position. So a
step with drafts gives the same tokens as successive steps."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.choose import Chosen, RowsToChoose, choose, logits
from jdisagg.executor.draft_rows import DraftPlan, DraftRows, Guesses, Slots
from jdisagg.executor.drafted_states import DraftedStates
from jdisagg.executor.grammar_rows import GrammarRows
from jdisagg.executor.next_tokens import NextTokens
from jdisagg.executor.page_pool import Kept, LayerPages, Pools
from jdisagg.executor.prefill_program import RANK
from jdisagg.executor.programs import Programs
from jdisagg.executor.slot_state import RowFormat
from jdisagg.executor.state_access import recur_over
from jdisagg.executor.step_attention import StepAttention
from jdisagg.executor.weights import LayerCalls, Part, Weights
from jdisagg.messages.step_commands import SlotAdmit, SlotGrow
from jdisagg.model_api import AdapterRows, GivenTokens, Shards
from jdisagg.ops.quarantine import reveal
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.speculation import CHAIN

ROWS_PER_UPDATE = 8
MOST_BATCHES = 16  # arrays of slot numbers that stay on the mesh
Forward = Callable[[tuple[Any, ...], int], Any]
Changes = Sequence[Sequence[SlotAdmit | SlotGrow]]  # of slots, by rank


class SlotState(NamedTuple):
    """The state of all decode slots as device arrays, with the columns of `slot_state`."""

    hot: jax.Array  # int32 [ranks, slots, 2]
    ints: jax.Array  # int32 [ranks, slots, I]
    floats: jax.Array  # float32 [ranks, slots, F]
    counts: jax.Array  # int32 [ranks, slots, V]


class _Passed(NamedTuple):
    """A step after its last layer, inside its program. `states` is set if the recurrent states are
    not in `kept` yet."""

    step: DraftRows
    kept: Kept
    x_TD: jax.Array
    edge: Any
    shards: Shards
    tapped: list[jax.Array]
    states: DraftedStates | None


class EarlierStages(Protocol):
    """The pipeline stages before the last one."""

    def run(self, slots: Slots, bucket: int, plan: DraftPlan | None) -> jax.Array:
        """Issues a step's computation in these stages. Returns the activations [ranks, b + E, D]
        that enter the last stage, on its mesh."""
        ...


class DecodePrograms:
    """Builds and runs the decode programs for the layers of one mesh, and owns the slot state. Used
    by the dispatch thread only.

    With pipeline stages, the last stage chooses the tokens (`step`). The other stages compute their
    `part` of each step."""

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        pools: Pools,
        shards: Shards,
        limits: MeshLimits,
        rows: RowFormat,
        grammars: GrammarRows,
    ) -> None:
        self._programs, self._weights, self._shards, self._pools = programs, weights, shards, pools
        self._limits, self._rows, self._grammars = limits, rows, grammars
        ranks, slots = limits.ranks, limits.slots_per_rank
        # The host keeps a copy, because growth of a sequence changes only a part of its row.
        self._ints = np.zeros((ranks, slots, rows.ints), np.int32)
        self._floats = np.zeros((ranks, slots, rows.floats), np.float32)
        hot, counts = (
            np.zeros((ranks, slots, 2), np.int32),
            np.zeros((ranks, slots, rows.vocabulary), np.int32),
        )
        self._state = SlotState(*programs.put((hot, self._ints, self._floats, counts)))
        self._no_counts = programs.put(np.zeros((ranks, 1, rows.vocabulary), np.int32))
        self.earlier: EarlierStages | None = None
        self._batches: dict[tuple[Slots, int], jax.Array] = {}  # of the newest steps
        self._masks: dict[int, jax.Array] = {}
        self._next_tokens = (
            NextTokens(weights, shards, pools, rows, limits.ring_pages)
            if weights.next_token and limits.speculates
            else None
        )
        self._drafts: jax.Array = programs.put(np.full((ranks, slots, 1 + CHAIN), -1, np.int32))

    def update(self, admits: Sequence[SlotAdmit], grows: Sequence[SlotGrow]) -> None:
        for admit in admits:
            ints, floats = self._ints[admit.rank, admit.slot], self._floats[admit.rank, admit.slot]
            self._rows.pack(
                ints, floats, admit.sample, admit.pages, admit.limit, admit.state, admit.shift
            )
            self._rows.pack_adapter(ints, admit.adapter)
        for grow in grows:
            self._rows.pack_pages(self._ints[grow.rank, grow.slot], grow.pages, grow.limit)
        penalised = [admit for admit in admits if admit.sample.sampling.penalised]
        for changed, histories in itertools.zip_longest(
            _per_rank_groups([*admits, *grows], ROWS_PER_UPDATE),
            _per_rank_groups(penalised, 1),
            fillvalue=(),
        ):
            self._write(changed, histories)

    def step(self, slots: Slots, masked: bool, guesses: Guesses | None = None) -> Chosen:
        """Issues one decode step. Returns the chosen tokens [ranks, b, Q] and log-probabilities,
        for b rows in the order of `slots[rank]` and at most Q tokens per row. A row has several
        tokens if some of its drafts were accepted. NO_TOKEN fills the row after its last token. Q
        is 1 without drafts."""
        width, guesses = max(1, *map(len, slots)), guesses or {}
        pair = self._limits.pair_batch(width)
        if masked:
            guesses = self._grammars.runs(slots, self._limits.extra_rows(pair), guesses)
        if masked or guesses:
            return self._step_in_two(slots, pair, masked, self._plan(guesses, pair))
        bucket = next(size for size in self._limits.batch_buckets if size >= width)
        batch, x = self._batch_array(slots, bucket), self._before(slots, bucket, None)
        hot, ints, floats, counts = self._state
        kept, hot, chosen, counts = self._program(bucket)(
            *self._model(), hot, counts, ints, floats, batch, (), x
        )
        self._pools.put(self._layers.start, kept)
        self._state = SlotState(hot, ints, floats, counts)
        return chosen

    def _no_masks(self, rows: int) -> jax.Array:
        if rows not in self._masks:
            masks = self._grammars.empty((self._limits.ranks, rows))
            self._masks[rows] = self._programs.put(masks)
        return self._masks[rows]

    @property
    def hot(self) -> jax.Array:
        """Token and position of each slot after the issued steps. The next step donates this
        array."""
        return self._state.hot

    def part(
        self, slots: Slots, bucket: int, plan: DraftPlan | None, hot: jax.Array, x: Any
    ) -> jax.Array:
        """Issues a step's computation in this stage, which is not the last one."""
        _, ints, floats, _ = self._state
        drafts = () if plan is None else (self._programs.argument(plan.array),)
        batch = self._batch_array(slots, bucket)
        arguments = (*self._model(), hot, (), ints, floats, batch, drafts, x)
        kept, x = self._forward(arguments, bucket)
        self._pools.put(self._layers.start, kept)
        return x

    def _before(self, slots: Slots, bucket: int, plan: DraftPlan | None) -> Any:
        return () if self.earlier is None else self.earlier.run(slots, bucket, plan)

    @property
    def _before_spec(self) -> Any:
        return () if self._weights.begins else RANK

    def step_with(self, slots: Slots, masked: bool, forward: Forward) -> Chosen:
        """Issues one decode step without drafts, of the largest batch size. `forward` computes its
        forward pass.

        Args:
            forward: Function that issues the forward pass. Its arguments are those of `_step_body`
                and the batch size. It returns the page pools and the logits.
        """
        if masked:
            self._grammars.runs(slots, 0, {})
        return self._step_in_two(slots, self._limits.batch_buckets[-1], masked, None, forward)

    def _plan(self, guesses: Guesses, bucket: int) -> DraftPlan | None:
        limits = self._limits
        if not guesses:
            return None
        return DraftPlan.of(
            guesses, limits.ranks, bucket, limits.extra_rows(bucket), limits.longest_run
        )

    def _step_in_two(
        self,
        slots: Slots,
        bucket: int,
        masked: bool,
        plan: DraftPlan | None,
        forward: Forward | None = None,
    ) -> Chosen:
        batch, planned = self._batch_array(slots, bucket), None
        if plan is not None:
            planned = self._programs.argument(plan.array)
        drafter = self._next_tokens if plan else None
        drafts = () if planned is None else (planned, self._drafts) if drafter else (planned,)
        whole = plan is not None and self._limits.kv_spec.has_state
        x = () if whole else self._before(slots, bucket, plan)
        hot, ints, floats, counts = self._state
        with jax.transfer_guard_host_to_device("allow"):
            logits_TV: Any = None
            y_TD: list[Any] = []
            if not whole:
                kept, logits_TV, *y_TD = (forward or self._forward)(
                    (*self._model(), hot, (), ints, floats, batch, drafts, x), bucket
                )
                self._pools.put(self._layers.start, kept)
            width = bucket + self._limits.extra_rows(bucket) * (plan is not None)
            masks: Any = self._no_masks(width)
            if masked:
                masks = self._programs.argument(self._grammars.masks(slots, width, plan))
            model, layer = ((), ()) if drafter is None else self._drafting(drafter)
            of_rows = (batch, drafts, masks, model, layer)
            if whole:
                state = (hot, counts, ints, floats)
                kept, hot, chosen, counts, *drafted = self._drafted(
                    (*self._model(), *state, *of_rows), bucket
                )
                self._pools.put(self._layers.start, kept)
            else:
                hot, chosen, counts, *drafted = self._choice(
                    (hot, counts, ints, floats, logits_TV, *of_rows, *y_TD)
                )
        shown: jax.Array | None = None
        if drafter is not None:
            layer, self._drafts, shown = drafted
            self._pools.put(drafter.layers.start, layer)
        self._state = SlotState(hot, ints, floats, counts)
        if masked:
            self._grammars.issued(slots, chosen.token, shown)
        return chosen

    def _drafting(self, drafter: NextTokens) -> tuple[Any, Kept]:
        part = self._weights.next_token
        assert part is not None
        return (self._weights.stem.leaves, part.leaves), self._pools.kept(drafter.layers)

    def warm_up(self, bucket: int) -> None:
        self.step(self._nobody(bucket), False).token.block_until_ready()

    def warm_pair(self, bucket: int, drafts: bool) -> None:
        limits, extra = self._limits, self._limits.extra_rows(bucket)
        plan = DraftPlan.of({}, limits.ranks, bucket, extra, limits.longest_run) if drafts else None
        chosen = self._step_in_two(self._nobody(bucket), bucket, False, plan)
        chosen.token.block_until_ready()

    def _nobody(self, bucket: int) -> Slots:
        return ((self._limits.slots_per_rank,) * bucket,) * self._limits.ranks

    def _model(self) -> tuple[Any, Any, Kept]:
        edge = self._weights.edge
        return (
            () if edge is None else edge.leaves,
            [self._weights.layers[index].leaves for index in self._layers],
            self._pools.kept(self._layers),
        )

    @property
    def _layers(self) -> range:
        return self._weights.held

    def warm_updates(self) -> None:
        self._write((), ())

    def _batch_array(self, slots: Slots, bucket: int) -> jax.Array:
        if (slots, bucket) not in self._batches:
            if len(self._batches) >= MOST_BATCHES:
                del self._batches[next(iter(self._batches))]
            # A number out of range is no slot.
            rows = np.full((len(slots), bucket), self._limits.slots_per_rank, np.int32)
            for rank, row in enumerate(slots):
                rows[rank, : len(row)] = row
            self._batches[slots, bucket] = self._programs.put(rows)
        return self._batches[slots, bucket]

    def _program(self, bucket: int) -> Any:
        def build() -> Any:
            hot, ints, floats, counts = self._state
            batch = jax.ShapeDtypeStruct((self._limits.ranks, bucket), jnp.int32)
            x = (
                ()
                if self._weights.begins
                else jax.ShapeDtypeStruct((*batch.shape, self._weights.width), self._weights.dtype)
            )
            kept_specs = self._pools.specs(self._layers)
            return self._programs.compile(
                self._step_body(True),
                (*self._model(), hot, counts, ints, floats, batch, (), x),
                (*self.model_specs(), RANK, RANK, RANK, RANK, RANK, (), self._before_spec),
                (kept_specs, RANK, Chosen.specs(self._programs), RANK),
                donate=(2, 3, 4),
            )

        return self._programs.get(("step", bucket), build)

    def _forward(self, arguments: tuple[Any, ...], bucket: int) -> Any:
        drafts = arguments[-2]

        def build() -> Any:
            specs = (RANK,) * len(drafts)
            return self._programs.compile(
                self._step_body(False),
                arguments,
                (*self.model_specs(), RANK, (), RANK, RANK, RANK, specs, self._before_spec),
                (self._pools.specs(self._layers), *(RANK,) * max(1, len(drafts))),
                donate=(2,),
            )

        return self._programs.get(("forward", bucket, len(drafts) > 0), build)(*arguments)

    def _choice(self, arguments: tuple[Any, ...]) -> Any:
        batch, drafts, _, _, _, *y_TD = arguments[5:]

        def build() -> Any:
            in_specs, model_specs, out_specs = self._choice_specs(len(drafts), bool(y_TD))
            in_specs = (*(RANK,) * 5, *in_specs, *model_specs, *(RANK,) * len(y_TD))
            donate = (0, 1, 9) if y_TD else (0, 1)
            body = self._choice_body()
            return self._programs.compile(body, arguments, in_specs, out_specs, donate=donate)

        key = "choose", batch.shape[1], len(drafts) > 0
        return self._programs.get(key, build)(*arguments)

    def _choice_specs(self, drafts: int, makes_drafts: bool) -> tuple[Any, Any, Any]:
        """Returns the specs of batch, drafts and masks, of the model that makes drafts and its KV,
        and of the results."""
        programs, drafter = self._programs, self._next_tokens
        in_specs: Any = (RANK, (RANK,) * drafts, RANK)
        out_specs = (RANK, Chosen.specs(programs), RANK)
        if drafter is None or not makes_drafts:
            return in_specs, ((), ()), out_specs
        kept_specs = self._pools.specs(drafter.layers)
        assert self._weights.next_token is not None
        model_specs = self._weights.stem.specs, self._weights.next_token.specs
        return (
            in_specs,
            (model_specs, kept_specs),
            (*out_specs, kept_specs, RANK, programs.readable_spec),
        )

    def _choice_body(self) -> Any:
        programs, ending, drafter = self._programs, self._ending(), self._next_tokens

        def body(hot: Any, counts: Any, ints: Any, floats: Any, logits_TV: Any, *rest: Any) -> Any:
            batch, drafts, masks, model, layer, *y_TD = rest
            rows = self._rows_of(batch, drafts, hot, ints, floats)
            hot, chosen, counts = ending(rows, hot, counts, logits_TV[0], masks[0])
            result = hot, chosen.on_rank(programs), counts
            if drafter is None or not y_TD:
                return result
            layer, drafts_SG = drafter.draft(
                model, layer, y_TD[0][0], rows, chosen, drafts[1][0], counts[0]
            )
            shown = programs.readable(jnp.take(drafts_SG, batch[0], axis=0, mode="clip")[None])
            return *result, layer, drafts_SG[None], shown

        return body

    def _drafted(self, arguments: tuple[Any, ...], bucket: int) -> Any:
        """The step with drafts of a model with recurrent state, as one program: it writes the
        states when it knows which drafts are accepted."""
        drafts, makes_drafts = arguments[8], bool(arguments[10])

        def build() -> Any:
            in_specs, model_specs, out_specs = self._choice_specs(len(drafts), makes_drafts)
            return self._programs.compile(
                self._drafted_body(makes_drafts),
                arguments,
                (*self.model_specs(), *(RANK,) * 4, *in_specs, *model_specs),
                (self._pools.specs(self._layers), *out_specs),
                donate=(2, 3, 4, 11) if makes_drafts else (2, 3, 4),
            )

        return self._programs.get(("drafted", bucket), build)(*arguments)

    def _drafted_body(self, makes_drafts: bool) -> Any:
        forward, choose_of = self._forward_body(), self._choice_body()

        def body(
            stem: Any, layers: Any, kept: Kept, hot: Any, counts: Any, *rest: Any
        ) -> tuple[Any, ...]:
            ints, floats, batch, drafts, masks, *model = rest
            passed = forward(stem, layers, kept, hot, ints, floats, batch, drafts, ())
            logits_TV, *y_TD = self._logits_of(passed, makes_drafts)
            of_rows = (batch, drafts, masks, *model, *y_TD)
            new_hot, *results = choose_of(hot, counts, ints, floats, logits_TV, *of_rows)
            assert passed.states is not None
            taken_S = new_hot[0, :, 1] - hot[0, :, 1]
            taken_B = jnp.take(taken_S, batch[0], axis=0, mode="fill", fill_value=0)
            settled = iter(passed.states.settled(taken_B))
            pages, states, rings = passed.kept
            states = [next(settled) if state else () for state in kept[1]]
            return (pages, states, rings), new_hot, *results

        return body

    def _rows_of(self, batch: Any, drafts: Any, hot: Any, ints: Any, floats: Any) -> DraftRows:
        planned, ours = (*(part[0] for part in drafts), None, None)[:2]
        limits, state = self._limits, (hot[0], ints[0], floats[0])
        sizes = limits.longest_run, limits.state_snapshot_tokens
        return DraftRows.of(self._rows, batch[0], planned, sizes, *state, ours)

    def model_specs(self) -> tuple[Any, ...]:
        layers = [self._weights.layers[index].specs for index in self._layers]
        edge = self._weights.edge
        return () if edge is None else edge.specs, layers, self._pools.specs(self._layers)

    def _ending(self) -> Any:
        row_format, shards = self._rows, self._shards

        def end(
            rows: DraftRows, hot: Any, counts: Any, logits_TV: jax.Array, mask_TW: Any = None
        ) -> tuple[Any, Chosen, Any]:
            row = rows.all
            chosen = choose(
                row_format,
                logits_TV,
                RowsToChoose(row.ints, row.floats, row.at + 1, row.active, mask_TW),
                lambda: rows.counts(counts[0]),
                shards,
            )
            chosen, hot_S2 = rows.accept(chosen, hot[0])
            return hot_S2[None], chosen, rows.counted(counts[0], chosen.token)[None]

        return end

    def _step_body(self, whole: bool) -> Any:
        forward, ending = self._forward_body(), self._ending() if whole else None
        weights, programs, rows = self._weights, self._programs, self._rows

        def body(stem: Any, layers: Any, kept: Kept, hot: Any, counts: Any, *rest: Any) -> Any:
            passed = forward(stem, layers, kept, hot, *rest)
            if not weights.ends:
                return passed.kept, passed.x_TD[None]
            if ending is None:
                _, _, _, drafts, _ = rest
                makes_drafts = self._next_tokens is not None and bool(drafts)
                return passed.kept, *self._logits_of(passed, makes_drafts)
            y_TD = passed.edge.normed(reveal(passed.x_TD))
            logits_TV = logits(passed.edge, y_TD, passed.shards, rows.vocabulary, apart=True)
            hot, chosen, counts = ending(passed.step, hot, counts, logits_TV)
            return passed.kept, hot, chosen.on_rank(programs), counts

        return body

    def _logits_of(self, passed: "_Passed", makes_drafts: bool) -> tuple[jax.Array, ...]:
        """Returns the logits, and with `makes_drafts` the input of the layer that drafts."""
        y_TD = passed.edge.normed(reveal(passed.x_TD))
        logits_TV = logits(passed.edge, y_TD, passed.shards, self._rows.vocabulary)
        if not makes_drafts:
            return (logits_TV[None],)
        hidden_TD = jnp.concatenate(passed.tapped, axis=-1) if passed.tapped else y_TD
        return logits_TV[None], hidden_TD[None]

    def _forward_body(self) -> "Callable[..., _Passed]":
        layers = [self._weights.layers[index] for index in self._layers]
        weights, common, rows = self._weights, self._shards, self._rows
        pools, nowhere = self._pools, self._pools.states.rank_rows
        ring_pages, spec = self._limits.ring_pages, self._limits.kv_spec
        taps = self._weights.taps if self._next_tokens else ()
        sources = spec.sources_in(self._layers)

        def forward(
            stem_leaves: Any,
            layer_leaves: Any,
            kept: Kept,
            hot: Any,
            ints: Any,
            floats: Any,
            batch: Any,
            drafts: Any,
            x: Any,
        ) -> _Passed:
            step = self._rows_of(batch, drafts, hot, ints, floats)
            row, at_T, shards = step.all, rows.turned(step.all), common
            if rows.adapters:
                shards = replace(common, adapters=AdapterRows(rows.adapter(row.ints)))
            attention = StepAttention(step, rows, pools, ring_pages, shards.platform)
            shards = attention.recording(shards) if spec.records else shards
            state_T = jnp.where(row.active, rows.state(row.ints), nowhere)
            whole = drafts and spec.has_state
            drafted = DraftedStates(step, state_T[: batch.shape[1]]) if whole else None

            def compute(
                part: Part, source: int | None, leaves: Any, x_TD: jax.Array, *of_layer: LayerPages
            ) -> tuple[Any, ...]:
                layer_pages, layer_states, layer_rings = of_layer
                # A layer without KV does not call `attend`, one without state not `recur`.
                new: tuple[list[LayerPages], list[LayerPages]] = [], []
                advanced: list[LayerPages] = []
                lists = new if source is None else (updated[0], updated[2])
                attend = attention.over(layer_pages, layer_rings, lists, source)
                if drafted is not None:
                    recur = drafted.over(layer_states)
                else:
                    recur = recur_over(layer_states, state_T, None, None, advanced.append)
                layer: Any = part.merge(leaves)
                x_TD = layer(x_TD, at_T, attend, shards, row.active, recur=recur, **more)
                (pages,), (states,), (rings,) = new[0] or [()], advanced or [()], new[1] or [()]
                return x_TD, pages, states, rings

            edge: Any = weights.edge.merge(stem_leaves) if weights.edge else None
            x_TD = edge.embed(row.token, shards) if weights.begins else x[0]
            more = {"given": GivenTokens(row.token, x_TD)} if weights.reads_tokens else {}
            tapped: list[jax.Array] = []
            updated: Kept = [], [], []
            calls = LayerCalls(compute, spec.selects or spec.shares or drafted is not None)
            for number, (part, leaves, *of_layer) in enumerate(
                zip(layers, layer_leaves, *kept, strict=True)
            ):
                tapped += [x_TD] * taps.count(number)
                x_TD, *of_layer = calls(part, sources[number], leaves, x_TD, *of_layer)
                for every, one in zip(updated, of_layer, strict=True):
                    every.append(one)
            return _Passed(step, updated, x_TD, edge, shards, tapped, drafted)

        return forward

    def _write(self, changed: Changes, histories: Changes) -> None:
        ranks, slots = self._limits.ranks, self._limits.slots_per_rank
        # Columns: the slot whose row changes, and the slot that gets a new sequence.
        where = np.full((ranks, ROWS_PER_UPDATE, 2), slots, np.int32)
        counted = np.full((ranks, 1), slots, np.int32)
        hot = np.zeros((ranks, ROWS_PER_UPDATE, 2), np.int32)
        ints = np.zeros((ranks, ROWS_PER_UPDATE, self._rows.ints), np.int32)
        floats = np.zeros((ranks, ROWS_PER_UPDATE, self._rows.floats), np.float32)
        counts: Any = self._no_counts
        for rank, rank_changes in enumerate(changed):
            for row, change in enumerate(rank_changes):
                where[rank, row, 0] = change.slot
                ints[rank, row] = self._ints[rank, change.slot]
                floats[rank, row] = self._floats[rank, change.slot]
                if isinstance(change, SlotAdmit):
                    where[rank, row, 1] = change.slot
                    hot[rank, row] = change.token, change.position
        if any(histories):
            host = np.zeros((ranks, 1, self._rows.vocabulary), np.int32)
            for rank, rank_changes in enumerate(histories):
                for change in rank_changes:
                    assert isinstance(change, SlotAdmit)
                    counted[rank] = change.slot
                    host[rank, 0] = self._rows.pack_history(change.sample)
            counts = self._programs.argument(host)

        def body(state: SlotState, where: Any, counted: Any, rows: Any, counts: Any) -> SlotState:
            hot_S2, ints_SI, floats_SF, counts_SV = (array[0] for array in state)
            changed_R, admitted_R = where[0, :, 0], where[0, :, 1]
            hot_S2 = hot_S2.at[admitted_R].set(rows[0][0], mode="drop")
            ints_SI = ints_SI.at[changed_R].set(rows[1][0], mode="drop")
            floats_SF = floats_SF.at[changed_R].set(rows[2][0], mode="drop")
            counts_SV = counts_SV.at[counted[0]].set(counts[0], mode="drop")
            return SlotState(hot_S2[None], ints_SI[None], floats_SF[None], counts_SV[None])

        arguments = (
            self._state,
            *self._programs.argument((where, counted, (hot, ints, floats))),
            counts,
        )
        state_spec = SlotState(RANK, RANK, RANK, RANK)  # type: ignore[arg-type]
        specs = (state_spec, RANK, RANK, (RANK,) * 3, RANK)
        build = lambda: self._programs.compile(body, arguments, specs, state_spec, donate=(0,))  # noqa: E731
        self._state = self._programs.get(("admit",), build)(*arguments)


def _per_rank_groups(
    changes: Sequence[SlotAdmit | SlotGrow], size: int
) -> list[list[list[SlotAdmit | SlotGrow]]]:
    ranks = 1 + max((change.rank for change in changes), default=-1)
    by_rank: list[list[SlotAdmit | SlotGrow]] = [[] for _ in range(ranks)]
    for change in changes:
        by_rank[change.rank].append(change)
    calls = -(-max((len(rows) for rows in by_rank), default=0) // size)
    return [[rows[call * size : (call + 1) * size] for rows in by_rank] for call in range(calls)]
