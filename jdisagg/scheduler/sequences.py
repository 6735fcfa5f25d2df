"""The state of a request on a worker: its prompt and, if it is decoded there, a group that reserves
pages. The group's children are the sequences, one for each sample of a request with n > 1.

`generated` holds all tokens of a sequence after the prompt, including those of earlier attempts.
Steps are issued before earlier results are read, so `issued_position` is the sequence's position
after all commands in flight.

Requests are served in order of arrival, but each unit of priority makes a request
`PRIORITY_SECONDS` older, up to `MOST_PRIORITY` units. So requests of low priority do not starve:
after enough time in the queue, a request is served before newer requests of higher priority. The
sequences of the lowest priority are preempted first, and among these the newest. No sequence is
preempted for ("yields to") an equal or lower priority.

Invariants (each is a test of the same name in tests/scheduler/test_priorities.py):
- only_a_lower_priority_yields_and_not_for_ever
- the_lowest_and_newest_are_preempted_and_no_more_than_needed
"""

import enum
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field

from jdisagg.messages.ports import Child
from jdisagg.messages.step_commands import SampleSpec
from jdisagg.plain import plain
from jdisagg.prompt.images import PromptImage
from jdisagg.prompt.logprobs import LAST, POOLINGS, PromptLogprobs
from jdisagg.request import FinishReason, Request, TokenLogprobs
from jdisagg.scheduler.block_names import Tail
from jdisagg.scheduler.draft_worth import Acceptance
from jdisagg.scheduler.handoff import Handoff
from jdisagg.scheduler.ngram import NgramSearch
from jdisagg.scheduler.residency import Chain


def sample_spec(request: Request, child: int, generated: tuple[int, ...]) -> SampleSpec:
    """Returns the sampling parameters for the token after `generated`. Earlier tokens are included
    only if sampling depends on them (penalties, grammars)."""
    penalised, constrained = request.sampling.penalised, request.sampling.grammar is not None
    return SampleSpec(
        child=child,
        sampling=request.sampling,
        stop_ids=request.stop_ids,
        min_position=len(request.prompt_token_ids) + request.sampling.min_tokens,
        prompt_history=request.prompt_token_ids if penalised else (),
        output_history=generated if penalised or constrained else (),
    )


class Stage(enum.Enum):
    """The stage of a sequence on its decode worker. RESERVED: it has pages, but not all its KV has
    arrived. READY: it has all KV and waits for a slot. RUNNING: it has a slot. ENDED: it has
    neither slot nor pages."""

    RESERVED = "reserved"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """One child of a group.

    Attributes:
        accepted: Number of leading generated tokens that an earlier attempt or another worker
            generated.
        limit: First position after the sequence's last allowed token. This position is never
            written.
        frozen: Whether the sequence runs no decode steps, because its last positions are being sent
            to another worker.
        predicted: Latest prediction that is not compared with generated tokens yet: its kind, the
            number of generated tokens before it, and its tokens.
        aside_seconds: Time that the sequence has spent without pages since it was first preempted
            for a request of higher priority.
    """

    key: int
    child: int
    group: "SequenceGroup"
    generated: list[int]
    limit: int
    stage: Stage = Stage.RESERVED
    frozen: bool = False
    slot: int = -1
    issued_position: int = 0
    issued_limit: int = 0
    held_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ngrams: NgramSearch | None = None
    acceptance: list[Acceptance] = field(default_factory=list)
    drafting: int = 0
    drafted: int = -1
    predicted: tuple[int, int, tuple[int, ...]] | None = None
    aside_seconds: float = 0.0
    # while there are fewer generated tokens than this, no token ends the sequence or is reported
    uneventful: int = 0
    rank: int = field(init=False)
    accepted: int = field(init=False)
    told: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.group.rank
        self.accepted = self.told = len(self.generated)

    @property
    def position(self) -> int:
        """Position of the newest token read back from the device. This token has no KV yet."""
        return self.group.prompt_tokens + len(self.generated) - 1

    @property
    def age_key(self) -> tuple[float, int, int]:
        return (self.group.arrival, self.group.key, self.child)

    @property
    def precedence(self) -> tuple[int, float, int, int]:
        """Sort key by priority and age. The sequence that sorts last is preempted first."""
        return (-self.group.request.priority, *self.age_key)

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort key of the sequences that wait for slots."""
        since = self.group.arrival - head_start(self.group.request.priority)
        return (since, self.group.key, self.child)

    def yields_to(self, priority: int) -> bool:
        """A sequence that was preempted yields again only after another token."""
        progressed = not self.accepted or len(self.generated) > self.accepted
        return progressed and yields(self.group.request.priority, self.aside_seconds, priority)

    def sample_spec(self) -> SampleSpec:
        return sample_spec(self.group.request, self.child, tuple(self.generated))


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The children of one request that were reserved together and share the prompt's pages on one
    rank.

    Attributes:
        key: Identifies the group, and owns the prompt's pages until the children are ready.
        copies: Copies of the prompt's shared last page as (rank, source page, destination page), to
            be made when all KV has arrived.
        chain: Hashes of the full blocks of `known_tokens`. They are invalid if the prefix cache was
            cleared since, which starts a new `epoch`.
        complete: Whether its pages have the KV of all known tokens but the newest, so that its only
            child goes on with a decode step.
    """

    key: int
    request: Request
    attempt: int
    rank: int
    arrival: float
    handoff: Handoff
    until: float
    children: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    root_held: bool = True
    cached_tokens: int = 0
    chain: Chain = ()
    epoch: int = 0
    complete: bool = False
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """Tokens to prefill: the prompt and, for a resumed child, its accepted tokens."""
        return self.request.prompt_token_ids + tuple(
            self.children[0].generated[: self.children[0].accepted]
        )

    @property
    def alive(self) -> list[Sequence]:
        return [child for child in self.children if child.stage is not Stage.ENDED]


@plain
class ChildProgress:
    """New tokens of one child. `finish`, `preempted` and `moved` state why the child ended, if it
    did. `yielded` means that it was preempted for a request of higher priority. `first_index` is
    the index of `token_ids[0]` among the generated tokens."""

    group_key: int
    child: int
    first_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    preempted: bool = False
    moved: bool = False
    yielded: bool = False


@dataclass(slots=True, eq=False)
class Prompt:
    """The prompt of a request, and the tokens that earlier attempts generated, from its arrival at
    a mesh until all its tokens are in issued chunks, or until its KV comes from another worker.

    Attributes:
        key: Identifies the prompt on its worker, and owns its pages.
        destination: Decode worker to which the KV is sent; empty if it stays.
        since: Time from which the prompt counts as waiting, if not from its arrival.
        decodes: Whether its answer is generated on this mesh. Otherwise its KV is sent.
        computes: Whether this mesh computes the uncached tokens. At least one token is then treated
            as uncached.
        asked: Whether the router leaves the uncached tokens to this mesh, even if it cannot compute
            them. At least one token is then treated as uncached, too.
        continues: Whether a sequence that gave way may go on with a decode step.
        chain: Names (hashes) of the full blocks; empty if no cached blocks may be used.
        useful: Names of the blocks among the `most_known` first positions.
        tail: The KV behind these blocks, if the sequence may continue; it may be gone.
        known: For each rank, the number of leading blocks of `useful` that were in pages at the
            last look-up.
        cached: For each rank, the number of leading positions after which a chunk could have begun
            at the last look-up; empty if no block is useful.
        rank: Data-parallel rank of the pages, or -1 if a prompt to compute has none.
        windows: Page table for sliding-window layers, if these have pages of their own.
        cached_tokens: Number of leading positions whose KV was in the pages at the start.
        epoch: Epoch of the prefix cache when the prompt got pages. Each clear of the cache starts a
            new epoch.
        offers_from: First position whose KV is sent to a decode worker, a multiple of
            `granule_tokens`; None if no KV is sent.
        snapshots: Positions, ascending, at which snapshots of the state are wanted.
        issued_tokens: Number of leading positions that are cached or part of issued chunks.
        scores: Log-probabilities of the parts that are computed.
        order: Sort key in the queue.
        prompt_logprobs: Number of log-probabilities to return for each prompt token, or LAST or SUM
            for a hidden state, or None.
    """

    key: int
    request: Request
    children: tuple[Child, ...]
    arrival: float
    attempt: int = 1
    computes: bool = True
    asked: bool = False
    continues: bool = False
    decodes: bool = True
    since: float | None = None
    destination: str = ""
    chain: Chain = ()
    useful: Chain = ()
    tail: Tail | None = None
    known: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    rank: int = -1
    pages: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    state: int = 0
    cached_tokens: int = 0
    epoch: int = 0
    samples: tuple[SampleSpec, ...] = ()
    adapter: int = 0
    images: tuple[PromptImage, ...] = ()
    offers_from: int | None = None
    snapshots: tuple[int, ...] = ()
    issued_tokens: int = 0
    scores: list[PromptLogprobs] = field(default_factory=list)
    token_ids: tuple[int, ...] = field(init=False)
    tokens: int = field(init=False)
    priority: int = field(init=False)
    order: tuple[float, int] = field(init=False)
    prompt_logprobs: int | None = field(init=False)

    def __post_init__(self) -> None:
        request, accepted = self.request, self.children[0].accepted
        self.token_ids = request.prompt_token_ids + accepted
        self.tokens = len(self.token_ids)
        self.priority = request.priority
        since = self.arrival if self.since is None else self.since
        self.order = (since - head_start(request.priority), self.key)
        wanted = POOLINGS.get(request.pooling, request.sampling.prompt_logprobs)
        # the attempt that generated the accepted tokens has returned the log-probabilities
        self.prompt_logprobs = None if accepted else wanted

    @property
    def all_scores(self) -> PromptLogprobs | None:
        return PromptLogprobs.joined(self.scores) if self.scores else None

    @property
    def most_known(self) -> int:
        """Number of leading positions that are not computed if they are cached."""
        if not (self.computes or self.asked):
            return self.tokens
        return self.tokens - 1 if self.prompt_logprobs in (None, LAST) else 0

    @property
    def known_tokens(self) -> int:
        return max(self.cached, default=0)

    @property
    def begun(self) -> bool:
        return self.issued_tokens > self.cached_tokens

    @property
    def left_tokens(self) -> int:
        return self.tokens - self.issued_tokens

    def most_tokens(self, grain: int) -> int:
        """Returns the largest number of next tokens that one row may have. A row makes at most one
        snapshot, after a multiple of `grain` tokens or at its end."""
        ahead = [at - self.issued_tokens for at in self.snapshots if at > self.issued_tokens]
        ends = len(ahead) > 1 or (ahead and ahead[0] % grain)
        return ahead[0] if ends else self.left_tokens


PRIORITY_SECONDS = 30.0
MOST_PRIORITY = 10


def head_start(priority: int) -> float:
    """Returns by how many seconds a priority makes a request older in the queue. Negative for
    negative priorities."""
    return PRIORITY_SECONDS * max(-MOST_PRIORITY, min(MOST_PRIORITY, priority))


def yields(priority: int, aside_seconds: float, to_priority: int) -> bool:
    return aside_seconds < head_start(to_priority) - head_start(priority)


@plain
class YieldingSequence:
    """A sequence that may be preempted, or a prompt that may lose its pages.

    Attributes:
        slots: Number of its batch or state slots, or of its pages of windows.
        computed: Whether all its KV is in pages. If it is not, a preemption loses the part that was
            computed.
    """

    key: int
    priority: int
    newness: tuple[float, int, int]
    pages: int
    computed: bool = True
    slots: int = 1


def to_preempt(
    holders: Sized[YieldingSequence], pages: int, slots: int
) -> list[YieldingSequence] | None:
    """Chooses the sequences that are preempted on one rank, lowest priority first.

    Returns:
        The fewest sequences that suffice, in order of preemption, or None if all together do not
            suffice.
    """
    order = sorted(holders, key=lambda one: one.newness, reverse=True)
    order.sort(key=lambda one: (one.priority, not one.computed))
    chosen: list[YieldingSequence] = []
    for holder in order:
        if pages <= 0 and slots <= 0:
            break
        chosen.append(holder)
        pages, slots = pages - holder.pages, slots - holder.slots
    if pages > 0 or slots > 0:
        return None
    for holder in reversed(chosen):  # a later choice may suffice alone
        if pages + holder.pages <= 0 and slots + holder.slots <= 0:
            chosen.remove(holder)
            pages, slots = pages + holder.pages, slots + holder.slots
    return chosen
