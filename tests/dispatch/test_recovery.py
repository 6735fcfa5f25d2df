"""Workers that die, in virtual time: while one of each kind lives, every stream goes on with the
right tokens and nothing is left held."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from jdisagg.config import LimitsConfig, RoutingConfig
from jdisagg.errors import HandoffError, InvalidRequestError, OverloadedError, UnavailableError
from jdisagg.messages.ports import (
    GenerateCall,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    Span,
)
from jdisagg.request import AcceptedChild, Resumption
from jdisagg.router.candidates import FAILURES
from jdisagg.router.cluster_state import Description
from jdisagg.router.decision import NoRouterEvents
from tests.dispatch.deaths import kill_later, outlive
from tests.dispatch.storms import mixed_requests
from tests.fakes.cluster import Collected, Fleet, toy_request
from tests.fakes.fake_executor import Costs, Faults, toy_limits
from tests.fakes.fake_states import Keeps, kept_as_it_is, with_state
from tests.fakes.toy_model import expected_tokens
from tests.fakes.virtual_time import run_virtually
from tests.lanes import given_examples
from tests.router.fleets import H100

SLOW = Costs(prefill_token=1e-3, pull=0.02)


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize(
    ("name", "seconds"),
    [("prefill0", at) for at in (0.001, 0.01, 0.03, 0.06)]
    + [("decode0", at) for at in (0.001, 0.01, 0.03, 0.06, 0.1, 0.2)],
)
async def test_a_dead_worker_ends_no_stream_while_another_lives(
    name: str, seconds: float, wire: bool
) -> None:
    async with Fleet(costs=SLOW, wire=wire) as fleet:
        await outlive(fleet, fleet.collect_all(mixed_requests(10)), name, seconds)


async def test_what_has_come_of_a_dead_prefill_workers_kv_is_kept_and_its_first_token_holds():
    async with Fleet(costs=Costs(pull=0.05, prefill_token=1e-4)) as fleet:
        request = toy_request(1, prompt_tokens=100, max_tokens=9)
        collecting = asyncio.create_task(fleet.collect(request))
        await asyncio.sleep(0.08)
        assert fleet.processes["prefill0"].worker.counters["handoffs_aborted"] == 0
        await fleet.kill("prefill0")
        fleet.check(request, await collecting)
        assert fleet.path.counters["sources_replaced"] == 1
        assert fleet.path.counters["attempts_failed"] == 0
        kept = fleet.counted("kv_tokens_kept")
        assert 0 < kept < 100 and kept % 4 == 0
        answer = collecting.result()
        assert answer.timings is not None
        assert answer.timings.kv_bytes_moved < 2 * 100 * 8, "what was here is not moved again"


async def test_children_whose_first_tokens_were_delivered_keep_them_across_a_prefill_death():
    async with Fleet(costs=Costs(pull=0.2)) as fleet:
        request = toy_request(1, prompt_tokens=50, max_tokens=9, n=3, temperature=1.0)
        collecting = asyncio.create_task(fleet.collect(request))
        await asyncio.sleep(0.15)
        await fleet.kill("prefill0")
        fleet.check(request, await collecting)
        assert fleet.path.counters["sources_replaced"] == 1
        assert fleet.path.counters["attempts_failed"] == 0


async def test_a_prefill_that_lost_its_reply_does_not_hold_the_stream_back() -> None:
    """All KV had come when the prefill worker died, but not its reply: the decode side gives the
    first token out."""
    async with Fleet(costs=Costs(pull=0.001)) as fleet:
        for number, seconds in enumerate([0.0016, 0.0018, 0.002, 0.0025, 0.003, 0.004]):
            request = toy_request(number, prompt_tokens=8, max_tokens=5)
            collecting = asyncio.create_task(fleet.collect(request))
            await asyncio.sleep(seconds)
            await fleet.kill("prefill0")
            fleet.check(request, await collecting)
            await fleet.start("prefill0")


async def test_a_worker_restarted_under_its_name_is_another_peer() -> None:
    async with Fleet(prefills=1, decodes=1) as fleet:
        for number in range(3):
            await fleet.collect_all([toy_request(number, prompt_tokens=20)])
            await fleet.kill("prefill0")
            with pytest.raises(UnavailableError):
                await fleet.collect(toy_request(10 + number))
            await fleet.start("prefill0")
        await fleet.collect_all([toy_request(7, prompt_tokens=20)])
        assert len(fleet.processes["decode0"].mesh.peers) == 1, "the former ones are disconnected"


async def test_one_death_counts_once_for_each_child_however_many_there_are() -> None:
    """Children that were resumed or preempted go each in an attempt of its own: a death ends
    several attempts at once."""
    async with Fleet(limits=LimitsConfig(max_attempts=3)) as fleet:
        request = toy_request(1, prompt_tokens=10, max_tokens=60, n=8, temperature=1.0)
        had = [AcceptedChild(expected_tokens(request, child, 128)[0][:1]) for child in range(8)]
        rest = Collected(tokens={child: list(one.token_ids) for child, one in enumerate(had)})
        again = replace(request, resumption=Resumption(1, tuple(had)))
        collecting = asyncio.create_task(fleet.collect(again, into=rest))
        await asyncio.sleep(0.2)
        await fleet.kill("decode0")
        fleet.check(request, await collecting)
        assert fleet.path.counters["attempts_failed"] > 3, "several attempts felt it"
        await fleet.check_quiet(settle_seconds=10.0)


async def test_an_earlier_attempt_that_waits_for_pages_is_superseded_too() -> None:
    limits = LimitsConfig(max_attempts=2)
    async with Fleet(
        prefills=1, decodes=1, decode=toy_limits(pages_per_rank=24), limits=limits
    ) as fleet:
        full = asyncio.create_task(
            fleet.collect_all([toy_request(9, prompt_tokens=60, max_tokens=30)])
        )
        await asyncio.sleep(0.05)
        request = toy_request(1, prompt_tokens=60, max_tokens=9)
        resumed, again = (
            replace(request, resumption=Resumption(attempt, (AcceptedChild(),)))
            for attempt in (1, 2)
        )  # the router does not hold back what was admitted before
        old = asyncio.create_task(fleet.collect(resumed))
        await asyncio.sleep(0.05)
        assert (await fleet.decode_worker("decode0").status()).waiting == 1
        new = asyncio.create_task(fleet.collect(again, fleet.new_path()))
        await asyncio.sleep(0.01)
        assert (await fleet.decode_worker("decode0").status()).waiting == 1, (
            "the client asks for it no more"
        )
        with pytest.raises(HandoffError):
            await old
        fleet.check(request, await new)
        await full
        assert fleet.counted("attempts_superseded") == 1


async def test_without_survivors_streams_end_with_a_typed_error() -> None:
    async with Fleet(prefills=1, decodes=1, limits=LimitsConfig(max_attempts=4)) as fleet:
        streams = [asyncio.create_task(fleet.collect(request)) for request in mixed_requests(6)]
        await asyncio.sleep(0.05)
        await fleet.kill("decode0")
        answers = await asyncio.gather(*streams, return_exceptions=True)
        assert any(isinstance(answer, UnavailableError) for answer in answers)
        assert all(isinstance(answer, UnavailableError | Collected) for answer in answers)
        await fleet.check_quiet(settle_seconds=40)


@given_examples(
    20,
    60,
    deaths=st.lists(
        st.tuples(st.sampled_from(["prefill0", "decode0"]), st.floats(0, 0.4)),
        min_size=1,
        max_size=2,
        unique_by=lambda d: d[0],
    ),
    restart=st.booleans(),
    pull_faults=st.sampled_from([0, 11, 20]),
    kind=st.sampled_from(["lost", "garble", "stall"]),
    pull=st.sampled_from([0.001, 0.03]),
    keeps=st.sampled_from([kept_as_it_is, with_state]),
    seed=st.integers(0, 1000),
)
def test_any_deaths_and_bad_transfers_change_no_token(
    deaths: list[tuple[str, float]],
    restart: bool,
    pull_faults: int,
    kind: str,
    pull: float,
    keeps: Keeps,
    seed: int,
) -> None:
    async def main() -> None:
        faults = Faults(
            pull_error=lambda nth: kind if pull_faults and nth % pull_faults == 3 else ""
        )
        costs = Costs(prefill_token=1e-3, pull=pull)
        async with Fleet(
            decode=keeps(toy_limits()),
            prefill=keeps(toy_limits()),
            costs=costs,
            faults=lambda name: faults,
            seed=seed,
            growth_tokens=1 + seed % 8,
        ) as fleet:

            async def die(name: str, seconds: float) -> None:
                await kill_later(fleet, name, seconds)
                if restart:
                    await asyncio.sleep(0.05)
                    await fleet.start(name)

            await asyncio.gather(
                fleet.collect_all(mixed_requests(8)), *(die(*death) for death in deaths)
            )
            await fleet.check_quiet(settle_seconds=40.0)

    run_virtually(main)


@pytest.mark.parametrize("after", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("old_router_dies", [True, False])
async def test_a_client_goes_on_through_another_router_at_its_next_token(
    after: float, old_router_dies: bool
) -> None:
    async with Fleet() as fleet:
        request = toy_request(
            1, prompt_tokens=20, max_tokens=40, n=2, temperature=1.0, repetition_penalty=1.2
        )
        had = Collected()
        first = asyncio.create_task(fleet.collect(request, into=had))
        await asyncio.sleep(after)
        if old_router_dies:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        children = tuple(
            AcceptedChild(tuple(had.tokens.get(child, ())), had.finish.get(child))
            for child in range(2)
        )
        again = replace(request, resumption=Resumption(1, children))
        rest = Collected(tokens={child: list(one.token_ids) for child, one in enumerate(children)})
        fleet.check(request, await fleet.collect(again, fleet.new_path(), rest))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("odd", ["prefill0", "decode0"])
@pytest.mark.parametrize("wire", [False, True])
async def test_a_worker_that_does_not_fit_the_others_is_gone_round(odd: str, wire: bool) -> None:
    async with Fleet(wire=wire, fingerprint=lambda name: "another" if name == odd else "") as fleet:
        await fleet.collect_all(mixed_requests(6))
        assert fleet.counted("sources_lost") > 0, "the odd one was asked"


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_a_request_too_large_for_one_worker_goes_to_another_and_for_all_is_refused(
    kind: str,
) -> None:
    async with Fleet() as fleet:

        async def shrink(name: str) -> None:
            await fleet.kill(name)
            fleet._limits[kind[0]] = toy_limits(pages_per_rank=8)
            await fleet.start(name)

        await shrink(f"{kind}0")
        large = [toy_request(number, prompt_tokens=40, max_tokens=30) for number in range(20, 26)]
        await fleet.collect_all(large + mixed_requests(8))
        await shrink(f"{kind}1")
        with pytest.raises(InvalidRequestError, match="prompt"):
            await fleet.collect(toy_request(30, prompt_tokens=40, max_tokens=30))


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_children_that_go_on_apart_may_all_be_refused_by_a_worker_that_is_too_small(
    kind: str,
) -> None:
    async with Fleet() as fleet:
        await fleet.kill(f"{kind}0")
        fleet._limits[kind[0]] = toy_limits(pages_per_rank=8)
        await fleet.start(f"{kind}0")
        request = toy_request(1, prompt_tokens=40, max_tokens=30, n=3, temperature=1.0)
        had = [AcceptedChild(expected_tokens(request, child, 128)[0][:1]) for child in range(3)]
        rest = Collected(tokens={child: list(one.token_ids) for child, one in enumerate(had)})
        again = replace(request, resumption=Resumption(1, tuple(had)))
        fleet.check(request, await fleet.collect(again, into=rest))
        assert fleet.path.counters["attempts_failed"] > 1, "the small one was asked"


async def test_where_no_two_workers_fit_the_client_hears_what_differs() -> None:
    async with Fleet(
        prefills=1, decodes=1, limits=LimitsConfig(max_attempts=2), fingerprint=lambda name: name
    ) as fleet:
        with pytest.raises(
            UnavailableError, match="model_fingerprint is 'prefill0' on 'prefill0' and 'decode0'"
        ):
            await fleet.collect(toy_request(1))


@pytest.mark.parametrize("wire", [False, True])
async def test_an_id_may_be_used_again_right_after_a_request_that_was_resumed(wire: bool) -> None:
    async with Fleet(prefills=1, decodes=1, wire=wire) as fleet:
        request = replace(toy_request(1, prompt_tokens=20, max_tokens=9), life=2**64 - 1)
        resumed = replace(request, resumption=Resumption(1, (AcceptedChild(),)))
        fleet.check(request, await fleet.collect(resumed))
        for life in (1, 2):
            fleet.check(request, await fleet.collect(replace(request, life=life)))
        assert fleet.path.counters["attempts_failed"] == 0
        with pytest.raises(HandoffError, match="comes after attempt"):
            await fleet.collect(request)


async def test_an_id_may_be_used_again_after_a_request_of_many_attempts() -> None:
    """Without a life, which clients need not choose, the attempts of the second request would be
    taken for late ones of the first, until one has a higher number."""
    few = LimitsConfig(max_attempts=2)
    async with Fleet(
        prefills=1, decodes=1, decode=toy_limits(pages_per_rank=14), growth_tokens=1, limits=few
    ) as fleet:
        for _ in range(3):
            await fleet.collect_all(mixed_requests(10))
        assert (await fleet.decode_worker("decode0").status()).preemptions > 10
        assert fleet.path.counters["attempts_failed"] == 0


class Starting:
    """A worker's port that fails a few calls."""

    def __init__(self, port: Any, failing: int) -> None:
        self._port, self._failing = port, failing

    def __getattr__(self, name: str) -> object:
        return getattr(self._port, name)

    def _call(self) -> None:
        self._failing -= 1
        if self._failing >= 0:
            raise UnavailableError("it starts")

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        self._call()
        return await self._port.prefill(call)

    async def reserve(self, call: ReserveCall) -> Reservation:
        self._call()
        return await self._port.reserve(call)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("failing", [1, 3])
async def test_a_failure_of_the_only_worker_that_is_large_enough_is_no_refusal(
    kind: str, failing: int
) -> None:
    async with Fleet() as fleet:
        await fleet.kill(f"{kind}0")
        fleet._limits[kind[0]] = toy_limits(pages_per_rank=8)
        await fleet.start(f"{kind}0")
        ports = vars(fleet)[f"_{kind}_ports"]
        ports[f"{kind}1"] = Starting(ports[f"{kind}1"], failing)
        await fleet.ask(toy_request(1, prompt_tokens=40, max_tokens=30))


class Broken:
    """A worker's port whose prefills fail at once, and whose decoding when the first token is long
    out."""

    def __init__(self, port: object) -> None:
        self._port = port

    def __getattr__(self, name: str) -> object:
        return getattr(self._port, name)

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        raise UnavailableError("its mesh is broken")

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        await asyncio.sleep(0.1)
        raise UnavailableError("its mesh is broken")
        yield


@pytest.mark.parametrize("name", ["prefill0", "decode0"])
async def test_a_worker_that_always_fails_after_others_helped_its_attempts_is_barred(
    name: str,
) -> None:
    """A first token is a success of whoever computed it, and says nothing of who is to decode."""
    async with Fleet() as fleet:
        ports = vars(fleet)["_prefill_ports" if name == "prefill0" else "_decode_ports"]
        ports[name] = Broken(ports[name])
        for number in range(FAILURES):
            assert not barred(fleet, name)
            await fleet.collect_all([toy_request(number, prompt_tokens=20)])
        counters = fleet.path.counters
        assert (
            counters["sources_replaced" if name == "prefill0" else "attempts_failed"] == FAILURES
        ), "the fault was felt"
        assert barred(fleet, name)
        assert not any(barred(fleet, other) for other in fleet.processes if other != name)


def barred(fleet: Fleet, name: str) -> bool:
    return any(
        one.worker == name and one.barred_seconds > 0 for one in fleet.path.routing().accounts
    )


async def test_who_found_no_worker_at_first_is_no_less_new_than_others_when_there_is_one() -> None:
    """It pays its quota then, and can be refused."""
    async with Fleet(
        prefills=1, decodes=1, routing=RoutingConfig(tenant_quotas="t=10", quota_burst_seconds=10.0)
    ) as fleet:
        await fleet.kill("prefill0")
        requests = [
            replace(toy_request(number, prompt_tokens=50), tenant="t") for number in range(3)
        ]
        collecting = [asyncio.create_task(fleet.collect(request)) for request in requests]
        await asyncio.sleep(0.05)
        assert fleet.path.counters["attempts_failed"] >= 3, "they have all asked in vain"
        await fleet.start("prefill0")
        answers = await asyncio.gather(*collecting, return_exceptions=True)
        assert [isinstance(answer, OverloadedError) for answer in answers] == [False, True, True], (
            "the burst is enough for one"
        )


async def test_predictions_are_held_against_what_one_leg_did_undisturbed() -> None:
    measured = Counter[str]()

    class Measured(NoRouterEvents):
        def measured(self, what: str, predicted: float, actual: float) -> None:
            measured.update([what])

    async with Fleet(costs=SLOW, events=Measured()) as fleet:
        for name in fleet.processes:
            fleet.path.placer.accounts.state.describe(name, Description("r", H100))
        await fleet.collect_all([toy_request(1, prompt_tokens=20)])
        assert measured == {"ttft": 1, "tpot": 1}
        for number, (name, seconds) in enumerate([("prefill0", 0.001), ("decode0", 0.06)]):
            await asyncio.gather(
                fleet.collect_all([toy_request(2 + number, prompt_tokens=20)]),
                kill_later(fleet, name, seconds),
            )
        counters = fleet.path.counters
        assert counters["sources_replaced"] + counters["attempts_failed"] == 2, (
            "both deaths were felt"
        )
        assert measured["tpot"] == 1
