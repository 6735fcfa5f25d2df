"""The router's snapshot of the cluster: what the workers said of themselves when asked, and what was placed on them. Plain data; the
truth is at the workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jdisagg.dispatch.ports import WorkerRole, WorkerStatus


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Workers that answered. `decode` holds mixed workers too: they can do both. `placed`: requests that are at a worker by our own
    account, for what the worker last said may be older."""

    prefill: tuple[WorkerStatus, ...]
    decode: tuple[WorkerStatus, ...]
    placed: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, statuses: tuple[WorkerStatus, ...], placed: Mapping[str, int] | None = None) -> "ClusterState":
        return cls(
            prefill=tuple(status for status in statuses if status.role is WorkerRole.PREFILL),
            decode=tuple(status for status in statuses if status.role is not WorkerRole.PREFILL),
            placed=dict(placed or {}),
        )
