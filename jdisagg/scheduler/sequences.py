"""A decode worker's view of a request: a group (one reservation) and its children (sequences).

A sequence is the request, its accepted ids and its KV. `generated` holds all ids so far, including
accepted ones. Its KV is in the pages that the ledger lists under `key`. Positions count prompt and
generated tokens. The device runs ahead of what was read back: `issued_position` is where the slot
will be after all commands in flight."""

import enum
from dataclasses import dataclass, field

from jdisagg.messages.step_commands import SampleSpec
from jdisagg.plain import plain
from jdisagg.request import FinishReason, Request, TokenLogprobs
from jdisagg.scheduler.handoff import Handoff
from jdisagg.scheduler.residency import Chain


def sample_spec(request: Request, child: int, generated: tuple[int, ...]) -> SampleSpec:
    """Returns how the token after `generated` is chosen. Histories are sent only if the choice
    depends on them."""
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
    """Returns which log-probabilities of the prompt a prefill must return, or None. A request with
    accepted tokens has received them already."""
    return None if accepted else request.sampling.prompt_logprobs


class Stage(enum.Enum):
    """RESERVED: holds pages, KV is still to come. READY: all KV is in place, waits for a slot.
    RUNNING: in a slot. SPILLED: swapped out to host memory, holds nothing. RETURNING: holds pages,
    KV is being swapped in. ENDED: holds nothing."""

    RESERVED = "reserved"
    READY = "ready"
    RUNNING = "running"
    SPILLED = "spilled"
    RETURNING = "returning"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """One child of a group.

    Attributes:
        accepted: Generated tokens that came with the call.
        limit: First position that it may never write.
        frozen: It makes no steps for now, because its last positions are being migrated.
        told: Leading tokens of `generated` that were reported.
        held_logprobs: Log-probabilities of the unreported tokens.
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
    # with fewer generated tokens than this, new ones neither end it nor are reported
    uneventful: int = 0

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def position(self) -> int:
        """Position of the newest known token, whose KV is not written yet."""
        return self.group.prompt_tokens + len(self.generated) - 1

    @property
    def age_key(self) -> tuple[float, int, int]:
        """Smaller is older; the youngest is preempted first."""
        return (self.group.arrival, self.group.key, self.child)

    def sample_spec(self) -> SampleSpec:
        """Returns how its next token is chosen."""
        return sample_spec(self.group.request, self.child, tuple(self.generated))


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One reservation: children that share the prompt's pages on one rank.

    Attributes:
        key: Owner of the pages until the group is ready.
        copies: Shared last pages to copy then: (rank, source, destination).
        until: Deadline of the call that generates from it.
        cached_tokens: Leading positions whose KV was cached at the start.
        chain: Names of the blocks of known tokens, in `epoch` of the prefix cache.
        suspended_until: Until then it is suspended and its KV is kept in host memory; None if it
            runs.
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
    suspended_until: float | None = None

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
    """New tokens of one child, or why it ended or was swapped out (`aside`). `first_index` counts
    from the first generated token."""

    group_key: int
    child: int
    first_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    preempted: bool = False
    moved: bool = False
    aside: bool = False
