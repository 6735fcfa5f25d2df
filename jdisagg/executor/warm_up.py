"""Compiles and runs every program that an instance can be asked for, so that nothing is compiled in steady state (rule 12).

Each program is run with arguments that change nothing: chunks of padding, slots of nobody, blocks of no valid token. On a GPU
it is run three times, since the second run of a command buffer builds the graph. Runs on the dispatch thread, before there is work.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from jdisagg.executor.choose import Variant
from jdisagg.executor.prefill_program import chunk_forms
from jdisagg.scheduler.commands import MeshLimits

if TYPE_CHECKING:
    from jdisagg.executor.mesh_executor import MeshExecutor

GPU_RUNS = 3


def warm_up_steps(executor: "MeshExecutor") -> list[Callable[[], None]]:
    """One callable a program (or a few that belong together), in the order in which they are best run."""
    limits, role = executor.limits, executor.role
    steps: list[Callable[[], None]] = []
    if role.prefill:
        chunks = [(width, form) for width in limits.chunk_buckets for form in chunk_forms(limits, width)]
        steps += [lambda width=width, form=form: executor.warm_prefill(width, form) for width, form in chunks]
    if role.decode:
        sizes = [(size, variant) for size in limits.batch_buckets for variant in Variant]
        steps += [lambda size=size, variant=variant: executor.warm_decode(size, variant) for size, variant in sizes]
        steps += [executor.warm_updates]
        if role.extracts or not role.prefill:  # else it is the one mesh of an embedded cluster: nobody is there to send it anything
            steps += [lambda band=band, tokens=tokens: executor.warm_insert(band, tokens) for band, tokens in block_shapes(limits)]
        if role.extracts:
            steps += [lambda band=band, tokens=tokens: executor.warm_extract(band, tokens) for band, tokens in block_shapes(limits)]
    if executor.card.ends and (role.emit or role.extracts):
        steps += [lambda band=band, tokens=tokens: executor.warm_pieces(band, tokens) for band, tokens in block_shapes(limits)]
    runs = GPU_RUNS if executor.platform == "gpu" else 1
    return [step for step in steps for _ in range(runs)]


def block_lengths(limits: MeshLimits) -> list[int]:
    """Every length that an offered block can have: powers of two from the granule to the largest chunk."""
    lengths = [limits.granule_tokens]
    while lengths[-1] * 2 <= limits.chunk_buckets[-1]:
        lengths.append(lengths[-1] * 2)
    return lengths


def block_shapes(limits: MeshLimits) -> list[tuple[range, int]]:
    """The layer groups and the length of every block that can be offered."""
    return [(band, tokens) for tokens in block_lengths(limits) for band in limits.bands(tokens)]
