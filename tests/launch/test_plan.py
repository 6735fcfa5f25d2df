"""The planner as a command: a plan of a small case from end to end, what it writes, and how it says
no."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import accelerator
from jdisagg.engine.limits import worker_config
from jdisagg.engine.memory_plan import DeviceMemory, fit_worker
from jdisagg.engine.prefix_defaults import worker_defaults
from jdisagg.errors import ConfigError, WorkloadError
from jdisagg.layout.axes import Layout
from jdisagg.layout.platforms import DEVICE_FRACTION
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.commands.plan_output import plan_recipe
from jdisagg.node.recipes import load_recipe, load_shape
from jdisagg.simulator.planning.bounds import Bounds, Goal
from jdisagg.simulator.planning.candidates import PAGE_TOKENS, Candidate, Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.pools import Row
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.report import summarise
from jdisagg.simulator.workloads import Fixed, poisson
from launch.fitted_pages import with_fitting_pages
from launch.plan_inputs import mixture, shared_prefixes
from launch.workload_inputs import check_output
from tests.launch.script_ends import ends, not_refused

SMALL = (
    "--model=llama-3-8b",
    "--hardware=h100",
    "--finalists=1",
    "--most_requests=120",
    "--ttft=0.4",
    "--tpot=0.03",
)


@pytest.mark.ci
def test_a_plan_ranks_says_who_wins_and_writes_a_recipe_that_is_read(tmp_path: Path):
    recipe, figures = tmp_path / "best.py", tmp_path / "plan.json"
    given = (
        *SMALL,
        "--accelerators=2",
        "--mixture=0.7:900/30,0.3:2500/40",
        f"--output={recipe}",
        f"--json={figures}",
        "--serve_rate=100",
        "--dollars_per_hour=3.6",
    )
    ((status, out, err),) = ends("plan", given)
    assert status == 0, err
    found = json.loads(figures.read_text())
    answers = err.splitlines()  # by stepping, and then each simulated candidate
    assert "By stepping" in answers[0] and all("requests/s" in line for line in answers[1:])
    simulated = [item for item in found["findings"] if item["simulated"]]
    assert 2 <= len(simulated) <= len(answers) - 4
    assert "Left at their defaults:" in out and "seed=0" in found["defaults"]
    assert "ttft" not in found["defaults"] and "accelerators" not in found["defaults"]
    assert {item["mode"] for item in found["findings"]} == {"disaggregated", "chunked", "unified"}
    best = found["findings"][0]
    # Both accelerators at 3.60 dollars and 700 W an hour, for the tokens of the best row.
    spent = 2 / best["tokens_per_second"]
    assert best["dollars_per_million_output_tokens"] == pytest.approx(1e3 * spent)
    assert best["joules_per_output_token"] == pytest.approx(700 * spent)
    needed = math.ceil(100 / best["requests_per_second"] * best["devices"])
    assert any(f"100 requests/s need {count} h100" in out for count in (needed, needed + 1))
    assert "At 80% of the first row's rate: TTFT p90" in found["verdict"]
    table = out[: out.index(found["verdict"])].splitlines()
    assert max(map(len, table)) <= 80 and "…" not in out and "e+" not in "".join(table)
    for item in found["findings"]:  # no figure and no mode is cut
        p99 = 1e3 * item["report"]["ttft"]["p99"]
        assert (f"{p99:.0f}" if p99 >= 100 else f"{p99:.3g}") in out.split()
        assert item["mode"] in out.split()
    carried = [item["per_accelerator"] for item in simulated]
    assert carried == sorted(carried, reverse=True) and carried[-1] > 0
    assert found["verdict"] in out and (
        "win" in found["verdict"] or "No clear winner" in found["verdict"]
    )
    best, config, shape = found["findings"][0], load_recipe(str(recipe)), load_shape(str(recipe))
    assert config.mode is Mode(best["mode"]) and str(config.decode.layout) == best["decode_layout"]
    assert (shape.decode or shape.mixed) == best["decode_instances"] and shape.prefill == best[
        "prefill_instances"
    ]
    assert config.model.context_tokens == 2560 and config.model.dtype == "bfloat16"
    assert config.decode.pages_per_rank is not None
    part = config.decode.pages_per_rank * config.decode.page_size / best["kv_tokens_per_rank"]
    assert 0.8 < part < 1.0, "activations and KV in transfer take the rest"


@pytest.mark.parametrize(("shared", "rate"), [(1000, 0.0), (0, 0.6)])
def test_a_prefix_in_plain_numbers_is_what_the_simulated_cache_holds(shared: int, rate: float):
    """All prompts but the first find the tokens that they share, in whole pages."""
    drawn = poisson(2.0, 60, mixture(("0.5:900/4", "0.5:2500/4")), seed=1)
    named = shared_prefixes(drawn, shared, rate)
    maker = FleetMaker(
        geometry("llama-3-8b"), Site(accelerator("h100"), 1), reuse=True, block_tokens=PAGE_TOKENS
    )
    one = Candidate(Mode.UNIFIED, Layout(), 1)
    for run in (maker.run, maker.runners.stepped):
        outcomes = run(one, named, lambda outcome: False).outcomes
        for item, outcome in zip(drawn[5:], outcomes[5:], strict=True):
            wanted = min(shared, item.prompt_tokens - 1) or rate * item.prompt_tokens
            assert wanted - 2 * PAGE_TOKENS < outcome.cached_tokens <= wanted


def test_a_recipe_of_two_kinds_names_the_hardware_and_the_commands_of_each(tmp_path: Path) -> None:
    second = Site(accelerator("a100"), 32, hardware="a100")
    site = Site(accelerator("h100"), 4, hardware="h100", decoding=second)
    layout = Layout(tp=2)
    path = tmp_path / "plan.py"
    text = recipe_of(site, Candidate(Mode.DISAGGREGATED, layout, 16, 4096, Layout(tp=4), 1))
    path.write_text(text)
    config, shape = load_recipe(str(path)), load_shape(str(path))
    assert (config.prefill.hardware, config.decode.hardware) == ("h100", "a100")
    assert (config.prefill.layout, config.decode.layout) == (Layout(tp=4), layout)
    assert config.prefill.pages_per_rank == fitting_room("h100", Layout(tp=4))
    assert config.decode.pages_per_rank == fitting_room("a100", layout)
    assert shape is not None and (shape.prefill, shape.decode) == (1, 16)
    assert "jdisagg router --config=plan.py" in text and "jdisagg cluster" not in text
    counts = (("prefill", "(1 times, each on 4 h100)"), ("decode", "(16 times, each on 2 a100)"))
    for role, said in counts:
        (line,) = (line for line in text.splitlines() if f"--role={role}" in line)
        assert line.endswith(said) and "--router=ROUTER:8700" in line


def recipe_of(site: Site, candidate: Candidate) -> str:
    maker = FleetMaker(geometry("llama-3-8b"), site)
    run = maker.runners.stepped(candidate, poisson(1.0, 20, Fixed(900, 9)), lambda outcome: False)
    report, bounds = summarise(run.outcomes), Bounds((("TPOT", 5.0),))
    finding = Finding(candidate, bounds, 5.0, 0.1, (), report, "TPOT", 0, 0, 9, 1)
    engine = maker.engine(candidate, "DIR", 2048)
    return plan_recipe(Row(site, finding), engine, maker.geometry, Goal(1.0, 0.05), "plan.py")


def test_a_recipe_for_several_hosts_names_the_commands_of_each_worker() -> None:
    site, one, wide = Site(accelerator("h100"), 32), Layout(tp=8), Layout(dp=2, tp=8)
    near = recipe_of(Site(accelerator("h100"), 8), Candidate(Mode.CHUNKED, Layout(), 8, 2048))
    assert "jdisagg cluster --config=plan.py" in near and "jdisagg worker" not in near
    both = recipe_of(site, Candidate(Mode.CHUNKED, one, 4, 2048))
    assert "jdisagg cluster" not in both and "jdisagg router --config=plan.py" in both
    assert "jdisagg worker --role=mixed --config=plan.py --router=ROUTER:8700    (4 times" in both
    two = recipe_of(site, Candidate(Mode.DISAGGREGATED, wide, 1, 8192, one, 2))
    prefill, decode = (line for line in two.splitlines() if "jdisagg worker" in line)
    assert "--role=prefill" in prefill and "--num_processes" not in prefill
    assert "--num_processes=2 --process_id=I --coordinator=FIRST_HOST:PORT" in decode
    assert decode.endswith("each on 16 h100 of 2 hosts, with I from 0 to 1)")


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(Mode.DISAGGREGATED, Layout(tp=2), 1, 8192, Layout(), 2),
        Candidate(Mode.CHUNKED, Layout(), 4, 2048),
    ],
)
def test_workers_of_a_recipe_have_memory_for_its_pages(candidate: Candidate) -> None:
    """As planned they would not, because the planner counts a tenth for all but weights and KV."""
    shape, first, second = geometry("llama-3.1-8b"), accelerator("h100"), accelerator("a100")
    site = Site(first, 2, hardware="h100", decoding=Site(second, 2, hardware="a100"))
    site = site if candidate.prefill else site.decodes
    planned = FleetMaker(shape, site).engine(candidate, "DIR", 2112)
    roles = (WorkerRole.PREFILL, WorkerRole.DECODE) if candidate.prefill else (WorkerRole.MIXED,)
    cards = dict.fromkeys(roles, second) | {WorkerRole.PREFILL: first}
    fitted = with_fitting_pages(planned, shape, cards)
    for role in roles:
        memory = DeviceMemory(int(DEVICE_FRACTION * cards[role].memory_bytes), "", "gpu")
        with pytest.raises(ConfigError, match="does not fit"):
            fit_worker(worker_config(planned, role), role, shape, memory)
        worker = worker_config(fitted, role)
        fit_worker(worker, role, shape, memory)
        more = replace(worker.instance, pages_per_rank=1 + (worker.instance.pages_per_rank or 0))
        with pytest.raises(ConfigError, match="does not fit"):
            defaults = worker_defaults(replace(worker, instance=more), role, 1, 1)
            fit_worker(defaults, role, shape, memory)
    before, after = planned.decode.pages_per_rank, fitted.decode.pages_per_rank
    assert before and after and 0.9 * before < after < before


def fitting_room(hardware: str, layout: Layout) -> int:
    model = CostModel(geometry("llama-3-8b"), accelerator(hardware), layout)
    return model.kv_tokens_per_rank(0.1) // PAGE_TOKENS


LLAMA = ("--model=llama-3-8b", "--hardware=h100")
DRAWN = (*LLAMA, "--mixture=1:100/10")
POOL = ("--model=llama-3-8b", "--mixture=1:100/10", "--pool=h100:4@2.5")
# Flags, and what is said of them.
REFUSED = (
    ((*DRAWN, "--hit_rate=1"), "--hit_rate must be in [0, 1), got 1.0"),
    (
        (*LLAMA, "--trace=x.csv", "--shared_tokens=64"),
        "--shared_tokens and --hit_rate describe a --mixture",
    ),
    (
        ("--model=llama-3-70b", "--hardware=h100", "--accelerators=1", "--mixture=1:100/10"),
        "nothing fits, because the weights of llama-3-70b",
    ),
    (
        (*LLAMA, "--mixture=1:7000/10", "--ttft=0.0001"),
        "nothing fits, because no candidate keeps 90%",
    ),
    ((*LLAMA, "--mixture=1:9000/10"), "none of 4000 requests fits a context of 8192"),
    (("--model=llama-3-8b", "--hardware=h200x", "--mixture=1:100/10"), "no hardware named 'h200x'"),
    (("--model=llama-3-8b", "--mixture=1:100/10"), "the accelerators: give either --hardware=NAME"),
    ((*POOL, "--pool=a100"), "--pool=a100 must be NAME:COUNT"),
    ((*POOL, "--pool=a100:0"), "--pool=a100:0 must have a COUNT of at least 1"),
    ((*POOL, "--accelerators=4"), "--accelerators is part of --pool"),
    ((*POOL, "--pool=h100:2"), "--pool: h100, h100 must differ"),
    (
        (*POOL, "--pool=a100:4", "--between=pcie5", "--modes=chunked"),
        "--between=pcie5 is the link of a hand-off",
    ),
    ((*POOL, "--between=pcie5"), "--between is the link between pools, and there is one"),
    (
        ("--model=llama-3-8b", "--mixture=1:100/10", "--pool=h200:2", "--best=dollars"),
        "planner: best=dollars needs the price of 2 h200",
    ),
    ((*DRAWN, "--accelerators=0"), "site: accelerators must be at least 1"),
    ((*LLAMA,), "the workload: give either --trace=FILE or --mixture"),
    ((*DRAWN, "--limit=9"), "--limit counts the requests of a trace"),
    ((*DRAWN, "--modes=both"), "--modes: no mode named 'both'"),
    ((*DRAWN, "--ttft=-1"), "goal: ttft_seconds must be positive"),
    ((*DRAWN, "--output=/no/such/plan.py"), "/no/such/plan.py cannot be written"),
    ((*DRAWN, "--json=/no/such/plan.json"), "/no/such/plan.json cannot be written"),
    ((*DRAWN, "--output=plan.py", "--choose=4"), "--choose=4 must be a row of the table, 1 to 3"),
    ((*DRAWN, "--output=plan.py", "--choose=0"), "--choose=0 must be a row of the table"),
    ((*LLAMA, "--trace=/no/such.csv"), "/no/such.csv cannot be read"),
)


def test_what_cannot_be_planned_is_one_line():
    few = ("--finalists=1", "--most_requests=50")
    given = (((*flags, *few), said) for flags, said in REFUSED)
    assert not_refused("plan", given) == []


def test_where_results_cannot_go_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    check_output(None, ".json")
    check_output(str(tmp_path / "new.json"), ".json")
    (tmp_path / "old.json").write_text("kept")
    check_output(str(tmp_path / "old.json"), ".json")
    assert (tmp_path / "old.json").read_text() == "kept"
    (tmp_path / "folder.json").mkdir()
    for bad in ("folder.json", "none/new.json", "new.txt"):
        with pytest.raises(ConfigError, match=f"{bad} cannot be written"):
            check_output(str(tmp_path / bad), ".json")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    said = "cannot be written after the run: .* one that you may write"
    for bad in ("new.json", "old.json"):
        with pytest.raises(ConfigError, match=f"{bad} {said}"):
            check_output(str(tmp_path / bad), ".json")


def test_a_mixture_is_read_part_by_part():
    parts = mixture(["0.8:1000/200", "2:8000/300"]).parts
    found = [(weight, drawn.prompt_tokens, drawn.output_tokens) for weight, drawn in parts]  # type: ignore[attr-defined]
    assert found == [(0.8, 1000, 200), (2.0, 8000, 300)]
    for bad in ("1000/200", "1:1000", "x:1/2", "0:10/10", "1:-5/10", "nan:1/1"):
        with pytest.raises(WorkloadError, match="--mixture"):
            mixture([bad])
