"""Compiles and runs every program that an instance may need, so that no request has to wait for a
compilation.

Each program runs with arguments that change nothing: chunks of padding, empty slots, blocks without
a valid token. Warm-up runs on the dispatch thread, before the first command, or between commands of
a worker that will change its role."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jdisagg.executor.image_programs import patch_buckets
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.prefill_program import chunk_forms
from jdisagg.layout.kv_spec import KvKind
from jdisagg.scheduler.blocks import split_blocks
from jdisagg.scheduler.executor import MeshLimits

_Shape = tuple[range, int, KvKind]


# A step of warm-up compiles one program or a few related ones, by running them.
WarmUpStep = Callable[[], object]


def warm_up_steps(executor: MeshExecutor, *roles: MeshRole) -> list[WarmUpStep]:
    """Returns the steps of each of `roles`, without those of earlier roles. Without `roles`, what
    the mesh can do is one role."""
    steps = [step for role in roles or (executor.role,) for step in _steps(executor, role)]
    return list({(step.func, step.args, *step.keywords.items()): step for step in steps}.values())


def _steps(executor: MeshExecutor, role: MeshRole) -> list[partial[Any]]:
    limits, blocks = executor.limits, executor.blocks
    insert = partial(executor.warm_insert, codec=role.codec)
    steps = _chunk_steps(executor, role)
    if limits.adapters:
        steps += [partial(executor.adapters.warm_up)]
    if role.decode:
        steps += [partial(executor.warm_decode, size) for size in limits.batch_buckets]
        steps += [partial(executor.warm_mixed, width) for width in limits.mixed_buckets]
        steps += [partial(executor.warm_updates), *_pairs(executor)]
        # A mesh that also prefills and sends no blocks is the only mesh of an embedded cluster. It
        # receives no blocks.
        if role.extracts or not role.prefill:
            steps += [partial(insert, *one) for one in limits.block_shapes()]
    kept, fetched = (_shapes_of(limits, tokens) for tokens in (role.host_tokens, role.peer_tokens))
    if role.tails and not limits.has_slots:  # a tail may have any number of tokens
        parts = [one for one in limits.block_shapes() if one[1] <= role.host_tokens]
        kept = [(*one, KvKind.POSITIONS) for one in parts]
    if role.extracts:
        steps += [partial(blocks.warm_extract, *one) for one in limits.block_shapes()]
    else:
        steps += [partial(blocks.warm_extract, *shape) for shape in kept]
    if role.host_tokens:
        kept = [*kept, *_snapshot_shapes(limits)]
    steps += [partial(blocks.warm_restore, *shape) for shape in kept]
    steps += [partial(insert, *shape) for shape in fetched]
    if executor.card.ends and (role.emit or role.extracts):
        steps += [partial(blocks.warm_pieces, *one) for one in limits.block_shapes()]
    return steps + _steps_apart(executor, role)


def _chunk_steps(executor: MeshExecutor, role: MeshRole) -> list[partial[Any]]:
    limits = executor.limits
    if not (role.prefill or limits.append_buckets):
        return []
    computed = limits.computed_by(role.prefill)
    forms = chunk_forms(computed, executor.platform)
    chunks = [(width, form) for width in computed.chunk_buckets for form in forms]
    warm = partial(executor.warm_prefill, sends=role.emit)
    steps: list[partial[Any]] = [partial(warm, *one) for one in chunks]
    if (images := executor.images) is not None:
        steps += [partial(images.warm_encoder, size) for size in patch_buckets(images.form)]
        steps += [partial(images.warm_place, width) for width in computed.chunk_buckets]
        steps += [partial(executor.warm_pictured, *one) for one in chunks if images.depth]
    if limits.snapshots_per_rank and not role.decode:
        steps += [partial(executor.blocks.warm_copy)]
    return steps


def _pairs(executor: MeshExecutor) -> list[partial[Any]]:
    limits, grammars = executor.limits, executor.grammars
    drafts = limits.longest_run > 1 and (grammars or limits.speculates)
    forms = [False] * grammars + [True] * drafts
    return [
        partial(executor.warm_pair, size, form) for size in limits.pair_batches for form in forms
    ]


def _snapshot_shapes(limits: MeshLimits) -> list[_Shape]:
    if not limits.snapshot_tokens:
        return []
    state: list[_Shape] = [(range(1), 1, KvKind.STATE)] if limits.kv_spec.has_state else []
    return [*state, *((*shape, KvKind.WINDOW) for shape in limits.window_shapes())]


def _steps_apart(executor: MeshExecutor, role: MeshRole) -> list[partial[Any]]:
    limits, blocks = executor.limits, executor.blocks
    alone = role.prefill and role.decode and not role.extracts
    sent = [(range(1), 1, KvKind.STATE)] if limits.kv_spec.has_state and not alone else []
    sent += [(groups, tokens, KvKind.WINDOW) for groups, tokens in limits.window_shapes()]
    steps: list[partial[Any]] = []
    for shape in sent:
        if role.decode or (limits.snapshot_tokens and role.peer_tokens):
            steps += [partial(executor.warm_insert, *shape, codec=role.codec)]
        if role.extracts or role.emit:
            steps += [partial(blocks.warm_extract, *shape)]
            if executor.card.ends:
                steps += [partial(blocks.warm_pieces, *shape)]
    return steps


def _shapes_of(limits: MeshLimits, tokens: int) -> list[_Shape]:
    largest = limits.chunk_buckets[-1]
    lengths = {
        length
        for first in range(0, tokens, largest)
        for _, length, _ in split_blocks(
            min(largest, tokens - first), limits.granule_tokens, limits.whole_blocks
        )
    }
    return [
        (groups, length, KvKind.POSITIONS)
        for length in sorted(lengths)
        for groups in limits.bands(length)
    ]
