"""Ports: the calls of the request path to a worker, and the calls between two workers at a
hand-off.

An embedded cluster calls ports directly, and separate processes call them over gRPC. All arguments
are frozen plain data. Deadlines are remaining seconds. Each retry of a request has a higher
`attempt` number, so that workers ignore calls of an outdated attempt."""

import enum
from collections.abc import AsyncIterator
from typing import Protocol

from jdisagg.layout.kv_spec import KvKind
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.plain import Message
from jdisagg.prompt_logprobs import PromptLogprobs
from jdisagg.request import CachedTokens, Request, TokenLogprobs


class Child(Message, frozen=True):
    """One of a request's n streams, with its accepted tokens. A retry computes the KV of these
    tokens and never samples them again."""

    index: int
    accepted: tuple[int, ...] = ()


class ReserveCall(Message, frozen=True):
    """Reserves pages on a decode worker for the prompt, accepted tokens and expected growth of
    `children`.

    Attributes:
        children: Streams to reserve for. Several share the prompt's pages, so they must have no
            accepted tokens.
        age_seconds: Time since the request arrived. Queues serve by arrival, so a preempted request
            precedes younger ones.
        whole: Whether all KV will be sent, including positions that the worker has cached.
        computes: Whether the worker itself prefills its uncached tokens, at least one.
    """

    request: Request
    attempt: int
    children: tuple[Child, ...]
    deadline_seconds: float
    age_seconds: float = 0.0
    whole: bool = False
    computes: bool = False


class Reservation(Message, frozen=True):
    """Pages reserved for `lease_seconds`, or until `generate` uses them. The decode worker has the
    first `cached_tokens` positions cached, so they are neither computed nor sent."""

    reservation_id: int
    worker: str
    rank: int
    lease_seconds: float
    cached_tokens: int = 0


class FirstToken(Message, frozen=True):
    child: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class HandoffSource(Message, frozen=True):
    """The sender of a sequence's KV.

    Attributes:
        worker: Name of the sender.
        handoff_id: Id of the hand-off at the sender.
        address: host:port of its `PeerPort`. Empty in the embedded cluster, which resolves names.
        boot_id: Boot of the sender's process. 0 means unknown until the hello.
    """

    worker: str
    handoff_id: int
    address: str = ""
    boot_id: int = 0


class GenerateCall(Message, frozen=True):
    """Starts a reserved sequence. Without `source` the decode worker itself computes the prompt."""

    reservation_id: int
    attempt: int
    deadline_seconds: float
    source: HandoffSource | None = None


class SpanEnd(enum.Enum):
    """Why a child's spans end. `PREEMPTED`: the worker took the child's pages, and the request path
    retries with the accepted tokens. `MOVED`: another worker continues the sequence."""

    STOP = "stop"
    LENGTH = "length"
    PREEMPTED = "preempted"
    MOVED = "moved"


class SourceLost(Message, frozen=True):
    """Reports that the KV of hand-off `handoff_id` will not arrive. The decode worker keeps the
    reservation with the first `kept_tokens` positions for a while, and `resume_source` can fetch
    the rest from another source."""

    handoff_id: int
    kept_tokens: int
    reason: str


class Span(Message, frozen=True):
    """Tokens of one child from generated token `first_index` on, all from one dispatch.

    On `STOP` the last token is the stop id itself.

    Attributes:
        kv_bytes_moved: Bytes of the hand-off, on the first span.
        exposed_transfer_seconds: Hand-off time beyond the prefill, on the first span.
        lost: Failure of the KV's source. Such a span has no tokens and applies to all children.
        moving: Hand-off by which another worker can take the sequence over. Such a span has no
            tokens and applies to all children.
        prompt_logprobs: Requested prompt log-probabilities, on the first span.
        aside: Whether the child is swapped out after these tokens.
    """

    child: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    end: SpanEnd | None = None
    kv_bytes_moved: int = 0
    exposed_transfer_seconds: float = 0.0
    lost: SourceLost | None = None
    moving: HandoffSource | None = None
    prompt_logprobs: PromptLogprobs | None = None
    aside: bool = False


class ResumeCall(Message, frozen=True):
    """Fetches the rest of a reservation's KV from another source. `firsts` are first tokens that
    the client already has. They override what the new source samples."""

    reservation_id: int
    attempt: int
    source: HandoffSource
    firsts: tuple[FirstToken, ...] = ()


class PrefillCall(Message, frozen=True):
    """Computes prompt and accepted tokens, samples one token per child, and offers the KV.

    Attributes:
        from_token: First position whose KV is offered under `handoff_id`. The prompt's length means
            that no KV is offered.
        peer: Worker that probably has the first `peer_tokens` positions cached and can send them
            under this hand-off.
    """

    request: Request
    attempt: int
    children: tuple[Child, ...]
    handoff_id: int
    destination: str
    from_token: int
    deadline_seconds: float
    age_seconds: float = 0.0
    peer: HandoffSource | None = None
    peer_tokens: int = 0


class PrefillReply(Message, frozen=True):
    """Result of a prefill. `cached` counts cached tokens of the prompt by tier. `prompt_logprobs`
    is set if requested."""

    tokens: tuple[FirstToken, ...]
    queue_seconds: float
    prefill_seconds: float
    cached: CachedTokens = CachedTokens()
    prompt_logprobs: PromptLogprobs | None = None


class FetchCall(Message, frozen=True):
    """Fetches cached KV from a worker. Names are keyed and include the tenant, so the right to
    fetch a block follows from its name.

    Attributes:
        asker: Worker that receives the KV.
        names: Chain of block names from the first position on.
        first: Index of the first block to fetch.
        block_tokens: Tokens of a block.
        deadline_seconds: Time limit of the offer.
    """

    handoff_id: int
    asker: str
    names: tuple[bytes, ...]
    first: int
    block_tokens: int
    deadline_seconds: float


class FetchReply(Message, frozen=True):
    """Number of blocks offered, counted from `first`. 0 means that no hand-off has begun."""

    blocks: int = 0


class Offer(Message, frozen=True):
    """A KV block that the receiver may pull. The sender may still be computing it.

    The block holds positions [start, start + valid_tokens) of `groups` layer groups from `group`
    on, padded to `block_tokens`, on dp rank `rank` of the sender.

    Attributes:
        kind: Content of the block. WINDOW blocks hold the positions inside the sliding windows and
            have their own layer groups. STATE and WINDOW blocks follow all POSITIONS blocks.
    """

    offer_id: int
    group: int
    start: int
    valid_tokens: int
    block_tokens: int
    rank: int
    groups: int = 1
    kind: KvKind = KvKind.POSITIONS


class OfferChecksum(Message, frozen=True):
    """Checksum of an offered block, for its insertion. Sent once the block is computed."""

    offer_id: int
    checksum: int


class HandoffEnd(Message, frozen=True):
    """End of a hand-off. `prompt_logprobs` repeats those of `PrefillReply`, which may be lost.

    Attributes:
        offers: Number of blocks offered.
        tokens: Number of positions offered.
        firsts: First sampled token of each child.
        moved: All generated tokens of a running sequence that moves to another worker. The KV of
            the newest token is not included.
    """

    offers: int
    tokens: int
    firsts: tuple[FirstToken, ...]
    moved: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


PeerMessage = Offer | OfferChecksum | HandoffEnd


class PeerHello(Message, frozen=True):
    """Properties that two workers compare before a KV hand-off. A difference is refused with an
    error that names the field.

    Attributes:
        kv_layers: KV spec as text.
        windows_apart: Whether layers with a window are sent separately, limited to their window.
        worker, boot_id: Name and boot of the worker that sends this hello. Not compared.
        checksum_key: Secret key of this worker's checksums, sent over the control connection only.
            Not compared.
        mesh: Mesh of this worker. Only `transports` must be equal on both sides.
    """

    protocol: int
    worker: str
    model_fingerprint: str
    kv_layers: str
    kv_dtype: str
    layer_groups: int
    boot_id: int = 0
    checksum_key: int = 0
    mesh: MeshCard | None = None
    block_bytes: int = 0
    windows_apart: bool = False


async def close_stream(items: object) -> None:
    """Closes an iterator returned by a port, which cancels the call. Iterators without `aclose`
    need no closing."""
    aclose = getattr(items, "aclose", None)
    if aclose is not None:
        await aclose()


class PrefillPort(Protocol):
    async def prefill(self, call: PrefillCall) -> PrefillReply:
        """Computes a prompt and returns once the first tokens are sampled. Raises OverloadedError
        (queue full), DeadlineExceededError or UnavailableError."""
        ...

    async def cancel_prefill(self, handoff_id: int) -> None:
        """Stops the prefill and frees the offers and pages of the hand-off. Idempotent."""
        ...

    async def reset_cache(self) -> int:
        """Empties the prefix cache, including blocks that running sequences will release, and
        returns the number of blocks dropped."""
        ...

    async def status(self) -> WorkerStatus: ...


class DecodePort(Protocol):
    async def reserve(self, call: ReserveCall) -> Reservation:
        """Reserves pages, waiting in a bounded queue until enough are free. Raises OverloadedError
        if the queue is full, InvalidRequestError if the request can never fit,
        DeadlineExceededError if the wait outlasts the deadline."""
        ...

    def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        """Yields spans of all children until each has ended. Closing the iterator cancels the
        sequence. Raises HandoffError, UnavailableError or DeadlineExceededError."""
        ...

    async def resume_source(self, call: ResumeCall) -> int | None:
        """Replaces the source of the KV. Returns the position from which KV is needed, or None if
        all has arrived. Raises HandoffError if the reservation is not held any more."""
        ...

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        """Cancels one child, or all if `child` is None. Its slot is freed within one step. Its
        pages are freed at once, or at the latest at the end of the lease if KV is in flight.
        Idempotent."""
        ...

    async def suspend(self, reservation_id: int, keep_seconds: float | None) -> None:
        """Swaps all children out to host memory for `keep_seconds`, once their KV has arrived.
        Children for which host memory has no room end as preempted. `keep_seconds` None swaps the
        children in again when pages are free. The last call wins. Idempotent."""
        ...

    async def reset_cache(self) -> int:
        """Empties the prefix cache, including blocks that running sequences will release, and
        returns the number of blocks dropped."""
        ...

    async def status(self) -> WorkerStatus: ...


class PeerPort(Protocol):
    """The sender of KV as its receiver sees it: a prefill worker at a hand-off, a decode worker
    that moves a running sequence, or a worker with cached blocks that a prefill worker fetches."""

    async def hello(self, hello: PeerHello) -> PeerHello:
        """Compares both hellos and returns this worker's. Raises IncompatiblePeerError with the
        field that differs and both values."""
        ...

    async def fetch(self, call: FetchCall) -> FetchReply:
        """Begins a hand-off of the requested blocks that this worker still has cached and may send.
        The caller's view of the cache may be outdated."""
        ...

    def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        """Yields each offer when made, its checksum when the block is computed, and at last
        HandoffEnd.

        Raises:
            HandoffError: The sender gave up.
        """
        ...

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        """Reports that these blocks arrived, so that the sender frees them. A call without ids only
        renews the lease. Idempotent."""
        ...

    async def abort(self, handoff_id: int, reason: str) -> None:
        """Reports that the receiver gave up, so that the sender frees the hand-off. Idempotent."""
        ...
