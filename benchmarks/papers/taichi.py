"""TaiChi (arXiv 2508.01989): instances of two kinds that both prefill and decode, compared with one
chunked pool and with two pools, under limits that stress TTFT, TPOT, or neither.

Our version has prefill workers, which run long chunks and do not decode, and decode workers that
prefill in short chunks what the router leaves to them (`StudyPool.prefills`), within the bound on a
step. Two features of TaiChi are missing here: decoding on the instances with long chunks, and
sequences that move between the kinds while they run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.papers.runs import Load, Serve, Tally, best
from benchmarks.simulator_engines.cluster import simulate
from benchmarks.simulator_engines.fleet import StudyFleet, StudyPool
from jdisagg.config import Mode, RoutingConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.trials import requests_at, settled
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival

DATA = Path(__file__).resolve().parent.parent / "data"
MODEL, CARD, DEVICES = "qwen3-14b", accelerator("a100"), 8
GUESS = 1.5  # requests per second and GPU
WHOLE = 8192
REGIMES = {
    "first token tight": Goal(0.5, 0.2),
    "balanced": Goal(1.0, 0.07),
    "tokens tight": Goal(4.0, 0.045),
}
ONE_POOL_CHUNKS = (256, 512, 2048)
SPLITS = (2, 3, 4)  # prefill workers of two pools
MIXED_SPLITS, MIXED_CHUNKS = (1, 2, 3), (256, 512)


def workload() -> Sequence[Arrival]:
    return read_trace(DATA / "azure2023_conv_slice.csv.gz")


def pool(count: int, chunk: int, prefills: bool = False) -> Pool:
    instance = replace(INSTANCE, chunk_tokens=chunk, min_chunk_tokens=min(256, chunk))
    return StudyPool(count, CARD, instance, prefills=prefills)


def one_pool(chunk: int, fused: bool = True) -> Fleet:
    return Fleet(geometry(MODEL), pool(DEVICES, chunk), mode=Mode.CHUNKED, fused=fused)


def two_pools(prefills: int) -> Fleet:
    decode = pool(DEVICES - prefills, WHOLE)
    return Fleet(geometry(MODEL), decode, pool(prefills, WHOLE), overlap=4)


def two_kinds(prefills: int, chunk: int, bound: float | None, fused: bool = True) -> Fleet:
    """Returns a fleet with two kinds of instances. `bound`: longest step, in seconds, that the
    router allows on a decode worker that runs a chunk."""
    routing = RoutingConfig(tpot_slo_seconds=bound)
    decode = pool(DEVICES - prefills, chunk, prefills=True)
    return StudyFleet(
        geometry(MODEL), decode, pool(prefills, WHOLE), overlap=4, fused=fused, routing=routing
    )


def contenders(tally: Tally, goal: Goal) -> dict[str, dict[str, tuple[Serve, int]]]:
    """Returns the deployments that are compared, by kind."""

    def serve(fleet: Fleet) -> tuple[Serve, int]:
        return tally.server(fleet), DEVICES

    return {
        "one pool": {f"chunk {chunk}": serve(one_pool(chunk)) for chunk in ONE_POOL_CHUNKS},
        "two pools": {f"{count} -> {DEVICES - count}": serve(two_pools(count)) for count in SPLITS},
        "two kinds": {
            f"{count} -> {DEVICES - count}, chunk {chunk}": serve(
                two_kinds(count, chunk, goal.tpot_seconds)
            )
            for count in MIXED_SPLITS
            for chunk in MIXED_CHUNKS
        },
    }


def at_decode(fleet: Fleet, load: Load, rate: float) -> float:
    """Returns the fraction of prompts that decode workers prefilled."""
    arrivals = requests_at(load.workload, rate, min(load.requests, 800), "poisson", load.seed)
    judged = settled(simulate(fleet, arrivals).outcomes, 10.0)
    return sum(item.prefill == item.decode for item in judged) / len(judged)


def regimes(requests: int, tally: Tally) -> tuple[list[list[object]], str]:
    """Returns the rows, and the best deployment with two kinds under balanced limits."""
    rows: list[list[object]] = []
    chosen = ""
    for name, goal in REGIMES.items():
        load = Load(workload(), goal, requests)
        found = {kind: best(load, some, GUESS) for kind, some in contenders(tally, goal).items()}
        one, two, kinds = (found[kind] for kind in found)
        rival = max(one[1], two[1])
        part: object = "-"
        if kinds[1]:
            count, chunk = _parsed(kinds[0])
            fleet = two_kinds(count, chunk, goal.tpot_seconds)
            part = at_decode(fleet, load, kinds[1] * DEVICES)
        if name == "balanced":
            chosen = kinds[0]
        limits = f"{goal.ttft_seconds:g} s, {goal.tpot_seconds:g} s"
        row: list[object] = [name, limits]
        for winner, rate in (one, two, kinds):
            row += [rate, winner]
        rows.append([*row, kinds[1] / rival if rival else "-", part])
    return rows, chosen


def changed(requests: int, tally: Tally, chosen: str) -> list[list[object]]:
    """Returns rows under balanced limits, for the chosen deployment and for changes of one property
    at a time."""
    goal = REGIMES["balanced"]
    load = Load(workload(), goal, requests)
    count, chunk = _parsed(chosen) if chosen != "none" else (3, 256)
    bound = goal.tpot_seconds
    fleets = {
        f"two kinds, {count} -> {DEVICES - count}, chunk {chunk}": two_kinds(count, chunk, bound),
        "the router bounds no step": two_kinds(count, chunk, None),
        "the router bounds steps at twice the limit": two_kinds(count, chunk, 2 * bound),
        "chunks and steps in turns, as our engine has it": two_kinds(count, chunk, bound, False),
        "decode workers do not prefill": two_pools(count),
        f"two kinds, {count + 1} -> {DEVICES - count - 1}": two_kinds(count + 1, chunk, bound),
        "no prefill workers: one pool": one_pool(chunk),
        "one pool, in turns": one_pool(chunk, False),
    }
    rows: list[list[object]] = []
    for name, fleet in fleets.items():
        rate = load.goodput(tally.server(fleet), GUESS * DEVICES)
        part = at_decode(fleet, load, rate) if rate and fleet.prefill else "-"
        rows.append([name, rate / DEVICES, part])
    return rows


def _parsed(name: str) -> tuple[int, int]:
    """Returns (prefill workers, chunk) from the name of a deployment with two kinds."""
    split, _, chunk = name.partition(", chunk ")
    return int(split.split(" ")[0]), int(chunk)


def tables(small: bool) -> tuple[list[dict[str, object]], int]:
    tally, requests = Tally(), 150 if small else 700
    rows, chosen = regimes(requests, tally)
    return [
        {
            "title": (
                f"{MODEL} on {DEVICES} A100, Azure's conversation: requests per second and GPU"
            ),
            "columns": [
                "limits lean to", "TTFT, TPOT", "one pool", "of", "two pools", "of", "two kinds",
                "of", "two kinds over the better", "prompts at decode workers",
            ],
            "rows": rows,
        },
        {
            "title": "Balanced limits, one thing changed at a time",
            "columns": ["", "requests per second and GPU", "prompts at decode workers"],
            "rows": changed(requests, tally, chosen),
        },
    ], tally.runs  # fmt: skip
