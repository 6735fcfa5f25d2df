"""Runs the prefill chunks of an instance with pipeline stages.

Each stage has its own mesh, with a range of consecutive layer groups, their weights and their
pages. A chunk runs through the stages in order. Activations are copied from each device of a stage
to the device at the same place in the next stage's mesh. All calls only issue work. So while a
stage computes one chunk, the stage before it computes the next chunk, as long as enough commands
are in flight (`MeshLimits.stages`). The KV of a layer group is sent from the mesh of its stage. An
instance without pipeline stages has a single stage."""

from collections.abc import Sequence
from typing import Any

import jax

from jdisagg.executor.image_programs import ImagePrograms
from jdisagg.executor.prefill_program import ChunkArrays, PrefillPrograms
from jdisagg.executor.programs import Programs


class PrefillStages:
    """The prefill programs of all stages. Used by the dispatch thread only."""

    def __init__(
        self,
        stages: Sequence[tuple[Programs, PrefillPrograms]],
        stage_of: Sequence[int],
        images: ImagePrograms | None = None,
    ) -> None:
        self._stages, self._stage_of, self._images = stages, stage_of, images

    def run(
        self, chunk: ChunkArrays, deep: Any = ()
    ) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        """Returns the result of `PrefillPrograms.run` for the whole model, with the blocks and
        checksums of all layer groups."""
        (_, first), *later = self._stages
        x, blocks, sums = first.run(chunk, deep=deep, images=self._images)
        for programs, stage in later:
            x, more, of_more = stage.run(chunk, programs.receive(x))
            blocks, sums = [*blocks, *more], [*sums, *of_more]
        return x, blocks, sums

    def cut(
        self, blocks: Sequence[jax.Array], groups: range, rank: int, offset: int, tokens: int
    ) -> jax.Array:
        _, stage = self._stages[self._stage_of[groups.start]]
        assert self._stage_of[groups.start] == self._stage_of[groups.stop - 1], groups
        return stage.cut(blocks[groups.start : groups.stop], rank, offset, tokens)
