"""The router's snapshot of the cluster: what the workers said of themselves when asked. Plain data; the truth is at the workers."""

from dataclasses import dataclass

from jdisagg.dispatch.ports import WorkerRole, WorkerStatus


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Workers that answered. `decode` holds mixed workers too: they can do both."""

    prefill: tuple[WorkerStatus, ...]
    decode: tuple[WorkerStatus, ...]

    @classmethod
    def of(cls, statuses: tuple[WorkerStatus, ...]) -> "ClusterState":
        return cls(
            prefill=tuple(status for status in statuses if status.role is WorkerRole.PREFILL),
            decode=tuple(status for status in statuses if status.role is not WorkerRole.PREFILL),
        )
