"""A decision that was written down in a simulated cluster is made again from its record, as a live router's is: it is the same code."""

from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import Answer, Ask, Decision, Rules
from jdisagg.router.decision_record import Record, answer_of, record_of, replay
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import poisson
from tests.simulator.test_conservation import LENGTHS, small_fleet


def test_a_simulated_routers_decisions_replay_to_themselves() -> None:
    records: list[Record] = []

    def write(state: ClusterState, ask: Ask, now: float, rules: Rules, answer: Answer) -> None:
        records.append(record_of(state, ask, now, rules, answer))

    result = simulate(small_fleet(pages=512), poisson(4.0, 40, LENGTHS, 1), on_answer=write)
    assert len(records) == 40
    for record, outcome in zip(records, result.outcomes, strict=True):
        answer = replay(record)
        assert answer == answer_of(record) and isinstance(answer, Decision)
        assert outcome.prefill == answer.prefill and outcome.decode in (answer.decode, answer.prefill)
    assert {outcome.prefill for outcome in result.outcomes} == {"prefill-0", "prefill-1"}
