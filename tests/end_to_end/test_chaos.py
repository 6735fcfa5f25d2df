"""Deaths, stops and bad channels under load, in real processes: one fault ends no stream, no token
is wrong, no page is lost.

One cluster for the file, hurt again and again. The short form runs by default; `-m slow` runs every
moment, victim and deed, and `python -m benchmarks.soak` random ones for as long as one likes."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.soak.cluster import ROUTER, ChaosCluster, Shape
from benchmarks.soak.load import Kind, Stream, known_kinds
from benchmarks.soak.moments import Moment
from benchmarks.soak.report import table
from benchmarks.soak.scenarios import (
    BACK_SECONDS,
    QUIET_SECONDS,
    Harness,
    Outcome,
    Scenario,
    all_scenarios,
)
from jdisagg.client import AsyncClient
from jdisagg.errors import DeadlineExceededError, JdisaggError, UnavailableError
from tests import time_scale
from tests.programs import PROGRAMS

STREAMS = 8
RATE = 0.05
KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
SHORT = [
    Scenario(Moment.PART_INSERTED, "prefill", KILL),
    Scenario(Moment.DECODING, "decode", KILL),
    Scenario(Moment.PULLING, "prefill", STOP),
    Scenario(Moment.OFFERED, ROUTER, KILL),
    Scenario(Moment.ALL_INSERTED, "client", KILL),
    Scenario(Moment.DECODING, "decode", TERM),
]

pytestmark = [pytest.mark.ci, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kinds() -> list[Kind]:
    return await known_kinds(10)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    """Every worker's channel goes wrong in some of its calls, too."""
    folder: Path = tmp_path_factory.mktemp("chaos")
    cluster = ChaosCluster(Shape(rate=RATE, seed=11, warm_up=False), folder, str(PROGRAMS))
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return []


@pytest.mark.parametrize("scenario", SHORT, ids=lambda scenario: scenario.name)
async def test_one_fault_ends_no_stream(
    scenario: Scenario, cluster: ChaosCluster, kinds: list[Kind], outcomes: list[Outcome]
):
    outcomes.append(await Harness(cluster, kinds, STREAMS).run(scenario))
    assert outcomes[-1].faults == []


async def test_faults_of_the_channels_took_effect_meanwhile(
    cluster: ChaosCluster, outcomes: list[Outcome]
):
    print(table(outcomes))
    took = sum(sum(counts.values()) for counts in cluster.desk.counts.values())
    assert took > 0, "no channel went wrong: the scenarios above proved less than they say"


async def test_a_stopped_decode_worker_holds_back_no_hand_off_to_another(
    cluster: ChaosCluster, kinds: list[Kind]
):
    """Streams that the stopped one has may wait for it or move; new ones end meanwhile."""
    await cluster.until_live(cluster.workers, BACK_SECONDS)
    async with AsyncClient(cluster.address) as client:
        before = [asyncio.create_task(Stream(kind).run(client)) for kind in kinds[:4]]
        await asyncio.sleep(0.3)
        await cluster.stop_process("decode-0")
        try:
            after = await asyncio.wait_for(
                asyncio.gather(*(Stream(kind).run(client) for kind in kinds)),
                time_scale.seconds(60),
            )
            assert cluster.processes("decode-0")[0].status() == "stopped"
        finally:
            cluster.signal("decode-0", signal.SIGCONT)
        assert [
            stream.wrong for stream in (*after, *await asyncio.gather(*before)) if stream.wrong
        ] == []
    await cluster.until_quiet(QUIET_SECONDS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_started_again_at_its_address_is_used_again(
    role: str, cluster: ChaosCluster, kinds: list[Kind]
):
    """The only one of its role, killed: its peers and the router must find the new process behind
    the old address."""
    name, other = f"{role}-0", f"{role}-1"
    await cluster.until_live([name], BACK_SECONDS)
    await cluster.groups[other].stop(30)
    async with AsyncClient(cluster.address) as client:
        cluster.forget_start(name)
        assert cluster.signal(name, KILL)
        await cluster.until_live([name], BACK_SECONDS)
        stream = await Stream(kinds[1]).run(client)
    assert stream.wrong == "" and stream.ended_at is not None
    print(
        f"{name}: a whole stream {stream.ended_at - cluster.served_at[name]:.1f} s after it served"
        " again"
    )


async def test_without_survivors_streams_end_with_a_typed_error(
    cluster: ChaosCluster, kinds: list[Kind]
):
    """The one of each role that is left serves until here; then the decode worker goes for good."""
    long = 3 * [max(kinds, key=lambda kind: kind.max_tokens)]
    async with AsyncClient(cluster.address) as client:
        streams = [Stream(kind) for kind in long]
        tasks = [asyncio.create_task(stream.run(client, deadline_seconds=30)) for stream in streams]
        while not any(stream.times for stream in streams):
            await asyncio.sleep(0.01)
        for name in cluster.of_role("decode"):
            await cluster.groups[name].stop(0)
        at = time.monotonic()
        await asyncio.wait_for(asyncio.gather(*tasks), time_scale.seconds(40))
        print(
            f"told after {max(stream.ended_at or 0 for stream in streams) - at:.1f} s:"
            f" {[stream.error for stream in streams]}"
        )
        cut = [stream for stream in streams if stream.error is not None]
        assert cut, "all ended before the worker did"
        for stream in cut:
            assert isinstance(stream.error, UnavailableError | DeadlineExceededError), stream.error
            assert tuple(stream.tokens) == stream.kind.expected[: len(stream.tokens)], (
                "wrong tokens before the end"
            )
        with pytest.raises(JdisaggError):
            await client.complete(token_ids=long[0].token_ids, max_tokens=4, deadline_seconds=5)
    await cluster.until_quiet(QUIET_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("moment", Moment, ids=lambda one: one.name.lower())
@pytest.mark.parametrize("processes", [1, 2])
async def test_every_victim_and_deed(
    processes: int, moment: Moment, tmp_path: Path, kinds: list[Kind]
):
    layouts = {"prefill_layout": "tp=2", "decode_layout": "dp=2"} if processes == 2 else {}
    own = ChaosCluster(Shape(processes=processes, **layouts), tmp_path, str(PROGRAMS))  # type: ignore[arg-type]
    try:
        await own.start()
        harness = Harness(own, kinds, 50)
        scenarios = [one for one in all_scenarios(processes) if one.moment is moment]
        outcomes = [await harness.run(scenario) for scenario in scenarios]
    finally:
        await own.stop()
    print(table(outcomes))
    assert {outcome.scenario: outcome.faults for outcome in outcomes if outcome.faults} == {}
