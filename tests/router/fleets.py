"""Snapshots of workers whose speed is known, for the tests of placement."""

import random

from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.speeds import Kind
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.accounts import Accounts
from jdisagg.router.cluster_state import ClusterState, Description

MODEL = geometry("llama-3.1-8b")
H100 = Kind(MODEL, Layout(), accelerator("h100"))
A100 = Kind(MODEL, Layout(), accelerator("a100"))
WIDE = Kind(MODEL, Layout(dp=2, tp=2), accelerator("h100"))
P, D, M = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED


def prefill_status(
    name: str, queued_tokens: int = 0, draining: bool = False, chunk_tokens: int = 2048
) -> WorkerStatus:
    pairs = queued_tokens * (queued_tokens + 1) / 2
    return WorkerStatus(
        name, P, "dp=1", (4096,), (4096,), 0, 0, 16, 16, 8192, draining,
        queued_tokens=queued_tokens, queued_pairs=pairs, can_prefill=True, chunk_tokens=chunk_tokens,  # noqa: E501
    )  # fmt: skip


def decode_status(
    name: str,
    sequences: tuple[int, ...] = (0,),
    contexts: tuple[int, ...] = (0,),
    free: tuple[int, ...] | None = None,
    waiting: int = 0,
    slots: int = 256,
    role: WorkerRole = D,
    can_prefill: bool = False,
    draining: bool = False,
) -> WorkerStatus:
    total = (4096,) * len(sequences)
    free = tuple(4096 - -(-context // 16) for context in contexts) if free is None else free
    return WorkerStatus(
        name, role, "dp=1", free, total, sum(sequences), waiting, slots, 16, 8192, draining,
        rank_sequences=sequences, rank_contexts=contexts,
        can_prefill=can_prefill or role is M, chunk_tokens=2048 if can_prefill or role is M else 0,
    )  # fmt: skip


def accounts_of(workers: dict[WorkerStatus, Description], now: float = 0.0) -> Accounts:
    accounts = Accounts(ClusterState())
    for status, description in workers.items():
        accounts.state.describe(status.name, description)
        accounts.heard(status, now)
    return accounts


def state_of(*workers: WorkerStatus, kind: Kind = H100, place: str = "r/h/d/p") -> ClusterState:
    return accounts_of({status: Description(place, kind) for status in workers}).state


def random_fleet(seed: int, prefills: int, decodes: int) -> Accounts:
    """Workers of three kinds at random places, with random loads."""
    draw = random.Random(seed)
    workers: dict[WorkerStatus, Description] = {}
    for number in range(prefills):
        place = f"r{draw.randrange(2)}/h{draw.randrange(3)}/d{draw.randrange(2)}/p{number}"
        workers[prefill_status(f"p{number}", draw.randrange(0, 9000))] = Description(
            place, draw.choice([H100, A100])
        )
    for number in range(decodes):
        kind = draw.choice([H100, A100, WIDE])
        ranks = kind.layout.dp
        sequences = tuple(draw.randrange(0, 100) for _ in range(ranks))
        contexts = tuple(count * draw.randrange(50, 500) for count in sequences)
        place = f"r{draw.randrange(2)}/h{draw.randrange(3)}/d{draw.randrange(2)}/q{number}"
        workers[
            decode_status(f"d{number}", sequences, contexts, can_prefill=draw.random() < 0.3)
        ] = Description(place, kind)
    return accounts_of(workers)
