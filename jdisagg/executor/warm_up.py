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
        if not role.prefill:
            blocks = [(group, tokens) for group in range(limits.layer_groups) for tokens in block_lengths(limits)]
            steps += [lambda group=group, tokens=tokens: executor.warm_insert(group, tokens) for group, tokens in blocks]
            if role.extracts:
                steps += [lambda group=group, tokens=tokens: executor.warm_extract(group, tokens) for group, tokens in blocks]
    if executor.card.ends and (role.emit or role.extracts):
        blocks = [(group, tokens) for group in range(limits.layer_groups) for tokens in block_lengths(limits)]
        steps += [lambda group=group, tokens=tokens: executor.warm_pieces(group, tokens) for group, tokens in blocks]
    runs = GPU_RUNS if executor.platform == "gpu" else 1
    return [step for step in steps for _ in range(runs)]


def block_lengths(limits: MeshLimits) -> list[int]:
    """Every length that an offered block can have: powers of two from the granule to the largest chunk."""
    lengths = [limits.granule_tokens]
    while lengths[-1] * 2 <= limits.chunk_buckets[-1]:
        lengths.append(lengths[-1] * 2)
    return lengths
