"""A prompt at a mesh, from its arrival until all its tokens are in issued chunks, or until its KV
comes from another worker."""

from dataclasses import dataclass, field

from jdisagg.errors import InvalidRequestError
from jdisagg.messages.ports import Child
from jdisagg.messages.step_commands import SampleSpec
from jdisagg.prompt.images import PromptImage
from jdisagg.prompt.logprobs import LAST, PromptLogprobs
from jdisagg.request import Request
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.priorities import head_start
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.sequences import wanted_of_prompt

MAX_EXPERTS_BYTES = 16 << 20  # of a request, so that they fit a message


def check_experts(worker: str, limits: MeshLimits, request: Request) -> None:
    """Raises InvalidRequestError if a request asks for the experts of its tokens, and a worker with
    these limits does not record them, or they do not fit a message."""
    spec, positions = limits.kv_spec, len(request.prompt_token_ids)
    if not request.sampling.return_routed_experts:
        return
    if not spec.records:
        raise InvalidRequestError(
            f"return_routed_experts: worker {worker!r} does not record the experts of tokens; start"
            " all workers with --routed_experts, or omit it"
            if spec.choices
            else f"return_routed_experts: the model of worker {worker!r} has no experts; omit it"
        )
    positions += request.most_tokens(limits.context_tokens)
    nbytes = request.sampling.n * positions * sum(2 * chosen for chosen, _ in spec.choices)
    if nbytes > MAX_EXPERTS_BYTES:
        raise InvalidRequestError(
            f"return_routed_experts: the experts of prompt and answers take up to {nbytes} bytes"
            f" ({positions} positions each), and at most {MAX_EXPERTS_BYTES} fit a reply; send a"
            " shorter prompt, or lower max_tokens or n"
        )


@dataclass(slots=True, eq=False)
class Prompt:
    """The prompt of a request, and the tokens that earlier attempts generated.

    Attributes:
        key: Identifies the prompt on its worker, and owns its pages.
        destination: Decode worker to which the KV is sent; empty if it stays.
        since: Time from which the prompt counts as waiting, if not from its arrival.
        computes: Whether this mesh computes the uncached tokens. At least one token is then treated
            as uncached.
        chain: Names (hashes) of the full blocks; empty if no cached blocks may be used.
        useful: Names of the blocks among the `most_known` first positions.
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
    """

    key: int
    request: Request
    children: tuple[Child, ...]
    arrival: float
    attempt: int = 1
    computes: bool = True
    since: float | None = None
    destination: str = ""
    chain: Chain = ()
    useful: Chain = ()
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

    def __post_init__(self) -> None:
        self.token_ids = self.request.prompt_token_ids + self.children[0].accepted

    @property
    def order(self) -> tuple[float, int]:
        since = self.arrival if self.since is None else self.since
        return (since - head_start(self.priority), self.key)

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of log-probabilities to return for each prompt token, or LAST or SUM for a hidden
        state, or None."""
        return wanted_of_prompt(self.request, self.children[0].accepted)

    @property
    def all_scores(self) -> PromptLogprobs | None:
        return PromptLogprobs.joined(self.scores) if self.scores else None

    @property
    def most_known(self) -> int:
        """Number of leading positions that are not computed if they are cached."""
        if not self.computes:
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
