"""Snapshots and jobs of prompts."""

import itertools
from collections.abc import Mapping

from jdisagg.messages.ports import Child
from jdisagg.messages.step_commands import SampleSpec
from jdisagg.request import Request, SamplingParams
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.prefill_admission import AdmissionSnapshot, RankLoad
from jdisagg.scheduler.prefill_batches import PrefillBatches
from jdisagg.scheduler.prompt import Prompt
from tests.fakes.fake_executor import toy_limits

MOST = 100
LIMITS = toy_limits(
    chunk_buckets=(16, 32, 64), granule_tokens=8, rows_per_chunk=3, page_size=8, context_tokens=512
)


def prompt(
    key: int,
    pages: int = 1,
    destination: str = "d0",
    tokens: int = 4,
    arrival: float | None = None,
    priority: int = 0,
    rank: int = -1,
) -> Prompt:
    """A prompt that waits for pages, or has them on a rank. By default it came at the instant of
    its key."""
    request = Request("r", (1,) * tokens, SamplingParams(), priority=priority)
    at = float(key) if arrival is None else arrival
    made = Prompt(key, request, (Child(0),), at, rank=rank, destination=destination)
    made.needs_pages = pages
    return made


def snapshot(
    *waiting: Prompt,
    ranks: tuple[RankLoad, ...] = (RankLoad(8, 0),),
    unbegun: tuple[Prompt, ...] = (),
    offered: Mapping[str, int] | None = None,
) -> AdmissionSnapshot:
    return AdmissionSnapshot(waiting, unbegun, ranks, offered or {}, MOST)


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
