"""Decode workers that compute the rest of a prompt."""

from dataclasses import replace

from jdisagg.scheduler.executor import MeshLimits
from tests.fakes.cluster import Cluster
from tests.router.fleets import H100
from tests.worker.conversations import NAMES, limits

APPEND = 24
SLOW = replace(H100, hardware=replace(H100.hardware, memory_bytes_per_second=5e11))


def appending(ranks: int = 1, pages: int = 160, page_size: int = 4) -> MeshLimits:
    """The chunks of the prefill side are larger."""
    return replace(limits(ranks, pages, page_size), append_buckets=(8, 16, APPEND))


def cluster(**more: object) -> Cluster:
    """Of speeds that the router knows, so that it weighs both ways; the prefill worker's is so much
    less that many a prompt is appended."""
    kinds = {"appends": (SLOW, H100), "decode": appending(), "prefill": limits(), "names": NAMES}
    return Cluster(**{**kinds, **more})  # type: ignore[arg-type]
