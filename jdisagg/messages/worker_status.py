"""What a worker reports of itself: its role, its load and its room."""

import enum

from jdisagg.plain import Message


class WorkerRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class KeptTier(Message, frozen=True):
    """KV that a worker keeps for later requests in one place: `tier` is "pages" (those that
    sequences hold among them), "host" or "disk"; in "host" of a worker that decodes lie sequences
    that were set aside. `room_bytes`: what there is for it."""

    tier: str
    blocks: int
    bytes: int
    room_bytes: int


class WorkerStatus(Message, frozen=True):
    """A snapshot, per worker; lists are per dp rank. `reserved_pages` are held for KV that has not
    all come; empty where none ever are.

    queued_tokens: of prompts, not computed yet, whether they wait or are computing; queued_pairs:
    pairs of positions that these will attend to. rank_sequences, rank_contexts: sequences that hold
    pages and the sum of their known tokens. can_prefill: it has a prefill program, in chunks of
    chunk_tokens at most (0: whole prompts); one of role DECODE appends no more than that of a
    prompt. loading_seconds: it serves, but loads programs beside,
    for about so long still; until then whoever comes may wait for one. free_states, total_states:
    slots of state; none in a model that keeps none. kv_channels: by what KV comes from each process
    of other workers that was asked for some, as "address channel"; of an instance of several
    processes, to the one that leads. kept: where KV stays, what lies where."""

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
