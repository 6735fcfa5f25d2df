"""Runs the end of a prefill chunk: computes logits for the rows that end their prompt, and samples
their first tokens.

A chunk has at most `samples_per_chunk` samples per dp rank. If a request wants several completions
of one prompt, several samples use the same row. The sampling programs do not depend on the size of
the chunk."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.choose import Chosen, Variant, choose, logits
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
    """Parameters of each sample, as arrays [ranks, samples, ...]. `counts` and `mask` are () if the
    program variant does not use them."""

    ints: Any
    floats: Any
    position: Any
    counts: Any
    mask: Any


class PrefillSampler:
    """Samples the first token of each prompt that ends in a chunk. Used by the dispatch thread
    only."""

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        shards: Shards,
        limits: MeshLimits,
        rows: RowFormat,
        grammars: GrammarRows,
    ) -> None:
        self._programs, self._weights, self._shards, self._limits, self._rows = (
            programs,
            weights,
            shards,
            limits,
            rows,
        )
        self._grammars = grammars

    def run(self, command: PrefillChunk, x: jax.Array, every_token: bool = False) -> Chosen | None:
        """Issues the programs that choose the chunk's tokens.

        Args:
            command: The chunk.
            x: Activations after the last layer. [ranks, R, D] for the last token of each row, in
                the order of the command's rows on each dp rank; or [ranks, T, D] for all tokens
                with `every_token`.
            every_token: Whether `x` has the activations of all tokens.

        Returns:
            The chosen tokens, or None if no row samples.
        """
        samples = [(row, spec) for row in command.rows for spec in row.samples]
        if not samples:
            return None
        every = [spec.sampling for _, spec in samples]
        variant = Variant.of(
            sampled=any(not params.greedy for params in every),
            shaped=any(params.shaped for params in every),
            masked=any(params.grammar is not None for params in every),
        )
        per_rank = Counter(row.rank for row, _ in samples)
        source, rows = self._empty(variant, max(per_rank.values()))
        rows_seen, used = [0] * self._limits.ranks, [0] * self._limits.ranks
        for row in command.rows:
            for spec in row.samples:
                at = row.rank, used[row.rank]
                used[row.rank] += 1
                last = row.offset + len(row.tokens) - 1
                source[at] = last if every_token else rows_seen[row.rank]
                rows.position[at] = row.start + len(row.tokens)
                self._rows.pack(rows.ints[at], rows.floats[at], spec)
                if variant.shaped and spec.sampling.penalised:
                    rows.counts[at] = self._rows.pack_history(spec)
                if variant.masked:
                    self._grammars.first_mask(spec, rows.mask[at])
            rows_seen[row.rank] += 1
        return self._head(variant, self._pick(x, source), rows)

    def warm_up(self, variant: Variant, x: jax.Array) -> None:
        """Compiles the programs of one variant, by running them on the activations `x` of a chunk
        of padding."""
        for samples in {self._room(1), self._limits.samples_per_chunk}:
            source, rows = self._empty(variant, samples)
            jax.block_until_ready(self._head(variant, self._pick(x, source), rows).token)

    def _empty(self, variant: Variant, samples: int) -> tuple[np.ndarray, _SampledRows]:
        """Returns empty parameters with room for this number of samples per dp rank."""
        shape = self._limits.ranks, self._room(samples)
        return np.zeros(shape, np.int32), _SampledRows(
            ints=np.zeros((*shape, self._rows.ints), np.int32),
            floats=np.zeros((*shape, self._rows.floats), np.float32),
            position=np.zeros(shape, np.int32),
            counts=np.zeros((*shape, self._rows.vocabulary), np.int32) if variant.shaped else (),
            mask=self._grammars.empty(shape) if variant.masked else (),
        )

    def _room(self, samples: int) -> int:
        """Returns the number of samples for which a program is compiled: one, or
        `samples_per_chunk`. A program for one sample saves 1 % of the prefill of a long prompt. A
        decode mesh computes no long prompts and always uses `samples_per_chunk`."""
        alone = samples == 1 and not self._limits.append_buckets
        return 1 if alone else self._limits.samples_per_chunk

    def _pick(self, x: jax.Array, source: np.ndarray) -> jax.Array:
        """Returns x[rank, source[rank]], [ranks, samples, D]."""

        def body(x: jax.Array, source: jax.Array) -> jax.Array:
            return jnp.take(x[0], source[0], axis=0, mode="clip")[None]

        on_mesh = self._programs.argument(source)
        build = lambda: self._programs.compile(body, (x, on_mesh), (RANK, RANK), RANK)  # noqa: E731
        return self._programs.get(("pick", x.shape[1], source.shape), build)(x, on_mesh)

    def _head(self, variant: Variant, x: jax.Array, rows: _SampledRows) -> Chosen:
        stem, shards, row_format, programs = (
            self._weights.head,
            self._shards,
            self._rows,
            self._programs,
        )

        def body(leaves: tuple[jax.Array, ...], x: jax.Array, rows: _SampledRows) -> Chosen:
            row: _SampledRows = jax.tree.map(lambda array: array[0], rows)
            head: Any = stem.merge(leaves)
            y_RD = head.normed(reveal(x[0]))
            logits_RV, shard = logits(variant, head, y_RD, shards, row_format.vocabulary)
            active_R = jnp.ones(row.position.shape, jnp.bool_)
            return choose(
                variant,
                row_format,
                logits_RV,
                row.ints,
                row.floats,
                row.position,
                active_R,
                row.counts if variant.shaped else None,
                shard,
                shards.platform,
                row.mask if variant.masked else None,
            ).on_rank(programs)

        on_mesh = self._programs.argument(rows)

        def build() -> Callable[..., Chosen]:
            in_specs = (stem.specs, RANK, jax.tree.map(lambda _: RANK, rows))
            return self._programs.compile(
                body, (stem.leaves, x, on_mesh), in_specs, Chosen.specs(variant, programs)
            )

        return self._programs.get(("head", variant, x.shape), build)(stem.leaves, x, on_mesh)
