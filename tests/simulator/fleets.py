"""A small fleet that is short of pages, so that all mechanisms occur in it, and prompts for it."""

from dataclasses import replace

from jdisagg.config import Mode
from jdisagg.simulator.fleet import INSTANCE, LIMITS, Fleet, Pool
from jdisagg.simulator.workloads import LogNormal
from tests.costs.named import L40S, LLAMA_8B

LENGTHS = LogNormal(400, 1.0, 60, 1.0, longest=2000)


def small_fleet(mode: Mode = Mode.DISAGGREGATED, pages: int = 64) -> Fleet:
    """Returns a fleet of two instances of each role, short of pages, that detects a hung mesh
    within two seconds."""
    instance = replace(
        INSTANCE,
        chunk_tokens=2048,
        slots_per_rank=16,
        pages_per_rank=pages,
        growth_tokens=64,
        stream_tokens=16,
    )
    pool = Pool(2, L40S, instance)
    limits = replace(
        LIMITS,
        step_seconds=2.0,
        handoff_lease_seconds=5.0,
        pull_seconds=2.0,
        default_deadline_seconds=120.0,
    )
    return Fleet(LLAMA_8B, pool, pool if mode is Mode.DISAGGREGATED else None, mode, limits=limits)
