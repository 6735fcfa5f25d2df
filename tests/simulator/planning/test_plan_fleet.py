"""Plans by the real simulator where the answer is known; the configuration is what was
simulated."""

from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.engines import Software
from jdisagg.costs.hardware import link
from jdisagg.engine.limits import stage_cut, worker_config
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.simulator.fleet import kv_spec
from jdisagg.simulator.planning.bounds import Bounds, Demand, Goal, RateCeilings
from jdisagg.simulator.planning.candidates import (
    ACTIVATIONS,
    PAGE_TOKENS,
    Candidate,
    NothingFits,
    Site,
    fitting_layouts,
)
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Plan, Planner, Search
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.workloads import Arrival, Fixed, poisson
from tests.costs.named import H100, LLAMA_8B
from tests.simulator.planning.plans import best_of

MODEL = LLAMA_8B


def plan(
    site: Site,
    workload: list[Arrival],
    goal: Goal,
    modes: tuple[Mode, ...] = (Mode.DISAGGREGATED, Mode.UNIFIED),
) -> Plan:
    maker = FleetMaker(MODEL, site)
    return Planner(
        MODEL, site, goal, maker.runners, Search(modes=modes, finalists=1, most_requests=80)
    ).plan(workload)


def test_over_a_slow_link_one_pool_wins_and_over_a_fast_one_the_same_hand_off_is_no_burden():
    """2000 tokens are 262 MB: 0.26 s over 10 Gb Ethernet, spread over 10 steps 26 ms each, which
    the TPOT limit of 20 ms does not allow."""
    workload, goal = poisson(1.0, 100, Fixed(2000, 11), seed=2), Goal(0.5, 0.02)
    slow = plan(Site(H100, 2, domain_devices=1, scale_out=link("ethernet-10g")), workload, goal)
    assert slow.findings[0].candidate.mode is Mode.UNIFIED and slow.verdict.startswith("One pool")
    two = best_of(slow, Mode.DISAGGREGATED)
    assert two is not None
    assert two.rate == 0
    assert "ethernet-10g" in two.binding
    assert "the link is slow" in slow.verdict
    fast = plan(Site(H100, 2), workload, goal, (Mode.DISAGGREGATED,))
    assert fast.findings[0].rate > 0 and fast.findings[0].link_share < 0.05


def test_an_answer_of_one_token_never_decodes_so_that_two_pools_waste_one():
    found = plan(Site(H100, 2), poisson(1.0, 100, Fixed(1500, 1), seed=2), Goal(0.4, 0.05))
    two = best_of(found, Mode.DISAGGREGATED)
    assert found.findings[0].candidate.mode is Mode.UNIFIED and two is not None
    assert found.findings[0].rate / two.rate == pytest.approx(2, rel=0.4)


def test_more_than_the_prefill_can_compute_is_not_carried_however_generous_the_limit_on_the_first_token():  # noqa: E501
    """400 requests at once and a half of what can be computed last as long as the limit: none of
    them is late yet."""
    site = Site(H100, 1)
    goal = Goal(10.0, 0.05)
    workload = poisson(1.0, 100, Fixed(800, 1))
    demand, fitting = Demand.of(workload), fitting_layouts(MODEL, site, 801)
    candidate = Candidate(Mode.UNIFIED, Layout(), 1)
    computed = 1 / float(
        RateCeilings(site, demand, goal, fitting)
        .prefill_seconds(Layout(), candidate.chunk_tokens)
        .mean()
    )
    planner = Planner(MODEL, site, goal, FleetMaker(MODEL, site).runners, Search(most_requests=400))
    over, under = (planner.trial(candidate, workload, factor * computed) for factor in (1.5, 0.85))
    assert over.attainment == 1 and over.overload
    assert under.lasting_attainment == 1


def test_kv_in_fp8_is_planned_for_twice_the_pages_and_configured_so() -> None:
    site = Site(H100, 4)
    candidate = Candidate(Mode.DISAGGREGATED, Layout(tp=2), 1, 4096, Layout(), 2)
    plain, kept = (FleetMaker(replace(MODEL, kv_dtype=dtype), site) for dtype in ("", "uint8"))
    one, other = (maker.engine(candidate, "DIR", 8192) for maker in (plain, kept))
    assert (one.model.kv_dtype, other.model.kv_dtype) == ("", "fp8")
    assert one.decode.pages_per_rank and other.decode.pages_per_rank
    assert other.decode.pages_per_rank // 2 == one.decode.pages_per_rank
    spec = kept.fleet(candidate).limits_of(kept.fleet(candidate).decode).kv_spec
    assert spec.bytes_per_token == MODEL.kv_bytes_per_token("bfloat16") // 2


def test_weights_in_fp8_leave_room_for_pages_and_are_configured_so() -> None:
    site = Site(H100, 2)
    candidate = Candidate(Mode.UNIFIED, Layout(tp=2), 1)
    fewer = replace(MODEL, matrix_bits=8)
    plain = FleetMaker(MODEL, site).engine(candidate, "DIR", 8192)
    in_fp8 = replace(site, software=Software(weights="fp8"))
    less = FleetMaker(fewer, in_fp8).engine(candidate, "DIR", 8192)
    assert (plain.model.weights, less.model.weights) == ("", "fp8")
    assert plain.decode.pages_per_rank and less.decode.pages_per_rank
    page = PAGE_TOKENS * MODEL.kv_bytes_per_token("bfloat16")
    saved = (less.decode.pages_per_rank - plain.decode.pages_per_rank) * page
    # a byte of each value of the layers' matrices; embedding and head stay as they are
    assert saved == pytest.approx(MODEL.parameters - MODEL.embedding_parameters, rel=0.01)


def test_what_is_predicted_is_what_is_configured():
    site = Site(H100, 4, hardware="h100")
    maker = FleetMaker(MODEL, site, codec="int8", slots=64)
    candidate = Candidate(Mode.DISAGGREGATED, Layout(tp=2), 1, 4096, Layout(), 2)
    fleet, engine = maker.fleet(candidate), maker.engine(candidate, "DIR", 8192)
    assert fleet.accelerators == candidate.devices == 4
    assert fleet.prefill is not None and fleet.prefill.count == 2
    for pool, instance in ((fleet.prefill, engine.prefill), (fleet.decode, engine.decode)):
        simulated = pool.instance
        for name in ("layout", "page_size", "chunk_tokens", "min_chunk_tokens", "codec"):
            assert getattr(simulated, name) == getattr(instance, name)
        assert instance.pages_per_rank is not None
        of_all_slots = simulated.slots_per_rank * 8192 // simulated.page_size
        assert fleet.limits_of(pool).pages_per_rank == min(instance.pages_per_rank, of_all_slots)
    assert fleet.decode.instance.slots_per_rank == engine.decode.slots_per_rank
    assert engine.decode.slots_per_rank == 64 and engine.decode.hardware == "h100"
    assert engine.model.context_tokens == 8192
    one = maker.fleet(Candidate(Mode.CHUNKED, Layout(tp=2), 2, 512))
    assert one.prefill is None and one.mode is Mode.CHUNKED and one.fused
    in_turns = FleetMaker(MODEL, site, fused=False)
    assert not in_turns.fleet(Candidate(Mode.CHUNKED, Layout(tp=2), 2, 512)).fused
    assert not maker.fleet(Candidate(Mode.UNIFIED, Layout(tp=2), 2)).fused


@pytest.mark.parametrize(("prefill", "decode"), [(8, 8), (2, 1), (1, 8)])
def test_layer_groups_of_a_recipe_suit_the_stages_of_both_sides(prefill: int, decode: int) -> None:
    candidate = Candidate(Mode.DISAGGREGATED, Layout(pp=decode), 1, 8192, Layout(pp=prefill), 1)
    config = FleetMaker(MODEL, Site(H100, 16)).engine(candidate, "DIR", 8192)
    spec = kv_spec(MODEL, "bfloat16")
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        instance = worker_config(config, role).instance
        stages = stage_cut(instance.layout.pp, instance.layer_groups)(spec)
        assert len({len(layers) for layers in stages}) == 1 and len(stages) == instance.layout.pp
    assert config.prefill.layer_groups == config.decode.layer_groups


def test_a_recipe_has_the_drafter_that_was_planned_for() -> None:
    two = Candidate(Mode.DISAGGREGATED, Layout(), 1, 8192, Layout(), 1)
    staged = replace(two, prefill=Layout(pp=2))
    maker = FleetMaker(MODEL, Site(H100, 4), draft="ASSISTANT")
    assert maker.engine(two, "DIR", 8192).model.draft == "ASSISTANT"
    assert maker.engine(staged, "DIR", 8192).model.draft == "", "stages load no drafter"


def test_a_recipe_has_as_few_slots_as_carry_what_was_predicted():
    """A mean of sequences hides their peaks: with slots for the mean alone the goal may be
    missed."""
    site = Site(H100, 1)
    goal = Goal(1.0, 0.02)
    workload = poisson(1.0, 60, Fixed(200, 60), seed=2)
    maker = FleetMaker(MODEL, site)
    planner = Planner(
        MODEL,
        site,
        goal,
        maker.runners,
        Search(modes=(Mode.UNIFIED,), finalists=1, most_requests=60),
    )
    candidate, rate = Candidate(Mode.UNIFIED, Layout(), 1), 5.0
    trial = planner.trial(candidate, workload, rate)
    best = Finding(
        candidate,
        Bounds((("TPOT", rate),)),
        rate,
        rate,
        (trial,),
        trial.report,
        "TPOT",
        0.0,
        0.0,
        1,
        rate * 60,
    )
    sized = maker.sized(best, lambda runner: planner.holds(best, workload, runner))
    assert 8 <= sized.slots < maker.slots and planner.holds(best, workload, sized.run)
    asked: list[object] = []
    found = maker.sized(best, lambda runner: asked.append(runner) or len(asked) > 1)
    assert found.slots == 2 * maker.sized(best, lambda runner: True).slots
    assert maker.sized(best, lambda runner: False) == maker
    assert not planner.holds(best, workload, FleetMaker(MODEL, site, slots=1).run)


def test_a_request_for_which_only_parts_of_pages_are_left_does_not_fit():
    """Room for 10,001 tokens is 156 pages of 64: 9,984 tokens. (The workers take one more: of the
    last token no KV is kept.)"""
    roomy = H100
    weights = CostModel(MODEL, roomy).weight_bytes_per_device
    small = replace(
        roomy, memory_bytes=(weights + 10_001 * MODEL.kv_bytes_per_token()) / (1 - ACTIVATIONS)
    )
    site = Site(small, 1)
    assert fitting_layouts(MODEL, site, 9_984)
    with pytest.raises(
        NothingFits,
        match="longest request has 9,985 tokens and a dp rank .* has room for 9,984 at most",
    ):
        fitting_layouts(MODEL, site, 9_985)
    maker = FleetMaker(replace(MODEL, context_tokens=16_384), site)
    run = maker.run(
        Candidate(Mode.UNIFIED, Layout(), 1), [Arrival(0.0, 9_884, 100), Arrival(0.0, 9_886, 100)]
    )
    assert [item.end for item in run.outcomes] == ["finished", "failed"]


def test_pairs_of_a_unit_share_a_domain_where_it_holds_them():
    fleet = FleetMaker(MODEL, Site(H100, 16)).fleet(
        Candidate(Mode.DISAGGREGATED, Layout(tp=4), 2, prefill=Layout(tp=4), prefill_instances=2)
    )
    hosts = [[place.split("/")[1] for place in places] for places in fleet.places()]
    assert hosts[0] == hosts[1] and len(set(hosts[0])) == 2
