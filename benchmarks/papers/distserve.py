"""DistServe (Zhong et al., OSDI'24, arXiv 2401.09670): two pools of A100-80G compared with one pool
of the vLLM of that time, for OPT models. The figure is the request rate per GPU at which 90 % of
requests meet TTFT and TPOT.

Simulated here with our engine on all sides. For OPT-13B also with the paper's two engines, modelled
from their published runs (`benchmarks/engines.py`), which separates the effect of the engines from
the effect of the pools."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.engines import SimulatedEngine, starts
from benchmarks.measured_runs import distserve_runs
from benchmarks.papers.runs import RESULTS, Load, Serve, Tally, best
from benchmarks.run_fitting import from_report
from benchmarks.simulator_engines.cluster import simulate
from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.model_geometry import CostGeometry, GroupedAttention
from jdisagg.layout.axes import Layout
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.report import RequestOutcome
from jdisagg.simulator.workloads import Arrival, LogNormal, poisson, within_context

A100 = accelerator("a100")
CHUNKS = (512, 2048)
SCALES = (0.5, 1.0, 2.0)  # of both limits
CONTEXT = 2048
QUICK_START = Goal(0.2, 0.1)  # of DistServe's README, which says 1.56 requests per second and GPU


@dataclass(frozen=True)
class Instance:
    """Instances of one pool: tensor parallelism, number of pipeline stages, number of instances."""

    tp: int
    stages: int = 1
    count: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.stages * self.count

    def pool(self, chunk: int) -> Pool:
        layout = Layout(tp=self.tp, pp=self.stages)
        instance = replace(
            INSTANCE, layout=layout, chunk_tokens=chunk, min_chunk_tokens=min(256, chunk)
        )
        return Pool(self.count, A100, instance)

    def __str__(self) -> str:
        return f"{self.count} x tp{self.tp}" + (f" pp{self.stages}" if self.stages > 1 else "")


@dataclass(frozen=True)
class Case:
    """An application of the paper.

    Attributes include its limits, the published gain over vLLM, the deployments of the paper (one
    pool and two pools), and other divisions of two pools."""

    name: str
    model: str
    lengths: Callable[[int], Sequence[Arrival]]
    goal: Goal
    published: str
    one: Instance
    two: tuple[tuple[Instance, Instance], ...]
    guess: float  # requests per second and GPU


def sharegpt(count: int) -> Sequence[Arrival]:
    """Returns the lengths of the measured runs in order, repeated."""
    known = distserve_runs()["distserve-c21d12-600-6"].arrivals
    return [known[index % len(known)] for index in range(count)]


def humaneval(count: int) -> Sequence[Arrival]:
    """Returns requests with means of 171 and 98 tokens; the spread is our assumption."""
    return poisson(1.0, count, LogNormal(158, 0.4, 82, 0.6), seed=1)


def longbench(count: int) -> Sequence[Arrival]:
    """Returns requests with means of 1,738 tokens (before truncation to the context) and 91 tokens;
    the spread is our assumption."""
    drawn = poisson(1.0, count, LogNormal(1690, 0.25, 76, 0.6), seed=2)
    return [
        replace(item, prompt_tokens=min(item.prompt_tokens, CONTEXT - item.output_tokens - 1))
        for item in drawn
    ]


CASES = (
    Case(
        "chatbot, OPT-13B, ShareGPT", "opt-13b", sharegpt, Goal(0.25, 0.1), "2.0 to 4.6",
        Instance(1, count=3),
        (
            (Instance(2), Instance(1)),
            (Instance(1, count=2), Instance(1)),
            (Instance(1), Instance(1, count=2)),
        ), 1.5,
    ),
    Case(
        "chatbot, OPT-66B, ShareGPT", "opt-66b", sharegpt, Goal(2.5, 0.15), "2.0 to 4.6",
        Instance(4, count=2),
        ((Instance(4), Instance(2, 2)), (Instance(4), Instance(4)),
         (Instance(4, count=2), Instance(4)), (Instance(4), Instance(4, count=2))), 0.4,
    ),
    Case(
        "chatbot, OPT-175B, ShareGPT", "opt-175b", sharegpt, Goal(4.0, 0.2), "2.0 to 4.6",
        Instance(8, count=2),
        ((Instance(3, 3), Instance(4, 3)), (Instance(8), Instance(8)),
         (Instance(8), Instance(8, count=2))), 0.15,
    ),
    Case(
        "code completion, OPT-66B, HumanEval", "opt-66b", humaneval, Goal(0.125, 0.2), "5.7",
        Instance(4, count=2),
        ((Instance(4), Instance(2, 2)), (Instance(4), Instance(4)),
         (Instance(4, count=2), Instance(4))), 0.8,
    ),
    Case(
        "summarization, OPT-66B, LongBench", "opt-66b", longbench, Goal(15.0, 0.15), "4.3",
        Instance(4, count=2),
        ((Instance(4), Instance(2, 2)), (Instance(4), Instance(4)),
         (Instance(4, count=2), Instance(4))), 0.3,
    ),
)  # fmt: skip


def one_pool(shape: CostGeometry, one: Instance, chunk: int | None) -> Fleet:
    """Returns a fleet with one pool. With `chunk` None, whole prompts run before any decode
    step."""
    mode = Mode.CHUNKED if chunk else Mode.UNIFIED
    return Fleet(shape, one.pool(chunk or CONTEXT), mode=mode, fused=mode is Mode.CHUNKED)


def two_pools(shape: CostGeometry, prefill: Instance, decode: Instance) -> Fleet:
    return Fleet(shape, decode.pool(CONTEXT), prefill.pool(CONTEXT), overlap=4)


Contenders = dict[str, dict[str, tuple[Serve, int]]]


def contenders(case: Case, tally: Tally) -> Contenders:
    """Returns the deployments that are compared, by mode."""
    one, shape = case.one.devices, geometry(case.model)
    return {
        "unified": {str(case.one): (tally.server(one_pool(shape, case.one, None)), one)},
        "chunked": {
            f"{case.one}, chunk {chunk}": (tally.server(one_pool(shape, case.one, chunk)), one)
            for chunk in CHUNKS
        },
        "two pools": {
            f"{prefill} -> {decode}": (
                tally.server(two_pools(shape, prefill, decode)),
                prefill.devices + decode.devices,
            )
            for prefill, decode in case.two
        },
    }


def compared(case: Case, requests: int, tally: Tally) -> list[list[object]]:
    """Returns a row for each scale of the limits. The deployment of each mode is chosen under the
    paper's own limits."""
    load = Load(within_context(case.lengths(requests), CONTEXT), case.goal, requests)
    modes, chosen, rates = contenders(case, tally), {}, {1.0: {}}
    for mode, some in modes.items():
        name, rates[1.0][mode] = best(load, some, case.guess)
        chosen[mode] = {name: some[name]} if name in some else some
    for scale in SCALES:
        if scale != 1.0:
            scaled = load.under(
                Goal(scale * case.goal.ttft_seconds, scale * case.goal.tpot_seconds)
            )
            rates[scale] = {
                mode: best(scaled, some, rates[1.0][mode] or case.guess)[1]
                for mode, some in chosen.items()
            }
    rows: list[list[object]] = []
    for scale in SCALES:
        one, chunked, two = (rates[scale][mode] for mode in modes)
        goal = case.goal
        limits = f"{scale * goal.ttft_seconds:g} s, {scale * goal.tpot_seconds:g} s"
        row = [case.name, limits, one, chunked, two, _ratio(two, one), _ratio(two, chunked)]
        rows.append([*row, case.published if scale == 1.0 else ""])
    names = ", ".join(f"{mode} {next(iter(some))}" for mode, some in chosen.items())
    return [*rows, [f"served by: {names}", "", "", "", "", "", "", ""]]


def engine_server(engine: SimulatedEngine, tally: Tally) -> Serve:
    """Simulates one of the measured engines. Its time outside the device counts towards the first
    token."""
    front, fleet = engine.constants.front_seconds, engine.fleet()

    def serve(
        arrivals: Sequence[Arrival], lost: Callable[[RequestOutcome], bool]
    ) -> Sequence[RequestOutcome]:
        tally.runs += 1
        later = [replace(item, at_seconds=item.at_seconds + front) for item in arrivals]

        def earlier(outcome: RequestOutcome) -> RequestOutcome:
            return replace(outcome, arrival=outcome.arrival - front)

        found = simulate(fleet, later, enough=lambda outcome: lost(earlier(outcome)))
        return [earlier(outcome) for outcome in found.outcomes]

    return serve


Step = tuple[str, Serve, int]


def steps(tally: Tally) -> list[Step]:
    """Returns the deployments of OPT-13B, with their numbers of GPUs, from the paper's two engines
    to one engine on both sides. Each entry states what it changes."""
    constants = json.loads((RESULTS / "fidelity.json").read_text())["constants"]
    theirs = {name: from_report(starts()[name], constants[name]) for name in ("distserve", "vllm")}
    same = replace(theirs["vllm"], constants=theirs["distserve"].constants)
    shape, one, wide = geometry("opt-13b"), Instance(1), Instance(2)
    grouped = replace(shape, name="opt-13b, 10 kv heads", attention=GroupedAttention(40, 10, 128))
    return [
        ("vLLM, as measured: 1 x tp1", engine_server(theirs["vllm"], tally), 1),
        ("its batching with DistServe's kernels and host: 1 x tp1", engine_server(same, tally), 1),
        (
            "DistServe, as measured: 1 x tp2 -> 1 x tp1",
            engine_server(theirs["distserve"], tally),
            3,
        ),
        ("our engine, unified: 1 x tp1", tally.server(one_pool(shape, one, None)), 1),
        ("our engine, chunks of 512 fused: 1 x tp1", tally.server(one_pool(shape, one, 512)), 1),
        ("our engine, two pools: 1 x tp2 -> 1 x tp1", tally.server(two_pools(shape, wide, one)), 3),
        (
            "vLLM's batching with DistServe's kernels and host, but 1 x tp2",
            engine_server(replace(same, decode_tp=2), tally),
            2,
        ),
        ("our engine, unified: 1 x tp2", tally.server(one_pool(shape, wide, None)), 2),
        (
            "our engine, 10 KV heads in place of 40, unified: 1 x tp1",
            tally.server(one_pool(grouped, one, None)),
            1,
        ),
        (
            "our engine, 10 KV heads, two pools: 1 x tp2 -> 1 x tp1",
            tally.server(two_pools(grouped, wide, one)),
            3,
        ),
    ]


def stepped(some: Sequence[Step], requests: int) -> list[list[object]]:
    """Returns rows with the ShareGPT rates of these deployments, under several limits."""
    case, rows = CASES[0], []
    for name, serve, devices in some:
        row: list[object] = [name]
        for goal in (QUICK_START, case.goal, Goal(0.5, 0.1), Goal(0.25, 0.05)):
            load = Load(within_context(case.lengths(requests), CONTEXT), goal, requests)
            row.append(load.goodput(serve, 1.5 * devices) / devices)
        rows.append(row)
    return rows


def _ratio(ours: float, rival: float) -> object:
    return ours / rival if rival else "-"


def tables(small: bool) -> tuple[list[dict[str, object]], int]:
    tally, requests = Tally(), 150 if small else 1500
    return [
        {
            "title": "One engine on all sides: requests per second and GPU, 90 % within the limits",
            "columns": [
                "case", "TTFT, TPOT", "unified", "chunked", "two pools", "over unified",
                "over chunked", "published, over vLLM",
            ],
            "rows": [row for case in CASES for row in compared(case, requests, tally)],
        },
        {
            "title": "OPT-13B, ShareGPT, one thing changed at a time: requests per second and GPU",
            "columns": ["", "0.2 s, 0.1 s", "0.25 s, 0.1 s", "0.5 s, 0.1 s", "0.25 s, 0.05 s"],
            "rows": stepped(steps(tally), requests),
        },
    ], tally.runs  # fmt: skip
