"""A worker's report of its role, load and free capacity."""

import enum

from jdisagg.plain import Message


class WorkerRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class KeptTier(Message, frozen=True):
    """Cached KV of a worker in one tier: "pages" (device pages, including those of running
    sequences), "host" or "disk". On decode workers "host" holds swapped-out sequences. `room_bytes`
    is the tier's capacity."""

    tier: str
    blocks: int
    bytes: int
    room_bytes: int


class WorkerStatus(Message, frozen=True):
    """Snapshot of a worker. Tuples are per dp rank.

    Attributes:
        draining: Whether the worker takes no new requests.
        reserved_pages: Pages held for KV that has not fully arrived. Empty if there are none.
        queued_tokens: Prompt tokens in the queue or being computed.
        queued_pairs: Query-key pairs of the attention of these tokens, for cost estimates.
        rank_sequences: Sequences that hold pages.
        rank_contexts: Sum of these sequences' tokens.
        can_prefill: Whether the worker has a prefill program. A decode worker computes at most
            `chunk_tokens` tokens of a prompt.
        chunk_tokens: Largest prefill chunk. 0 means whole prompts.
        loading_seconds: Remaining time in which the worker serves while it still loads programs, so
            that a request may wait for one.
        free_states, total_states: State slots. Empty in models without state.
        kv_channels: "address channel" for each process of other workers that sent KV. An instance
            of several processes reports those of its leader.
        kept: Cached KV in each tier.
    """

    name: str
    role: WorkerRole
    layout: str
    free_pages: tuple[int, ...]
    total_pages: tuple[int, ...]
    running: int
    waiting: int
    slots: int
    page_size: int
    context_tokens: int
    draining: bool = False
    handoffs: int = 0
    preemptions: int = 0
    reserved_pages: tuple[int, ...] = ()
    queued_tokens: int = 0
    queued_pairs: float = 0.0
    rank_sequences: tuple[int, ...] = ()
    rank_contexts: tuple[int, ...] = ()
    can_prefill: bool = False
    chunk_tokens: int = 0
    loading_seconds: float = 0.0
    free_states: tuple[int, ...] = ()
    total_states: tuple[int, ...] = ()
    kv_channels: tuple[str, ...] = ()
    kept: tuple[KeptTier, ...] = ()
