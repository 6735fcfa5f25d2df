"""Compiles and runs every program that an instance may need, so that no request has to wait for a
compilation.

Each program runs with arguments that change nothing: chunks of padding, empty slots, blocks without
a valid token. On a GPU each program runs three times, because XLA builds the CUDA graph of a
command buffer only in the second run. Warm-up runs on the dispatch thread, before the first
command."""

from collections.abc import Callable
from functools import partial

from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.executor.prefill_program import chunk_forms
from jdisagg.layout.kv_spec import KvKind
from jdisagg.layout.platforms import traits_of
from jdisagg.scheduler.blocks import split_blocks
from jdisagg.scheduler.executor import MeshLimits


def warm_up_steps(executor: MeshExecutor) -> list[Callable[[], None]]:
    """Returns the warm-up as a list of functions, in the order to run them. Each function compiles
    one program or a few related programs."""
    limits, role = executor.limits, executor.role
    steps: list[Callable[[], None]] = []
    if role.prefill or limits.append_buckets:
        computed = limits.computed
        chunks = [
            (width, form)
            for width in computed.chunk_buckets
            for form in chunk_forms(computed, width, executor.platform)
        ]
        steps += [
            lambda width=width, form=form: executor.warm_prefill(width, form)
            for width, form in chunks
        ]
        if limits.snapshots_per_rank and not role.decode:
            steps += [executor.blocks.warm_copy]
    if limits.adapters:
        steps += [executor.adapters.warm_up]
    if role.decode:
        sizes = [(size, variant) for size in limits.batch_buckets for variant in executor.variants]
        steps += [
            lambda size=size, variant=variant: executor.warm_decode(size, variant)
            for size, variant in sizes
        ]
        steps += [executor.warm_updates]
        # Otherwise it is the only mesh of an embedded cluster and receives no blocks.
        if role.extracts or not role.prefill:
            steps += [
                partial(executor.warm_insert, groups, tokens)
                for groups, tokens in limits.block_shapes()
            ]
    if role.extracts or role.spills:
        steps += [
            partial(executor.blocks.warm_extract, groups, tokens)
            for groups, tokens in limits.block_shapes()
        ]
    kept, fetched = (_shapes_of(limits, tokens) for tokens in (role.host_tokens, role.peer_tokens))
    back = [(*shape, KvKind.POSITIONS) for shape in limits.block_shapes()] if role.spills else kept
    if limits.snapshots_per_rank and role.host_tokens:
        back = [*back, (range(1), 1, KvKind.STATE)]
    steps += [partial(executor.blocks.warm_restore, *shape) for shape in back]
    steps += [partial(executor.warm_insert, *shape) for shape in fetched]
    if executor.card.ends and (role.emit or role.extracts):
        steps += [
            partial(executor.blocks.warm_pieces, groups, tokens)
            for groups, tokens in limits.block_shapes()
        ]
    alone = role.prefill and role.decode and not (role.extracts or role.spills)
    apart = [(range(1), 1, KvKind.STATE)] if limits.kv_spec.has_state and not alone else []
    windows = [(groups, tokens, KvKind.WINDOW) for groups, tokens in limits.window_shapes()]
    windows += [shape for shape in (*kept, *fetched) if shape[2] is KvKind.WINDOW]
    apart += dict.fromkeys(windows)
    for shape in apart:
        if role.decode or (limits.snapshots_per_rank and role.peer_tokens):
            steps += [partial(executor.warm_insert, *shape)]
        if role.spills:
            steps += [partial(executor.blocks.warm_restore, *shape)]
        if role.extracts or role.emit or role.spills:
            steps += [partial(executor.blocks.warm_extract, *shape)]
            if executor.card.ends:
                steps += [partial(executor.blocks.warm_pieces, *shape)]
    return [step for step in steps for _ in range(traits_of(executor.platform).warm_runs)]


def _shapes_of(limits: MeshLimits, tokens: int) -> list[tuple[range, int, KvKind]]:
    """Returns the shapes (layer groups, tokens, kind) of the blocks into which all KV of `tokens`
    tokens is divided."""
    largest = limits.chunk_buckets[-1]
    lengths = {
        length
        for first in range(0, tokens, largest)
        for _, length, _ in split_blocks(
            min(largest, tokens - first), limits.granule_tokens, limits.whole_blocks
        )
    }
    kinds = [(KvKind.POSITIONS, limits.bands)]
    if limits.windows_apart and not limits.ring_pages:
        kinds.append((KvKind.WINDOW, limits.window_bands))
    return [
        (groups, length, kind)
        for length in sorted(lengths)
        for kind, bands in kinds
        for groups in bands(length)
    ]
