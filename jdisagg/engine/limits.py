"""Computes the limits that a scheduler and its executor share (`MeshLimits`), from an instance's
configuration and a model's KV spec. No function has side effects."""

import math
from dataclasses import replace
from typing import Any

from jdisagg.config import (
    FROM_FOLDER,
    NO_PREFIX,
    EngineConfig,
    InstanceConfig,
    Mode,
    PrefixConfig,
    WorkerConfig,
)
from jdisagg.errors import ConfigError
from jdisagg.layout.kv_spec import KVSpec, ring_pages
from jdisagg.layout.platforms import traits_of
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.scheduler.blocks import StageCut, stage_layers
from jdisagg.scheduler.executor import TYPICAL_PROMPT, MeshLimits, buckets, sequences_ahead
from jdisagg.scheduler.window_pages import prompt_pages
from jdisagg.settings.declared import settings_of

GRANULE_TOKENS = 16
LARGEST_WHOLE_PREFILL = 8192
ROWS_PER_CHUNK = 16
CONTINUING_ROWS = 4  # CPU cap: each row with cached tokens attends with all queries.
SAMPLES_PER_CHUNK = 16
CHUNK_SIZES = 3
CPU_BATCH = 8
# Size of a layer group: bytes of its KV for a prompt of GROUP_TOKENS tokens. With smaller groups,
# hardly more of the transfer overlaps with computation, and each group costs host work.
GROUP_BYTES = 4 << 20
GROUP_TOKENS = 512
GROUPS_PER_STAGE = 2
# Each block costs both workers about 1 ms of CPU time, in which this many bytes could be
# transferred.
BLOCK_COST_BYTES = 1 << 20


def mesh_limits(
    instance: InstanceConfig,
    mode: Mode,
    spec: KVSpec,
    context_tokens: int,
    layer_groups: int | None,
    platform: str = "cpu",
    *,
    windows_apart: bool = False,
    rings: bool = False,
    append_tokens: int = 0,
    prefix: PrefixConfig = NO_PREFIX,
) -> MeshLimits:
    """Computes the limits of one mesh, for a model without images and without a drafting layer.

    Args:
        layer_groups: Number of layer groups. Both sides of a hand-off must use the number of the
            prefill side. None derives the number from the KV size.
        windows_apart: Whether the KV of sliding-window layers is transferred separately (see
            `hands_windows_apart`).
        rings: Whether this mesh holds the KV of sliding-window layers that are transferred
            separately in ring buffers. Otherwise it holds them in pages of their own.
        append_tokens: Number of tokens in the longest prompt chunk that a decode mesh prefills
            itself; 0 for none. A mesh with ring buffers prefills none, because they are shorter
            than a chunk.
        prefix: Configuration of the prefix cache; by default there is none.
    """
    _check_pages(instance, platform)
    if instance.routed_experts:
        _check_recording(instance, windows_apart)
        spec = spec.recording()
    traits, slots, pp = traits_of(platform), instance.slots_per_rank, instance.layout.pp
    smallest, largest = _chunk_range(instance, mode, context_tokens)
    chunks = _chunk_buckets(smallest, largest)
    appends = 0 if rings else append_tokens
    sent = spec.unwindowed if windows_apart else spec
    limits = MeshLimits(
        ranks=instance.layout.dp,
        page_size=instance.page_size,
        pages_per_rank=instance.pages_per_rank or slots * -(-context_tokens // instance.page_size),
        slots_per_rank=slots,
        context_tokens=context_tokens,
        chunk_buckets=chunks,
        append_buckets=_chunk_buckets(min(smallest, appends), appends) if appends else (),
        mixed_buckets=_mixed_buckets(chunks, instance, mode, spec),
        gather_steps=instance.gather_steps if mode is not Mode.DISAGGREGATED else 0,
        batch_buckets=_batch_buckets(slots, platform),
        layer_groups=groups_of_layers(sent, layer_groups, pp),
        granule_tokens=GRANULE_TOKENS,
        rows_per_chunk=ROWS_PER_CHUNK,
        samples_per_chunk=SAMPLES_PER_CHUNK,
        kv_spec=spec,
        block_bytes=_block_bytes(instance, layer_groups),
        block_cost_tokens=BLOCK_COST_BYTES / sent.bytes_per_token,
        stages=pp,
        continuing_rows=1 if traits.without_loops else CONTINUING_ROWS,
        windows_apart=windows_apart,
        pack_tokens=min(instance.chunk_tokens, largest) if mode is Mode.UNIFIED else None,
        draft_rows=traits.draft_rows,
        speculates=instance.speculate != "off",
        adapters=instance.adapters,
        adapter_rank=instance.adapter_rank if instance.adapters else 0,
        adapter_experts=bool(instance.adapters) and instance.adapter_experts,
    )
    return _with_state(limits, instance, prefix, rings, windows_apart and not rings)


def _with_state(
    limits: MeshLimits, instance: InstanceConfig, prefix: PrefixConfig, rings: bool, windows: bool
) -> MeshLimits:
    """Returns `limits` with the numbers of recurrent-state slots, ring-buffer pages, sliding-window
    pages and snapshots."""
    spec, size = limits.kv_spec, limits.page_size
    snapshots = snapshot_slots(instance) if spec.has_state and prefix.reuse else 0
    whole = -(-limits.context_tokens // size)
    chunk, context = limits.chunk_buckets[-1], limits.context_tokens
    pages = 0
    if windows:
        pages = window_pages(limits.pages_per_rank, size, spec.widest_window, context, chunk)
    return replace(
        limits,
        state_slots_per_rank=state_slots(instance) if spec.has_state or rings else 0,
        ring_pages=min(ring_pages(spec.widest_window, size), whole) if rings else 0,
        snapshots_per_rank=snapshots,
        window_pages_per_rank=pages,
        snapshot_tokens=prefix.start_tokens(size) if snapshots or pages and prefix.reuse else 0,
    )


def _check_recording(instance: InstanceConfig, windows_apart: bool) -> None:
    """A lossy codec would change the numbers of experts, and windows would lose them."""
    if windows_apart:
        raise ConfigError(
            "routed_experts: the model has sliding windows, of which a prefill and a decode mesh"
            " keep only the last positions; use mode=unified or mode=chunked, or remove"
            " routed_experts"
        )
    for name, value, needed in (("pp", instance.layout.pp, 1), ("codec", instance.codec, "none")):
        if value != needed:
            raise ConfigError(
                f"routed_experts needs {name}={needed}, got {value}: set it, or remove"
                " routed_experts"
            )


def _check_pages(instance: InstanceConfig, platform: str) -> None:
    pp, least = instance.layout.pp, traits_of(platform).least_page
    if pp > 1 and instance.block_bytes:
        raise ConfigError(
            f"block_bytes={instance.block_bytes} must be 0 with pipeline stages (pp={pp}): a block"
            " has the layers of one stage; remove block_bytes"
        )
    if instance.page_size < least:
        raise ConfigError(
            f"page_size={instance.page_size} must be at least {least} on a {platform.upper()},"
            " which stores arrays in tiles of this many tokens; set --page_size=128"
        )


def _chunk_range(instance: InstanceConfig, mode: Mode, context_tokens: int) -> tuple[int, int]:
    """Returns the sizes in tokens of the smallest and of the largest prefill chunk."""
    largest = largest_chunk(instance, mode, context_tokens)
    smallest = min(instance.min_chunk_tokens, largest)
    for name, tokens in (("chunk_tokens", largest), ("min_chunk_tokens", smallest)):
        if tokens % GRANULE_TOKENS:
            raise ConfigError(
                f"{name}={tokens} must be a multiple of {GRANULE_TOKENS}, the smallest block that a"
                " hand-off sends"
            )
    return smallest, largest


def _mixed_buckets(
    chunks: tuple[int, ...], instance: InstanceConfig, mode: Mode, spec: KVSpec
) -> tuple[int, ...]:
    """Returns the chunk sizes for which one program runs a prefill chunk and a decode step
    together. Empty if the mesh does not run mixed steps."""
    alternates = mode is not Mode.CHUNKED or instance.layout.pp > 1
    return () if alternates or spec.has_state or spec.records else chunks


def _chunk_buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """Returns the sizes in tokens for which programs of prefill chunks are compiled: the largest,
    its half and its quarter, but none below `smallest`. Mean padding is 25 % between these sizes.
    Each size needs a program of all layers, which takes seconds to minutes to compile."""
    return buckets(smallest, largest)[-CHUNK_SIZES:]


def _batch_buckets(slots: int, platform: str) -> tuple[int, ...]:
    """Returns the sizes of decode batches for which programs are compiled. Each is four times the
    next smaller one. An accelerator reads all weights in each step, so that padding takes little
    time. On a CPU rows take time: padded to the next of these sizes, 5 to 8 rows would take 41 %
    longer, so that there is a program for 8, and 2 rows take 17 % longer (benchmarks/LOG.md)."""
    sizes = buckets(min(traits_of(platform).least_batch, slots), slots, factor=4)
    more = {CPU_BATCH} if sizes[0] == 1 and slots > CPU_BATCH else set()
    return tuple(sorted({*sizes, *more}))


def _block_bytes(instance: InstanceConfig, layer_groups: int | None) -> int:
    if instance.block_bytes is not None:
        return instance.block_bytes
    return 0 if layer_groups else GROUP_BYTES


def state_slots(instance: InstanceConfig) -> int:
    """Returns the number of recurrent states that each dp rank can hold. This includes the
    sequences in decode slots and the sequences that are queued for a slot."""
    slots = instance.slots_per_rank
    return slots + sequences_ahead(slots, instance.ahead_sequences)


def snapshot_slots(instance: InstanceConfig) -> int:
    """Returns the number of snapshots of recurrent state that the prefix cache of each dp rank can
    hold. Half of these slots are for snapshots of running sequences."""
    return 2 * state_slots(instance)


def window_pages(pages: int, page_size: int, window: int, context_tokens: int, chunk: int) -> int:
    """Returns the number of sliding-window pages of each dp rank of a prefill-only mesh.

    These pages hold the prompt that is being computed, and the windows of computed prompts: as many
    prompts of `TYPICAL_PROMPT` tokens as the ordinary pages hold. With fewer window pages, shorter
    prompts would wait for window pages while ordinary pages are free. With more, longer prompts
    would wait for ordinary pages while window pages are free.

    Args:
        pages: Number of ordinary pages of each dp rank.
        page_size: Number of tokens in a page.
        window: Number of positions of the widest window.
        context_tokens: Number of positions of the longest sequence.
        chunk: Number of tokens of the longest prefill chunk.
    """
    whole, kept = -(-context_tokens // page_size), ring_pages(window, page_size)
    computed = min(whole, prompt_pages(window, chunk, page_size))
    prompt = -(-TYPICAL_PROMPT // page_size)
    return min(pages, computed + -(-pages * min(kept, prompt) // prompt))


def drafts_with_layer(speculate: str, platform: str, stages: int) -> bool:
    """Returns whether an instance loads the checkpoint's next-token layer, if there is one and no
    separate drafter is given. With `speculate` "auto", an instance on a CPU does not load it,
    because the layer adds to each prompt's computation and KV even if drafts save no time.

    Args:
        speculate: As in `InstanceConfig`.
        platform: JAX platform of the instance's devices.
        stages: Number of pipeline stages.
    """
    return speculate == "mtp" or (
        speculate == "auto" and traits_of(platform).spare_rows and stages == 1
    )


def loads_drafter(speculate: str, stages: int) -> bool:
    """Returns whether an instance loads the configured separate drafter. With `speculate` "auto",
    an instance with several pipeline stages does not load it. `drafts_with_layer` describes the
    arguments."""
    return speculate in FROM_FOLDER or (speculate == "auto" and stages == 1)


def check_drafter(draft: str, instance: InstanceConfig) -> None:
    """Raises ConfigError if an instance would not load the drafter in the folder `draft`."""
    pp = instance.layout.pp
    if draft and not loads_drafter(instance.speculate, pp):
        raise ConfigError(
            f"draft={draft}: a separate drafter drafts only with speculate={', '.join(FROM_FOLDER)}"
            f" or auto and without pipeline stages, and this instance has"
            f" speculate={instance.speculate} and pp={pp}; remove --draft, or set"
            f" --speculate=auto{' and pp=1' if pp > 1 else ''}"
        )


def shared_drafts(config: EngineConfig, speculate: str) -> str:
    """Returns the `speculate` setting of an instance in a cluster. The prefill and the decode side
    of a hand-off must either both load a drafting layer or both load none. If one side has pipeline
    stages, "auto" therefore becomes "ngram" on both sides."""
    staged = max(config.prefill.layout.pp, config.decode.layout.pp) > 1
    speculate = repeatable_drafts(config.prefix, speculate)
    return "ngram" if staged and speculate == "auto" else speculate


def repeatable_drafts(prefix: PrefixConfig, speculate: str) -> str:
    """Returns the `speculate` setting of an instance with these settings of the prefix cache. With
    `grid_tokens`, a repeated request must give the same bits, and "auto" becomes "off". Otherwise
    measured times would decide which steps have drafts, and in bfloat16 a step with drafts rounds
    differently."""
    return "off" if prefix.grid_tokens is not None and speculate == "auto" else speculate


def hands_windows_apart(can_part: bool, mode: Mode) -> bool:
    """Returns whether the KV of sliding-window layers is transferred separately. If so, only
    positions inside the window are transferred. Decode meshes hold the KV of sliding-window layers
    in ring buffers, and prefill meshes in separate pages.

    Returns False for a mesh that both prefills and decodes, because a prefill chunk is longer than
    a ring buffer.

    Args:
        can_part: Whether the model's `KVSpec` allows a separate transfer.
    """
    return can_part and mode is Mode.DISAGGREGATED


def largest_chunk(instance: InstanceConfig, mode: Mode, context_tokens: int) -> int:
    """Returns the number of tokens in the longest prefill chunk of one dp rank. In unified mode
    short prompts share a chunk of at most `chunk_tokens`, because on a CPU longer chunks exceed the
    processor's caches and are slower per token. It is the smallest size, so that a short prompt is
    not padded to more; longer prompts have chunks of up to four times as many."""
    if mode is not Mode.UNIFIED:
        return instance.chunk_tokens
    longest = instance.chunk_tokens << (CHUNK_SIZES - 1)
    whole = 1 << (context_tokens.bit_length() - 1)
    return max(instance.min_chunk_tokens, min(longest, whole, LARGEST_WHOLE_PREFILL))


def asked_groups(asked: int | None, *pps: int) -> int | None:
    """Returns the number of layer groups of instances that hand KV to each other, or None if the
    number is to be derived from the model.

    A configured number is returned unchanged. Without one, and if some instance has several
    pipeline stages, the result is divisible by each number of stages, so that all stages are
    equally long if there are enough layers. It has at least two groups per stage.

    Args:
        asked: Configured number, or None.
        pps: Numbers of pipeline stages of all instances.
    """
    if asked is not None or max(pps) == 1:
        return asked
    return GROUPS_PER_STAGE * math.lcm(*pps)


def handoff_groups(config: EngineConfig) -> int | None:
    """Returns `asked_groups` for the prefill and decode instances of a cluster."""
    prefill, decode = config.prefill, config.decode
    return asked_groups(prefill.layer_groups, prefill.layout.pp, decode.layout.pp)


def worker_config(config: EngineConfig, role: WorkerRole) -> WorkerConfig:
    """Returns the configuration of one worker of the cluster that `config` describes."""
    instance = config.prefill if role is WorkerRole.PREFILL else config.decode
    cut = config.prefill  # Both sides of a hand-off must use the same layer groups.
    two_meshes = config.mode is Mode.DISAGGREGATED
    groups = handoff_groups(config) if two_meshes else config.decode.layout.pp
    mode = Mode.CHUNKED if two_meshes else config.mode
    instance = replace(
        instance,
        layer_groups=groups,
        block_bytes=cut.block_bytes,
        speculate=shared_drafts(config, instance.speculate),
    )
    names = [form.name for form in settings_of(WorkerConfig)]
    values: dict[str, Any] = {name: getattr(config, name, None) for name in names}
    return WorkerConfig(**values | {"mode": mode, "instance": instance})


def stage_cut(pp: int, layer_groups: int | None) -> StageCut:
    """Returns the function that divides a model's layers into `pp` pipeline stages. `mesh_limits`
    describes `layer_groups`."""

    def cut(spec: KVSpec) -> tuple[range, ...]:
        groups = groups_of_layers(spec, layer_groups, pp)
        return stage_layers(spec.cuts, len(spec.layers), groups, pp)

    return cut


def groups_of_layers(spec: KVSpec, asked: int | None, pp: int = 1) -> int:
    """Returns the number of layer groups. Each group is one program of a prefill chunk, and a
    group's KV is transferred while the next group computes. With n groups the transfer of the last
    group, 1/n of the KV, cannot overlap with computation. More groups therefore hide more of the
    transfer, but each transferred block costs host time. `asked` is the configured number. If it is
    None, the result is the largest number of groups with which the blocks of a typical prompt are
    large enough for an efficient transfer. Both sides of a hand-off must use the same number.

    Raises:
        ConfigError: There are fewer groups than pipeline stages.
    """
    return group_count(spec.bytes_per_token, len(spec.cuts), asked, pp)


def group_count(token_bytes: int, layers: int, asked: int | None, pp: int) -> int:
    """Computes the result of `groups_of_layers` from sizes alone: `layers` is the number of layers
    with KV, and `token_bytes` the number of bytes of KV per token in all layers."""
    by_bytes = max(1, token_bytes * GROUP_TOKENS // GROUP_BYTES)
    groups = min(asked or by_bytes, layers)
    if groups < pp:
        raise ConfigError(
            f"pp={pp} exceeds the {groups} groups of layers, and each stage has whole groups;"
            f" choose at most pp={groups}"
            + (f", or raise layer_groups={asked}" if asked and asked < layers else "")
        )
    return groups
