"""Plans an instance's memory on each device before allocation.

`fit_instance` sets the number of KV pages: enough for `slots_per_rank` sequences of full context,
or as many as fit. If the context length is not configured, it is reduced until the pages of one
sequence fit. If even this is impossible, an error lists all parts of the plan. Only
`device_memory`, `host_room` and `check_host_cache` read the machine's state."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jdisagg.assembly import fetched_tokens
from jdisagg.config import (
    NO_PREFIX,
    EngineConfig,
    InstanceConfig,
    Mode,
    ModelConfig,
    PrefixConfig,
    WorkerConfig,
)
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.layout_fit import check_layout
from jdisagg.costs.model_geometry import CostGeometry, LatentAttention, dtype_bytes
from jdisagg.engine.adapter_memory import adapter_bytes
from jdisagg.engine.drafter_files import keeps_kv
from jdisagg.engine.host_memory import host_memory
from jdisagg.engine.limits import (
    SAMPLES_PER_CHUNK,
    asked_groups,
    check_drafter,
    drafts_with_layer,
    group_count,
    hands_windows_apart,
    largest_chunk,
    loads_drafter,
    snapshot_slots,
    state_slots,
    window_pages,
    worker_config,
)
from jdisagg.engine.stages import check_stages
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import ring_pages
from jdisagg.layout.platforms import DEVICE_FRACTION, traits_of
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.model_api import Device
from jdisagg.ops.image_attention import SCORES
from jdisagg.scheduler.blocks import stage_layers
from jdisagg.scheduler.executor import LONGEST_RUN
from jdisagg.scheduler.host_blocks import MOST_WRITING
from jdisagg.worker.given_kv import MOST_CHUNKS, MOST_CHUNKS_OF_DECODE, MOST_GIVEN_WITH_STATE
from jdisagg.worker.host_tier import MOST_SNAPSHOTS_WRITING
from jdisagg.worker.incoming_handoff import BLOCKS_IN_FLIGHT
from jdisagg.worker.incoming_kv import MOST_FETCHES

# Default fraction of a host's memory. The rest is for XLA's fragmentation, Python and other
# programs.
HOST_FRACTION = 0.5
# Fraction of a host's memory that virtual devices and KV in host memory may take together.
MOST_OF_HOST = 0.9
# Chunks of staged KV: computed but not yet transferred, or received but not yet inserted.
STAGED_CHUNKS = 4
LEAST_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device."""

    bytes: int
    what: str
    platform: str = "cpu"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory on one device of an instance: bytes for each purpose, and the number of tokens for
    which there are KV pages. `room`: number of pages per rank that the memory would hold."""

    instance: str
    weights: int
    activations: int
    staged: int
    pages: int
    tokens_per_rank: int
    context_tokens: int
    memory: DeviceMemory
    states: int = 0
    rings: int = 0
    adapters: int = 0
    images: int = 0
    second_copy: int = 0
    room: int = 0

    @property
    def total(self) -> int:
        beside = self.states + self.rings + self.adapters + self.images + self.second_copy
        return self.weights + self.activations + self.staged + beside + self.pages

    @property
    def stages_weights(self) -> bool:
        """Whether a second copy of the weights fits, so that new weights are read while requests
        run. Otherwise the worker sleeps while it reads them."""
        return self.second_copy > 0 or self.memory.bytes - self.total >= self.weights

    @property
    def summary(self) -> str:
        """Returns the total and the context length in one line. `str` also lists the parts, which
        `check_config` prints."""
        return (
            f"{self.instance}, each device: {_gigabytes(self.total)} of"
            f" {_gigabytes(self.memory.bytes)}; context {self.context_tokens:,} tokens"
        )

    @property
    def parts(self) -> str:
        beside = (
            (self.states, "of sequence states"),
            (self.rings, "of sliding windows"),
            (self.adapters, "of adapter slots"),
            (self.images, "of encoded images"),
            (self.second_copy, "for new weights"),
        )
        return (
            f"{_gigabytes(self.weights)} of weights, {_gigabytes(self.activations)} for"
            f" activations, {_gigabytes(self.staged)} of KV in transfer"
            + "".join([f", {_gigabytes(count)} {what}" for count, what in beside if count])
        )

    def __str__(self) -> str:
        update = "while requests run" if self.stages_weights else "while the worker sleeps"
        return (
            f"{self.instance}, each device: {self.parts}, {_gigabytes(self.pages)} of KV pages"
            f" ({self.tokens_per_rank:,} tokens per rank); {_gigabytes(self.total)} of"
            f" {_gigabytes(self.memory.bytes)}"
            f" ({self.memory.what}); context {self.context_tokens:,} tokens; new weights are read"
            f" {update}"
        )


def fit_engine(
    config: EngineConfig, geometry: CostGeometry, memory: DeviceMemory
) -> tuple[EngineConfig, tuple[MemoryPlan, ...]]:
    """Completes the configuration of an embedded cluster for devices with `memory` each. Returns
    the configuration and one plan for each mesh. Raises ConfigError if the cluster does not fit
    into memory."""
    roles = {"prefill": WorkerRole.PREFILL, "decode": WorkerRole.DECODE}
    if config.mode is not Mode.DISAGGREGATED:
        roles = {"decode": WorkerRole.MIXED}
    fitted = {
        name: fit_worker(worker_config(config, role), role, geometry, memory)
        for name, role in roles.items()
    }
    plans = tuple([plan for _, plan in fitted.values()])
    model = replace(config.model, context_tokens=min(plan.context_tokens for plan in plans))
    instances: Any = {name: worker.instance for name, (worker, _) in fitted.items()}
    return replace(config, model=model, **instances), plans


def fit_worker(
    config: WorkerConfig, role: WorkerRole, geometry: CostGeometry, memory: DeviceMemory
) -> tuple[WorkerConfig, MemoryPlan]:
    """Completes the configuration of a worker in one role for devices with `memory` each. Returns
    the configuration and the plan. Raises ConfigError if the worker does not fit into memory."""
    mode = config.mode if role is WorkerRole.MIXED else Mode.DISAGGREGATED
    instance, plan = fit_instance(
        config.instance, role, mode, config.model, geometry, memory, config.prefix
    )
    model = replace(config.model, context_tokens=plan.context_tokens)
    return replace(config, model=model, instance=instance), plan


def fit_roles(
    config: WorkerConfig, role: WorkerRole, geometry: CostGeometry, memory: DeviceMemory
) -> tuple[WorkerConfig, MemoryPlan]:
    """As `fit_worker`, for a worker that may also take the other role, of prefill and decode, on
    the same mesh: both must fit, and the pages are those of the role that leaves fewer."""
    fitted = [fit_worker(config, one, geometry, memory) for one in (role, role.other)]
    least, plan = min(fitted, key=lambda one: (one[1].context_tokens, one[1].tokens_per_rank))
    return least, replace(plan, instance=fitted[0][1].instance)


def fit_instance(
    instance: InstanceConfig,
    role: WorkerRole,
    mode: Mode,
    model: ModelConfig,
    geometry: CostGeometry,
    memory: DeviceMemory,
    prefix: PrefixConfig = NO_PREFIX,
) -> tuple[InstanceConfig, MemoryPlan]:
    """Returns the instance with `pages_per_rank` set, and the memory plan.

    Raises:
        ConfigError: The device memory is too small for the weights, activations, KV in transfer,
            and the configured pages (or the pages of one sequence). The message lists these parts.
            Or a drafter is given that the instance would not load.
    """
    check_drafter(model.draft, instance)
    drafts = geometry.next_token_layers > 0 or bool(model.draft)
    can_part = geometry.windowed_part > 0
    apart = hands_windows_apart(can_part, mode)
    check_stages(
        instance,
        state=bool(geometry.linear),
        windows_apart=apart,
        drafts=drafts,
        reads_tokens=geometry.token_inputs > 0,
    )
    context = model.context_tokens or geometry.context_tokens
    each = bytes_per_device(geometry, instance, model.dtype, memory.platform, model.draft)
    weights, token_bytes, state_bytes, windowed, adapters = each
    chunk = largest_chunk(instance, mode, context)
    decodes, window = role is WorkerRole.DECODE, windowed * min(geometry.widest_window, context)
    append = 0 if apart and decodes else prefix.appends
    states = state_slots(instance) * state_bytes
    if prefix.reuse and (role is not WorkerRole.DECODE or append):
        states += snapshot_slots(instance) * state_bytes
    staged = STAGED_CHUNKS * (chunk * token_bytes + state_bytes)
    if apart and not decodes:
        each = each._replace(token=token_bytes - windowed, state=window)
    tiered = _tiered(instance, role, prefix, each, chunk, append)
    computed = append if role is WorkerRole.DECODE else chunk
    kept_images, of_encoder = _images(geometry, model.dtype) if computed else (0, 0)
    of_layers = _activations(geometry, instance, role, computed, model.dtype, memory.platform)
    of_layers += _index_scores(geometry, instance, chunk, context, model.dtype)
    plan = MemoryPlan(
        f"{role.value} ({instance.layout})",
        weights,
        max(of_layers, of_encoder),
        # Recurrent states are staged too: the state that is being packed, and states in transfer.
        tiered + (0 if role is WorkerRole.MIXED else staged),
        0,
        0,
        context,
        memory,
        states,
        adapters=adapters,
        images=kept_images,
        second_copy=weights if instance.stage_weights else 0,
    )
    padding = _padding(geometry, traits_of(memory.platform).lanes)
    page_bytes = int(instance.page_size * token_bytes * padding)
    window_bytes = int(instance.page_size * windowed * padding) if apart else 0
    beside = partial(_window_bytes, window_bytes, geometry, instance, context, chunk, decodes)
    return _with_pages(plan, instance, model, geometry, page_bytes - window_bytes, beside)


def _window_bytes(
    page_bytes: int,
    geometry: CostGeometry,
    instance: InstanceConfig,
    context: int,
    chunk: int,
    decodes: bool,
    pages: int,
) -> int:
    size, widest = instance.page_size, geometry.widest_window
    if not page_bytes:
        return 0
    if not decodes:
        return page_bytes * window_pages(pages, size, widest, context, chunk)
    ring = min(ring_pages(widest, size), -(-context // size))
    return page_bytes * state_slots(instance) * ring


def _with_pages(
    plan: MemoryPlan,
    instance: InstanceConfig,
    model: ModelConfig,
    geometry: CostGeometry,
    page_bytes: int,
    of_windows: Callable[[int], int],
) -> tuple[InstanceConfig, MemoryPlan]:
    context, size = plan.context_tokens, instance.page_size
    left = max(0, plan.memory.bytes - plan.total)
    counts = range(left // page_bytes + 1)
    room = bisect_right(counts, left, key=lambda count: count * page_bytes + of_windows(count)) - 1
    a_sequence = -(-context // size)
    pages = instance.pages_per_rank or min(room, instance.slots_per_rank * a_sequence)
    needed = instance.pages_per_rank or a_sequence
    if not (instance.pages_per_rank or model.context_tokens) and pages < a_sequence:
        context = pages * size
        needed = max(pages, -(-min(LEAST_CONTEXT, geometry.context_tokens) // size))
    if needed > room:
        asked = replace(plan, pages=needed * page_bytes, rings=of_windows(needed))
        raise ConfigError(_refusal(geometry.name, asked))
    plan = replace(
        plan,
        pages=pages * page_bytes,
        rings=of_windows(pages),
        tokens_per_rank=pages * size,
        context_tokens=context,
        room=room,
    )
    return replace(instance, pages_per_rank=pages), plan


def _tiered(
    instance: InstanceConfig,
    role: WorkerRole,
    prefix: PrefixConfig,
    each: "DeviceBytes",
    chunk: int,
    append: int,
) -> int:
    size, prefills = instance.page_size, role is WorkerRole.PREFILL
    tokens = MOST_WRITING * prefix.host_tokens(size)
    computes = role is not WorkerRole.DECODE or append > 0
    asked = fetched_tokens(role, prefix, size) if computes else 0
    tokens += MOST_FETCHES * BLOCKS_IN_FLIGHT * asked
    if prefix.peer_tokens(size) and (prefills or instance.codec == "none"):
        tokens += (MOST_CHUNKS if prefills else MOST_CHUNKS_OF_DECODE) * chunk
    snapshots = MOST_SNAPSHOTS_WRITING if prefix.host_bytes else 0
    snapshots += MOST_GIVEN_WITH_STATE + MOST_FETCHES if asked else 0
    # Workers that decode keep snapshots in device memory only.
    return tokens * each.token + (snapshots * each.state if prefills else 0)


def _padding(geometry: CostGeometry, lanes: int) -> float:
    attention = geometry.attention
    if isinstance(attention, LatentAttention):
        widths = (attention.kv_rank + attention.rope_dim,)
    else:
        widths = (attention.head_dim, attention.full_head_dim, attention.value_dim)
    return max(-(-width // lanes) * lanes / width for width in widths if width)


class DeviceBytes(NamedTuple):
    """Bytes on one device: of the weights, of one token's KV, of one sequence's recurrent state, of
    one token's KV in sliding-window layers (0 unless some layers have a window and others have
    none), and of all adapter slots."""

    weights: int
    token: int
    state: int
    windowed: int
    adapters: int


def bytes_per_device(
    geometry: CostGeometry,
    instance: InstanceConfig,
    dtype: str,
    platform: str = "cpu",
    draft: str = "",
) -> DeviceBytes:
    """Returns the bytes of a model on each device. Includes what drafts tokens, if anything: the
    model's own layer, or the drafter in the folder `draft`, which is counted as unsharded. With
    pipeline stages, returns the bytes of the longest stage, plus embedding and head."""
    added, drafting, slots = 0, 0, adapter_bytes(geometry, instance, dtype)
    layer = drafts_with_layer(instance.speculate, platform, instance.layout.pp)
    if draft and loads_drafter(instance.speculate, instance.layout.pp):
        added = sum(path.stat().st_size for path in Path(draft).glob("*.safetensors"))
        drafting = int(keeps_kv(draft))
    elif geometry.next_token_layers and layer:
        experts = geometry.expert_layers + (geometry.experts is not None)
        geometry = replace(geometry, layers=geometry.layers + 1, expert_layers=experts)
        added = int(2 * geometry.width**2 * dtype_bytes(dtype))  # joins token and hidden state
    # The kind of accelerator does not affect the bytes.
    costs = CostModel(geometry, accelerator("h100"), replace(instance.layout, pp=1), dtype=dtype)
    longest = _longest_stage(geometry, instance, costs)
    kv = costs.kv_bytes_per_device * (longest + drafting) / geometry.layers
    if geometry.images is not None:
        added += int(geometry.images.parameters * dtype_bytes(dtype))
    return DeviceBytes(
        int(costs.stage_weight_bytes(longest)) + added,
        int(kv),
        int(costs.state_bytes_per_device),
        round(kv * geometry.windowed_part),
        slots * longest // geometry.layers if instance.layout.pp > 1 else slots,
    )


def _longest_stage(geometry: CostGeometry, instance: InstanceConfig, costs: CostModel) -> int:
    layers, pp = geometry.layers, instance.layout.pp
    if pp == 1:
        return layers
    check_layout(geometry, instance.layout)
    kv = geometry.kv_values * costs.kv_value_bytes
    groups = group_count(kv, layers, asked_groups(instance.layer_groups, pp), pp)
    return max(map(len, stage_layers(tuple(range(layers)), layers, groups, pp)))


def device_memory(
    devices: Sequence[Device], fraction: float | None, sharers: int = 1
) -> DeviceMemory:
    """Returns the memory of each of `devices` that an instance may use. For GPUs, the result is
    XLA's limit, which `prepare_runtime` sets from `fraction`, and for TPUs `fraction` of the limit.
    For virtual CPU devices, `fraction` of the host's memory is divided equally among the devices of
    all `sharers` processes.

    Raises:
        ConfigError: An accelerator reports no memory limit.
    """
    first = devices[0]
    if first.platform != "cpu":
        least = min(int((device.memory_stats() or {}).get("bytes_limit", 0)) for device in devices)
        if not least:
            raise ConfigError(
                f"the memory of a {first.device_kind} must be known, and JAX reports no limit for"
                f" it; install the JAX release that supports this {first.platform.upper()}"
            )
        traits = traits_of(first.platform)
        what, own = f"what XLA may take of a {first.device_kind}", 1.0
        if not traits.limit_has_fraction:
            own = DEVICE_FRACTION if fraction is None else fraction
            what = f"{own:g} of {what}"
        return DeviceMemory(int(least * own), what, first.platform)
    part = HOST_FRACTION if fraction is None else fraction
    whole, count = host_memory(), len(devices) * sharers
    shared = f" over {count} devices" if count > 1 else ""
    return DeviceMemory(int(whole * part) // count, f"{part:g} of {_gigabytes(whole)}{shared}")


def check_host_cache(
    prefix: PrefixConfig, device: Device, fraction: float | None, sharers: int = 1
) -> None:
    """Checks that host memory has room for `prefix.host_gib` of KV for each of `sharers` workers,
    in addition to the `fraction` that virtual devices use.

    Raises:
        ConfigError: There is too little memory. The message lists the parts.
    """
    part, whole = _device_part(device, fraction), host_memory()
    room = host_room(device, fraction) // sharers
    if prefix.host_bytes > room:
        raise ConfigError(
            f"prefix.host_gib={prefix.host_gib:g} does not fit: this host has {_gigabytes(whole)},"
            f" of which {part:.0%} are for devices and {1 - MOST_OF_HOST:.0%} for all else, so that"
            f" each of {sharers} workers may have {_gigabytes(room)}; lower --host_cache_gib"
            + (" or --memory_fraction" if part else "")
        )


def host_room(device: Device, fraction: float | None) -> int:
    return int(host_memory() * max(0.0, MOST_OF_HOST - _device_part(device, fraction)))


def _device_part(device: Device, fraction: float | None) -> float:
    if device.platform != "cpu":
        return 0.0
    return HOST_FRACTION if fraction is None else fraction


def check_disk_cache(prefix: PrefixConfig, layout: Layout, processes: int) -> None:
    """Raises ConfigError if an instance of several processes with data parallelism has a disk
    cache: only some of its processes would have shards of a block."""
    if prefix.disk_dir and processes > 1 and layout.dp > 1:
        raise ConfigError(
            f"prefix.disk_dir={prefix.disk_dir!r}: instances of {processes} processes keep KV on"
            f" disk only with layouts without dp, not with {layout}; remove --disk_cache_dir, or"
            " use tp only"
        )


def host_sharers(config: EngineConfig) -> int:
    return 1 + (config.mode is Mode.DISAGGREGATED and bool(config.prefix.reuse))


def describe_cache(prefix: PrefixConfig) -> str:
    if not prefix.reuse:
        return "prefix cache off"
    tiers = ["device pages"]
    if prefix.host_bytes:
        tiers.append(f"{prefix.host_gib:g} GiB of host memory")
    if prefix.disk_dir:
        tiers.append(f"{prefix.disk_gib:g} GiB in {prefix.disk_dir}")
    if prefix.peer_fetch:
        tiers.append("other workers")
    appends = f"; decode appends up to {prefix.appends} tokens" if prefix.appends else ""
    return f"prefix cache on: {', '.join(tiers)}{appends}"


def _activations(
    geometry: CostGeometry,
    instance: InstanceConfig,
    role: WorkerRole,
    chunk: int,
    dtype: str,
    platform: str,
) -> int:
    tp, attention, experts = instance.layout.tp, geometry.attention, geometry.experts
    routed = experts.active * experts.ffn + experts.shared_ffn if experts else 0
    ffn = max(geometry.ffn * (2 if geometry.doubled_ffn else 1), routed)
    heads = (
        attention.query_heads * (attention.nope_dim + attention.rope_dim + attention.value_dim)
        if isinstance(attention, LatentAttention)
        else 2 * attention.query_heads * max(attention.head_dim, attention.full_head_dim)
    )
    inner = geometry.width * 6 + (3 * ffn + 2 * heads) / tp
    rows = tokens = inputs = 0
    if chunk:
        tokens, rows = chunk, SAMPLES_PER_CHUNK
        if role is WorkerRole.MIXED:  # a chunk and a decode step may run in one program
            tokens += instance.slots_per_rank
    if role is not WorkerRole.PREFILL:
        step = instance.slots_per_rank
        step += max(LONGEST_RUN - 1, traits_of(platform).draft_rows * step)
        tokens, rows = max(tokens, step), max(rows, step)
        if linear := geometry.linear:  # kept until a step with drafts knows which it accepts
            inputs = step * linear.layers * (linear.channels + linear.scalars)
    values = tokens * inner + inputs
    return int(values * max(dtype_bytes(dtype), 4)) + 3 * 4 * rows * geometry.vocabulary


def _images(geometry: CostGeometry, dtype: str) -> tuple[int, int]:
    if (images := geometry.images) is None:
        return 0, 0
    kept = images.kept_rows * geometry.width * dtype_bytes(dtype)
    scores = 3 * 4 * SCORES
    return kept, images.most_patches * images.patch_values * max(dtype_bytes(dtype), 4) + scores


def _index_scores(
    geometry: CostGeometry, instance: InstanceConfig, chunk: int, context: int, dtype: str
) -> int:
    attention = geometry.attention
    if not 0 < attention.index_top < context:
        return 0
    # `ops/sparse_attention.py` computes 4,096 keys and 512 tokens of a chunk at once.
    rows, keys = max(min(chunk, 512), instance.slots_per_rank), min(context, 4096)
    if not isinstance(attention, LatentAttention):
        # Scores of the keys of a step and a mask of all positions, for each kv head.
        heads = max(1, attention.kv_heads // instance.layout.tp)
        selected = 2 * instance.slots_per_rank * heads * attention.index_top * attention.head_dim
        scores = rows * heads * (4 * max(keys, chunk) + 2 * context)
        return scores + selected * dtype_bytes(dtype)
    scores = 4 * rows * (attention.index_heads * keys + 4 * context)
    if attention.shared_layers:  # a selection stays in memory for the layers that share it
        scores += chunk * (chunk + context)
    selected = instance.slots_per_rank * attention.index_top * attention.kv_values
    return scores + selected * dtype_bytes(dtype)


def _refusal(name: str, plan: MemoryPlan) -> str:
    path = Path(name)  # a checkpoint's geometry is in its config.json
    name = path.parent.name if path.name == "config.json" else name
    return (
        f"model {name} does not fit, {plan.instance}: each device would hold {plan.parts} and"
        f" {_gigabytes(plan.pages)} of KV pages,"
        f" {_gigabytes(plan.total)} in all, and has {_gigabytes(plan.memory.bytes)}"
        f" ({plan.memory.what}); spread it over more devices, or lower --context_tokens,"
        " --slots_per_rank, --chunk_tokens or pages_per_rank"
    )


def _gigabytes(count: int) -> str:
    if count < 1e9:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e9:.2f} GB" if count < 10e9 else f"{count / 1e9:.0f} GB"
