"""The executor as a scheduler sees it: what runs step commands on a mesh, and the limits of that
mesh."""

from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol, runtime_checkable

from jdisagg.layout.kv_spec import KVLayer, KVSpec
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.plain import plain
from jdisagg.scheduler.blocks import bands


@plain
class MeshLimits:
    """What a scheduler may count on from its mesh. `pages_per_rank` are usable pages (ids
    0..pages_per_rank-1).

    `chunk_buckets` and `batch_buckets` ascend. Prompts are packed into one chunk up to
    `pack_tokens` together; one prompt alone may fill the largest bucket. Where the two differ, only
    whole prompts are packed. A sequence may hold at most `context_tokens` positions. Offered blocks
    have power-of-two lengths of at least `granule_tokens`; rows of a packed chunk start at
    multiples of it. `state_slots_per_rank`: sequences whose state a rank holds, in a model that
    keeps some, or that have a ring.

    `windows_apart`: blocks of positions are of the layers without a window alone; what those with
    one still see of a sequence follows behind the last, apart. `ring_pages`: so many pages of the
    layers with a window belong to each slot of state, in which a sequence's KV goes round; 0: these
    layers lie in pages as all do.

    `append_buckets` ascend: the chunks of a mesh that decodes what others prefill, and appends
    short pieces itself; empty: it appends none. `chunk_buckets` are then the others'."""

    ranks: int
    page_size: int
    pages_per_rank: int
    slots_per_rank: int
    context_tokens: int
    chunk_buckets: tuple[int, ...]
    batch_buckets: tuple[int, ...]
    layer_groups: int
    granule_tokens: int
    rows_per_chunk: int
    samples_per_chunk: int
    kv_spec: KVSpec
    pack_tokens: int | None = None  # None: the largest bucket
    whole_blocks: bool = False  # blocks may have any length: nothing is compiled for it
    block_bytes: int = 0  # blocks of fewer bytes carry several layer groups; 0: each carries one
    # what a block costs beside its bytes, in tokens of KV of all layers; above it, padding is
    # cheaper
    block_cost_tokens: float = 0.0
    stages: int = 1  # of a pipeline: so many chunks are computed at once
    continuing_rows: int = (
        1  # of a packed chunk, on each rank, that go on behind what lies in pages
    )
    state_slots_per_rank: int = 0
    windows_apart: bool = False
    ring_pages: int = 0
    append_buckets: tuple[int, ...] = ()

    @property
    def computed(self) -> "MeshLimits":
        """With the chunks that this mesh computes itself as `chunk_buckets`."""
        if not self.append_buckets:
            return self
        return replace(self, chunk_buckets=self.append_buckets, append_buckets=())

    @property
    def sent(self) -> KVSpec:
        """What blocks of positions are of."""
        return self.kv_spec.unwindowed if self.windows_apart else self.kv_spec

    @property
    def paged(self) -> KVSpec:
        """What lies in the pages that the ledger counts."""
        return self.kv_spec.unwindowed if self.ring_pages else self.kv_spec

    @property
    def nothing(self) -> KVSpec:
        """Of as many layers, which keep nothing."""
        return KVSpec((KVLayer(()),) * len(self.kv_spec.layers), self.kv_spec.dtype)

    def seen_from(self, end: int) -> int:
        """The first of the positions below `end` that a window still reaches from there on."""
        return max(0, end - max(0, self.kv_spec.widest_window - 1))

    def ring(self, slot: int, tokens: int) -> tuple[int, ...]:
        """The pages of the layers with a window for positions [0, tokens), of which the last ones
        hold something: those of a slot's ring, over and over."""
        first, size = slot * self.ring_pages, self.ring_pages
        return tuple([first + column % size for column in range(-(-tokens // self.page_size))])

    def bands(self, block_tokens: int) -> tuple[range, ...]:
        """The layer groups of each block of so many tokens."""
        return bands(self.layer_groups, block_tokens * self.sent.bytes_per_token, self.block_bytes)

    @property
    def window_groups(self) -> int:
        """Into how many groups the layers with a window are cut where they are sent apart."""
        count = len(self.kv_spec.windowed.positioned) if self.windows_apart else 0
        return min(self.layer_groups, count)

    def window_bands(self, block_tokens: int) -> tuple[range, ...]:
        """As `bands`, of the layers with a window."""
        nbytes = block_tokens * self.kv_spec.windowed.bytes_per_token
        return bands(self.window_groups, nbytes, self.block_bytes)

    def window_shapes(self) -> list[tuple[range, int]]:
        """As `block_shapes`, of the blocks in which those go out."""
        if not self.windows_apart:
            return []
        longest = min(self.kv_spec.widest_window - 1, self.context_tokens)
        lengths = [
            tokens for tokens in self._block_lengths() if tokens < longest + self.granule_tokens
        ]
        return [(band, tokens) for tokens in lengths for band in self.window_bands(tokens)]

    def block_shapes(self) -> list[tuple[range, int]]:
        """The layer groups and the length of every block that can be offered: powers of two from
        the granule to the largest chunk."""
        return [(band, tokens) for tokens in self._block_lengths() for band in self.bands(tokens)]

    def _block_lengths(self) -> list[int]:
        lengths = [self.granule_tokens]
        while lengths[-1] * 2 <= self.chunk_buckets[-1]:
            lengths.append(lengths[-1] * 2)
        return lengths


def buckets(smallest: int, largest: int, factor: int = 2) -> tuple[int, ...]:
    """Sizes from `smallest`, each `factor` times the one before, and `largest` itself."""
    sizes: list[int] = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def sequences_ahead(slots: int, asked: int | None) -> int:
    """How many sequences get pages beyond the slots, so that a freed slot finds its next one ready:
    a quarter of them, unless another number is asked for."""
    return max(1, slots // 4) if asked is None else asked


class Executor(Protocol):
    """The hands of one instance: runs commands on its mesh in the order in which `run` was
    called."""

    limits: MeshLimits
    card: MeshCard  # what peers are told of this mesh

    def run(self, command: StepCommand) -> Awaitable[StepResult]:
        """Enqueues at once and returns; awaiting gives the result. Raises `UnavailableError` when
        the mesh failed.

        Must be called on the event loop; JAX runs on the executor's own threads."""
        ...

    def close(self) -> None:
        """Stops the threads and frees the mesh's memory. Idempotent."""
        ...


@runtime_checkable
class InterruptibleExecutor(Executor, Protocol):
    """One that can end a `DecodeSteps` early, so that the scheduler may ask for many steps at once:
    its result then holds fewer tokens."""

    def interrupt(self) -> None:
        """Ends the `DecodeSteps` under way, if there is one, after the step where what is issued
        now would have its turn."""
        ...
