"""Compiles and runs every program that an instance may need, so that no request has to wait for a
compilation.

Each program runs with arguments that change nothing: chunks of padding, empty slots, blocks without
a valid token. On a GPU each program runs three times, because XLA builds the CUDA graph of a
command buffer only in the second run. Warm-up runs on the dispatch thread, before the first
command."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from jdisagg.executor.image_programs import patch_buckets
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.prefill_program import chunk_forms
from jdisagg.layout.kv_spec import KvKind
from jdisagg.layout.platforms import traits_of
from jdisagg.scheduler.blocks import split_blocks
from jdisagg.scheduler.capabilities import Capability
from jdisagg.scheduler.executor import MeshLimits

_Shape = tuple[range, int, KvKind]


@dataclass(frozen=True)
class WarmUpStep:
    """A part of warm-up.

    Attributes:
        run: Function that compiles one program or a few related ones, by running them.
        capability: Optional capability that needs the programs, or None for common programs.
    """

    run: Callable[[], object]
    capability: Capability | None = None


def warm_up_steps(executor: MeshExecutor) -> list[WarmUpStep]:
    """Returns the warm-up of a mesh, in the order to run it."""
    limits, role, blocks = executor.limits, executor.role, executor.blocks
    steps = _chunk_steps(executor)
    if limits.adapters:
        steps += [WarmUpStep(executor.adapters.warm_up)]
    if role.decode:
        steps += [WarmUpStep(partial(executor.warm_decode, size)) for size in limits.batch_buckets]
        steps += [WarmUpStep(partial(executor.warm_mixed, width)) for width in limits.mixed_buckets]
        steps += [WarmUpStep(executor.warm_updates), *_pairs(executor)]
        # A mesh that also prefills and sends no blocks is the only mesh of an embedded cluster. It
        # receives no blocks.
        if role.extracts or not role.prefill:
            inserts = [partial(executor.warm_insert, *one) for one in limits.block_shapes()]
            steps += [WarmUpStep(insert) for insert in inserts]
    if role.extracts or role.spills:
        needed = _needs_extracts(role)
        extracts = [partial(blocks.warm_extract, *one) for one in limits.block_shapes()]
        steps += [WarmUpStep(extract, needed) for extract in extracts]
    kept, fetched = (_shapes_of(limits, tokens) for tokens in (role.host_tokens, role.peer_tokens))
    back = [(*shape, KvKind.POSITIONS) for shape in limits.block_shapes()] if role.spills else kept
    if role.host_tokens:
        back = [*back, *_snapshot_shapes(limits)]
    tiers = [partial(blocks.warm_restore, *shape) for shape in back]
    tiers += [partial(executor.warm_insert, *shape) for shape in fetched]
    steps += [WarmUpStep(one, Capability.TIERS) for one in tiers]
    if executor.card.ends and (role.emit or role.extracts):
        steps += [WarmUpStep(partial(blocks.warm_pieces, *one)) for one in limits.block_shapes()]
    steps += _steps_apart(executor)
    return [step for step in steps for _ in range(traits_of(executor.platform).warm_runs)]


def _chunk_steps(executor: MeshExecutor) -> list[WarmUpStep]:
    """Returns the steps for prefill chunks."""
    limits, role = executor.limits, executor.role
    if not (role.prefill or limits.append_buckets):
        return []
    computed = limits.computed
    forms = chunk_forms(computed, executor.platform)
    chunks = [(width, form) for width in computed.chunk_buckets for form in forms]
    needed = None if role.prefill else Capability.APPEND
    steps = [WarmUpStep(partial(executor.warm_prefill, *one), needed) for one in chunks]
    if (images := executor.images) is not None:
        of_images = [partial(images.warm_encoder, size) for size in patch_buckets(images.form)]
        of_images += [partial(images.warm_place, width) for width in computed.chunk_buckets]
        of_images += [partial(executor.warm_pictured, *one) for one in chunks if images.depth]
        steps += [WarmUpStep(one, Capability.IMAGES) for one in of_images]
    if limits.snapshots_per_rank and not role.decode:
        steps += [WarmUpStep(executor.blocks.warm_copy, Capability.REUSE)]
    return steps


def _pairs(executor: MeshExecutor) -> list[WarmUpStep]:
    """Returns the steps for decode steps of two programs: with drafts, if steps verify drafts or
    tokens that a grammar forces, and without drafts for rows with a grammar."""
    limits, grammars = executor.limits, executor.grammars
    steps: list[WarmUpStep] = []
    for size in limits.pair_batches:
        if grammars:
            plain = partial(executor.warm_pair, size, False)
            steps += [WarmUpStep(plain, Capability.GRAMMARS)]
        if limits.longest_run > 1 and (grammars or limits.speculates):
            needed = Capability.GRAMMARS if grammars else Capability.DRAFTS
            steps += [WarmUpStep(partial(executor.warm_pair, size, True), needed)]
    return steps


def _needs_extracts(role: MeshRole) -> Capability | None:
    """Returns the capability that needs programs to extract ordinary blocks. Decode meshes that
    migrate sequences always need them."""
    if not role.extracts:
        return Capability.TIERS
    return None if role.decode else Capability.REUSE


def _snapshot_shapes(limits: MeshLimits) -> list[_Shape]:
    """Returns the shapes of the blocks of the prefix cache's snapshots."""
    if not limits.snapshot_tokens:
        return []
    state: list[_Shape] = [(range(1), 1, KvKind.STATE)] if limits.kv_spec.has_state else []
    return [*state, *((*shape, KvKind.WINDOW) for shape in limits.window_shapes())]


def _steps_apart(executor: MeshExecutor) -> list[WarmUpStep]:
    """Returns the steps for KV that is transferred separately: recurrent state and sliding
    windows."""
    limits, role, blocks = executor.limits, executor.role, executor.blocks
    alone = role.prefill and role.decode and not (role.extracts or role.spills)
    sent = [(range(1), 1, KvKind.STATE)] if limits.kv_spec.has_state and not alone else []
    sent += [(groups, tokens, KvKind.WINDOW) for groups, tokens in limits.window_shapes()]
    steps: list[WarmUpStep] = []
    for shape in sent:
        if role.decode or (limits.snapshot_tokens and role.peer_tokens):
            needed = None if role.decode else Capability.TIERS
            steps += [WarmUpStep(partial(executor.warm_insert, *shape), needed)]
        if role.spills:
            steps += [WarmUpStep(partial(blocks.warm_restore, *shape), Capability.TIERS)]
        if role.extracts or role.emit or role.spills:
            needed = None if role.extracts or role.emit else Capability.TIERS
            steps += [WarmUpStep(partial(blocks.warm_extract, *shape), needed)]
            if executor.card.ends:
                steps += [WarmUpStep(partial(blocks.warm_pieces, *shape), needed)]
    return steps


def _shapes_of(limits: MeshLimits, tokens: int) -> list[_Shape]:
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
    return [
        (groups, length, KvKind.POSITIONS)
        for length in sorted(lengths)
        for groups in limits.bands(length)
    ]
