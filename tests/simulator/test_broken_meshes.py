"""Commands on a simulated mesh that breaks or hangs, and a worker that meets a fault and a role
change together."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from jdisagg.errors import UnavailableError
from jdisagg.messages.step_commands import (
    DecodeSteps,
    ExtractBlock,
    InsertBlock,
    PrefillChunk,
    PrefillRow,
    PullBlock,
    SampleSpec,
    SlotAdmit,
    StepCommand,
)
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.request import SamplingParams
from jdisagg.simulator.channel import ChannelEnd, SimulatedChannel, SimulatedOffer
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.executor import SimulatedExecutor
from jdisagg.simulator.faults import Broken, Death, Fault, Stall, schedule
from jdisagg.simulator.run import Hook, Result, simulate
from jdisagg.simulator.timeline import Timeline
from jdisagg.simulator.virtual_time import run_virtually
from jdisagg.simulator.workloads import Arrival, Fixed, poisson
from tests.simulator.fleets import small_fleet

SAMPLE = SampleSpec(0, SamplingParams())
PROMPT = PrefillRow(1, 0, 0, (0,) * 1000, 0, (), (SAMPLE,))
CHUNK = PrefillChunk(1, 1024, (PROMPT,))
ADMIT = SlotAdmit(1, 0, 0, 0, 100, 9000, (), SAMPLE)
UNDER_WAY: list[tuple[StepCommand, ...]] = [
    (CHUNK,),
    (DecodeSteps(1, 4000, ((0,),), (ADMIT,)),),
    (DecodeSteps(1, 1, ((0,),), (ADMIT,), chunk=CHUNK),),
    (PullBlock(1, 7, 0, 0, 1024, 10.0, "other"),),
    (InsertBlock(1, 7, 0, 0, 1024, 1000, 0, ()),),
    (ExtractBlock(1, 8, 0, 0, 0, 1000, 1024, ()),),
]


def struck(
    commands: Sequence[StepCommand], fault: Callable[[SimulatedExecutor], None]
) -> list[str]:
    """Returns the state of commands that were running when the fault struck, long afterwards."""

    async def main() -> list[str]:
        fleet = small_fleet()
        channel = SimulatedChannel(fleet.link_between(), fleet.overlap)
        channel.ends = {
            "mesh": ChannelEnd("rack0/host0/domain0/0", 1),
            "other": ChannelEnd("rack0/host1/domain1/0", 1),
        }
        channel.offered[7] = SimulatedOffer("other", 1024, 0.0, 0.0)
        limits, costs = fleet.limits_of(fleet.decode), fleet.costs_of(fleet.decode)
        mesh = SimulatedExecutor("mesh", limits, costs, channel, Timeline(0, "mesh"))
        results = [mesh.run(command) for command in commands]
        await asyncio.sleep(1e-6)
        assert not any(result.done() for result in results), "it is under way"
        fault(mesh)
        mesh.interrupt()
        await asyncio.sleep(1000.0)
        return [
            "waits" if not result.done() else "failed" if result.exception() else "ended"
            for result in results
        ]

    return run_virtually(main)


@pytest.mark.parametrize("commands", UNDER_WAY, ids=lambda commands: type(commands[0]).__name__)
def test_what_is_under_way_on_a_mesh_fails_when_it_breaks_and_never_ends_when_it_hangs(
    commands: tuple[StepCommand, ...],
) -> None:
    assert struck(commands, SimulatedExecutor.break_down) == ["failed"]
    assert struck(commands, SimulatedExecutor.hang) == ["waits"]
    assert struck(commands, lambda mesh: None) == ["ended"]


def simulated(hooks: list[Hook], faults: list[Fault]) -> Result:
    arrivals = [Arrival(0.2 * number, 500, 40) for number in range(60)]
    return simulate(
        small_fleet(pages=512),
        arrivals,
        hooks=[*hooks, schedule(faults)],
        mortal=True,
        settle_seconds=40.0,
    )


@pytest.mark.parametrize(("back_after", "left"), [(None, {"prefill-1"}), (2.0, set())])
def test_a_stalled_workers_pulls_stay_unfinished_until_another_process_sits_there(
    back_after: float | None, left: set[str]
) -> None:
    found: list[set[str]] = []

    async def look(cluster: SimulatedCluster) -> None:
        await cluster.clock.sleep(4.0)
        found.append(set(cluster.channel.stalled))

    result = simulated([look], [Stall("prefill-1", 1.0, back_after)])
    assert found == [left]
    assert {outcome.end for outcome in result.outcomes} == {"finished"}, (
        "the other worker of its role serves"
    )


@pytest.mark.parametrize("at", [1.01, 3.0], ids=["while it drains", "while it is away"])
def test_a_worker_that_dies_while_it_changes_its_role_is_started_once_and_as_what_it_was(
    at: float,
) -> None:
    ends: list[str] = []

    async def switch(cluster: SimulatedCluster) -> None:
        await cluster.clock.sleep(1.0)
        try:
            await cluster.switch_role("decode-1", WorkerRole.PREFILL, 5.0, drain_seconds=30.0)
        except UnavailableError as error:
            ends.append(error.message)
        await cluster.clock.sleep(4.0)
        ends.append(cluster.seats["decode-1"].role.value)
        ends.append(str([process.card.name for process in cluster.former].count("decode-1")))

    result = simulated([switch], [Death("decode-1", at, 2.0)])
    assert "decode-1" in ends[0] and ends[1:] == ["decode", "1"]
    assert result.pages_lost == 0 and {outcome.end for outcome in result.outcomes} == {"finished"}


def test_what_a_worker_did_before_it_died_is_counted() -> None:
    result = simulated([], [Death("decode-0", 11.0, 1.0)])
    assert result.counters["faults"] == 1
    assert {outcome.end for outcome in result.outcomes} == {"finished"}
    assert result.counters["handoffs_completed"] >= 60, "each prompt was handed over once at least"


@pytest.mark.parametrize(
    "fault",
    [
        Broken("prefill-0", 1.0),
        Broken("decode-1", 1.0),
        Stall("decode-0", 1.0),
        Stall("prefill-1", 1.0),
    ],
)
def test_a_run_ends_with_what_others_served_where_a_broken_worker_never_comes_back(fault: Fault):
    result = simulate(
        small_fleet(pages=512),
        poisson(4.0, 30, Fixed(400, 40)),
        hooks=[schedule([fault])],
        mortal=True,
    )
    assert result.counters["faults"] == 1
    assert [outcome.end for outcome in result.outcomes] == ["finished"] * 30
