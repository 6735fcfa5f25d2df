"""Prices without a description of the hardware: from the times and links that workers report."""

from dataclasses import replace

import msgspec
import pytest

from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import LINKS, accelerator
from jdisagg.costs.measured import StepTimes
from jdisagg.costs.speeds import Kind, speed_of
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import LinkTimes, WorkerStatus
from jdisagg.router.accounts import Work
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.cost_terms import transfers_of
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery, PromptWay, Refusal
from jdisagg.router.placement import decide
from jdisagg.router.predictor import Corrections
from tests.router.fleets import decode_status, prefill_status, state_of

MODEL = geometry("llama-3.1-8b")
UNKNOWN = Kind(MODEL, Layout(), None)
PREFILL = StepTimes((512, 2048), ((512, 0, 0.05), (2048, 0, 0.2), (2048, 1024, 0.24)))
APPENDING = StepTimes(
    (128, 256),
    ((128, 0, 0.012), (256, 0, 0.024), (256, 1024, 0.03)),
    (1, 8),
    ((1, 1, 0.01), (8, 1, 0.012), (8, 1000, 0.014)),
)
QUERY = PlacementQuery(Work(1000, expected_tokens=10))
RULES = PlacementPolicy(peer_fetch=True, fetch_from_decode=True)


def with_times(status: WorkerStatus, times: StepTimes | None, **fields: object) -> WorkerStatus:
    return msgspec.structs.replace(status, times=times, **fields)


def measured(**links: tuple[LinkTimes, ...]) -> ClusterState:
    prefill = with_times(prefill_status("p"), PREFILL)
    decode = decode_status("d", can_prefill=True)
    decode = with_times(decode, APPENDING, chunk_tokens=256, links=links.get("links", ()))
    return state_of(prefill, decode, kind=UNKNOWN)


def decided(state: ClusterState, query: PlacementQuery = QUERY) -> Decision:
    answer = decide(state, query, 0.0, RULES)
    assert isinstance(answer, Decision)
    return answer


def test_the_first_token_is_predicted_from_reported_times() -> None:
    expected = speed_of(replace(UNKNOWN, times=PREFILL))
    assert expected is not None
    decision = decided(measured())
    assert decision.way is PromptWay.PREFILL
    assert decision.ttft_seconds == pytest.approx(expected.prefill_seconds(1000, 0, 2048))


def test_of_workers_that_left_neither_speeds_nor_links_are_kept() -> None:
    links = (LinkTimes("p", 0.002, 1e-9),)
    state, expected = measured(links=links), decided(measured(links=links))
    decode = state.statuses()[1]
    for number in range(20):  # each start measures other times
        times = replace_seconds(PREFILL, 0.3 + number)
        state.describe(f"p{number}", state.description("p"))
        state.update(with_times(prefill_status(f"p{number}"), times), 0.0)
        link = LinkTimes(f"p{number}", 0.5, 1e-9)
        state.update(msgspec.structs.replace(decode, links=(*decode.links, link)), 0.0)
        state.forget(f"p{number}")
        state.update(msgspec.structs.replace(decode, links=(*decode.links, link)), 0.0)
        assert decided(state) == expected
    assert len(state.speeds) == 2 and len(vars(state)["_measured"]) == 1


def replace_seconds(times: StepTimes, seconds: float) -> StepTimes:
    chunks = tuple((tokens, cached, seconds) for tokens, cached, _ in times.chunks)
    return msgspec.structs.replace(times, chunks=chunks)


def test_the_last_block_of_a_prompt_of_whole_cached_blocks_counts_as_computed() -> None:
    expected = speed_of(replace(UNKNOWN, times=PREFILL))
    assert expected is not None
    query = replace(QUERY, work=Work(1024, expected_tokens=10), block_tokens=128)
    decision = decided(measured(), replace(query, cached={"p": 1024}))
    assert decision.way is PromptWay.PREFILL and decision.cached_tokens == 896
    seconds = expected.prefill_seconds(128, 896, 2048)
    assert decision.ttft_seconds == pytest.approx(seconds, rel=1e-4)
    coming = replace(query, coming={"p": 1024})
    assert decided(measured(), coming).ttft_seconds == pytest.approx(seconds, rel=1e-4)


def test_nothing_is_sent_of_a_prompt_of_whole_blocks_that_the_decode_worker_has_cached() -> None:
    state = measured(links=(LinkTimes("p", 0.5, 1.0),))
    query = replace(QUERY, work=Work(1024), cached={"d": 1024}, block_tokens=128)
    far = LINKS["ethernet-25g"]
    seconds = transfers_of(state, state.prefill.rows, state.decode.rows, query, far)
    assert seconds.tolist() == [[0.5]], "the latency of the link"


def test_until_a_worker_has_reported_times_those_of_a_fast_accelerator_are_assumed() -> None:
    decode = decode_status("d")
    state = state_of(prefill_status("p"), decode, kind=UNKNOWN)
    assumed = decided(state).ttft_seconds
    described = replace(UNKNOWN, hardware=accelerator("h100"))
    assert assumed == decided(state_of(prefill_status("p"), decode, kind=described)).ttft_seconds
    state.update(with_times(prefill_status("p"), PREFILL), 0.0)
    assert decided(state).ttft_seconds > 5 * assumed


@pytest.mark.parametrize("timed", [None, "p", "d"])
def test_assumed_times_refuse_no_request(timed: str | None) -> None:
    """Nor does a pair of which one worker alone has measured times."""
    workers = {
        "p": with_times(prefill_status("p"), PREFILL),
        "d": with_times(decode_status("d"), APPENDING),
    }
    hurried = replace(QUERY, limit_seconds=1e-6)
    assert isinstance(
        decide(state_of(*workers.values(), kind=UNKNOWN), hurried, 0.0, RULES), Refusal
    )
    for name, status in workers.items():
        if name != timed:
            workers[name] = with_times(status, None)
    decided(state_of(*workers.values(), kind=UNKNOWN), hurried)


def test_times_do_not_change_predictions_of_described_hardware() -> None:
    described = replace(UNKNOWN, hardware=accelerator("h100"))
    plain = state_of(prefill_status("p"), decode_status("d"), kind=described)
    timed = state_of(
        with_times(prefill_status("p"), PREFILL),
        with_times(decode_status("d"), APPENDING, links=(LinkTimes("p", 9.0, 9.0),)),
        kind=described,
    )
    assert decided(timed) == decided(plain)


def test_a_measured_link_determines_the_hand_off_in_both_directions() -> None:
    state = measured(links=(LinkTimes("p", 0.5, 1e-9),))
    wire = state.speeds[0].wire_bytes_per_token
    far = LINKS["ethernet-25g"]
    (there,) = state.link_costs(far).seconds(state.prefill.rows * 0, slice(None), 100.0)[0]
    (back,) = state.return_costs(far).seconds(state.prefill.rows * 0, slice(None), 100.0)[0]
    assert there == back == pytest.approx(0.5 + 100 * wire * 1e-9)
    state.forget("p")
    state.update(with_times(prefill_status("p"), PREFILL), 0.0)
    state.describe("p", replace(state.description("d"), kind=UNKNOWN))
    (other,) = state.link_costs(far).seconds(state.prefill.rows * 0, slice(None), 100.0)[0]
    assert other < 0.1, "another worker of the name begins with an assumed link"


def test_corrections_decide_between_the_ways_of_a_second_turn() -> None:
    cached = {"p": 896, "d": 896}
    append, pair = ((0.0, 1.0), (1.0, 1.0))
    for corrections, way in (
        (Corrections(prefill=pair, fetch=pair, append=append), PromptWay.APPEND),
        (Corrections(prefill=append, fetch=append, append=pair), PromptWay.PREFILL),
    ):
        decision = decided(measured(), replace(QUERY, cached=cached, corrections=corrections))
        assert decision.way is way


def test_corrections_decide_whether_cached_kv_is_fetched() -> None:
    query = replace(QUERY, cached={"d": 640})
    cheap, dear = (0.0, 1.0), (5.0, 1.0)
    fetching = replace(query, corrections=Corrections(cheap, cheap, dear))
    assert decided(measured(), fetching).way is PromptWay.FETCH
    computing = replace(query, corrections=Corrections(cheap, dear, dear))
    assert decided(measured(), computing).way is PromptWay.PREFILL


def test_a_link_that_a_worker_no_longer_reports_has_an_assumed_time() -> None:
    state, fresh = measured(links=(LinkTimes("p", 0.5, 1e-9),)), measured()
    far = LINKS["ethernet-25g"]

    def seconds(state: ClusterState) -> float:
        return state.link_costs(far).seconds(state.prefill.rows * 0, slice(None), 100.0)[0, 0]

    assert seconds(state) > 0.5
    state.update(msgspec.structs.replace(state.statuses()[1], links=()), 0.0)
    assert seconds(state) == seconds(fresh)
