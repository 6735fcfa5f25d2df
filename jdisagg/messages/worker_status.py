"""A worker's report of its role, load and free capacity."""

import enum

from jdisagg.costs.measured import StepTimes
from jdisagg.plain import Message


class WorkerRole(enum.Enum):
    """What a worker does with prompts, as two flags. A worker that does not decode sends the KV of
    the prompts that it computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def decodes(self) -> bool:
        """Whether it generates answers."""
        return self is not WorkerRole.PREFILL

    @property
    def other(self) -> "WorkerRole":
        """The role that a prefill or decode worker may change to."""
        return WorkerRole.DECODE if self is WorkerRole.PREFILL else WorkerRole.PREFILL

    @property
    def computes(self) -> bool:
        """Whether it computes every prompt, and not only what the router leaves to it."""
        return self is not WorkerRole.DECODE


class KeptTier(Message, frozen=True):
    """Amount of KV of a worker in one cache tier. Tiers are "pages" (device pages, including those
    of running sequences), "host" and "disk". `room_bytes` is the tier's capacity."""

    tier: str
    blocks: int
    bytes: int
    room_bytes: int


class LinkTimes(Message, frozen=True):
    """Measured time of KV transfers from a worker: a latency plus a time per byte, in seconds. A
    transfer counts from the moment at which the sender has computed the KV."""

    sender: str
    latency_seconds: float
    byte_seconds: float


class PriorityLoad(Message, frozen=True):
    """The part of a worker's load that belongs to requests of one priority.

    Attributes:
        pages: Number of these pages. A shared page counts for each of its sequences.
    """

    priority: int
    sequences: int = 0
    pages: int = 0
    waiting: int = 0
    queued_tokens: int = 0


class WorkerStatus(Message, frozen=True):
    """Snapshot of a worker's load and capacity. Each tuple of numbers has one entry per dp rank.

    Attributes:
        reserved_pages: Number of pages held for KV that has not fully arrived. Empty if no rank
            holds such pages.
        queued_tokens: Number of prompt tokens in the queue or being computed.
        queued_pairs: Number of query-key pairs in the attention of the queued tokens, for cost
            estimates.
        rank_sequences: Number of sequences that hold pages.
        rank_contexts: Number of tokens of all sequences that hold pages.
        can_prefill: Whether the worker has a prefill program. A decode worker with such a program
            computes at most `chunk_tokens` tokens of a prompt.
        chunk_tokens: Size of the largest prefill chunk, in tokens. 0 means that prompts are not
            chunked.
        free_states, total_states: Number of slots for recurrent state. Empty for models without
            recurrent layers.
        kv_channels: Text "ADDRESS CHANNEL" for each process that has sent KV to this worker. A
            worker of several processes reports the senders to its leader process only.
        times: Measured times of the worker's programs. None before they are measured, and if the
            worker was started without warm-up.
        kernels: Text "NAME: reason" for each hand-written kernel that failed its check at the start
            and was replaced by plain XLA.
        drafted_tokens, accepted_tokens: Number of draft tokens verified and accepted since the
            start (docs/speculation.md).
        priorities: The load by priority, lowest first. Requests of higher priority can preempt
            those of lower priority.
        weights: Identity of the weights that the worker serves, "VERSION@FINGERPRINT". Empty for
            its initial weights.
        asleep: Whether the worker has freed its weights and pages, and takes no requests.
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
    free_states: tuple[int, ...] = ()
    total_states: tuple[int, ...] = ()
    kv_channels: tuple[str, ...] = ()
    kept: tuple[KeptTier, ...] = ()
    times: StepTimes | None = None
    links: tuple[LinkTimes, ...] = ()
    kernels: tuple[str, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    adapter_slots: int = 0
    adapters: tuple[str, ...] = ()
    priorities: tuple[PriorityLoad, ...] = ()
    weights: str = ""
    asleep: bool = False
    images: bool = False

    @property
    def serving(self) -> bool:
        """Whether the worker takes new requests: it neither drains nor sleeps."""
        return not (self.draining or self.asleep)
