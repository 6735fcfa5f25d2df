"""The interface of an executor, which runs commands on one device mesh, and the limits of a
mesh."""

import math
from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol, runtime_checkable

from jdisagg.layout.kv_spec import KVLayer, KVSpec, ring_pages
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.plain import plain
from jdisagg.prompt.images import ImageFormat
from jdisagg.scheduler.blocks import LENGTHS, bands

LONGEST_RUN = 8  # most tokens of one sequence in one decode step
LONG_GRAIN = 64
TYPICAL_PROMPT = 4096  # assumed prompt length, by which memory is divided between kinds of KV


@plain
class MeshLimits:
    """The capacity of a mesh and the sizes for which its programs are compiled.

    Attributes:
        pages_per_rank: Number of usable pages of each data-parallel rank. Their ids are 0 to
            pages_per_rank-1.
        chunk_buckets, batch_buckets: Sizes for which programs are compiled, ascending: tokens of a
            prefill chunk, and sequences of a decode batch.
        layer_groups: Number of groups of consecutive layers. The KV of each group can be
            transferred in a separate block while the next group is computed.
        granule_tokens: Number of tokens of the shortest transfer block (`blocks.LENGTHS`). Rows of
            a packed chunk start at multiples of this length.
        pack_tokens: Set if prompts are computed whole, and before decode steps (mode UNIFIED):
            largest number of tokens of a chunk that several prompts share. A single prompt may fill
            the largest chunk. None if chunks of a prompt and decode steps alternate or mix.
        state_slots_per_rank: Number of sequences on a rank that can have recurrent state or a
            sliding-window ring buffer.
        windows_apart: Whether the KV of sliding-window layers is stored and sent separately, after
            the blocks of all other layers. Only positions inside the current window are then sent.
        ring_pages: Number of pages of each sequence's ring buffer for sliding-window layers; 0 if
            these layers use other pages.
        window_pages_per_rank: Number of pages of sliding-window layers of each rank, on a mesh that
            only prefills (`scheduler/window_pages.py`); 0 if these layers use ordinary pages or
            ring buffers.
        speculates: Whether decode steps verify drafts of all sequences, not only tokens that a
            grammar forces.
        draft_layer: Source of the drafts ("mtp", "eagle" or "assistant") if the mesh itself drafts
            tokens. Otherwise "".
        snapshots_per_rank: Number of snapshots that the prefix cache of a rank may hold. A snapshot
            is a copy of recurrent state and ring buffers at the end of a cached prefix
            (`scheduler/snapshots.py`).
        snapshot_tokens: Snapshots, of recurrent state or of windows, are made at multiples of this
            number of tokens; 0 makes none.
        append_buckets: Numbers of tokens of the prefill chunks that the mesh of a decode worker
            computes, ascending; empty if it computes none. `chunk_buckets` are the chunk sizes of
            all other workers (`computed_by`).
        appends: Whether the mesh computes chunks only for the last tokens of prompts whose other KV
            it has. Fewer chunk programs are then compiled.
        mixed_buckets: Numbers of tokens of the prefill chunks that can run together with a decode
            step in one program, ascending; empty if chunks and steps only alternate.
        gather_steps: Number of decode steps for which prompts wait until each dp rank has a prompt,
            on a mesh that prefills and decodes. 0 means that prompts do not wait.
    """

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
    pack_tokens: int | None = None  # None is the largest bucket
    whole_blocks: bool = False  # blocks may have any length, because nothing is compiled for it
    block_bytes: int = 0  # smaller blocks hold several layer groups; if 0, each has one
    # Time overhead of a block, as the number of tokens (of all layers) that can be sent in this
    # time.
    block_cost_tokens: float = 0.0
    stages: int = 1  # pipeline stages, each of which computes a chunk
    continuing_rows: int = 1  # rows after cached positions, in a packed chunk on one rank
    state_slots_per_rank: int = 0
    windows_apart: bool = False
    ring_pages: int = 0
    window_pages_per_rank: int = 0
    append_buckets: tuple[int, ...] = ()
    appends: bool = False
    mixed_buckets: tuple[int, ...] = ()
    gather_steps: int = 0
    draft_rows: int = 1
    speculates: bool = False
    draft_layer: str = ""
    snapshots_per_rank: int = 0
    snapshot_tokens: int = 0
    adapters: int = 0
    adapter_rank: int = 0
    adapter_experts: bool = False
    images: ImageFormat | None = None
    image_rows: int = 0

    @property
    def spatial(self) -> bool:
        return self.images is not None and self.images.spatial

    @property
    def longest_run(self) -> int:
        """Largest number of positions of one sequence in one decode step. With a ring buffer, it is
        limited so that the last position does not overwrite a position that the first one still
        attends to."""
        if not self.ring_pages:
            return LONGEST_RUN
        room = self.ring_pages * self.page_size - self.kv_spec.widest_window + 1
        return max(1, min(LONGEST_RUN, room))

    @property
    def state_snapshot_tokens(self) -> int:
        """The `snapshot_tokens` of recurrent state, which is copied only between steps, so that
        steps with drafts must stop at the multiples of this number."""
        return self.snapshot_tokens if self.kv_spec.has_state else 0

    def extra_rows(self, batch: int) -> int:
        longest = self.longest_run
        return max(longest - 1, self.draft_rows * batch) if longest > 1 else 0

    @property
    def pair_batches(self) -> tuple[int, ...]:
        """Batch sizes of decode steps with grammars or drafts, each of which needs four programs:
        the largest, and where one row is much faster, one row. A step of another size is padded."""
        return tuple(size for size in self.batch_buckets if size in (1, self.batch_buckets[-1]))

    def pair_batch(self, sequences: int) -> int:
        """Returns the size of a step with grammars or drafts of this many sequences per rank."""
        return next(size for size in self.pair_batches if size >= sequences)

    @property
    def state_rows(self) -> int:
        """Number of slots of a rank for recurrent state and ring buffers. The slots of sequences
        come first, then the slots of snapshots."""
        return self.state_slots_per_rank + self.snapshots_per_rank

    @property
    def snapshot_bytes(self) -> int:
        spec, pages = self.kv_spec, self.ring_pages
        if self.window_pages_per_rank:
            pages = ring_pages(spec.widest_window, self.page_size)
        return spec.state.bytes_per_token + pages * self.page_size * spec.windowed.bytes_per_token

    @property
    def snapshot_part(self) -> float:
        """Share of a cache tier's bytes that is reserved for snapshots. It is the size of one
        snapshot relative to a snapshot plus the KV of a prompt of `TYPICAL_PROMPT` tokens. 0 if
        cache hits need no snapshots."""
        if not self.snapshot_tokens:
            return 0.0
        prompt = TYPICAL_PROMPT * self.sent.bytes_per_token
        return self.snapshot_bytes / (self.snapshot_bytes + prompt)

    @property
    def snapshot_slot_bytes(self) -> int:
        if not self.window_pages_per_rank:
            return self.snapshot_bytes
        return self.page_size * self.kv_spec.windowed.bytes_per_token

    @property
    def state_grain(self) -> int:
        """Number of tokens that one step of a recurrence computes in a prefill chunk of one row.
        Snapshots are made between such steps."""
        return math.gcd(LONG_GRAIN, self.snapshot_tokens)

    def computed_by(self, every_prompt: bool) -> "MeshLimits":
        """Returns these limits with `chunk_buckets` replaced by the sizes of the prefill chunks
        that this mesh computes.

        Args:
            every_prompt: Whether its worker computes every prompt (`WorkerRole.computes`).
        """
        if every_prompt or not self.append_buckets:
            return self
        return replace(self, chunk_buckets=self.append_buckets, append_buckets=(), appends=True)

    @property
    def sent(self) -> KVSpec:
        """KV spec of the layers whose KV is in ordinary pages and transfer blocks. Sliding-window
        layers are excluded if they are sent separately, because they then have ring buffers or
        pages of their own."""
        return self.kv_spec.unwindowed if self.windows_apart else self.kv_spec

    @property
    def page_tables(self) -> int:
        return 2 if self.window_pages_per_rank else 1

    @property
    def nothing(self) -> KVSpec:
        """A KV spec in which no layer has KV. It has the model's number of layers."""
        return KVSpec((KVLayer(()),) * len(self.kv_spec.layers), self.kv_spec.dtype)

    def seen_from(self, end: int) -> int:
        return max(0, end - max(0, self.kv_spec.widest_window - 1))

    def ring(self, slot: int, tokens: int) -> tuple[int, ...]:
        """Returns the page table of sliding-window layers for positions [0, tokens). The table
        repeats the pages of the ring buffer that belongs to state slot `slot`."""
        first, size = slot * self.ring_pages, self.ring_pages
        return tuple([first + column % size for column in range(-(-tokens // self.page_size))])

    def bands(self, block_tokens: int) -> tuple[range, ...]:
        return bands(self.layer_groups, block_tokens * self.sent.bytes_per_token, self.block_bytes)

    @property
    def window_groups(self) -> int:
        count = len(self.kv_spec.windowed.positioned) if self.windows_apart else 0
        return min(self.layer_groups, count)

    def window_bands(self, block_tokens: int) -> tuple[range, ...]:
        nbytes = block_tokens * self.kv_spec.windowed.bytes_per_token
        return bands(self.window_groups, nbytes, self.block_bytes)

    def window_shapes(self) -> list[tuple[range, int]]:
        if not self.windows_apart:
            return []
        longest = min(self.kv_spec.widest_window - 1, self.context_tokens)
        lengths = [
            tokens for tokens in self._block_lengths() if tokens < longest + self.granule_tokens
        ]
        return [(band, tokens) for tokens in lengths for band in self.window_bands(tokens)]

    @property
    def has_slots(self) -> bool:
        """Whether sequences have slots, of recurrent state or of ring buffers."""
        return self.kv_spec.has_state or self.ring_pages > 0

    def block_shapes(self) -> list[tuple[range, int]]:
        return [(band, tokens) for tokens in self._block_lengths() for band in self.bands(tokens)]

    def _block_lengths(self) -> list[int]:
        lengths = [self.granule_tokens * length for length in LENGTHS]
        return [tokens for tokens in lengths if tokens <= self.chunk_buckets[-1]]


def buckets(smallest: int, largest: int, factor: int = 2) -> tuple[int, ...]:
    sizes: list[int] = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def sequences_ahead(slots: int, asked: int | None) -> int:
    """Returns the number of sequences, beyond the number of batch slots, that may have pages.
    Returns `asked`, or a quarter of the slots if `asked` is None."""
    return max(1, slots // 4) if asked is None else asked


class Executor(Protocol):
    """Runs commands on the device mesh of one instance, in the order of the calls of `run`."""

    limits: MeshLimits
    card: MeshCard  # description of this mesh for peers

    def run(self, command: StepCommand) -> Awaitable[StepResult]:
        """Appends a command to the mesh's queue before returning. Returns an awaitable of the
        command's result.

        Must be called on the event loop, because JAX runs on the executor's own threads. Raises
        UnavailableError if the mesh has failed."""
        ...

    def close(self) -> None:
        """Stops the threads and frees the mesh's memory. Idempotent."""
        ...


@runtime_checkable
class InterruptibleExecutor(Executor, Protocol):
    """An executor that can end a `DecodeSteps` command early. A scheduler may therefore plan many
    steps in one command. The result of an interrupted command has fewer tokens."""

    def interrupt(self) -> None:
        """Ends the running `DecodeSteps` command, if any, after its current step."""
        ...
