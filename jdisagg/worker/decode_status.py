"""What a decode worker says of itself: its schedulers' counts as a `WorkerStatus`. Reads, changes nothing."""

from jdisagg.config import InstanceConfig
from jdisagg.dispatch.ports import WorkerRole, WorkerStatus
from jdisagg.scheduler.backlog import Backlog
from jdisagg.scheduler.decode_state import DecodeState


def decode_status(
    name: str,
    role: WorkerRole,
    config: InstanceConfig,
    state: DecodeState,
    backlog: Backlog,
    *,
    waiting: int,
    handoffs: int,
    draining: bool,
    can_prefill: bool,
    loading_seconds: float,
) -> WorkerStatus:
    """`waiting`: requests without pages yet; `backlog`: prompts that it computes itself."""
    limits = state.limits
    return WorkerStatus(
        name=name,
        role=role,
        layout=str(config.layout),
        free_pages=tuple(ledger.free_pages for ledger in state.ledgers),
        total_pages=tuple(ledger.total_pages for ledger in state.ledgers),
        running=sum(state.living),
        waiting=waiting,
        slots=limits.ranks * limits.slots_per_rank,
        page_size=limits.page_size,
        context_tokens=limits.context_tokens,
        draining=draining,
        handoffs=handoffs,
        preemptions=state.preemptions,
        reserved_pages=state.reserved_pages(),
        queued_tokens=backlog.tokens,
        queued_pairs=backlog.pairs,
        rank_sequences=tuple(state.living),
        rank_contexts=state.contexts(),
        can_prefill=can_prefill,
        chunk_tokens=limits.chunk_buckets[-1] if can_prefill else 0,
        loading_seconds=loading_seconds,
    )
