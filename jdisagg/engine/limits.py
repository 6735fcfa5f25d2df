"""From an instance's configuration and a model's KV spec to the limits that its scheduler and executor share. Pure."""

from jdisagg.config import InstanceConfig, Mode
from jdisagg.errors import ConfigError
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.scheduler.commands import MeshLimits

GRANULE_TOKENS = 16
LARGEST_WHOLE_PREFILL = 8192
ROWS_PER_CHUNK = 16
SAMPLES_PER_CHUNK = 16


def mesh_limits(instance: InstanceConfig, mode: Mode, spec: KVSpec, context_tokens: int, layer_groups: int) -> MeshLimits:
    """`layer_groups` is the prefill side's: both sides of a hand-off cut layers alike.

    Unified mode prefills a prompt whole, whatever its length, but packs short ones only up to `chunk_tokens`: on a CPU a chunk of
    several thousand tokens leaves the caches and is slower a token than several of 512.
    """
    pages_per_sequence = -(-context_tokens // instance.page_size)
    pages = instance.pages_per_rank or instance.slots_per_rank * pages_per_sequence
    largest = instance.chunk_tokens
    if mode is Mode.UNIFIED:
        largest = max(instance.min_chunk_tokens, min(_power_of_two(context_tokens), LARGEST_WHOLE_PREFILL))
    if largest % GRANULE_TOKENS:
        raise ConfigError(f"chunk_tokens={largest} must be a multiple of {GRANULE_TOKENS}, the smallest block that a hand-off sends")
    return MeshLimits(
        ranks=instance.layout.dp,
        page_size=instance.page_size,
        pages_per_rank=pages,
        slots_per_rank=instance.slots_per_rank,
        context_tokens=context_tokens,
        chunk_buckets=buckets(min(instance.min_chunk_tokens, largest), largest),
        batch_buckets=buckets(1, instance.slots_per_rank),
        layer_groups=min(layer_groups, len(spec.layers)),
        granule_tokens=GRANULE_TOKENS,
        rows_per_chunk=ROWS_PER_CHUNK,
        samples_per_chunk=SAMPLES_PER_CHUNK,
        kv_spec=spec,
        pack_tokens=min(instance.chunk_tokens, largest) if mode is Mode.UNIFIED else None,
    )


def buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """Doubling sizes from `smallest`, and `largest` itself."""
    sizes: list[int] = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
