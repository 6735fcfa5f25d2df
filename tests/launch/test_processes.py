"""Candidates on several processes: the same plan as on one."""

import pytest

from jdisagg.simulator.planning.planner import in_turn
from launch.processes import on_cores, usable_cores
from tests.launch.script_ends import ended

# In a process of its own: this one has JAX and its threads, and is not to be forked.
PROGRAM = """
from jdisagg.costs.catalog import geometry
from jdisagg.simulator.planning.planner import Planner, Search, in_turn
from launch.processes import on_cores
from tests.simulator.planning.plans import GOAL, SITE, WORKLOAD, Servers, both
plans = [
    Planner(
        geometry("llama-3-70b"), SITE, GOAL, both(Servers(lambda item: 3.0 + len(item.name))),
        Search(finalists=2), spread=spread,
    ).plan(WORKLOAD)
    for spread in (in_turn, on_cores(2))
]
assert plans[0] == plans[1], plans
assert len(plans[0].findings) >= 4, plans[0].findings
print("alike")
"""


@pytest.mark.ci
def test_a_plan_on_two_processes_is_the_plan_on_one() -> None:
    done = ended("-c", PROGRAM)
    assert (done.status, done.out) == (0, "alike\n"), done.err


def test_one_process_is_this_one_and_there_is_a_core() -> None:
    assert on_cores(1) is in_turn and usable_cores() >= 1
