"""Runs prefill chunks as a chain of programs, one for each layer group.

The chain is: group 0 (with the embedding), group 1, ..., then head and sampling for rows that end
their prompt. Page arrays are never offered.

The last layer with KV or state computes these for all tokens, but everything else only for the last
tokens of the rows that sample. Layers after it, which read the KV of earlier layers or have no
attention, compute these tokens only.

The keys and values of a next-token layer depend on the last hidden state of every token, so all
layers are then computed for all tokens."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.block_sums import PrefillSums
from jdisagg.executor.chunk_attention import ChunkAttention, RankChunk
from jdisagg.executor.image_programs import ImagePrograms
from jdisagg.executor.page_pool import LayerPages, Pools
from jdisagg.executor.programs import BLOCK_SPEC, RANK, Programs
from jdisagg.executor.state_access import recur_over, runs_of
from jdisagg.executor.weights import LayerCalls, Part, Weights
from jdisagg.layout.platforms import traits_of
from jdisagg.messages.step_commands import PrefillChunk, PrefillRow
from jdisagg.model_api import AdapterRows, Attend, DraftLayer, GivenTokens, Shards
from jdisagg.ops.kv_rows import block_of
from jdisagg.prompt.images import spatial_positions
from jdisagg.prompt.logprobs import LAST
from jdisagg.scheduler.executor import MeshLimits


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """The static properties of a chunk's program.

    Attributes:
        packed: Whether the chunk of some dp rank may have several rows, a row that does not begin
            at the chunk's first token, or several samples of a row.
    """

    packed: bool = False
    every_token: bool = False


def chunk_forms(limits: MeshLimits, platform: str = "cpu") -> tuple[ChunkForm, ...]:
    """Returns the forms in which chunks of the mesh are compiled. A packed chunk may hold a single
    prompt, too, and takes 4 % longer for it on a CPU: it computes the last layer for more rows. So
    a mesh that computes long prompts has a form for chunks of one row. A GPU, where a few more rows
    are nearly free, has this form only for recurrent state, whose longer grain it allows."""
    apart = limits.kv_spec.has_state or not traits_of(platform).without_loops
    return (ChunkForm(), ChunkForm(True)) if apart and not limits.appends else (ChunkForm(True),)


@dataclass(frozen=True)
class ChunkArrays:
    """A packed prefill chunk as host arrays. The first dimension of every array is the dp rank."""

    tokens: np.ndarray  # int32 [ranks, T]
    positions: np.ndarray  # int32 [ranks, T]
    segment: np.ndarray  # int32 [ranks, T]; -1 is padding
    # int32 [ranks, R, N]. On a mesh with pages of windows [ranks, R, 2N]: the pages of layers
    # without a window, then those of layers with one.
    table: np.ndarray
    past: np.ndarray  # int32 [ranks, R]: tokens already in pages
    continuing: np.ndarray  # int32 [ranks]: rows that have a past
    # int32 [ranks, R, or 1 unless packed]: index of a row's last token in the chunk; -1 if the row
    # does not sample
    sampling: np.ndarray
    form: ChunkForm
    # int32 [*sampling.shape, 3 or 4]: slot of a row's state, slot of its snapshot, and number of
    # the row's tokens in the snapshot; a number beyond the last slot is no slot. On a mesh with
    # adapter slots, also the row's adapter slot.
    states: np.ndarray
    checksum_key: int = 0
    # int32 [ranks, T, 3]: rotary positions by time, row and column, of a model with those
    spatial: np.ndarray | None = None
    pictured: tuple[PrefillRow, ...] = ()  # rows that have images

    @classmethod
    def build(
        cls,
        command: PrefillChunk,
        limits: MeshLimits,
        form: ChunkForm | None = None,
        platform: str = "cpu",
    ) -> "ChunkArrays":
        """On each dp rank, rows that continue an earlier chunk come first. On a GPU at most one row
        continues, and it begins at the chunk's first token."""
        form = form or _form_of(command, limits, platform)
        loops = not traits_of(platform).without_loops
        ranks, width, rows = limits.ranks, command.chunk_tokens, limits.rows_per_chunk
        columns = -(-limits.context_tokens // limits.page_size)
        chunk = cls(
            tokens=np.zeros((ranks, width), np.int32),
            positions=np.zeros((ranks, width), np.int32),
            segment=np.full((ranks, width), -1, np.int32),
            table=np.zeros((ranks, rows, limits.page_tables * columns), np.int32),
            past=np.zeros((ranks, rows), np.int32),
            continuing=np.zeros((ranks,), np.int32),
            sampling=np.full((ranks, rows if form.packed else 1), -1, np.int32),
            states=np.zeros(
                (ranks, rows if form.packed else 1, 4 if limits.adapters else 3), np.int32
            ),
            form=form,
            checksum_key=command.checksum_key,
            spatial=np.zeros((ranks, width, 3), np.int32) if limits.spatial else None,
            pictured=tuple([row for row in command.rows if row.images]),
        )
        chunk.states[:, :, :2] = limits.state_rows
        used = [0] * ranks
        for row in command.rows:
            rank, index = row.rank, used[row.rank]
            assert row.start == 0 or chunk.continuing[rank] == index, (
                "rows that continue come first on their rank"
            )
            assert loops or row.start == 0 or row.offset == index == 0
            span = slice(row.offset, row.offset + len(row.tokens))
            assert np.all(chunk.segment[rank, span] == -1), "rows of a chunk overlap"
            chunk.tokens[rank, span] = row.tokens
            chunk.positions[rank, span] = np.arange(row.start, row.start + len(row.tokens))
            if chunk.spatial is not None and limits.images is not None:
                chunk.spatial[rank, span] = spatial_positions(
                    row.start, len(row.tokens), row.shift, row.images, limits.images
                )
            chunk.segment[rank, span] = index
            chunk.table[rank, index, : len(row.pages)] = row.pages
            chunk.table[rank, index, columns : columns + len(row.windows)] = row.windows
            chunk.past[rank, index] = row.start
            chunk.continuing[rank] += row.start > 0
            chunk.states[rank, index, 0] = row.state
            if limits.adapters:
                chunk.states[rank, index, 3] = row.adapter
            if row.snapshot_at:
                chunk.states[rank, index, 1:3] = row.snapshot, row.snapshot_at - row.start
            if row.samples:
                chunk.sampling[rank, index] = row.offset + len(row.tokens) - 1
            used[rank] += 1
        return chunk

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arrays in the order in which programs take them. The last is () for a model without
        spatial positions."""
        inputs = self.tokens, self.positions, self.segment, self.table, self.past
        spatial = () if self.spatial is None else self.spatial
        return *inputs, self.continuing, self.states, self.sampling, spatial

    @property
    def specs(self) -> tuple[Any, ...]:
        return *(RANK,) * 8, () if self.spatial is None else RANK


def _form_of(command: PrefillChunk, limits: MeshLimits, platform: str) -> ChunkForm:
    if any(row.prompt_logprobs not in (None, LAST) for row in command.rows):
        return ChunkForm(packed=True, every_token=True)
    packed = any(row.offset > 0 or len(row.samples) > 1 for row in command.rows)
    return ChunkForm(packed or ChunkForm() not in chunk_forms(limits, platform))


def asks_of_prompts(command: PrefillChunk) -> bool:
    """Returns whether log-probabilities or hidden states of prompts are wanted."""
    return any(row.prompt_logprobs is not None for row in command.rows)


class PrefillPrograms:
    """Builds and runs the programs of prefill chunks for the layers of one mesh."""

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        pools: Pools,
        shards: Shards,
        groups: tuple[range, ...],
        sums: PrefillSums | None,
        limits: MeshLimits,
    ) -> None:
        self._programs, self._weights, self._shards = programs, weights, shards
        self._pool, self._states = pools.attended, pools.states
        self._rank_rows = pools.pages.rank_rows, pools.rings.rank_rows
        self._tables = limits.page_tables
        held = self._pool.held
        self._groups = [(at, group) for at, group in enumerate(groups) if group.start in held]
        self._sums, self._emit = sums, sums is not None
        # Rows of a packed chunk begin at multiples of this power of two, which the recurrent layers
        # require.
        self._grain = limits.granule_tokens & -limits.granule_tokens
        self._long_grain = limits.state_grain
        self._keeps = limits.snapshots_per_rank > 0
        self._adapters = limits.adapters > 0

    def run(
        self,
        chunk: ChunkArrays,
        x: jax.Array | None = None,
        deep: Any = (),
        images: ImagePrograms | None = None,
    ) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        """Issues the programs of one chunk.

        Args:
            x: Activations [ranks, T, D] before the mesh's first layer, on this mesh. None on the
                mesh with the embedding.
            deep: Image activations to add after the first layers (`ImagePrograms.run`); () adds
                none.

        Returns:
            Activations after the mesh's last layer, [ranks, T, D]. After the model's last layer:
                [ranks, R, D] for the rows in `ChunkArrays.sampling`, or [ranks, T, D] with
                `ChunkForm.every_token`. If the instance hands off KV, also one KV block for
                each of the mesh's layer groups, and the blocks' checksums.
        """
        tokens, *meta, sampling, spatial = self._programs.argument(chunk.arguments, often=True)
        if x is None and images is not None:
            embedded = self._embed(chunk.tokens.shape[1])(self._weights.stem.leaves, tokens)
            x = embedded
            if chunk.pictured:
                x, deep = images.run(chunk.pictured, embedded)
        blocks: list[jax.Array] = []
        sums: list[jax.Array] = []
        key = self._programs.argument(self._sums.key(chunk.checksum_key)) if self._sums else ()
        for index, group in self._groups:
            layers = [part.leaves for part in self._weights[group]]
            pages = self._pool.layers[group.start : group.stop]
            states = self._states.layers[group.start : group.stop]
            adds = images is not None and group.start < images.depth
            of_group = deep if adds else ()
            embeds = x is None
            program = self._group(group, chunk, of_group, embeds)
            place = self._sums.place(index) if self._sums else ()
            embedded = embeds or self._embeds(group)
            own = (self._weights.stem.leaves, tokens) if embedded else ()
            before = () if x is None else x
            x, new_pages, new_states, block, of_block = program(
                layers, pages, states, before, *meta, sampling, spatial, of_group, key, place, *own
            )
            self._pool.put(group.start, new_pages)
            self._states.put(group.start, new_states)
            blocks.extend(block)
            sums.extend(of_block)
        assert x is not None
        return x, blocks, sums

    def cut(self, blocks: Sequence[jax.Array], rank: int, offset: int, tokens: int) -> jax.Array:
        """Cuts the tokens of one offer out of a chunk's KV blocks.

        Args:
            blocks: Blocks [ranks, C, K, T, H] of consecutive layer groups.
            rank: dp rank of the sequence. The result is unspecified on all other dp ranks.

        Returns:
            One block with the components of all groups. If the result equals a single input block,
                that block itself.
        """
        if len(blocks) == 1 and blocks[0].shape[3] == tokens:
            return blocks[0]

        def body(blocks: Sequence[jax.Array], offset: jax.Array) -> jax.Array:
            return jnp.concatenate(
                [
                    jax.lax.dynamic_slice_in_dim(block, offset[0], tokens, axis=3)
                    for block in blocks
                ],
                axis=1,
            )

        offsets = np.zeros((self._programs.mesh.shape["dp"],), np.int32)
        offsets[rank] = offset
        on_mesh, shapes = self._programs.argument(offsets), tuple(block.shape for block in blocks)
        inputs = (list(blocks), on_mesh)
        build = lambda: self._programs.compile(  # noqa: E731
            body, inputs, ([BLOCK_SPEC] * len(blocks), RANK), BLOCK_SPEC
        )
        return self._programs.get(("cut", shapes, str(blocks[0].dtype), tokens), build)(*inputs)

    def _embed(self, width: int) -> Any:
        stem, shards = self._weights.stem, self._shards
        ranks = self._programs.mesh.shape["dp"]

        def body(leaves: Sequence[jax.Array], tokens: jax.Array) -> jax.Array:
            return stem.merge(leaves).embed(tokens[0], shards)[None]  # type: ignore[attr-defined]

        arguments = (stem.leaves, jax.ShapeDtypeStruct((ranks, width), jnp.int32))
        return self._programs.get(
            ("embed", width),
            lambda: self._programs.compile(body, arguments, (stem.specs, RANK), RANK),
        )

    def _embeds(self, group: range) -> bool:
        """Whether the group embeds tokens for its layers."""
        return len(self._weights.layers) in group or self._weights.reads_tokens

    def _group(self, group: range, chunk: ChunkArrays, deep: Any, embeds: bool) -> Any:
        parts, embedded = self._weights[group], embeds or self._embeds(group)
        width, last = chunk.tokens.shape[1], group.stop == len(self._pool.spec.layers)
        # Only the last group's program depends on which tokens are sampled.
        form = chunk.form if last else ChunkForm(chunk.form.packed)
        kinds = self._pool.spec.layers[group.start : group.stop]
        before, within = _taps(self._weights, group)
        structures = tuple(part.structure for part in parts)
        key = ("group", width, form, last, structures, kinds, before, within, embeds)
        deep_spec = () if isinstance(deep, tuple) else RANK
        if deep_spec:
            key += (group.start,)

        def build() -> Any:
            pages = self._pool.layers[group.start : group.stop]
            states = self._states.layers[group.start : group.stop]
            shape = (*chunk.tokens.shape, (1 + before) * self._weights.width)
            x = () if embeds else jax.ShapeDtypeStruct(shape, self._weights.dtype)
            ranks, sums, meta = len(chunk.tokens), self._sums, chunk.arguments[1:]
            keys, key_specs, sum_specs = ((), ()), ((), ()), []
            if sums is not None:
                keys = tuple(jax.ShapeDtypeStruct((ranks, size), jnp.uint32) for size in (2, 1))
                key_specs, sum_specs = (RANK, RANK), [sums.spec_of_shares]
            page_specs, state_specs = self._pool.specs(group), self._states.specs(group)
            in_specs = (
                [part.specs for part in parts],
                page_specs,
                state_specs,
                () if embeds else RANK,
                *chunk.specs[1:],
                deep_spec,
                *key_specs,
            )
            in_specs += (self._weights.stem.specs, RANK) if embedded else ()
            emitted = [BLOCK_SPEC] if self._emit else []
            out_specs = (RANK, page_specs, state_specs, emitted, sum_specs)
            arguments = ([part.leaves for part in parts], pages, states, x, *meta, deep, *keys)
            arguments += (self._weights.stem.leaves, chunk.tokens) if embedded else ()
            # The last group returns fewer activations than its input has. A group with taps returns
            # more.
            donate = (1, 2) if last or within or embeds else (1, 2, 3)
            return self._programs.compile(
                self._group_body(group, form), arguments, in_specs, out_specs, donate=donate
            )

        return self._programs.get(key, build)

    def _group_body(self, group: range, form: ChunkForm) -> Any:
        parts, stored = self._weights[group], self._pool.spec.last_stored
        sources = self._pool.spec.sources_in(group)
        weights, layers = self._weights, len(self._weights.layers)
        common, sums, page_size = self._shards, self._sums, self._pool.page_size
        tables, (rows, window_rows) = self._tables, self._rank_rows
        spec = sums.spec if sums else self._pool.spec
        kinds = spec.layers[group.start : group.stop]
        apart = [tables > 1 and layer.window is not None for layer in self._pool.spec.layers]
        grain, keeps = self._grain if form.packed else self._long_grain, self._keeps
        adapters = self._adapters
        taps, width, records = weights.taps, weights.width, self._pool.spec.records

        def body(
            leaves: Sequence[Sequence[jax.Array]],
            pages: Sequence[LayerPages],
            states: Sequence[LayerPages],
            x: Any,
            positions: jax.Array,
            segment: jax.Array,
            table: jax.Array,
            past: jax.Array,
            continuing: jax.Array,
            state: jax.Array,
            sampling: jax.Array,
            spatial: Any,
            deep: Any,
            key: Any,
            place: Any,
            stem_leaves: Sequence[jax.Array] = (),
            tokens: jax.Array | None = None,
        ) -> tuple[jax.Array, list[LayerPages], list[LayerPages], list[jax.Array], list[jax.Array]]:
            positions_T, segment_T, past_R = positions[0], segment[0], past[0]
            slot_R, kept_R, stop_R = (state[0, :, column] for column in range(3))
            rows_R = sampling[0]
            shards = common
            if adapters:
                own_T = jnp.take(state[0, :, 3], segment_T, mode="clip")
                shards = dataclasses.replace(common, adapters=AdapterRows(own_T, not form.packed))
            table_RN, *others = jnp.split(table[0], tables, axis=1)
            ours = (positions_T, segment_T, table_RN, past_R, continuing[0], rows_R)
            rank_chunk = RankChunk(*ours, form.packed)
            windows = (others[0], window_rows) if others else None
            attention = ChunkAttention(rank_chunk, rows, page_size, shards, windows)
            shards = attention.recording(shards) if records else shards
            begun_R = past_R[: slot_R.shape[0]]
            runs = runs_of(segment_T, positions_T, begun_R, grain, stop_R if keeps else None)
            kept = kept_R if keeps else None
            new_states: list[LayerPages] = []
            turned_T = positions_T if isinstance(spatial, tuple) else spatial[0]
            if tokens is not None and isinstance(x, tuple):
                x = weights.stem.merge(stem_leaves).embed(tokens[0], shards)[None]  # type: ignore[attr-defined]
            x_TD, *tapped = jnp.split(x[0], x.shape[-1] // width, axis=-1)
            valid_T, alone, given = segment_T >= 0, False, None
            if weights.reads_tokens and tokens is not None:
                own: Any = weights.stem.merge(stem_leaves)
                given = GivenTokens(tokens[0], own.embed(tokens[0], shards))

            def compute(
                part: Part,
                form_of_layer: tuple[bool, bool, bool, bool, int | None],
                leaves: Sequence[jax.Array],
                layer_pages: LayerPages,
                layer_states: LayerPages,
                x_TD: jax.Array,
            ) -> tuple[jax.Array, LayerPages, LayerPages, LayerPages]:
                asks, rows_alone, sends, windowed, source = form_of_layer
                advanced: list[LayerPages] = []
                layer: Any = part.merge(leaves)
                recur = recur_over(layer_states, slot_R, begun_R == 0, runs, advanced.append, kept)
                if source is None:
                    attend = attention.over(layer_pages, rows_alone, sends, windowed)
                else:
                    attend = attention.reading(source, rows_alone)
                asked_R, more = rows_R if asks else None, {} if given is None else {"given": given}
                x_TD = layer(x_TD, turned_T, attend, shards, valid_T, asked_R, recur, **more)
                # A layer calls `attend` only if it has KV, and `recur` only if it has recurrent
                # state.
                if not layer_pages:
                    attention.without_kv()
                (state_of,) = advanced or [()]
                return x_TD, attention.pages.pop(), attention.sent.pop(), state_of

            spec_of_all = self._pool.spec
            calls = LayerCalls(compute, spec_of_all.selects or spec_of_all.shares)
            for index, source, part, part_leaves, layer_pages, layer_states, kind in zip(
                group, sources, parts, leaves, pages, states, kinds, strict=True
            ):
                tapped += [x_TD] * taps.count(index)
                of_rows = index == stored and not form.every_token
                asks, sends = of_rows and (index == layers or not records), bool(kind.components)
                alone |= asks
                if index == layers:
                    assert tokens is not None
                    attend = attention.over(layer_pages, True, sends, apart[index])
                    layer: Any = part.merge(part_leaves)
                    stem: Any = weights.stem.merge(stem_leaves)
                    y_TD = jnp.concatenate(tapped, axis=-1) if taps else stem.normed(x_TD)
                    compute_draft_kv(
                        stem, layer, y_TD, (tokens[0], turned_T, segment_T), attend, common
                    )
                    tapped = []
                    x_TD = _rows_of(x_TD, rows_R if asks else None)
                    new_states.append(())
                    continue
                form_of_layer = (asks, alone, sends, apart[index], source)
                x_TD, written, sent, state_of = calls(
                    part, form_of_layer, part_leaves, layer_pages, layer_states, x_TD
                )
                attention.pages.append(written)
                attention.sent.append(sent)
                new_states.append(state_of)
                if not isinstance(deep, tuple) and index < deep.shape[2]:
                    x_TD = x_TD + _rows_of(deep[0, :, index], rows_R if alone else None)
                if of_rows:  # layers after this one have these rows alone
                    if not alone:
                        x_TD, alone = _rows_of(x_TD, rows_R), True
                    turned_T, valid_T = _rows_of(turned_T, rows_R), rows_R >= 0
                    shards, given = shards.of_rows(rows_R), given and given.of_rows(rows_R)
            if tapped:
                x_TD = jnp.concatenate((x_TD, *tapped), axis=-1)
            if sums is None:
                return x_TD[None], attention.pages, new_states, [], []
            block_CKTH = block_of(kinds, attention.sent, spec)
            where = positions_T, segment_T
            shares = sums.shares(block_CKTH, *where, key[0], place[0, 0])
            return x_TD[None], attention.pages, new_states, [block_CKTH[None]], [shares]

        return body


def _rows_of(of_TD: jax.Array, rows_R: jax.Array | None) -> jax.Array:
    return of_TD if rows_R is None else jnp.take(of_TD, rows_R, axis=0, mode="clip")


def _taps(weights: Weights, group: range) -> tuple[int, tuple[int, ...]]:
    before = sum(tap < group.start for tap in weights.taps)
    return before, tuple(tap - group.start for tap in weights.taps if tap in group)


def compute_draft_kv(
    stem: Any,
    layer: DraftLayer,
    y_TD: jax.Array,
    chunk: tuple[jax.Array, jax.Array, jax.Array],
    attend: Attend,
    shards: Shards,
) -> None:
    """Computes the keys and values of a chunk in the layer that drafts tokens. `attend` writes
    them."""
    tokens_T, positions_T, segment_T = chunk
    y_TD, known_T = _before(layer.fused(y_TD, shards), segment_T)
    layer(
        jnp.where(known_T[:, None], stem.embed(tokens_T, shards), 0),
        y_TD,
        positions_T,
        attend,
        shards,
        segment_T >= 0,
        jnp.zeros((0,), jnp.int32),  # only keys and values
    )


def _before(y_TD: jax.Array, segment_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state before a row's first token in the chunk is unknown. Unknown states are zero."""
    index_T = jnp.arange(segment_T.shape[0], dtype=jnp.int32)
    known_T = (index_T > 0) & (segment_T >= 0) & (segment_T == jnp.roll(segment_T, 1))
    return jnp.where(known_T[:, None], jnp.roll(y_TD, 1, axis=0), 0), known_T
