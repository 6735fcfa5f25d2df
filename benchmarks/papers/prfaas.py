"""PrfaaS (Qin et al., arXiv 2604.15039): long prompts are prefilled in another data centre on
faster cards, and their KV is sent over Ethernet. Short prompts are prefilled locally.

The model has attention in every fourth layer, so its KV is small. 32 H200 prefill at one site and
64 H20 are at another, with a link that all hand-offs share. They are compared with 96 H20 at one
site. The live router chooses the prefill site by predicted times, or by a threshold on the prompt's
uncached tokens (`routing.far_prefill_tokens`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.papers.runs import Load, Serve, Tally, best
from benchmarks.simulator_engines.cluster import simulate
from benchmarks.simulator_engines.fleet import StudyFleet, StudyPool
from jdisagg.config import RoutingConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import LINKS, Accelerator, Link, accelerator
from jdisagg.layout.axes import Layout
from jdisagg.simulator.fleet import INSTANCE
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.trials import requests_at, settled
from jdisagg.simulator.report import RequestOutcome
from jdisagg.simulator.workloads import Arrival, LogNormal, poisson

H200 = accelerator("h200")
# 148 TFLOP/s in bfloat16, 4.0 TB/s, 96 GB; what programs reach of it: as on H200.
H20 = replace(H200, name="h20", peak_flops=148e12, memory_bytes_per_second=4.0e12,
              memory_bytes=96e9)  # fmt: skip
# Matrices in fp8, as they must be for eight H20 to hold them.
MODEL = replace(geometry("qwen3.5-397b-a17b"), matrix_bits=8)
ETHERNET = replace(LINKS["ethernet-100g"], name="between sites, 100 Gb/s", latency_seconds=1e-3)
GOAL = Goal(8.0, 0.025)  # 40 tokens per second, as in the paper; its TTFT is not limited
REMOTE, LOCAL = 4, 8  # instances of 8 H200 and of 8 H20
HOMOGENEOUS = 12  # instances of 8 H20 instead of all of them
OVERLAP = 8  # groups of layers that leave as they are computed
THRESHOLDS = (16384, 32768)
GUESS = 5.0


def workload(count: int) -> Sequence[Arrival]:
    """Returns requests with log-normal prompts (mu 9.9, sigma 1.0) of 128 to 131,072 tokens; longer
    and shorter prompts are omitted. The mean is 27,000 tokens. Answers have 1,024 tokens."""
    lengths = LogNormal(np.exp(9.9), 1.0, 1024, 0.0, longest=1 << 24)
    drawn = poisson(1.0, 2 * count, lengths, seed=3)
    return [item for item in drawn if 128 <= item.prompt_tokens <= 131072][:count]


def pool(count: int, card: Accelerator, site: str = "") -> StudyPool:
    instance = replace(
        INSTANCE, layout=Layout(tp=8, ep=8), page_size=64, chunk_tokens=8192, min_chunk_tokens=256
    )
    return StudyPool(count, card, instance, site=site)


def homogeneous(prefills: int, instances: int = HOMOGENEOUS) -> StudyFleet:
    return StudyFleet(MODEL, pool(instances - prefills, H20), pool(prefills, H20), overlap=OVERLAP)


def naive(link: Link = ETHERNET) -> StudyFleet:
    """Returns a fleet in which all prompts are prefilled at the far site."""
    far = pool(REMOTE, H200, "far")
    return StudyFleet(MODEL, pool(LOCAL, H20), far, site_link=link, overlap=OVERLAP)


def selective(prefills: int, threshold: int = 0, link: Link = ETHERNET) -> StudyFleet:
    """Returns a fleet in which `prefills` near instances prefill too. With `threshold` 0, the
    router's predicted times decide."""
    return StudyFleet(
        MODEL,
        pool(LOCAL - prefills, H20),
        pool(prefills, H20),
        more_prefill=(pool(REMOTE, H200, "far"),),
        site_link=link,
        overlap=OVERLAP,
        routing=RoutingConfig(far_prefill_tokens=threshold),
    )


def served(fleet: StudyFleet, load: Load, rate: float, count: int) -> list[RequestOutcome]:
    arrivals = requests_at(load.workload, rate, count, "poisson", load.seed)
    return settled(simulate(fleet, arrivals).outcomes, 30.0)


def went_far(outcome: RequestOutcome, fleet: StudyFleet) -> bool:
    pool = fleet.prefill
    near = pool.count if isinstance(pool, StudyPool) and not pool.site else 0
    return int(outcome.prefill.rpartition("-")[2]) >= near


def divided(outcomes: Sequence[RequestOutcome], fleet: StudyFleet) -> tuple[float, int, float]:
    """Returns the fraction of prompts prefilled at the far site, the prompt length that separates
    far from near prompts best, and the fraction of prompts that this length classifies
    correctly."""
    lengths = np.array([item.prompt_tokens for item in outcomes])
    far = np.array([went_far(item, fleet) for item in outcomes])
    marks = np.unique(np.concatenate([[0], np.quantile(lengths, np.linspace(0, 1, 101))]))
    right = [float(np.mean((lengths >= mark) == far)) for mark in marks]
    at = int(np.argmax(right))
    return float(far.mean()), int(marks[at]), right[at]


def told(
    name: str, fleet: StudyFleet, load: Load, rate: float, at: float, tally: Tally
) -> list[object]:
    """Returns a row: goodput, and, at a common rate, the times to first token and the division of
    prompts."""
    tally.runs += 1
    outcomes = served(fleet, load, at, min(load.requests, 800))
    ttft = [item.ttft for item in outcomes if item.ttft is not None]
    tpot = [item.tpot for item in outcomes if item.tpot is not None]
    row: list[object] = [name, rate, *(float(np.percentile(ttft, part)) for part in (50, 90))]
    row.append(1e3 * float(np.percentile(tpot, 90)))
    if not fleet.site_link:
        return [*row, "-", "-", "-"]
    part, threshold, right = divided(outcomes, fleet)
    return [*row, part, threshold if 0 < part < 1 else "-", right if 0 < part < 1 else "-"]


@dataclass(frozen=True)
class Chosen:
    """The best deployment that routes by predicted times: number of near prefill instances, its
    goodput, and the common `rate` at which all deployments are reported."""

    prefills: int
    rate: float
    carried: float


def compared(load: Load, tally: Tally) -> tuple[list[list[object]], Chosen]:
    """Returns the rows of all deployments, and the deployment with which the others are
    compared."""

    def servers(fleets: dict[str, StudyFleet]) -> dict[str, tuple[Serve, int]]:
        return {name: (tally.server(fleet), 1) for name, fleet in fleets.items()}

    alone = {f"64 H20, {count} + {LOCAL - count}": homogeneous(count, LOCAL) for count in (6,)}
    same = {f"96 H20, {count} + {HOMOGENEOUS - count}": homogeneous(count) for count in (9, 10)}
    far = {"32 H200 far + 64 H20, all far": naive()}
    priced = {
        f"32 H200 far + 64 H20, {count} + {LOCAL - count}, by price": selective(count)
        for count in (2, 3, 4)
    }
    groups = [alone, same, far, priced]
    found = [best(load, servers(group), GUESS) for group in groups]
    near = priced[found[3][0]].prefill if found[3][0] in priced else None
    base, at = found[1][1], 0.9 * found[1][1]
    fleets = [group.get(name) for group, (name, _) in zip(groups, found, strict=True)]
    rows: list[list[object]] = []
    for (name, rate), fleet in zip(found, fleets, strict=True):
        if fleet is not None:
            rows.append([*told(name, fleet, load, rate, at, tally), rate / base if base else "-"])
    return rows, Chosen(near.count if near else 2, at, found[3][1])


def thresholds(load: Load, tally: Tally, chosen: Chosen) -> list[list[object]]:
    """Returns rows of the same instances, routed by predicted times (at two rates) and by fixed
    thresholds."""
    fleet, carried = selective(chosen.prefills), chosen.carried
    rows = [
        told("price", fleet, load, carried, chosen.rate, tally),
        told(f"price, told of at {carried:.3g} per second", fleet, load, carried, carried, tally),
    ]
    for threshold in THRESHOLDS:
        fleet = selective(chosen.prefills, threshold)
        rate = load.goodput(tally.server(fleet), chosen.carried or GUESS)
        rows.append(told(str(threshold), fleet, load, rate, chosen.rate, tally))
    return rows


def links(load: Load, tally: Tally, chosen: Chosen) -> list[list[object]]:
    """Returns rows for slower links, routed by predicted times and by a threshold."""
    rows: list[list[object]] = []
    for gigabits in (25,):
        link = replace(
            ETHERNET, name=f"between sites, {gigabits} Gb/s", bytes_per_second=gigabits * 1e9 / 8
        )
        for threshold in (0, THRESHOLDS[-1]):
            fleet = selective(chosen.prefills, threshold, link)
            rate = load.goodput(tally.server(fleet), (chosen.carried or GUESS) / 2)
            name = f"{gigabits} Gb/s, {f'from {threshold} tokens' if threshold else 'by price'}"
            rows.append(told(name, fleet, load, rate, chosen.rate, tally))
    return rows


def tables(small: bool) -> tuple[list[dict[str, object]], int]:
    tally, requests = Tally(), 120 if small else 500
    load = Load(workload(requests), GOAL, requests)
    rows, chosen = compared(load, tally)
    first = f"at {chosen.rate:.3g} per second: TTFT p50, s"
    near = f"{chosen.prefills} + {LOCAL - chosen.prefills} near instances"
    columns = ["goodput, requests per second", first, "p90, s", "TPOT p90, ms", "went far",
               "told apart at tokens", "rightly"]  # fmt: skip
    return [
        {
            "title": "Deployments, each in its best division (prefill + decode instances)",
            "columns": ["", *columns, "over 96 H20"],
            "rows": rows,
        },
        {
            "title": f"{near}: price against thresholds",
            "columns": ["far from so many tokens on", *columns],
            "rows": thresholds(load, tally, chosen),
        },
        {
            "title": "The same over slower links",
            "columns": ["", *columns],
            "rows": links(load, tally, chosen),
        },
    ], tally.runs
