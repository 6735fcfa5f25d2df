"""The interfaces of a worker, called ports: calls of the router's request path to a worker, and
calls between two workers for KV hand-offs.

An embedded cluster calls ports directly, and separate processes call them over gRPC. All arguments
are frozen plain data. A deadline is given as the number of seconds left. Each retry of a request
has a higher `attempt` number. Workers ignore calls of earlier attempts."""

import enum
from collections.abc import AsyncIterator
from typing import Protocol

from jdisagg.layout.kv_spec import KvKind
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.plain import Message
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import CachedTokens, Request, TokenLogprobs


class Child(Message, frozen=True):
    """One of the n answers of a request. `accepted` are its tokens that were already sent towards
    the client. A retry computes the KV of the accepted tokens and never samples them again."""

    index: int
    accepted: tuple[int, ...] = ()


class HandoffSource(Message, frozen=True):
    """The sender of a sequence's KV.

    Attributes:
        address: host:port of the sender's `PeerPort`. Empty in the embedded cluster, which finds
            the sender by its name.
        boot_id: Random number of the sender process, drawn at its start. 0 means unknown until the
            two workers have exchanged `PeerHello`.
        weights: Identity of the weights with which the KV is computed (`WorkerStatus.weights`). A
            receiver with other weights refuses the hand-off.
    """

    worker: str
    handoff_id: int
    address: str = ""
    boot_id: int = 0
    weights: str = ""


class ReserveCall(Message, frozen=True):
    """Reserves KV pages on a decode worker for the prompt, the accepted tokens, and the next tokens
    of `children`.

    Attributes:
        children: Answers to reserve pages for. If there are several children, they share the
            prompt's pages, and none may have accepted tokens.
        age_seconds: Time since the request arrived, by which queues are ordered. After a
            preemption, the request thus precedes younger requests.
        whole: Whether the sender sends the KV of all positions, even if the decode worker has
            cached some.
        computes: Whether the decode worker prefills the uncached tokens itself, or goes on with an
            answer of which it has cached all KV. A worker that cannot compute leaves the rest to a
            prefill worker. At least one token is then computed.
        peer: Another worker that probably has the KV of the first `peer_tokens` positions cached,
            and the hand-off id under which it sends this KV.
        aside_seconds: Time that the children have spent without pages since they were first
            preempted for a request of higher priority. It then replaces `age_seconds` in queues, so
            that they do not overtake such requests. None if they were not.
    """

    request: Request
    attempt: int
    children: tuple[Child, ...]
    deadline_seconds: float
    age_seconds: float = 0.0
    whole: bool = False
    computes: bool = False
    peer: HandoffSource | None = None
    peer_tokens: int = 0
    aside_seconds: float | None = None


class Reservation(Message, frozen=True):
    """KV pages reserved on a decode worker for `lease_seconds`, or until `generate` uses them. The
    KV of the first `cached_tokens` positions is in the decode worker's cache, so it is neither
    computed nor sent. If these are all known tokens, the sequence goes on with a decode step.
    `cached` counts the prompt tokens among these by cache tier. `weights` is the identity of the
    worker's weights. `block_tokens` is the length of its cached blocks; 0 without a prefix
    cache."""

    reservation_id: int
    worker: str
    rank: int
    lease_seconds: float
    cached_tokens: int = 0
    cached: CachedTokens = CachedTokens()
    weights: str = ""
    block_tokens: int = 0


class FirstToken(Message, frozen=True):
    child: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class GenerateCall(Message, frozen=True):
    """Starts decoding of a reserved sequence. `source` sends the prompt's KV. If `source` is None,
    the decode worker itself computes the prompt."""

    reservation_id: int
    attempt: int
    deadline_seconds: float
    source: HandoffSource | None = None


class SpanEnd(enum.Enum):
    """Why a child's spans end. `STOP`: a stop token was generated. `LENGTH`: a limit on the number
    of tokens was reached. `PREEMPTED`: the worker needed the child's pages for other sequences, and
    the request path retries with the accepted tokens. `MOVED`: another worker continues the
    sequence."""

    STOP = "stop"
    LENGTH = "length"
    PREEMPTED = "preempted"
    MOVED = "moved"


class SourceLost(Message, frozen=True):
    """Reports that the KV of hand-off `handoff_id` will not arrive completely. The decode worker
    keeps the reservation and the KV of the first `kept_tokens` positions until the lease ends.
    Until then, `resume_source` can fetch the remaining KV from another source."""

    handoff_id: int
    kept_tokens: int
    reason: str


class Span(Message, frozen=True):
    """Consecutive tokens of one child, all from one decode command. `first_index` is the index of
    the first token among the child's generated tokens.

    If `end` is `STOP`, the last token is the stop token itself.

    Attributes:
        kv_bytes_moved: Number of KV bytes transferred for the sequence. Set on the first span only.
        exposed_transfer_seconds: Time of the KV transfer after the end of the prefill. Set on the
            first span only.
        lost: Failure of the worker that sends the KV, or None. If it is set, the span has no tokens
            and applies to all children.
        moving: Hand-off by which another worker can take over the sequence, or None. If it is set,
            the span has no tokens and applies to all children.
        prompt_logprobs: Log-probabilities of the prompt, if requested. Set on the first span only.
        yielded: Whether the child was preempted for a request of higher priority.
        weights: Identity of the weights that generated the tokens.
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
    yielded: bool = False
    weights: str = ""


class ResumeCall(Message, frozen=True):
    """Fetches the missing KV of a reservation from another source. `firsts` are the first tokens
    that the client has already received. They replace the first tokens that the new source
    samples."""

    reservation_id: int
    attempt: int
    source: HandoffSource
    firsts: tuple[FirstToken, ...] = ()


class PrefillCall(Message, frozen=True):
    """Computes the KV of the prompt and of accepted tokens, samples one token per child, and offers
    the KV to the decode worker.

    Attributes:
        destination: Decode worker, or "" if no KV is offered.
        from_token: First position whose KV is offered under `handoff_id`. If it equals the prompt's
            length, no KV is offered.
        peer: Another worker that probably has the KV of the first `peer_tokens` positions cached,
            and the hand-off id under which it sends this KV.
        weights: Identity of the decode worker's weights. A prefill worker with other weights
            refuses the call.
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
    weights: str = ""


class PrefillReply(Message, frozen=True):
    """Result of a prefill. `cached` holds the number of cached prompt tokens in each cache tier.
    `prompt_logprobs` is set if the request asks for log-probabilities of the prompt."""

    tokens: tuple[FirstToken, ...]
    queue_seconds: float
    prefill_seconds: float
    cached: CachedTokens = CachedTokens()
    prompt_logprobs: PromptLogprobs | None = None


class FetchCall(Message, frozen=True):
    """Fetches cached KV from a worker. Blocks are identified by their names, which are keyed hashes
    that include the tenant. A caller that has a block's name may therefore fetch the block.

    Attributes:
        names: Names of consecutive blocks, the first at the prompt's start.
        first: Index in `names` of the first block to fetch.
        deadline_seconds: Time after which the worker withdraws the offered blocks.
    """

    handoff_id: int
    asker: str
    names: tuple[bytes, ...]
    first: int
    block_tokens: int
    deadline_seconds: float


class FetchReply(Message, frozen=True):
    """The number of blocks offered, from `FetchCall.first` on. `snapshot` means that a snapshot of
    the recurrent state at their end is offered, too. If nothing is offered, no hand-off has
    begun."""

    blocks: int = 0
    snapshot: bool = False


class SessionAction(enum.Enum):
    """What a worker does with the KV of a session. `SHOW`: nothing. `PREFETCH`: ends its pause and
    restores its blocks from host memory and disk to pages. `DROP`: forgets the session and drops
    the blocks that no other request used."""

    SHOW = "show"
    PREFETCH = "prefetch"
    DROP = "drop"


class SessionCall(Message, frozen=True):
    """Concerns the session with the key `session` of a tenant and cache scope."""

    tenant: str
    cache_scope: str
    session: str
    action: SessionAction
    deadline_seconds: float


class SessionReport(Message, frozen=True):
    """What a worker knows of a session, after the call's action.

    Attributes:
        tokens: Number of tokens of the last turn's whole blocks. Each of the next three numbers
            counts those that a tier has; several tiers may have a token.
        idle_seconds: Time since the last turn.
        retention_seconds, pause_seconds: Time that is left of the retention of the last turn, and
            of the pause that follows it.
        dropped_tokens: Number of tokens whose blocks were dropped.
    """

    worker: str
    tokens: int = 0
    pages_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    idle_seconds: float = 0.0
    retention_seconds: float = 0.0
    pause_seconds: float = 0.0
    dropped_tokens: int = 0


class Offer(Message, frozen=True):
    """A KV block that the receiver may pull. The sender may still be computing it.

    The block holds positions [start, start + valid_tokens) of `groups` layer groups from `group`
    on, padded to `block_tokens`, on dp rank `rank` of the sender. A layer group is a run of layers
    whose KV is sent together.

    Attributes:
        kind: Content of the block. WINDOW blocks hold the positions inside the sliding windows and
            have their own layer groups. STATE and WINDOW blocks are sent after all POSITIONS
            blocks.
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
    """Keyed checksum of an offered block, sent once the block is computed. The receiver compares it
    with the checksum of the KV in its own pages."""

    offer_id: int
    checksum: int


class HandoffEnd(Message, frozen=True):
    """Last message of a hand-off. `prompt_logprobs` is the same as in `PrefillReply`, because that
    reply may be lost.

    Attributes:
        firsts: First sampled token of each child.
        moved: All generated tokens of a running sequence that moves to another worker; empty for a
            prefill. The KV of the newest token is not offered, because it is not computed yet.
    """

    offers: int
    tokens: int
    firsts: tuple[FirstToken, ...]
    moved: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


PeerMessage = Offer | OfferChecksum | HandoffEnd


class PeerHello(Message, frozen=True):
    """Properties that two workers compare before a KV hand-off. If they differ, the hand-off is
    refused with an error that names the field.

    Attributes:
        kv_layers: Heads, sizes and dtypes of the KV of each layer, as text (layout/kv_spec.py).
        windows_apart: Whether the KV of sliding-window layers is sent separately, limited to the
            window.
        worker, boot_id: Name and boot id of the worker that sends this hello. Not compared.
        checksum_key: Secret key of this worker's checksums, sent over the control connection only.
            Not compared.
        mesh: Mesh of this worker. Only its field `transports` must be equal on both sides.
        oldest_protocol: Oldest protocol version that this worker works with.
        tuning: Kind of the worker and digest of its autotune results, "KIND:DIGEST". Compared
            between workers of the same kind. Empty if unknown.
        tuned_apart: Whether float32 sequences may move between workers of different results.
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
    oldest_protocol: int = 0
    weights: str = ""
    tuning: str = ""
    tuned_apart: bool = False


async def close_stream(items: object) -> None:
    """Closes an iterator that a port returned. This cancels the call. Does nothing for an iterator
    without `aclose`."""
    aclose = getattr(items, "aclose", None)
    if aclose is not None:
        await aclose()


class PrefillPort(Protocol):
    async def prefill(self, call: PrefillCall) -> PrefillReply:
        """Computes a prompt. Returns as soon as the first tokens are sampled, while the KV may
        still be fetched. Raises OverloadedError (queue full), DeadlineExceededError or
        UnavailableError."""
        ...

    async def cancel_prefill(self, handoff_id: int) -> None:
        """Stops the prefill and frees the offered blocks and pages of the hand-off. Idempotent."""
        ...

    async def reset_cache(self) -> int:
        """Empties the prefix cache and returns the number of blocks dropped. Blocks of running
        sequences are not cached later either."""
        ...

    async def session(self, call: SessionCall) -> SessionReport | None:
        """Shows, restores or drops the KV of a session. Returns None if the worker knows no such
        session."""
        ...

    async def status(self) -> WorkerStatus: ...


class DecodePort(Protocol):
    async def reserve(self, call: ReserveCall) -> Reservation:
        """Reserves pages. Waits in a bounded queue until enough pages are free.

        Raises:
            OverloadedError: The queue is full.
            InvalidRequestError: The request needs more pages than a rank has.
            DeadlineExceededError: No pages became free before the deadline.
        """
        ...

    def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        """Yields spans of all children until every child has finished. Closing the iterator cancels
        the sequence. Raises HandoffError, UnavailableError or DeadlineExceededError."""
        ...

    async def resume_source(self, call: ResumeCall) -> int | None:
        """Replaces the source of a reservation's KV. Returns the first position whose KV is
        missing, or None if all KV has arrived. Raises HandoffError if the reservation no longer
        exists."""
        ...

    async def cancel(
        self, reservation_id: int, child: int | None = None, awaited: bool = False
    ) -> None:
        """Cancels one child, or all children if `child` is None. The decode slot is freed within
        one step. The pages are freed immediately. If KV is being received into them, they are freed
        when the lease ends at the latest. Idempotent. `awaited`: whether a later attempt will
        continue, so that the blocks should stay cached longer than others."""
        ...

    async def reset_cache(self) -> int:
        """Empties the prefix cache and returns the number of blocks dropped. Blocks of running
        sequences are not cached later either."""
        ...

    async def session(self, call: SessionCall) -> SessionReport | None:
        """Shows, restores or drops the KV of a session. Returns None if the worker knows no such
        session."""
        ...

    async def status(self) -> WorkerStatus: ...


class PeerPort(Protocol):
    """Calls of a worker that receives KV to the worker that sends the KV. The sender is a prefill
    worker, a decode worker from which a running sequence migrates, or a worker whose cached blocks
    are fetched."""

    async def hello(self, hello: PeerHello) -> PeerHello:
        """Compares the caller's `PeerHello` with this worker's and returns this worker's. Raises
        IncompatiblePeerError with the field that differs and both values."""
        ...

    async def fetch(self, call: FetchCall) -> FetchReply:
        """Begins a hand-off of the requested blocks. Offers only blocks that this worker still
        caches, because the caller's list may be outdated."""
        ...

    def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        """Yields an Offer for each block, an OfferChecksum once the block is computed, and finally
        a HandoffEnd.

        Raises:
            HandoffError: The sender ended the hand-off early.
        """
        ...

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        """Reports that the blocks `offer_ids` have arrived. The sender then frees these blocks. If
        `offer_ids` is empty, the call only renews the hand-off's lease. Idempotent."""
        ...

    async def abort(self, handoff_id: int, reason: str) -> None:
        """Reports that the receiver gave up the hand-off. The sender then frees its blocks and
        pages. Idempotent."""
        ...
