"""What the decode scheduler knows of a request on its worker: a group (one reservation) and its
children (the sequences).

Rule 9: a sequence is (request, accepted ids, KV). `generated` holds all ids so far, the accepted
ones included; KV lies in the pages that the ledger lists under `key`. Positions count prompt and
generated tokens. The device runs ahead of what is read back: `issued_position` is where the slot
will be after all commands in flight."""

import enum
from dataclasses import dataclass, field

from jdisagg.messages.step_commands import SampleSpec
from jdisagg.plain import plain
from jdisagg.request import FinishReason, Request, TokenLogprobs
from jdisagg.scheduler.handoff import Handoff
from jdisagg.scheduler.residency import Chain


def sample_spec(request: Request, child: int, generated: tuple[int, ...]) -> SampleSpec:
    """How the token after `generated` is chosen; the histories travel only where the choice depends
    on them."""
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
    """What a prefill says of the prompt's tokens (`SamplingParams.prompt_logprobs`). Who has
    accepted tokens has that too: it comes with the first of them."""
    return None if accepted else request.sampling.prompt_logprobs


class Stage(enum.Enum):
    """RESERVED: pages held, KV still to come. READY: all KV in place, waits for a slot. RUNNING: in
    a slot. SPILLED: holds nothing, its KV is in host memory. RETURNING: pages held, KV on its way
    back from there. ENDED: holds nothing."""

    RESERVED = "reserved"
    READY = "ready"
    RUNNING = "running"
    SPILLED = "spilled"
    RETURNING = "returning"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """One child of a group. `accepted` generated tokens came with the call; `limit` is the first
    position it may never write. A `frozen` one makes no further steps for now: its last positions
    are on their way to another worker. Of `generated`, the first `told` were told to whoever
    listens; `held_logprobs` are those of the rest."""

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
    # with fewer generated tokens than this, new ones neither end it nor are told
    uneventful: int = 0

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def position(self) -> int:
        """Of the newest known token, whose KV is not written yet."""
        return self.group.prompt_tokens + len(self.generated) - 1

    @property
    def age_key(self) -> tuple[float, int, int]:
        """Smaller is older; the youngest is preempted first."""
        return (self.group.arrival, self.group.key, self.child)

    def sample_spec(self) -> SampleSpec:
        """How its next token is chosen, from what is known of it now."""
        return sample_spec(self.group.request, self.child, tuple(self.generated))


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One reservation: children that share the prompt's pages on one rank. `key` owns the pages
    that KV is written to until the group is ready; `copies` are the shared last pages to copy then
    (rank, source, destination). `until`: the deadline of the call that generates from it. The first
    `cached_tokens` positions hold their KV from the beginning; `chain` names the blocks of what was
    known, in `epoch` of what is kept. `suspended_until`: nothing of it runs; its KV is kept in host
    memory till then."""

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
    suspended_until: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """What must be prefilled: the prompt and, for a child that comes back, its accepted
        tokens."""
        return self.request.prompt_token_ids + tuple(
            self.children[0].generated[: self.children[0].accepted]
        )

    @property
    def alive(self) -> list[Sequence]:
        return [child for child in self.children if child.stage is not Stage.ENDED]


@plain
class ChildProgress:
    """New tokens of one child, or why it ended or rests (`aside`), for whoever listens.
    `first_index` counts from the first generated token."""

    group_key: int
    child: int
    first_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    preempted: bool = False
    moved: bool = False
    aside: bool = False
