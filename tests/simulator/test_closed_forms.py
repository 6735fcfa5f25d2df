"""The simulated cluster against queueing theory: a single server with constant service time.

Each prompt fills a chunk, so that the mesh is a single server, and answers have one token, so that
only the prefill takes time. Waiting is TTFT minus service. Lindley's recursion over the same
arrivals is exact; D/D/1 and M/D/1 are its means."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from jdisagg.config import Mode, RoutingConfig
from jdisagg.errors import WorkloadError
from jdisagg.simulator.executor import SimulatedExecutor
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.step_costs import Pace
from jdisagg.simulator.workloads import Arrival, Fixed, gamma
from tests.costs.named import H100, LLAMA_8B, LLAMA_31_8B

SERVICE = 0.1
CHUNK = 128


@dataclass(frozen=True, slots=True)
class ConstantCosts:
    """Seconds that do not depend on the batch; `stages`: prefills overlap in a pipeline."""

    prefill_seconds: float = SERVICE
    step_seconds: float = 0.01
    stages: int = 1

    def prefill(self, rows: Sequence[tuple[int, int]]) -> tuple[float, float]:
        return self.prefill_seconds, self.prefill_seconds / self.stages

    def decode(
        self, sequences: int, context_tokens: float, steps: int, longest: float = 0.0
    ) -> Pace:
        return Pace(self.step_seconds)

    def host(self, sequences: int) -> float:
        return 0.0

    def mixed(
        self,
        rows: Sequence[tuple[int, int]],
        sequences: int,
        context_tokens: float,
        elsewhere: int = 0,
    ) -> float:
        return self.prefill_seconds + (self.step_seconds if sequences else 0.0)

    def insert(self, tokens: int) -> float:
        return 0.0

    def wire_bytes(self, tokens: int) -> float:
        return 0.0


def one_server(mode: Mode, step_seconds: float = 0.02) -> Fleet:
    instance = replace(INSTANCE, chunk_tokens=CHUNK, pages_per_rank=4096)
    costs = ConstantCosts(prefill_seconds=SERVICE, step_seconds=step_seconds)
    pool = Pool(1, H100, instance, costs=costs)
    return Fleet(LLAMA_8B, pool, pool if mode is Mode.DISAGGREGATED else None, mode)


def waits(result: Result) -> np.ndarray:
    assert {outcome.end for outcome in result.outcomes} == {"finished"}
    return np.array([(outcome.ttft or 0.0) - SERVICE for outcome in result.outcomes])


def lindley(arrivals: Sequence[float], service: float = SERVICE) -> np.ndarray:
    """W(n+1) = max(0, W(n) + service - gap)."""
    found = [0.0]
    for gap in np.diff(arrivals):
        found.append(max(0.0, found[-1] + service - gap))
    return np.array(found)


@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.CHUNKED])
@pytest.mark.parametrize("variation", [0.0, 1.0, 3.0])
def test_every_single_wait_is_lindleys(mode: Mode, variation: float) -> None:
    arrivals = gamma(6.0, 300, Fixed(CHUNK, 1), variation, seed=3)
    assert waits(simulate(one_server(mode), arrivals)) == pytest.approx(
        lindley([item.at_seconds for item in arrivals]), abs=1e-6
    )


@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.CHUNKED])
@pytest.mark.parametrize("users", [1, 4, 50])
def test_users_of_a_closed_loop_wait_for_each_of_the_others_once(mode: Mode, users: int) -> None:
    """One server serves first come first served without think time. Request n ends after n + 1
    services, and its user sends the next request at once."""
    arrivals = gamma(6.0, 30, Fixed(CHUNK, 1), 1.0, seed=3)
    found = simulate(one_server(mode), arrivals, concurrency=users).outcomes
    began = [SERVICE * max(0, number - users + 1) for number in range(30)]
    assert [item.arrival for item in found] == pytest.approx(began, abs=1e-6)
    ended = [SERVICE * (number + 1) for number in range(30)]
    assert [item.finish for item in found] == pytest.approx(ended, abs=1e-6)


def test_a_closed_loop_goes_on_when_a_request_is_refused() -> None:
    arrivals = [Arrival(0.0, tokens, 1) for tokens in (CHUNK, 1 << 20, CHUNK)]
    found = simulate(one_server(Mode.DISAGGREGATED), arrivals, concurrency=1).outcomes
    assert [item.end for item in found] == ["finished", "failed", "finished"]
    with pytest.raises(WorkloadError, match="1 user or more, got 0"):
        simulate(one_server(Mode.DISAGGREGATED), arrivals, concurrency=0)


def staged(pool: Pool, stages: int) -> Pool:
    layout = replace(pool.instance.layout, pp=stages)
    return replace(pool, instance=replace(pool.instance, layout=layout))


@pytest.mark.parametrize(
    "stages", [2, *(pytest.param(more, marks=pytest.mark.ci) for more in (4, 8))]
)
def test_prompts_follow_each_other_through_a_pipeline_a_stage_apart(stages: int) -> None:
    """The first stage is again a single server."""
    fleet = one_server(Mode.DISAGGREGATED)
    assert fleet.prefill is not None
    fleet = replace(
        fleet,
        prefill=replace(staged(fleet.prefill, stages), costs=ConstantCosts(SERVICE, 0.02, stages)),
    )
    arrivals = gamma(0.9 * stages / SERVICE, 300, Fixed(CHUNK, 1), 1.0, seed=3)
    wanted = lindley([item.at_seconds for item in arrivals], SERVICE / stages)
    assert waits(simulate(fleet, arrivals)) == pytest.approx(wanted, abs=1e-6)


def test_a_router_that_knows_of_the_pipeline_keeps_it_full() -> None:
    """The router holds back what a prefill worker cannot begin soon; four stages begin four times
    as much."""
    stages, pool = 4, Pool(1, H100, replace(INSTANCE, chunk_tokens=2048))
    fleet = Fleet(
        LLAMA_31_8B, pool, staged(pool, stages), routing=RoutingConfig(ttft_slo_seconds=0.5)
    )
    seconds = fleet.cost_model(staged(pool, stages)).prefill([(2048, 0)]).seconds
    result = simulate(fleet, gamma(0.9 * stages / seconds, 300, Fixed(2048, 1), 1.0, seed=3))
    assert {outcome.end for outcome in result.outcomes} == {"finished"}
    assert sorted(outcome.ttft or 0.0 for outcome in result.outcomes)[-1] < 0.5


@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.CHUNKED, Mode.UNIFIED])
def test_alone_a_request_takes_its_prefill_and_a_step_for_each_token_more(mode: Mode) -> None:
    step, outputs = 0.02, 50
    result = simulate(one_server(mode, step), [Arrival(0.0, CHUNK, outputs)])
    (outcome,) = result.outcomes
    assert outcome.ttft == pytest.approx(SERVICE)
    assert outcome.gaps is not None and outcome.gaps.count == outputs - 1
    handoff = outcome.gaps.first - step
    assert 0 <= handoff < 1e-3, (
        "an empty link and an idle mesh: what a hand-off takes is its messages"
    )
    assert outcome.latency == pytest.approx(SERVICE + handoff + (outputs - 1) * step, rel=1e-6)
    assert outcome.tpot == pytest.approx(step, rel=1e-3)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_batch_steps_together_and_a_joiner_waits_for_the_boundary_and_the_step_behind_it(
    run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live loop has issued one more step when a sequence is ready (run_ahead=1). Without that
    the sequence joins at the next boundary."""
    monkeypatch.setattr(SimulatedExecutor, "run_ahead", run_ahead)
    step = 1.0
    arrivals = [Arrival(0.0, CHUNK, 40), Arrival(10.35, CHUNK, 5)]
    first, second = simulate(one_server(Mode.DISAGGREGATED, step), arrivals).outcomes
    assert first.latency == pytest.approx(SERVICE + 39 * step, abs=0.01)
    assert second.gaps is not None and second.first_token is not None
    # Its KV is inserted `run_ahead` steps after the boundary at 11.1, and it joins as many steps
    # after the next.
    joined = 11.1 + run_ahead * 2 * step
    assert second.first_token + second.gaps.first == pytest.approx(joined + step, abs=0.01)
