"""Meshes of a model with recurrent state."""

from tests.fakes.cluster import Cluster
from tests.fakes.fake_states import with_state
from tests.worker.conversations import limits


def stateful(ranks: int = 1, pages: int = 160, page_size: int = 4, snapshots: int = 24, **more):
    return with_state(limits(ranks, pages, page_size, **more), snapshots, every=16)


def residencies(cluster: Cluster):
    return [
        process.worker._kept
        for process in cluster.processes.values()
        if process.worker._kept.snapshots
    ]


def check_snapshots(cluster: Cluster) -> int:
    """Nothing is pending, each snapshot belongs to a cached block. Returns how often one was
    used."""
    used = 0
    for kept in residencies(cluster):
        for tree, snapshots in zip(kept.trees, kept.snapshots, strict=True):
            assert snapshots.pending == 0
            assert snapshots.free + len(snapshots) == snapshots.total
            assert all(name in tree for name in snapshots)
            used += snapshots.used
    return used
