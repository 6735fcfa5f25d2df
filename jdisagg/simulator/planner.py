"""Should one disaggregate, with how many of each, in which layout? All candidates by arithmetic,
the best few of each mode by simulation.

`Planner.plan` lists what fits (`plan_candidates`), ranks it by its bounds (`plan_bounds`), keeps
the best `finalists` of each mode, and finds for each of these by bisection the highest rate at
which the goal is attained in the simulator. A `Plan` holds them ranked by that rate for each
accelerator that the site has (idle ones count), what binds each, and the verdict in words
(`plan_verdict`).

`plan_trials` says how one rate is judged.

Knows the simulator only as a `Runner`; prints nothing. Deterministic by seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jdisagg.config import Mode
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.simulator.plan_bounds import Bounds, Demand, Estimator, Goal
from jdisagg.simulator.plan_candidates import (
    Candidate,
    Fitting,
    NothingFits,
    Site,
    fitting_layouts,
    one_pool,
    two_pools,
)
from jdisagg.simulator.plan_trials import TOLERANCE, Process, Runner, Trier
from jdisagg.simulator.plan_verdict import Finding, Trial, binding_limit, no_rate, verdict
from jdisagg.simulator.report import rate_at_attainment
from jdisagg.simulator.workloads import Arrival

ALL_MODES = (Mode.DISAGGREGATED, Mode.CHUNKED, Mode.UNIFIED)
MOST_RUNS = 14  # of one candidate


@dataclass(frozen=True, slots=True)
class Plan:
    """`findings` ranked, best first. `considered`: candidates priced by arithmetic. `left_out`:
    modes with no candidate, and why."""

    findings: tuple[Finding, ...]
    considered: int
    verdict: str
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Search:
    """What a planner looks at, and how closely.

    Args:
        dtype: of weights and KV. codec: how KV travels between two pools.
        modes: those to compare.
        finalists: candidates of each mode that are simulated.
        most_requests: of one simulated run.
        fused: chunked prefill is priced with a chunk and a decode step in one program, the best that
            one pool can do; not as this engine takes turns. The runner must do the same.
        arrivals: the process by which requests come.
        seed: of everything drawn at random.

    Raises:
        ConfigError: nothing could be found with these.
    """

    dtype: str = "bfloat16"
    codec: str = "none"
    modes: tuple[Mode, ...] = ALL_MODES
    finalists: int = 3
    most_requests: int = 6000
    fused: bool = True
    arrivals: Process = "poisson"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.finalists < 1 or self.most_requests < 10:
            raise ConfigError(
                f"planner: finalists={self.finalists} must be at least 1 and"
                f" most_requests={self.most_requests} at least 10"
            )
        if not self.modes:
            raise ConfigError(
                "planner: no mode to look at; give one of disaggregated, chunked, unified"
            )


class Planner:
    """`progress(text, done, total)` is called as work goes on."""

    def __init__(
        self,
        geometry: CostGeometry,
        site: Site,
        goal: Goal,
        runner: Runner,
        search: Search = Search(),
        progress: Callable[[str, int, int], None] = lambda text, done, total: None,
    ) -> None:
        self._geometry, self._site, self._goal, self._runner = geometry, site, goal, runner
        self._search, self._progress = search, progress

    def plan(self, workload: Sequence[Arrival]) -> Plan:
        """Raises NothingFits, with the reason, where there is no candidate or none that attains the
        goal at any rate."""
        demand = Demand.of(workload)
        fitting = fitting_layouts(
            self._geometry, self._site, demand.longest_tokens, self._search.dtype
        )
        search = self._search
        estimator = Estimator(self._site, demand, self._goal, fitting, search.codec, search.fused)
        chosen, considered, left_out = self._chosen(fitting, estimator)
        total = len(chosen) * MOST_RUNS
        findings: list[Finding] = []
        for index, (candidate, limits) in enumerate(chosen):
            said = f"{candidate.mode.value} {candidate.name}"

            def tried(runs: int, said: str = said, index: int = index) -> None:
                self._progress(said, index * MOST_RUNS + runs, total)

            findings.append(self._measured(candidate, limits, estimator, workload, tried))
        self._progress("done", total, total)
        findings.sort(
            key=lambda item: (-item.per_accelerator, item.candidate.mode is Mode.DISAGGREGATED)
        )
        if not findings[0].rate:
            raise NothingFits(no_rate(findings, self._goal))
        return Plan(tuple(findings), considered, verdict(findings, estimator, left_out), left_out)

    def _chosen(
        self, fitting: list[Fitting], estimator: Estimator
    ) -> tuple[list[tuple[Candidate, Bounds]], int, tuple[str, ...]]:
        """The best by arithmetic of each mode (of chunked: of each layout its best chunk size
        only)."""
        listed = [*one_pool(fitting, self._site, self._search.modes)]
        listed += two_pools(fitting, self._site) if Mode.DISAGGREGATED in self._search.modes else ()
        priced: list[tuple[Candidate, Bounds]] = []
        for index, candidate in enumerate(listed):
            if index % 50 == 0:
                self._progress(f"{len(listed)} candidates by arithmetic", 0, len(listed))
            priced.append((candidate, estimator.bounds(candidate)))
        priced.sort(key=lambda item: -item[1].rate)
        chosen: list[tuple[Candidate, Bounds]] = []
        left_out: list[str] = []
        chunked: dict[Layout, tuple[Candidate, Bounds]] = {}
        for item in priced:
            if item[0].mode is Mode.CHUNKED:
                chunked.setdefault(item[0].decode, item)
        for mode in self._search.modes:
            best = (
                list(chunked.values())
                if mode is Mode.CHUNKED
                else [item for item in priced if item[0].mode is mode]
            )
            if not best:
                needed = 2 * min(item.layout.devices for item in fitting)
                left_out.append(
                    f"{mode.value}: two pools need {needed} accelerators at least, there are"
                    f" {self._site.accelerators}"
                )
            chosen += best[: self._search.finalists]
        return chosen, len(listed), tuple(left_out)

    def _measured(
        self,
        candidate: Candidate,
        limits: Bounds,
        estimator: Estimator,
        workload: Sequence[Arrival],
        tried: Callable[[int], None],
    ) -> Finding:
        trials: list[Trial] = []

        def trial(rate: float) -> float:
            trials.append(self.trial(candidate, workload, estimator.demand, rate))
            tried(len(trials))
            return trials[-1].lasting_attainment

        # A bound of 0 says that arithmetic sees no way: the simulator may still, at a low rate.
        lowest = 2 / (
            self._goal.ttft_seconds + estimator.demand.steps_mean * self._goal.tpot_seconds
        )
        rate = highest_rate(trial, max(limits.rate, lowest), self._goal.attainment)
        wanted = self._goal.attainment
        met = [
            item
            for item in trials
            if item.lasting_attainment >= wanted and item.rate <= rate * (1 + 1e-9)
        ]
        shown = (
            max(met, key=lambda item: item.rate) if met else min(trials, key=lambda item: item.rate)
        )
        beyond = [item for item in trials if item.lasting_attainment < wanted]
        nearest = min(beyond, key=lambda item: item.rate, default=None)
        binding = binding_limit(nearest, limits) if nearest else limits.binding[0]
        kv_tokens = estimator.rooms[candidate.decode]
        ranks = candidate.decode_instances * candidate.decode.dp
        held = (
            shown.rate
            * estimator.demand.steps_mean
            * (shown.report.tpot.mean or 0.0)
            * estimator.demand.context_mean
        )
        return Finding(
            candidate=candidate,
            bounds=limits,
            rate=rate,
            per_accelerator=rate / self._site.accelerators,
            trials=tuple(sorted(trials, key=lambda item: item.rate)),
            report=shown.report,
            binding=binding,
            link_share=limits.link_share * rate,
            kv_share=held / (kv_tokens * ranks),
            kv_tokens=kv_tokens,
            short=nearest is not None and nearest.short,
        )

    def holds(self, finding: Finding, workload: Sequence[Arrival], runner: Runner) -> bool:
        """Whether the goal is attained with another runner too, at the rate of the run that the
        finding shows."""
        if not finding.rate:
            return True
        shown = next(item for item in finding.trials if item.report is finding.report)
        again = self.trial(finding.candidate, workload, Demand.of(workload), shown.rate, runner)
        return again.lasting_attainment >= self._goal.attainment

    def trial(
        self,
        candidate: Candidate,
        workload: Sequence[Arrival],
        demand: Demand,
        rate: float,
        runner: Runner | None = None,
    ) -> Trial:
        """One rate, in requests a second, judged as `plan_trials` says."""
        search = self._search
        tries = Trier(
            self._goal, workload, demand, search.most_requests, search.arrivals, search.seed
        )
        return tries.trial(runner or self._runner, candidate, rate)


def highest_rate(attained: Callable[[float], float], guess: float, wanted: float) -> float:
    """The highest rate at which `attained(rate)` is at least `wanted`, within TOLERANCE, starting
    from `guess`; 0 where it is not even at a hundredth of the guess. Assumes that attainment falls
    with the rate; at most MOST_RUNS calls."""
    points: list[tuple[float, float]] = []

    def met(rate: float) -> bool:
        points.append((rate, attained(rate)))
        return points[-1][1] >= wanted

    low, high, rate = 0.0, 0.0, 0.8 * guess
    while len(points) < MOST_RUNS and not (low and high):
        if met(rate):
            low, rate = rate, rate * 1.3
        elif rate < 0.4 * guess:
            return 0.0
        else:
            high, rate = rate, rate / 1.6 if rate > 0.6 * guess else 0.01 * guess
    while low and high > low * (1 + TOLERANCE) and len(points) < MOST_RUNS:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if met(middle) else (low, middle)
    return (
        rate_at_attainment([point for point in points if point[0] in (low, high)], wanted)
        if low
        else 0.0
    )
