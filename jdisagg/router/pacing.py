"""How fast prompts may come to a worker that both prefills and decodes, so that those that decode
there keep their pace. Pure.

While a prompt is computed no stream of the mesh gets a token. A step alone is within the bound
(`terms.decodes_of` sees to that); steps and prefills together are where prefills take no more of
the time than a step leaves of the bound: `1 - step / tpot_slo_seconds`. So each prompt placed there
moves an instant, `paced_until`, forward by its own seconds divided by that part, and while
sequences run there the next one waits for it: at the router, where it can be put in order, or
refused in time. All dp ranks wait for the one that computes."""

import math

from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery

# of the part of the time that may go to prefills: some streams meet more of them than others
USED = 0.9
LEAST = 0.05  # of all time, where a step alone takes nearly all that the bound leaves


def paced_until(
    state: ClusterState,
    query: PlacementQuery,
    decision: Decision,
    policy: PlacementPolicy,
    now: float,
) -> float | None:
    """The worker's new instant; None where there is no pace to keep: the prompt is computed
    elsewhere, or a token may take any time."""
    row, bound = state.row(decision.decode), policy.tpot_slo_seconds
    if decision.prefill is not None or decision.terms is None or bound == math.inf or row is None:
        return None
    chunk_tokens, before = (
        int(state.table["chunk_tokens"][row]),
        float(state.table["paced_until"][row]),
    )
    speed = state.speeds[int(state.table["speed"][row])]
    seconds = speed.prefill_seconds(
        query.work.tokens - decision.cached_tokens, decision.cached_tokens, chunk_tokens
    )
    part = max(LEAST, USED * (1.0 - decision.terms.step / bound))
    return max(before, now) + seconds / part
