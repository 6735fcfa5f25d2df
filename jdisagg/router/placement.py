"""Which pair of workers serves a request: the least loaded prefill worker and the least loaded decode worker. Pure.

Load is what waits and runs against what the worker can hold. Workers that just failed this request are avoided while there are
others; draining ones get only requests that are already under way. A mixed worker prefills for itself.
"""

from dataclasses import dataclass

from jdisagg.dispatch.ports import WorkerRole, WorkerStatus
from jdisagg.errors import UnavailableError
from jdisagg.router.cluster_state import ClusterState


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the decode worker prefills by itself. `context_tokens` is the decode worker's limit."""

    prefill: str | None
    decode: str
    context_tokens: int
    reason: str


def place(state: ClusterState, avoid: frozenset[str] = frozenset(), resuming: bool = False) -> Placement:
    """Raises UnavailableError when no worker of a needed kind takes requests."""
    decode = _least_loaded(state, state.decode, avoid, resuming, "decode")
    if decode.role is WorkerRole.MIXED:
        return Placement(None, decode.name, decode.context_tokens, f"{decode.name} does both, load {_load(state, decode):.2f}")
    prefill = _least_loaded(state, state.prefill, avoid, resuming, "prefill")
    reason = f"least loaded: {prefill.name} ({_load(state, prefill):.2f}) and {decode.name} ({_load(state, decode):.2f})"
    return Placement(prefill.name, decode.name, decode.context_tokens, reason)


def another_prefill(state: ClusterState, avoid: frozenset[str]) -> str:
    """Who goes on with a prompt whose prefill worker failed: one of `avoid` only when there is no other."""
    return _least_loaded(state, state.prefill, avoid, True, "prefill").name


def another_decode(state: ClusterState, avoid: frozenset[str]) -> str:
    """Who takes a running sequence over: never one of `avoid`, nor one that is draining."""
    others = tuple(worker for worker in state.decode if worker.name not in avoid)
    return _least_loaded(state, others, frozenset(), False, "other decode").name


def _least_loaded(state: ClusterState, workers: tuple[WorkerStatus, ...], avoid: frozenset[str], resuming: bool, kind: str) -> WorkerStatus:
    taking = [worker for worker in workers if resuming or not worker.draining]
    if not taking:
        known = ", ".join(f"{worker.name} (draining)" for worker in workers) or "none"
        raise UnavailableError(f"no {kind} worker takes requests; known: {known}", retry_after_seconds=1.0)
    return min(taking, key=lambda worker: (worker.name in avoid, worker.draining, _load(state, worker), worker.name))


def _load(state: ClusterState, worker: WorkerStatus) -> float:
    """Requests per slot, and the fraction of pages in use."""
    pages = max(1, sum(worker.total_pages))
    requests = max(worker.running + worker.waiting, state.placed.get(worker.name, 0))
    return requests / max(1, worker.slots) + 1 - sum(worker.free_pages) / pages
