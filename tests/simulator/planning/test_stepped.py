"""The stepped cost model against closed forms, and against the simulator on the same requests."""

from dataclasses import replace

import numpy as np
import pytest

from jdisagg.config import Mode
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.engines import Software
from jdisagg.costs.hardware import link
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.candidates import Candidate, Site, handoff_path
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.report import RequestOutcome
from jdisagg.simulator.workloads import Arrival, Fixed, Mixture, poisson
from tests.costs.named import A100, DEEPSEEK, H100, H200, LLAMA_8B

MODEL = LLAMA_8B
SITE = Site(H100, 4)
PAIR = Candidate(Mode.DISAGGREGATED, Layout(), 1, prefill=Layout(), prefill_instances=1)
ONE = Candidate(Mode.UNIFIED, Layout(), 1)
LENGTHS = Mixture(((0.7, Fixed(900, 60)), (0.3, Fixed(5000, 90))))


def stepped(
    candidate: Candidate, arrivals: list[Arrival], **changes: object
) -> list[RequestOutcome]:
    maker = replace(FleetMaker(MODEL, SITE), **changes)  # type: ignore[arg-type]
    return list(maker.runners.stepped(candidate, arrivals, lambda outcome: False).outcomes)


def test_a_request_alone_takes_its_prefill_its_transfer_and_its_steps():
    model = CostModel(MODEL, SITE.described, Layout())
    (found,) = stepped(PAIR, [Arrival(0.0, 900, 11)])
    prefill = model.prefill([(900, 0)]).seconds
    assert found.ttft == pytest.approx(prefill)
    steps = sum(model.decode_of(1, 901.0 + step).seconds for step in range(10))
    path, lanes = handoff_path(SITE, PAIR)
    moved = model.transfer(900, path, links=lanes).seconds
    assert steps < found.latency - prefill < steps + moved + 1e-3


def test_prompts_of_one_server_wait_as_in_lindleys_recursion():
    """Prompts of 8192 tokens fill a chunk each, and answers of one token have no decode step."""
    arrivals = poisson(3.0, 300, Fixed(8192, 1), seed=3)
    maker = FleetMaker(replace(MODEL, context_tokens=16_384), Site(H100, 1))
    found = maker.runners.stepped(ONE, arrivals, lambda outcome: False).outcomes
    each = CostModel(MODEL, SITE.described, Layout()).prefill([(8192, 0)]).seconds
    free, waited = 0.0, 0
    for item, outcome in zip(arrivals, found, strict=True):
        waited += free > item.at_seconds
        free = max(free, item.at_seconds) + each
        assert outcome.finish == pytest.approx(free)
    assert waited > 50


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(Mode.CHUNKED, Layout(), 2, 512),
        Candidate(Mode.UNIFIED, Layout(tp=2), 2),
        Candidate(Mode.DISAGGREGATED, Layout(tp=2), 1, prefill=Layout(), prefill_instances=2),
        Candidate(Mode.DISAGGREGATED, Layout(pp=2), 1, prefill=Layout(pp=2), prefill_instances=1),
    ],
    ids=lambda item: item.mode.value,
)
@pytest.mark.parametrize(
    "maker",
    [
        FleetMaker(MODEL, SITE),
        FleetMaker(MODEL, SITE, fused=False),
        FleetMaker(MODEL, replace(SITE, decoding=Site(A100, 8), between=link("infiniband-hdr"))),
    ],
    ids=["fused", "in turns", "two kinds"],
)
def test_latencies_are_those_of_the_simulator(candidate: Candidate, maker: FleetMaker):
    if not maker.fused and candidate.mode is not Mode.CHUNKED:
        return  # the same fleet
    if maker.site.decoding and candidate.prefill is None:
        return  # one kind alone
    arrivals = poisson(8.0, 150, LENGTHS, seed=1)
    live = maker.run(candidate, arrivals).outcomes
    quick = maker.runners.stepped(candidate, arrivals, lambda outcome: False).outcomes
    assert [item.request_id for item in quick] == [item.request_id for item in live]
    assert [item.output_tokens for item in quick] == [item.output_tokens for item in live]
    for name, within in (("ttft", 0.1), ("tpot", 0.08)):
        one, other = (
            np.quantile([getattr(item, name) for item in run], (0.5, 0.9)) for run in (live, quick)
        )
        assert other == pytest.approx(one, rel=within), name


def test_gathered_prompts_disturb_decode_steps_less_and_wait_no_longer_than_the_steps():
    """Prompts come one at a time. The chunk of one rank delays all eight."""
    software = Software.of("trtllm", "fp8", None)
    site = Site(H200, 8, software=software)
    maker = FleetMaker(software.shape(DEEPSEEK), site)
    arrivals = poisson(0.9, 150, Fixed(8192, 300), seed=1)
    found = {}
    for steps in (0, 60):
        candidate = Candidate(Mode.CHUNKED, Layout(dp=8, ep=8), 1, gather_steps=steps)
        live = maker.run(candidate, arrivals).outcomes
        quick = maker.runners.stepped(candidate, arrivals, lambda outcome: False).outcomes
        for name, within in (("ttft", 0.15), ("tpot", 0.1)):
            one, other = (np.mean([getattr(item, name) for item in run]) for run in (live, quick))
            assert other == pytest.approx(one, rel=within), (steps, name)
            found[steps, name] = one
    assert found[60, "tpot"] < 0.8 * found[0, "tpot"]
    assert found[60, "ttft"] < found[0, "ttft"] + 60 * found[60, "tpot"]


def test_a_slow_link_delays_the_second_token_and_not_the_first():
    slow = Site(H100, 2, domain_devices=1, scale_out=link("ethernet-10g"))
    arrivals = [Arrival(0.0, 2000, 11)]
    (near,), (far,) = (
        FleetMaker(MODEL, site).runners.stepped(PAIR, arrivals, lambda outcome: False).outcomes
        for site in (Site(H100, 2), slow)
    )
    assert near.ttft == far.ttft
    moved = 2000 * MODEL.kv_bytes_per_token() / (link("ethernet-10g").bytes_per_second)
    assert far.latency - near.latency > 0.3 * moved


def test_requests_wait_while_kv_has_no_room_and_larger_ones_fail():
    card = H100
    weights = CostModel(MODEL, card).weight_bytes_per_device
    small = replace(card, memory_bytes=(weights + 2000 * MODEL.kv_bytes_per_token()) / 0.9)
    maker = FleetMaker(MODEL, Site(small, 1))
    arrivals = [Arrival(0.0, 1000, 50), Arrival(0.0, 1000, 50), Arrival(0.0, 3000, 5)]
    found = maker.runners.stepped(ONE, arrivals, lambda outcome: False).outcomes
    assert [item.end for item in found] == ["finished", "finished", "failed"]
    first, second = found[:2]
    assert second.first_token is not None and second.first_token > first.finish


def test_cached_blocks_are_not_computed_again():
    """The prompts share 1536 of 2000 tokens, three blocks of 512."""
    arrivals = [Arrival(float(at), 2000, 2, (1, 2, 3, 10 + at)) for at in range(3)]
    cold, *warm = stepped(ONE, arrivals, reuse=True)
    assert [item.cached_tokens for item in (cold, *warm)] == [0, 1536, 1536]
    model = CostModel(MODEL, SITE.described, Layout())
    assert all(item.ttft == pytest.approx(model.prefill([(464, 1536)]).seconds) for item in warm)
    assert [item.cached_tokens for item in stepped(ONE, arrivals)] == [0, 0, 0]


def test_a_run_ends_when_it_is_told_to():
    seen: list[str] = []

    def enough(outcome: RequestOutcome) -> bool:
        seen.append(outcome.request_id)
        return len(seen) == 5

    runner = FleetMaker(MODEL, SITE).runners.stepped
    run = runner(PAIR, poisson(20.0, 50, Fixed(900, 20)), enough)
    assert run.stopped and [item.request_id for item in run.outcomes] == seen
