"""The state of a request on a decode worker. A group reserves pages. Its children are the
sequences, one for each sample of a request with n > 1.

`generated` holds all tokens of a sequence after the prompt, including those of earlier attempts.
Steps are issued before earlier results are read, so `issued_position` is the sequence's position
after all commands in flight."""

import enum
from dataclasses import dataclass, field

from jdisagg.messages.step_commands import SampleSpec
from jdisagg.plain import plain
from jdisagg.prompt.logprobs import POOLINGS
from jdisagg.request import FinishReason, Request, TokenLogprobs
from jdisagg.scheduler.acceptance import Acceptance
from jdisagg.scheduler.handoff import Handoff
from jdisagg.scheduler.ngram import NgramSearch
from jdisagg.scheduler.priorities import head_start, yields
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


def wanted_of_prompt(request: Request, accepted: tuple[int, ...]) -> int | None:
    """Returns the number of log-probabilities per prompt token that a prefill must return, or None
    if it must return none. If there are `accepted` tokens, the result is None, because the attempt
    that generated them has returned the log-probabilities."""
    wanted = POOLINGS.get(request.pooling, request.sampling.prompt_logprobs)
    return None if accepted else wanted


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
    accepted: int
    limit: int
    stage: Stage = Stage.RESERVED
    frozen: bool = False
    slot: int = -1
    issued_position: int = 0
    issued_limit: int = 0
    told: int = 0
    held_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ngrams: NgramSearch | None = None
    acceptance: list[Acceptance] = field(default_factory=list)
    drafting: int = 0
    drafted: int = -1
    predicted: tuple[int, int, tuple[int, ...]] | None = None
    aside_seconds: float = 0.0
    # while there are fewer generated tokens than this, no token ends the sequence or is reported
    uneventful: int = 0

    @property
    def rank(self) -> int:
        return self.group.rank

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
    """

    key: int
    request: Request
    attempt: int
    rank: int
    arrival: float
    handoff: Handoff
    context_tokens: int
    until: float
    children: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    root_held: bool = True
    cached_tokens: int = 0
    chain: Chain = ()
    epoch: int = 0
    computes: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

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
