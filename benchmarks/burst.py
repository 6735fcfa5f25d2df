"""Do the advised pools follow a burst without swinging? The load of dynamo#10528, where prefill
never grew: 8,000 tokens in, 1,000 out, from 1 to 8 requests a second within 900 s, and back.

    python -m benchmarks.burst    # results/burst.json and burst.png, some minutes

Virtual time. The controller, its inputs and the advice are the live code; the autoscaler is
deploy/keda.yaml (`jdisagg/simulator/elastic.py`). Reports what the autoscaler did and why, for each
pool how often it turned from growing to shrinking and from shrinking to growing, and the share of
requests within the objective."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from absl import app

from benchmarks.measure import RESULTS, machine, save
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.router.elastic import ROLES, ElasticConfig
from jdisagg.router.elastic_signals import SloTarget
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.elastic import Autoscaler, autoscaled
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.plots import new_figure
from jdisagg.simulator.report import SloLimits, attainment
from jdisagg.simulator.run import Hook, Result, simulate
from jdisagg.simulator.workloads import Arrival

NAME = "burst"  # of the results
PROMPT, OUTPUT = 8000, 1000
LOW, HIGH = 1.0, 8.0  # requests a second
# Seconds: at LOW, up, at HIGH, down, at LOW again.
PHASES = (300.0, 900.0, 300.0, 900.0, 1200.0)
SLO = SloTarget(ttft_seconds=3.0, tpot_seconds=0.035)
SAMPLE_SECONDS = 5.0


def rate_at(seconds: float, high: float = HIGH) -> float:
    """Returns the requests a second at a time of the burst."""
    ends = np.cumsum((0.0, *PHASES))
    return float(np.interp(seconds, ends, (LOW, LOW, high, high, LOW, LOW)))


def burst(high: float = HIGH) -> list[Arrival]:
    """Returns Poisson arrivals whose rate follows `rate_at`."""
    random = np.random.default_rng(0)
    arrivals: list[Arrival] = []
    seconds = 0.0
    while (seconds := seconds + random.exponential(1 / high)) < sum(PHASES):
        if random.random() < rate_at(seconds, high) / high:
            arrivals.append(Arrival(seconds, PROMPT, OUTPUT))
    return arrivals


@dataclass
class Followed:
    """A run, and what was seen of it. `workers`: (seconds, prefill workers, decode workers)."""

    result: Result
    workers: list[tuple[float, int, int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def sizes(self, role: WorkerRole) -> list[int]:
        return [(prefill, decode)[ROLES.index(role)] for _, prefill, decode in self.workers]

    @property
    def within(self) -> float:
        return attainment(self.result.outcomes, SloLimits(SLO.ttft_seconds, SLO.tpot_seconds))

    @property
    def worker_hours(self) -> float:
        return sum(sum(sample[1:]) for sample in self.workers) * SAMPLE_SECONDS / 3600


def turns(sizes: Sequence[int]) -> tuple[int, int]:
    """Returns how often a pool turned from growing to shrinking, and from shrinking to growing."""
    steps = [after - before for before, after in zip(sizes, sizes[1:], strict=False)]
    signs = [step > 0 for step in steps if step]
    pairs = list(zip(signs, signs[1:], strict=False))
    return pairs.count((True, False)), pairs.count((False, True))


def followed(
    arrivals: Sequence[Arrival], counts: tuple[int, int] = (1, 1), scaled: bool = True
) -> Followed:
    """Runs the burst on pools that start with `counts` workers."""
    card, instance = accelerator("h100"), replace(INSTANCE, layout=Layout(tp=2))
    prefill, decode = (Pool(count, card, instance) for count in counts)
    fleet = Fleet(geometry("qwen3-32b"), decode, prefill)
    run = Followed(Result((), (), 0.0, 0))

    async def watch(cluster: SimulatedCluster) -> None:
        while True:
            roles = [process.card.role for process in cluster.processes.values()]
            run.workers.append((cluster.clock.now(), *(roles.count(role) for role in ROLES)))  # type: ignore[arg-type]
            await cluster.clock.sleep(SAMPLE_SECONDS)

    hooks: list[Hook] = [watch]
    if scaled:
        config = ElasticConfig(slo=SLO)
        hooks.append(
            autoscaled(config, Autoscaler(), lambda now, text: run.said.append(f"{now:.0f} {text}"))
        )
    run.result = simulate(fleet, arrivals, hooks=hooks, gaps=False)
    return run


def figures(run: Followed) -> dict[str, object]:
    latencies = [item.ttft for item in run.result.outcomes if item.ttft is not None]
    paces = [item.tpot for item in run.result.outcomes if item.tpot is not None]
    return {
        "within_objective": round(run.within, 4),
        "ttft_p50_p90_p99": [round(float(x), 3) for x in np.quantile(latencies, (0.5, 0.9, 0.99))],
        "tpot_p50_p90_p99": [round(float(x), 4) for x in np.quantile(paces, (0.5, 0.9, 0.99))],
        "worker_hours": round(run.worker_hours, 2),
        "pools": {
            role.value: {
                "most": max(run.sizes(role)),
                "at_end": run.sizes(role)[-1],
                "turns_down_and_up": turns(run.sizes(role)),
            }
            for role in ROLES
        },
        "unfinished": sum(item.end != "finished" for item in run.result.outcomes),
        "pages_lost": run.result.pages_lost,
    }


def main(_: list[str]) -> None:
    arrivals, where = burst(), machine()
    run = followed(arrivals)
    told = {"requests": len(arrivals), "followed": figures(run), "said": run.said}
    print(json.dumps(told, indent=1))
    save(NAME, {"machine": where, **told})
    draw(run.said)


def draw(said: Sequence[str]) -> None:
    """Plots the sizes that the autoscaler asked for, beside the load."""
    figure, axes = new_figure()
    end = sum(PHASES)
    for role in ROLES:
        asked = [re.match(rf"(\d+) {role.value} [+-]\d+ to (\d+):", text) for text in said]
        changes = [(float(one[1]), int(one[2])) for one in asked if one is not None]
        seconds, sizes = zip((0.0, 1), *changes, (end, changes[-1][1]), strict=True)
        axes.step(seconds, sizes, where="post", label=f"{role.value} workers asked for")
    times = np.linspace(0.0, end, 500)
    axes.plot(times, [rate_at(at) for at in times], "k:", label="requests a second")
    axes.set_xlabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(RESULTS / f"{NAME}.png", dpi=120)


if __name__ == "__main__":
    app.run(main)
