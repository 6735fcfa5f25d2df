"""Snapshots and jobs of prompts."""

import itertools
from collections.abc import Mapping

from jdisagg.messages.step_commands import SampleSpec
from jdisagg.request import SamplingParams
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.prefill_admission import AdmissionSnapshot, QueuedPrompt, RankLoad
from jdisagg.scheduler.prefill_batches import PrefillBatches, PrefillJob
from tests.fakes.fake_executor import toy_limits

MOST = 100
LIMITS = toy_limits(
    chunk_buckets=(16, 32, 64), granule_tokens=8, rows_per_chunk=3, page_size=8, context_tokens=512
)


def snapshot(
    *waiting: QueuedPrompt,
    ranks: tuple[RankLoad, ...] = (RankLoad(8, 0),),
    unbegun: tuple[tuple[QueuedPrompt, int], ...] = (),
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
) -> PrefillJob:
    specs = tuple(SampleSpec(child, SamplingParams()) for child in range(samples))
    return PrefillJob(
        sequence, rank, tuple(range(tokens)), tuple(range(100)), specs, arrival, offers_from
    )


def batches(limits: MeshLimits = LIMITS) -> PrefillBatches:
    return PrefillBatches(limits, itertools.count(1).__next__)
