"""Ports: what the request path asks of a worker, and what two workers ask of each other at a
hand-off.

An embedded cluster calls these directly, processes over gRPC. All arguments are frozen plain data.
Durations are remaining seconds. `attempt` numbers rise with each retry of a request, so that a late
zombie is ignored."""

import enum
from collections.abc import AsyncIterator
from typing import Protocol

from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.plain import Message
from jdisagg.prompt_logprobs import PromptLogprobs
from jdisagg.request import CachedTokens, Request, TokenLogprobs


class Child(Message, frozen=True):
    """One of a request's n streams and the tokens already accepted for it; these are forced on
    re-prefill, never resampled."""

    index: int
    accepted: tuple[int, ...] = ()


class ReserveCall(Message, frozen=True):
    """Asks a decode worker for pages for the prompt, the accepted tokens and expected growth of all
    `children`.

    Several children share the prompt's pages, so they must have accepted nothing yet. `age_seconds`
    is how long ago the request arrived: queues serve by arrival, so that a preempted request goes
    before younger ones. `whole`: all of its KV will come, also what is known here. `computes`: the
    worker itself will compute what is not known here, one token at least."""

    request: Request
    attempt: int
    children: tuple[Child, ...]
    deadline_seconds: float
    age_seconds: float = 0.0
    whole: bool = False
    computes: bool = False


class Reservation(Message, frozen=True):
    """Pages held under a lease of `lease_seconds` from now; `generate` takes it over. The first
    `cached_tokens` positions are known here, and need neither be computed nor sent."""

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
    """Where the KV will come from: the sender's name, the hand-off's id there, and where its
    `PeerPort` listens (host:port; empty where it is known by name, as in the embedded cluster).
    `boot_id`: of the sender's process; 0 where nobody knows it: then a hello finds out."""

    worker: str
    handoff_id: int
    address: str = ""
    boot_id: int = 0


class GenerateCall(Message, frozen=True):
    """Starts a reserved sequence. `source` None: the worker prefills it itself."""

    reservation_id: int
    attempt: int
    deadline_seconds: float
    source: HandoffSource | None = None


class SpanEnd(enum.Enum):
    """Why a child's spans end. `PREEMPTED`: its pages were taken; re-enter the path with the
    accepted tokens. `MOVED`: the worker that took the sequence over goes on with it."""

    STOP = "stop"
    LENGTH = "length"
    PREEMPTED = "preempted"
    MOVED = "moved"


class SourceLost(Message, frozen=True):
    """The KV of hand-off `handoff_id` will not come (any more). The reservation is kept a while,
    with the first `kept_tokens` positions that have come: `resume_source` lets the rest come from
    elsewhere."""

    handoff_id: int
    kept_tokens: int
    reason: str


class Span(Message, frozen=True):
    """Tokens `first_index`.. (counted from the first generated token) of one child, all from one
    step or span of steps.

    On `STOP` the stop id itself is the last token. Set on the first span: `kv_bytes_moved` counts
    what the hand-off moved, `exposed_transfer_seconds` what it took beyond the prefill;
    `prompt_logprobs`, where they were asked for. `aside`: behind these tokens, if any, the child
    has no pages for a while. `lost` and `moving` are news of the whole reservation, without
    tokens: the KV's source failed; the sequence can be taken over from this worker under that
    hand-off."""

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
    """Lets the rest of a reservation's KV come from another source. `firsts`: first tokens that the
    client has already; they hold, whatever the new source samples."""

    reservation_id: int
    attempt: int
    source: HandoffSource
    firsts: tuple[FirstToken, ...] = ()


class PrefillCall(Message, frozen=True):
    """Computes prompt + accepted tokens, samples one token per child, and offers the KV from
    `from_token` on under `handoff_id`: none where that is all of them. `peer`: a hint that another
    worker keeps the first `peer_tokens` of them, and gives them under that hand-off."""

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
    """`cached`: tokens of the prompt itself that were known and not computed, by where they were.
    `prompt_logprobs`: where they were asked for."""

    tokens: tuple[FirstToken, ...]
    queue_seconds: float
    prefill_seconds: float
    cached: CachedTokens = CachedTokens()
    prompt_logprobs: PromptLogprobs | None = None


class FetchCall(Message, frozen=True):
    """Asks a worker for KV that it keeps: of the blocks of `block_tokens` positions that `names`
    are, a chain from the first position on, those from the `first` on. Offered under `handoff_id`,
    to worker `asker`, for `deadline_seconds` at the most. Names are keyed and say whose tenant a
    block is: who can name one may have it."""

    handoff_id: int
    asker: str
    names: tuple[bytes, ...]
    first: int
    block_tokens: int
    deadline_seconds: float


class FetchReply(Message, frozen=True):
    """So many blocks, from the `first` on, are offered: all that were asked for, fewer, or none,
    and then no hand-off was begun."""

    blocks: int = 0


class Offer(Message, frozen=True):
    """A block of KV ready to be pulled (perhaps still computing): positions [start, start +
    valid_tokens) of `groups` layer groups from `group` on, padded to `block_tokens`, on dp rank
    `rank` of the sender. `state`: not KV but the sequence's state in all layers, after all
    positions of the hand-off, as a block of one token. `window`: positions that the layers with a
    window still see, of their own groups, after all others of the hand-off too."""

    offer_id: int
    group: int
    start: int
    valid_tokens: int
    block_tokens: int
    rank: int
    groups: int = 1
    state: bool = False
    window: bool = False


class OfferChecksum(Message, frozen=True):
    """What an offered block must sum to after insertion; follows its offer once it is computed."""

    offer_id: int
    checksum: int


class HandoffEnd(Message, frozen=True):
    """All is offered: how many offers there were, how many positions, and the tokens sampled at the
    end. `prompt_logprobs` again, as in `PrefillReply`, which may not arrive.

    Of a running sequence that moves, `moved` holds all tokens generated so far; the newest one's KV
    is not among the positions."""

    offers: int
    tokens: int
    firsts: tuple[FirstToken, ...]
    moved: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


PeerMessage = Offer | OfferChecksum | HandoffEnd


class PeerHello(Message, frozen=True):
    """What must match before two workers hand over KV. `kv_layers` is the KV spec in words;
    differing fields are refused by name.

    `windows_apart`: layers with a window are handed over apart, as far as they are still seen.

    `worker`, `boot_id`, `checksum_key` and `mesh` are each side's own (of the mesh, `transports`
    must match). `checksum_key` keys the checksums of what this side offers: a secret, told over
    this control connection alone."""

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
    """Closes what a port's iterator holds: that cancels. What is no generator has nothing to
    close."""
    aclose = getattr(items, "aclose", None)
    if aclose is not None:
        await aclose()


class PrefillPort(Protocol):
    async def prefill(self, call: PrefillCall) -> PrefillReply:
        """Returns when the tokens are sampled. Raises OverloadedError (queue full),
        DeadlineExceededError, UnavailableError."""
        ...

    async def cancel_prefill(self, handoff_id: int) -> None:
        """Idempotent; frees compute, offers and pages of the hand-off."""
        ...

    async def reset_cache(self) -> int:
        """Nothing that is kept here is used again, nor what running sequences leave; returns how
        many blocks were forgotten."""
        ...

    async def status(self) -> WorkerStatus: ...


class DecodePort(Protocol):
    async def reserve(self, call: ReserveCall) -> Reservation:
        """Waits in a bounded queue until there is room. Raises OverloadedError when the queue is
        full, InvalidRequestError when the request can never fit, DeadlineExceededError when the
        wait outlasts the call's deadline."""
        ...

    def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        """Spans of all children until each has ended. Raises HandoffError, UnavailableError,
        DeadlineExceededError. Closing the iterator cancels."""
        ...

    async def resume_source(self, call: ResumeCall) -> int | None:
        """Gives the old source up and lets the KV come from another: returns from which position on
        it is wanted, None when all of it is here already. Raises HandoffError when the reservation
        is not held (any more)."""
        ...

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        """Idempotent; frees the slot within one step and the pages at once (KV in flight within its
        lease). `child` None is all."""
        ...

    async def suspend(self, reservation_id: int, keep_seconds: float | None) -> None:
        """Lets slot and pages of all children go as soon as their KV is here. It is kept in host
        memory for so long, as far as there is room; what is not ends as preempted. None: they go on
        when they get pages. The last call holds; idempotent."""
        ...

    async def reset_cache(self) -> int:
        """Nothing that is kept here is used again, nor what running sequences leave; returns how
        many blocks were forgotten."""
        ...

    async def status(self) -> WorkerStatus: ...


class PeerPort(Protocol):
    """The worker that KV comes from, as its receiver sees it: at a hand-off a prefill worker, or a
    decode worker that hands a running sequence on; at a fetch the worker that keeps what a prefill
    worker wants."""

    async def hello(self, hello: PeerHello) -> PeerHello:
        """Raises IncompatiblePeerError naming the field that differs and both values."""
        ...

    async def fetch(self, call: FetchCall) -> FetchReply:
        """Begins a hand-off of kept blocks, as far as they are here and may go now. The holder
        decides: what its caller believes is a hint."""
        ...

    def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        """Offers as they are made, the checksum of each when it is computed, then HandoffEnd.

        Raises HandoffError when the sender gave up."""
        ...

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        """These blocks have arrived; the sender forgets them. Naming none says that the receiver is
        still at it: the lease goes on. Idempotent."""
        ...

    async def abort(self, handoff_id: int, reason: str) -> None:
        """The receiver gives up; the sender frees all of it. Idempotent."""
        ...
