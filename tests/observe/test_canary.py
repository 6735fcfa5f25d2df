"""Ready means that KV makes the trip: pure rules first, then canaries through a fake cluster in
virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jdisagg.config import Mode
from jdisagg.observe.canary import Canary, CanaryRunner, Pair, Readiness
from jdisagg.observe.canary_probe import PortProbe, pairs_of
from jdisagg.router.decision import NoRouterEvents
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.fake_executor import Faults
from tests.fakes.virtual_time import VirtualClock, run_virtually

A, B = Pair("p0", "d0"), Pair("p1", "d0")
PAIR = Pair("prefill0", "decode0")


def test_nothing_is_ready_before_kv_made_the_trip() -> None:
    canary = Canary(10.0)
    assert not canary.readiness(0.0).ready
    canary.know([A, B])
    assert not canary.readiness(0.0).ready
    canary.succeeded(B, 1.0)
    assert canary.readiness(1.0).ready


def test_one_pair_is_enough_and_success_grows_old() -> None:
    canary = Canary(10.0)
    canary.know([A, B])
    canary.succeeded(A, 0.0)
    canary.succeeded(B, 5.0)
    canary.failed(B, "the wire broke")
    assert canary.readiness(15.0).ready and canary.age_seconds(A, 15.0) == 15.0
    over = canary.readiness(15.1)
    assert not over.ready and "the wire broke" in over.reason and str(B) in over.reason


def test_pairs_that_left_prove_nothing() -> None:
    canary = Canary(10.0)
    canary.know([A, B])
    canary.succeeded(A, 0.0)
    canary.know([B])
    assert not canary.readiness(0.0).ready
    canary.succeeded(A, 0.0)  # a late answer
    assert not canary.readiness(0.0).ready and canary.pairs == (B,)


def test_only_idle_pairs_are_due() -> None:
    canary = Canary(10.0)
    canary.know([A, B])
    assert canary.due(0.0, 2.0) == (A, B)
    canary.succeeded(A, 1.0)
    canary.tried(B, 2.5)
    assert canary.due(2.9, 2.0) == ()
    assert canary.due(3.0, 2.0) == (A,)


@contextlib.asynccontextmanager
async def probed(
    cluster: Cluster, canary: Canary | None = None, settle_seconds: float = 0.0
) -> AsyncIterator[tuple[CanaryRunner, list[Readiness]]]:
    """Canaries through a cluster, which has nothing left of them in the end; and each change."""
    said: list[Readiness] = []
    prefills = {"prefill0": cluster.prefill} if cluster.mode is Mode.DISAGGREGATED else {}
    probe = PortProbe(prefills, {"decode0": cluster.decode}, cluster.new_id)

    async def pairs() -> tuple[Pair, ...]:
        return pairs_of(await cluster.path.status())

    running = CanaryRunner(
        probe,
        pairs,
        VirtualClock(),
        canary or Canary(10.0),
        every_seconds=2.0,
        timeout_seconds=3.0,
        changed=said.append,
    )
    running.start()
    yield running, said
    await running.stop()
    await cluster.check_quiet(settle_seconds=settle_seconds)


def test_a_canary_makes_an_idle_cluster_ready_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        for mode in Mode:
            async with Cluster(mode) as cluster, probed(cluster) as (running, said):
                await asyncio.sleep(60.0)
                assert [readiness.ready for readiness in said] == [False, True], "never flickered"
                assert running.readiness().ready

    run_virtually(main)


def test_readiness_ends_when_kv_stops_moving_though_every_process_is_fine_and_comes_back() -> None:
    async def main() -> None:
        broken = False
        faults = Faults(pull_error=lambda _: "the network is down" if broken else "")
        async with Cluster(decode_faults=faults) as cluster, probed(cluster) as (running, said):
            await asyncio.sleep(20.0)
            assert said[-1].ready
            broken = True
            await asyncio.sleep(30.0)
            assert cluster.decode.counters["pulls_failed"] > 0, "the fault took effect"
            statuses = await cluster.path.status()
            assert [status.draining for status in statuses] == [False] * 2, "both processes answer"
            assert not said[-1].ready and "the network is down" in running.readiness().reason
            broken = False
            await asyncio.sleep(10.0)
            assert [readiness.ready for readiness in said] == [False, True, False, True]

    run_virtually(main)


def test_a_pull_that_hangs_costs_its_own_canary_alone() -> None:
    async def main() -> None:
        hanging = True
        faults = Faults(pull_error=lambda _: "stall" if hanging else "")
        async with (
            Cluster(decode_faults=faults) as cluster,
            probed(cluster, settle_seconds=100.0) as (running, _),
        ):
            await asyncio.sleep(30.0)
            assert not running.readiness().ready
            assert "did not finish within 3 s" in running.readiness().reason
            hanging = False
            await asyncio.sleep(10.0)
            assert running.readiness().ready

    run_virtually(main)


def test_a_busy_pair_needs_no_canary() -> None:
    async def main() -> None:
        canary, now = Canary(10.0), VirtualClock().now

        class Seen(NoRouterEvents):
            def handed_over(self, prefill: str | None, decode: str) -> None:
                canary.succeeded(Pair(prefill or "", decode), now())

        async with Cluster(events=Seen()) as cluster, probed(cluster, canary) as (running, _):
            for number in range(40):
                await cluster.collect(toy_request(number))
                await asyncio.sleep(0.5)
            canaries = cluster.decode.counters["handoffs_completed"] - 40
            assert canaries == 1, "the first one, before there was traffic"
            assert running.readiness().ready

    run_virtually(main)
