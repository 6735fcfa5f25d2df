"""Runs the end of a prefill chunk: computes logits for the rows that end their prompt, and samples
their first tokens.

A chunk has at most `samples_per_chunk` samples per dp rank. If a request wants several completions
of one prompt, several samples use the same row."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.choose import Chosen, RowsToChoose, choose, logits
from jdisagg.executor.grammar_rows import GrammarRows
from jdisagg.executor.prefill_program import RANK
from jdisagg.executor.programs import Programs
from jdisagg.executor.slot_state import RowFormat
from jdisagg.executor.weights import Weights
from jdisagg.messages.step_commands import PrefillChunk
from jdisagg.model_api import Shards
from jdisagg.ops.quarantine import reveal
from jdisagg.scheduler.executor import MeshLimits


class _SampledRows(NamedTuple):
    """`source` is the row of the chunk that the sample continues."""

    source: Any
    ints: Any
    floats: Any
    position: Any
    counts: Any
    mask: Any


class PrefillSampler:
    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        shards: Shards,
        limits: MeshLimits,
        rows: RowFormat,
        grammars: GrammarRows,
    ) -> None:
        self._programs, self._weights, self._shards = programs, weights, shards
        self._limits, self._rows, self._grammars = limits, rows, grammars
        # Counts and masks of samples without penalties and grammars stay on the mesh: from the
        # host they would be megabytes a chunk.
        self._neutral: dict[int, tuple[Any, Any]] = {}

    def run(self, command: PrefillChunk, x: jax.Array, every_token: bool = False) -> Chosen | None:
        """Issues the programs that choose the chunk's tokens.

        Args:
            x: Activations after the last layer. [ranks, R, D] for the last token of each row, in
                the order of the command's rows on each dp rank; or [ranks, T, D] for all tokens
                with `every_token`.
        """
        per_rank = Counter(row.rank for row in command.rows for _ in row.samples)
        if not per_rank:
            return None
        most, chunk_rows = max(per_rank.values()), 1 if every_token else x.shape[1]
        count = 1 if most == chunk_rows == 1 else self._limits.samples_per_chunk
        every = [spec.sampling for row in command.rows for spec in row.samples]
        penalised = any(params.penalised for params in every)
        masked = any(params.grammar is not None for params in every)
        rows = self._empty(count, penalised, masked)
        rows_seen, used = [0] * self._limits.ranks, [0] * self._limits.ranks
        for row in command.rows:
            for spec in row.samples:
                at = row.rank, used[row.rank]
                used[row.rank] += 1
                last = row.offset + len(row.tokens) - 1
                rows.source[at] = last if every_token else rows_seen[row.rank]
                rows.position[at] = row.start + len(row.tokens)
                self._rows.pack(rows.ints[at], rows.floats[at], spec)
                if spec.sampling.penalised:
                    rows.counts[at] = self._rows.pack_history(spec)
                if masked:
                    self._grammars.first_mask(spec, rows.mask[at])
            rows_seen[row.rank] += 1
        return self._head(x, rows)

    def warm_up(self, x: jax.Array) -> None:
        count = 1 if x.shape[1] == 1 else self._limits.samples_per_chunk
        jax.block_until_ready(self._head(x, self._empty(count, False, False)).token)

    def _empty(self, count: int, penalised: bool, masked: bool) -> _SampledRows:
        shape = self._limits.ranks, count
        if count not in self._neutral:
            counts = np.zeros((*shape, self._rows.vocabulary), np.int32)
            self._neutral[count] = self._programs.put((counts, self._grammars.empty(shape)))
        no_counts, no_mask = self._neutral[count]
        return _SampledRows(
            source=np.zeros(shape, np.int32),
            ints=np.zeros((*shape, self._rows.ints), np.int32),
            floats=np.zeros((*shape, self._rows.floats), np.float32),
            position=np.zeros(shape, np.int32),
            counts=np.zeros((*shape, self._rows.vocabulary), np.int32) if penalised else no_counts,
            mask=self._grammars.empty(shape) if masked else no_mask,
        )

    def _head(self, x: jax.Array, rows: _SampledRows) -> Chosen:
        stem, shards, row_format, programs = (
            self._weights.head,
            self._shards,
            self._rows,
            self._programs,
        )
        count = rows.position.shape[1]
        if x.shape[1] != count:
            x, own = self._gathered(x, rows.source), np.arange(count, dtype=np.int32)
            rows = rows._replace(source=np.repeat(own[None], self._limits.ranks, axis=0))

        def body(leaves: tuple[jax.Array, ...], x: jax.Array, rows: _SampledRows) -> Chosen:
            row: _SampledRows = jax.tree.map(lambda array: array[0], rows)
            head: Any = stem.merge(leaves)
            y_RD = head.normed(reveal(jnp.take(x[0], row.source, axis=0, mode="clip")))
            return choose(
                row_format,
                logits(head, y_RD, shards, row_format.vocabulary, apart=True),
                RowsToChoose(row.ints, row.floats, row.position, row.position > 0, row.mask),
                lambda: row.counts,
                shards,
            ).on_rank(programs)

        on_mesh = self._on_mesh(rows)

        def build() -> Callable[..., Chosen]:
            in_specs = (stem.specs, RANK, jax.tree.map(lambda _: RANK, rows))
            return programs.compile(
                body, (stem.leaves, x, on_mesh), in_specs, Chosen.specs(programs)
            )

        return programs.get(("head", count), build)(stem.leaves, x, on_mesh)

    def _gathered(self, x: jax.Array, source: np.ndarray) -> jax.Array:
        def body(x: jax.Array, source: jax.Array) -> jax.Array:
            return jnp.take(x[0], source[0], axis=0, mode="clip")[None]

        on_mesh = self._programs.argument(source)
        build = lambda: self._programs.compile(body, (x, on_mesh), (RANK, RANK), RANK)  # noqa: E731
        return self._programs.get(("pick", x.shape[1], source.shape[1]), build)(x, on_mesh)

    def _on_mesh(self, rows: _SampledRows) -> _SampledRows:
        names = [name for name, part in rows._asdict().items() if isinstance(part, np.ndarray)]
        arrays = self._programs.argument(tuple([getattr(rows, name) for name in names]))
        return rows._replace(**dict(zip(names, arrays, strict=True)))
