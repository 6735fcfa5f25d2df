"""What fits, and ceilings on rates, against closed forms and against stepping."""

import math

import pytest

from jdisagg.config import Mode
from jdisagg.costs.engines import Software
from jdisagg.costs.hardware import Accelerator, Efficiency, Link, link
from jdisagg.costs.model_geometry import CostGeometry, GroupedAttention
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.bounds import HEADROOM, Bounds, Demand, Goal, RateCeilings
from jdisagg.simulator.planning.candidates import (
    Candidate,
    NothingFits,
    Site,
    fitting_layouts,
    handoff_path,
    one_pool,
    two_pools,
)
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.measure import Measurer, Task
from jdisagg.simulator.planning.ranking import HOPELESS
from jdisagg.simulator.workloads import Arrival, Fixed, Mixture, poisson
from tests.costs.named import (
    DEEPSEEK,
    GB200,
    H100,
    H200,
    L40S,
    LLAMA_8B,
    LLAMA_31_70B,
    LLAMA_70B,
    QWEN_235B,
)

PERFECT = Efficiency(
    1,
    1,
    1,
    1,
    0,
    0,
    launch_seconds=0,
    prefill_launch_seconds=0,
    step_seconds=0,
    prefill_seconds=0,
    sequence_seconds=0,
    collective_seconds=0,
)


def machine(**changed: object) -> Accelerator:
    """No overheads: an operation takes its FLOP or its bytes, whichever is longer."""
    fast = Link("fast", 1e12, 0.0, 1.0)
    described = {
        "peak_flops": 1e14,
        "memory_bytes_per_second": 1e12,
        "memory_bytes": 80e9,
        "domain_devices": 8,
    }
    return Accelerator(
        "perfect",
        **{**described, **changed},
        scale_up=fast,
        host=fast,
        scale_out=fast,
        efficiency=PERFECT,
    )  # type: ignore[arg-type]


MODEL = CostGeometry(
    "square", 4096, 32, 32000, GroupedAttention(32, 32, 128), 16384, context_tokens=1 << 20
)


def ceilings(site: Site, demand: Demand, goal: Goal, model: CostGeometry = MODEL) -> RateCeilings:
    return RateCeilings(site, demand, goal, fitting_layouts(model, site, demand.longest_tokens))


def demand(prompt: int, output: int) -> Demand:
    return Demand.of([Arrival(0, prompt, output)] * 10)


def test_a_demand_is_its_means():
    mixed = Demand.of([Arrival(0, 100, 11), Arrival(1, 300, 1)])
    assert (mixed.prompt_mean, mixed.steps_mean, mixed.longest_tokens) == (200, 5, 301)
    assert mixed.context_mean == 105.5  # only the first decodes
    with pytest.raises(ConfigError, match="no requests to plan for"):
        Demand.of([])


# ---- what fits


def test_a_model_that_does_not_fit_is_told_with_what_is_missing():
    with pytest.raises(
        NothingFits,
        match=(
            r"nothing fits, because the weights of llama-3-70b \(141 GB in bfloat16\).* up to 1"
            r" h100 of 86 GB"
        ),
    ):
        fitting_layouts(LLAMA_70B, Site(H100, 1), 1000)
    assert [item.layout.tp for item in fitting_layouts(LLAMA_70B, Site(H100, 8), 1000)] == [2, 4, 8]


def test_a_request_that_no_rank_holds_is_told_with_the_room_there_is():
    with pytest.raises(
        NothingFits, match=r"longest request has 900,000 tokens .* room for [\d,]+ at most"
    ):
        fitting_layouts(LLAMA_31_70B, Site(H100, 4), 900_000)


def test_a_model_whose_heads_no_layout_divides_is_told():
    odd = CostGeometry("odd", 4099, 32, 32000, GroupedAttention(7, 7, 128), 16385 * 64)
    assert [
        item.layout for item in fitting_layouts(odd, Site(machine(memory_bytes=4e12), 4), 10)
    ] == [Layout()]
    with pytest.raises(NothingFits, match="odd"):
        fitting_layouts(odd, Site(machine(memory_bytes=10e9), 4), 10)


def test_experts_lie_over_all_devices_or_are_cut():
    site = Site(GB200, 16)
    fitting = fitting_layouts(QWEN_235B, site, 20_000)
    layouts = {item.layout for item in fitting}
    assert {Layout(dp=16, tp=1, ep=16), Layout(dp=4, tp=4, ep=16), Layout(tp=8)} <= layouts
    assert Layout(tp=8, ep=8) not in layouts  # it costs what tp=8 costs
    assert all(layout.ep in (1, layout.devices) for layout in layouts)
    wide = {item.decode for item in one_pool(fitting, site, (Mode.CHUNKED,))}
    assert {Layout(dp=2, tp=4, ep=8), Layout(dp=4, tp=2, ep=8)} <= wide


def test_dp_ranks_that_share_experts_may_lie_in_several_domains_and_tp_in_one():
    """DeepSeek-V3 in bfloat16 needs ten H200, which stand eight to a domain."""
    site = Site(H200, 32)
    layouts = [item.layout for item in fitting_layouts(DEEPSEEK, site, 9000)]
    assert layouts and all(item.devices > 8 >= item.tp for item in layouts)
    assert Layout(dp=16, tp=1, ep=16) in layouts and Layout(dp=4, tp=8, ep=32) in layouts
    with pytest.raises(NothingFits, match="leave no room"):
        fitting_layouts(DEEPSEEK, Site(H200, 8), 9000)
    dense = fitting_layouts(LLAMA_70B, Site(H200, 32), 9000)
    assert max(item.layout.devices for item in dense) == 8


def test_two_pools_use_what_is_left_and_one_pool_all_of_it():
    site = Site(H100, 10)
    fitting = fitting_layouts(LLAMA_70B, site, 1000)
    pools = list(two_pools(fitting, site))
    assert all(item.devices <= 10 and item.prefill for item in pools)
    assert {(item.prefill_instances, item.decode_instances) for item in pools if item.prefill == item.decode == Layout(tp=2)} == {  # noqa: E501
        (1, 4), (2, 3), (3, 2), (4, 1)
    }  # fmt: skip
    assert {item.decode_instances for item in one_pool(fitting, site, (Mode.UNIFIED,))} == {5, 2, 1}
    assert not list(two_pools(fitting_layouts(LLAMA_8B, Site(H100, 1), 1000), Site(H100, 1)))


@pytest.mark.parametrize(("engine", "gathers"), [("trtllm", True), ("vllm", False)])
def test_prompts_are_gathered_where_the_engine_can_and_there_are_several_ranks(
    engine: str, gathers: bool
):
    software = Software.of(engine, "fp8", None)
    site = Site(H200, 8, software=software)
    fitting = fitting_layouts(software.shape(DEEPSEEK), site, 9216)
    gathered = [one for one in one_pool(fitting, site, (Mode.CHUNKED,)) if one.gather_steps]
    assert {one.decode.dp for one in gathered} == ({2, 4, 8} if gathers else set())
    for one in gathered:
        assert f"gathered for {one.gather_steps} steps" in one.name


def test_a_hand_off_stays_in_a_domain_where_a_whole_unit_fits_into_one():
    site = Site(H100, 16)
    near = Candidate(Mode.DISAGGREGATED, Layout(tp=4), 2, prefill=Layout(tp=4), prefill_instances=2)
    far = Candidate(Mode.DISAGGREGATED, Layout(tp=4), 1, prefill=Layout(tp=2), prefill_instances=6)
    assert near.unit_devices() == 8 and far.unit_devices() == 16
    assert handoff_path(site, near) == (link("nvlink4"), 4)
    assert handoff_path(site, far) == (link("infiniband-ndr"), 2)


# ---- limits


def test_prefill_compute_is_peak_over_the_flop_of_a_prompt():
    site, asked = Site(machine(), 2), demand(2048, 2)
    candidate = Candidate(Mode.DISAGGREGATED, Layout(), 1, prefill=Layout(), prefill_instances=1)
    limits = dict(ceilings(site, asked, Goal(100.0, 100.0)).bounds(candidate).limits)
    products = 2 * 2048 * 32 * (4 * 4096 * 4096 + 3 * 4096 * 16384)
    attention = 4 * 4096 * 32 * 2048 * 2049 / 2
    assert limits["prefill compute"] == pytest.approx(1e14 / (products + attention), rel=0.06)


def test_answers_of_one_token_have_no_tpot_that_could_bind():
    """What binds is the prefill; a limit on what comes after the first token, however strict,
    changes nothing."""
    asked, candidate = demand(800, 1), Candidate(Mode.UNIFIED, Layout(), 1)
    site = Site(machine(), 1)
    strict, loose = (
        dict(ceilings(site, asked, Goal(10, tpot)).bounds(candidate).limits) for tpot in (1e-6, 100)
    )
    assert strict == loose and strict["TPOT"] >= strict["compute"]


def test_kv_memory_bounds_the_batch_and_the_batch_the_rate():
    asked = demand(4000, 401)
    small, large = (Site(machine(memory_bytes=size), 2) for size in (40e9, 80e9))
    candidate = Candidate(Mode.DISAGGREGATED, Layout(), 1, prefill=Layout(), prefill_instances=1)
    first, second = (
        dict(ceilings(site, asked, Goal(100, 100)).bounds(candidate).limits)["KV memory"]
        for site in (small, large)
    )
    model = ceilings(small, asked, Goal(100, 100)).models[Layout()]
    rooms = model.kv_tokens_per_rank() / (asked.context_mean * HEADROOM)
    step = model.decode_of(math.ceil(rooms), rooms * asked.context_mean).seconds
    assert first == pytest.approx(rooms / (400 * step)) and second > first


def test_a_slow_link_binds_two_pools_and_its_bound_is_its_speed_over_the_bytes_of_a_prompt():
    asked = demand(4000, 100)
    candidate = Candidate(
        Mode.DISAGGREGATED, Layout(tp=4), 1, prefill=Layout(tp=4), prefill_instances=1
    )
    rates = []
    for name in ("infiniband-ndr", "ethernet-100g", "ethernet-10g"):
        site = Site(H100, 8, domain_devices=4, scale_out=link(name))
        found = ceilings(site, asked, Goal(5.0, 0.1), LLAMA_31_70B).bounds(candidate)
        speed = link(name).bytes_per_second * link(name).efficiency * 4
        assert dict(found.limits)[f"link {name}"] == pytest.approx(speed / (4000 * 327_680))
        assert found.link_share == pytest.approx(4000 * 327_680 / speed)
        rates.append(found.rate)
    assert rates[0] > rates[2] and found.binding[0] == "link ethernet-10g"


def test_short_answers_over_a_slow_link_are_bound_by_the_hand_off():
    asked = demand(4000, 3)
    site = Site(H100, 8, domain_devices=4, scale_out=link("ethernet-10g"))
    candidate = Candidate(
        Mode.DISAGGREGATED, Layout(tp=4), 1, prefill=Layout(tp=4), prefill_instances=1
    )
    found = ceilings(site, asked, Goal(5.0, 0.05), LLAMA_31_70B).bounds(candidate)
    assert found.binding == ("hand-off over ethernet-10g", 0.0)


def test_twice_the_instances_carry_twice_as_much():
    asked = Demand.of(poisson(1.0, 300, Fixed(900, 100), seed=3))
    site = Site(H100, 16)
    made = ceilings(site, asked, Goal(1.0, 0.05), LLAMA_70B)

    def found(prefill: int, decode: int) -> Bounds:
        return made.bounds(
            Candidate(
                Mode.DISAGGREGATED,
                Layout(tp=4),
                decode,
                prefill=Layout(tp=4),
                prefill_instances=prefill,
            )
        )

    twice, once = (dict(found(count, count).limits) for count in (2, 1))
    assert twice == pytest.approx({name: 2 * rate for name, rate in once.items()})


@pytest.mark.parametrize(
    "bad",
    [
        {"ttft_seconds": 0.0},
        {"tpot_seconds": -1.0},
        {"attainment": 1.0},
        {"ttft_seconds": math.nan},
    ],
)
def test_a_goal_that_means_nothing_is_refused(bad: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Goal(**{"ttft_seconds": 1.0, "tpot_seconds": 0.1, **bad})


@pytest.mark.parametrize(
    ("lengths", "longest_of_four"), [((4096, 16384), (1 / 16, 15 / 16)), ((4096, 4096), (0.5, 0.5))]
)
def test_all_dp_ranks_of_a_prefill_instance_wait_for_the_longest_prompt_on_any(
    lengths: tuple[int, int], longest_of_four: tuple[float, float]
):
    site = Site(GB200, 8)
    mixed = Demand.of([Arrival(0, length, 2) for length in lengths] * 64)
    made = ceilings(site, mixed, Goal(1e6, 1e6), QWEN_235B)
    spread, together = Layout(dp=4, ep=4), Layout(tp=4)
    short, long = (made.prefill_seconds(spread, 2048)[at] for at in (0, -1))
    limits = dict(made.bounds(Candidate(Mode.DISAGGREGATED, together, 1, 2048, spread, 1)).limits)
    batch = longest_of_four[0] * short + longest_of_four[1] * long
    assert limits["prefill compute"] == pytest.approx(4 / batch, rel=0.01)


def test_one_pool_fills_a_step_with_prompts_up_to_the_limit_on_tpot():
    """In turns, a step with `tokens` new ones takes its decode step and, if prompts of 1,000 tokens
    come one at a time, the prefill of one in the part tokens / 1000 of the steps."""
    site, asked = Site(machine(), 1), demand(1000, 201)
    made = ceilings(site, asked, Goal(100.0, 0.03))
    rate = dict(made.bounds(Candidate(Mode.UNIFIED, Layout(), 1)).limits)["TPOT"]
    each = made.models[Layout()].prefill([(1000, 0)]).seconds
    count = rate * 200 * 0.03
    step = made.models[Layout()].decode_of(math.ceil(count), count * asked.context_mean).seconds
    assert step + rate * 0.03 * each == pytest.approx(0.03, rel=0.02)


@pytest.mark.parametrize(("engine", "least", "most"), [("sglang", 32, 64), ("jdisagg", 1, 8)])
def test_deepseek_on_64_h200_is_decoded_with_wide_expert_parallelism_where_the_engine_overlaps_it(
    engine: str, least: int, most: int
) -> None:
    """Public deployments of SGLang and vLLM use 32 to 72 GPUs for a decode instance. With the
    gather exchange of jdisagg, experts stay within a host."""
    software = Software.of(engine, "fp8", None)
    site = Site(H200, 64, software=software)
    demand = Demand.of([Arrival(0.0, 2000, 1500)])
    fitting = fitting_layouts(software.shape(DEEPSEEK), site, demand.longest_tokens)
    made = RateCeilings(site, demand, Goal(5.0, 0.1), fitting)
    best = max(two_pools(fitting, site), key=lambda item: made.bounds(item).rate)
    assert least <= best.decode.ep <= most


def test_stages_are_searched_where_cards_have_pcie_alone_and_for_two_pools_alone() -> None:
    shape, site = LLAMA_70B, Site(L40S, 8)
    found = fitting_layouts(shape, site, 2200)
    assert {item.layout.pp for item in found} == {1, 2, 4, 8}
    small = fitting_layouts(LLAMA_8B, Site(L40S, 2), 2200)
    assert [item.layout for item in small] == [Layout(), Layout(tp=2), Layout(pp=2)]
    # An instance stays within a host.
    two_hosts = fitting_layouts(shape, Site(L40S, 16), 2200)
    assert all(item.layout.devices <= 8 for item in [*found, *two_hosts])
    fast = fitting_layouts(shape, Site(H100, 8), 2200)
    assert {item.layout.pp for item in fast} == {1}
    assert all(one.decode.pp == 1 for one in one_pool(found, site, (Mode.CHUNKED, Mode.UNIFIED)))
    pairs = {(one.prefill.pp, one.decode.pp) for one in two_pools(found, site) if one.prefill}
    assert {(4, 1), (1, 4), (4, 2)} <= pairs


def test_each_stage_has_a_prompt_or_a_batch_of_its_own() -> None:
    shape, site = LLAMA_70B, Site(L40S, 8)
    demand = Demand.of(poisson(1.0, 50, Fixed(2000, 200), seed=1))
    made = RateCeilings(site, demand, Goal(60.0, 5.0), fitting_layouts(shape, site, 2200))
    staged = Layout(pp=4)
    limits = dict(made.bounds(Candidate(Mode.DISAGGREGATED, staged, 1, 8192, staged, 1)).limits)
    seconds = float(made.prefill_seconds(staged, 8192).mean())
    assert limits["prefill compute"] == pytest.approx(4 / seconds)
    model, context = made.models[staged], demand.context_mean
    rooms = made.rooms[staged] / (context * HEADROOM)
    step = model.decode_of(math.ceil(rooms / 4), rooms / 4 * context).seconds
    assert limits["KV memory"] == pytest.approx(rooms / (demand.steps_mean * step))


@pytest.mark.parametrize(
    ("link_name", "goal"), [("nvlink4", Goal(1.0, 0.03)), ("ethernet-10g", Goal(0.2, 0.05))]
)
def test_no_candidate_that_may_be_best_has_too_low_a_ceiling(link_name: str, goal: Goal) -> None:
    """Candidates with a ceiling below HOPELESS of the best stepped rate are not stepped."""
    site = Site(H100, 2, between=link(link_name))
    workload = poisson(1.0, 100, Mixture(((0.7, Fixed(300, 20)), (0.3, Fixed(2000, 40)))), seed=1)
    asked, fitting = Demand.of(workload), fitting_layouts(LLAMA_8B, site, 2100)
    made = RateCeilings(site, asked, goal, fitting)
    runner = FleetMaker(LLAMA_8B, site).runners.stepped
    measurer = Measurer(goal, workload, asked, 2, runner, 300)
    listed = [*one_pool(fitting, site, tuple(Mode)), *two_pools(fitting, site)]
    for candidate in listed:
        if candidate.chunk_tokens not in (512, 8192):
            continue
        bounds = made.bounds(candidate)
        found = measurer.measured(Task(candidate, bounds, made.rooms[candidate.decode]))
        assert found is not None and HOPELESS * found.rate <= bounds.rate, candidate.name
