"""From an instance's configuration and a model's KV spec to the limits that its scheduler and
executor share. Pure."""

from jdisagg.config import InstanceConfig, Mode, PrefixConfig
from jdisagg.errors import ConfigError
from jdisagg.layout.kv_spec import KVSpec, ring_pages
from jdisagg.scheduler.executor import MeshLimits, buckets, sequences_ahead

GRANULE_TOKENS = 16
LARGEST_WHOLE_PREFILL = 8192
ROWS_PER_CHUNK = 16
CONTINUING_ROWS = 4  # on a CPU each row with a past is folded into all queries of a chunk
GPU_BATCH = 8
SAMPLES_PER_CHUNK = 16
# of a prompt of GROUP_TOKENS: twice as many groups hide little more, and each costs its host work
GROUP_BYTES = 4 << 20
GROUP_TOKENS = 512
# a block costs both workers a millisecond or so of a CPU, as much as that many bytes
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
) -> MeshLimits:
    """The buckets of a GPU: batches from 8 rows on (one row is multiplied in another way, through
    memory, and rounded otherwise), and four chunk lengths a doubling, 8 % of padding in the mean
    instead of 25. A CPU would compile four times as much for them.

    `layer_groups` is the prefill side's, as is the instance's `block_bytes`: both sides of a
    hand-off cut alike. `windows_apart` and `rings`: as in `MeshLimits`, see
    `hands_windows_apart`. `append_tokens`: the longest chunk of a mesh that decodes what others
    prefill; 0: it computes none.

    Unified mode prefills a prompt whole, whatever its length, but packs short ones only up to
    `chunk_tokens`: on a CPU a chunk of several thousand tokens leaves the caches and is slower a
    token than several of 512."""
    pages_per_sequence = -(-context_tokens // instance.page_size)
    pages = instance.pages_per_rank or instance.slots_per_rank * pages_per_sequence
    largest = largest_chunk(instance, mode, context_tokens)
    smallest = min(instance.min_chunk_tokens, largest)
    for name, tokens in (("chunk_tokens", largest), ("min_chunk_tokens", smallest)):
        if tokens % GRANULE_TOKENS:
            raise ConfigError(
                f"{name}={tokens} must be a multiple of {GRANULE_TOKENS}, the smallest block that a"
                " hand-off sends"
            )
    ring = min(ring_pages(spec.widest_window, instance.page_size), pages_per_sequence)
    sent = spec.unwindowed if windows_apart else spec
    return MeshLimits(
        ranks=instance.layout.dp,
        page_size=instance.page_size,
        pages_per_rank=pages,
        slots_per_rank=instance.slots_per_rank,
        context_tokens=context_tokens,
        chunk_buckets=_chunk_buckets(smallest, largest, platform),
        append_buckets=(
            _chunk_buckets(min(smallest, append_tokens), append_tokens, platform)
            if append_tokens
            else ()
        ),
        batch_buckets=buckets(
            min(GPU_BATCH, instance.slots_per_rank) if platform == "gpu" else 1,
            instance.slots_per_rank,
        ),
        layer_groups=groups_of_layers(sent, layer_groups),
        granule_tokens=GRANULE_TOKENS,
        rows_per_chunk=ROWS_PER_CHUNK,
        samples_per_chunk=SAMPLES_PER_CHUNK,
        kv_spec=spec,
        block_bytes=(
            (0 if layer_groups else GROUP_BYTES)
            if instance.block_bytes is None
            else instance.block_bytes
        ),
        block_cost_tokens=BLOCK_COST_BYTES / sent.bytes_per_token,
        continuing_rows=1 if platform == "gpu" else CONTINUING_ROWS,
        state_slots_per_rank=state_slots(instance) if spec.has_state or rings else 0,
        windows_apart=windows_apart,
        ring_pages=ring if rings else 0,
        pack_tokens=min(instance.chunk_tokens, largest) if mode is Mode.UNIFIED else None,
    )


def _chunk_buckets(smallest: int, largest: int, platform: str) -> tuple[int, ...]:
    sizes = buckets(smallest, largest)
    return finer(sizes) if platform == "gpu" else sizes


def state_slots(instance: InstanceConfig) -> int:
    """Sequences whose state a dp rank holds, of a model that keeps some: those in its slots, and
    those ahead of them."""
    slots = instance.slots_per_rank
    return slots + sequences_ahead(slots, instance.ahead_sequences)


def hands_windows_apart(can_part: bool, mode: Mode, prefix: PrefixConfig) -> bool:
    """Whether layers with a window are handed over apart from those without, as far as they are
    still seen, and decode meshes keep them in rings. `can_part`: of the model's `KVSpec`.

    Not where KV stays for later requests: what begins alike would need what the window saw there,
    which nobody has any more. And not on a mesh that prefills and decodes: a chunk is longer than a
    ring."""
    return can_part and mode is Mode.DISAGGREGATED and not prefix.reuse


def check_reuse(spec: KVSpec, prefix: PrefixConfig) -> None:
    """Raises ConfigError where KV is to stay for later requests and the model keeps state: that is
    of a sequence's end, and what begins alike would need it as of there."""
    if prefix.reuse and spec.has_state:
        raise ConfigError(
            "prefix_cache is not for a model that keeps state beside KV (a recurrent one): a later"
            " request would need the state as of where it goes on, and only the newest is kept;"
            " leave it off"
        )


def largest_chunk(instance: InstanceConfig, mode: Mode, context_tokens: int) -> int:
    """Tokens of the longest chunk of one dp rank."""
    if mode is not Mode.UNIFIED:
        return instance.chunk_tokens
    return max(instance.min_chunk_tokens, min(_power_of_two(context_tokens), LARGEST_WHOLE_PREFILL))


def groups_of_layers(spec: KVSpec, asked: int | None) -> int:
    """How many programs a chunk is chained of. The last group's block of n cannot be hidden behind
    computing, and is one n-th of all; a block costs host work however small it is. So: as many as
    leave a middling prompt's blocks large enough, unless another number was asked for. What the two
    sides of a hand-off may differ in (their chunks, their meshes) does not count, for they must
    agree."""
    by_bytes = max(1, spec.bytes_per_token * GROUP_TOKENS // GROUP_BYTES)
    return min(asked or by_bytes, len(spec.positioned))


def finer(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """These sizes and, between each and the next, three more at equal distances, all multiples of
    the granule."""
    between = {
        -(-(low * (4 - part) + high * part) // (4 * GRANULE_TOKENS)) * GRANULE_TOKENS
        for low, high in zip(sizes[:-1], sizes[1:], strict=True)
        for part in range(1, 4)
    }
    return tuple(sorted({*sizes, *between}))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
