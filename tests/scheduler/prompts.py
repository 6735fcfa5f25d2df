"""Prompts that wait for pages, and jobs of prompts that have some."""

import itertools

from jdisagg.messages.ports import Child
from jdisagg.messages.step_commands import SampleSpec
from jdisagg.request import Request, SamplingParams
from jdisagg.scheduler.admission import Admission
from jdisagg.scheduler.block_names import BlockNames
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.prefill_batches import PrefillBatches
from jdisagg.scheduler.sequences import Prompt
from tests.fakes.fake_executor import toy_limits
from tests.scheduler.bench import prompts_of

LIMITS = toy_limits(
    chunk_buckets=(16, 32, 64), granule_tokens=8, rows_per_chunk=3, page_size=8, context_tokens=512
)


class Sender:
    """The queue of a mesh that sends KV, with its pages of eight tokens."""

    def __init__(self, ranks: int = 1, pages: int = 8, names: BlockNames | None = None) -> None:
        limits = toy_limits(ranks, 8, pages, context_tokens=512, chunk_buckets=(64,))
        self.state = DecodeState(limits, names)
        self.prompts = prompts_of(self.state)
        self.admission = Admission(self.state, self.prompts)

    def waits(
        self,
        key: int,
        pages: int = 1,
        destination: str = "d0",
        arrival: float | None = None,
        priority: int = 0,
    ) -> Prompt:
        """A prompt of this size that waits. By default it came at the instant of its key."""
        request = Request("r", (1,) * (8 * pages), SamplingParams(), priority=priority)
        at = float(key) if arrival is None else arrival
        made = Prompt(
            key, request, (Child(0),), at, decodes=False, destination=destination, offers_from=0
        )
        self.admission.enqueue(self.prompts.begin(made))
        return made

    def admit(self, *stalled: str) -> list[tuple[int, int]]:
        """Returns the key and rank of each prompt that has pages now."""
        return [(one.key, one.rank) for one in self.admission.admit(0.0, stalled).prompts]


def job(
    sequence: int,
    tokens: int,
    rank: int = 0,
    arrival: float = 0.0,
    samples: int = 1,
    offers_from: int | None = 0,
    priority: int = 0,
) -> Prompt:
    """A prompt that has pages."""
    request = Request("r", tuple(range(tokens)), SamplingParams(), priority=priority)
    made = Prompt(sequence, request, (Child(0),), arrival, rank=rank, offers_from=offers_from)
    made.pages = tuple(range(100))
    made.samples = tuple(SampleSpec(child, SamplingParams()) for child in range(samples))
    return made


def batches(limits: MeshLimits = LIMITS) -> PrefillBatches:
    return PrefillBatches(limits, itertools.count(1).__next__)
