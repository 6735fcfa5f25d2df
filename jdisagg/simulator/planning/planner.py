"""Plans whether to disaggregate, and the number and layout of the instances of each role.

The search has two levels. The first level ranks all candidates by stepping the cost model
(`ranking`, `stepped`), without those whose ceilings are too low (`bounds`). The second level
simulates live code. A `Plan` ranks the candidates by their rate per accelerator of the site, idle
accelerators included, simulated candidates first.

Goals that no candidate can attain are refused before any run (`never`)."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jdisagg.config import Mode
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.bounds import (
    SAMPLE,
    Bounds,
    Demand,
    Goal,
    RateCeilings,
    alone_seconds,
)
from jdisagg.simulator.planning.candidates import (
    WHOLE_CHUNK,
    Best,
    Candidate,
    Fitting,
    NothingFits,
    Site,
    check_priced,
    fitting_layouts,
    one_pool,
    short,
    two_kinds,
    two_pools,
)
from jdisagg.simulator.planning.measure import TOLERANCE, Measurer, Task
from jdisagg.simulator.planning.ranking import (
    STEPPED_REQUESTS,
    Spread,
    ranked_by_stepping,
    rate_with_error,
    resolved,
)
from jdisagg.simulator.planning.trials import Process, Runner, Runners, requests_needed
from jdisagg.simulator.planning.verdict import (
    HEADROOM,
    Finding,
    Trial,
    error_bars,
    headroom,
    no_rate,
    not_simulated,
    stepped_answer,
    verdict,
)
from jdisagg.simulator.workloads import Arrival, names_blocks

# A candidate is simulated if its stepped rate is at most this fraction below the stepped rate of
# the best candidate of its kind.
TIE = 0.02
# Nothing is simulated if a conclusive run needs more requests than this and than `most_requests`.
SIMULATED_REQUESTS = 10_000
COMPARED_REQUESTS = 1000  # of a stepped run of a plan with another link or other prompts
COMPARED_TOLERANCE = 0.08  # relative, of the rates that are compared
ALL_MODES = (Mode.DISAGGREGATED, Mode.CHUNKED, Mode.UNIFIED)


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of a planner's search.

    Attributes:
      findings: Simulated candidates, best first, and then the best stepped candidates; only the
        latter if nothing was simulated.
    """

    findings: tuple[Finding, ...]
    considered: int
    verdict: str
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Searched:
    """The first level of a planner's search: `stepped` are the candidates that come near the best
    of their mode, best first."""

    workload: Sequence[Arrival]
    ceilings: RateCeilings
    stepper: Measurer
    stepped: tuple[Finding, ...]
    considered: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Search:
    """Settings of a planner's search.

    Args:
        finalists: Largest number of candidates of each kind to simulate. Kinds are one pool and two
            pools, each without and with pipeline stages. Also the number of stepped candidates of
            each mode in the plan.
            most_requests: Cap on the number of requests of one simulated run. A run may have more
            if it would be inconclusive otherwise.
        fused: Whether the chunked mode runs a prefill chunk and a decode step as one program, or
            alternates them. Must equal the value of the `runner`.
        best: What candidates are ranked by: their rates, or rates per dollar or joule of the
            accelerators that they use.
    """

    dtype: str = "bfloat16"
    codec: str = "none"
    modes: tuple[Mode, ...] = ALL_MODES
    finalists: int = 3
    most_requests: int = 2000
    fused: bool = True
    arrivals: Process = "poisson"
    seed: int = 0
    best: Best = "rate"

    def __post_init__(self) -> None:
        if self.finalists < 1 or self.most_requests < 10:
            raise ConfigError(
                f"planner: finalists={self.finalists} must be at least 1 and"
                f" most_requests={self.most_requests} at least 10"
            )
        if not self.modes:
            raise ConfigError(
                "planner: modes must not be empty; give disaggregated, chunked or unified"
            )


class Told:
    """Receives the progress and the preliminary results of a planner."""

    def progress(self, text: str, done: int, total: int) -> None: ...

    def answer(self, text: str) -> None: ...


UNTOLD = Told()


def in_turn(measurer: Measurer, tasks: Sequence[Task]) -> Iterator[tuple[int, Finding | None]]:
    for index, task in enumerate(tasks):
        yield index, measurer.measured(task)


class Planner:
    def __init__(
        self,
        geometry: CostGeometry,
        site: Site,
        goal: Goal,
        runners: Runners,
        search: Search = Search(),
        told: Told = UNTOLD,
        spread: Spread = in_turn,
    ) -> None:
        """Raises ConfigError if a price or power that the search needs is unknown."""
        check_priced(site, search.best)
        self._geometry, self._site, self._goal, self._runners = geometry, site, goal, runners
        self._search, self._told, self._spread = search, told, spread

    @property
    def context_tokens(self) -> int:
        """The model's context length."""
        return self._geometry.context_tokens

    def plan(self, workload: Sequence[Arrival]) -> Plan:
        """Blocks until all simulations have ended. Raises NothingFits, with the reason, if no
        candidate fits or attains the goal at any rate."""
        return self.simulated(self.searched(workload))

    def searched(self, workload: Sequence[Arrival]) -> "Searched":
        """Steps the candidates. Raises NothingFits, with the reason, if none fits."""
        ceilings = self._ceilings(workload)
        if reason := never(ceilings, names_blocks(workload)):
            raise NothingFits(reason)
        priced = self._priced(ceilings)
        left_out = self._left_out(ceilings.fitting, priced)
        if not priced:
            raise NothingFits("; ".join(left_out))
        stepper = self._measurer(workload, ceilings.demand, self._runners.stepped)
        stepped = self._stepped(priced, stepper, ceilings)
        self._told.answer(stepped_answer(stepped))
        return Searched(workload, ceilings, stepper, tuple(stepped), len(priced), left_out)

    def excess(self, search: "Searched") -> int:
        """Returns the number of requests that a conclusive simulation needs, or 0 if they are not
        too many."""
        needed = requests_needed(search.stepped[0]) if search.stepped else 0
        return needed if needed > max(SIMULATED_REQUESTS, self._search.most_requests) else 0

    def simulated(
        self,
        search: "Searched",
        wanted: Callable[[Finding], bool] = lambda finding: True,
        excess: int | None = None,
    ) -> Plan:
        """Simulates the best candidates of each kind whose best one is `wanted`; if none is, the
        plan has stepped candidates alone. Raises NothingFits if none attains the goal. `excess`: as
        returned by `excess`, of all plans that are compared with this one; by default of this one.
        If it is not 0, nothing is simulated."""
        stepped, stepper, ceilings = search.stepped, search.stepper, search.ceilings
        measurer = self._measurer(search.workload, ceilings.demand)
        found = _Found(self._site, self._told)
        kinds = [kind for kind in _by_kind(stepped) if wanted(kind[0])]
        if not kinds:
            return Plan(tuple(self._rows(stepped, found)), search.considered, "", search.left_out)
        needed = self.excess(search) if excess is None else excess
        simulated = not needed
        if simulated:
            kinds = [_layouts_once(kind)[: self._search.finalists] for kind in kinds]
            self._simulate(measurer, [resolved(stepper, kind) for kind in kinds], found)
        else:
            for kind in kinds:
                found.came(_task(kind[0]), kind[0])
        self._told.progress("done", 1, 1)
        findings = found.ranked
        best = findings[0]
        if not best.rate:
            raise NothingFits(no_rate(findings, self._goal))
        stay = best.report.latency.mean or 0.0
        source = measurer if simulated else stepper
        below = source.report(best.candidate, HEADROOM * best.rate, stay)
        said = verdict(findings, ceilings, search.left_out, self._search.fused)
        said = f"{said} {headroom(below)}"
        if not simulated:
            said = f"{said} {not_simulated(needed)}"
        if bars := self._error_bars(stepper, stepped, best):
            said = f"{said} {bars}"
        findings += self._rows(stepped, found)
        return Plan(tuple(findings), search.considered, said, search.left_out)

    def stepped(self, workload: Sequence[Arrival]) -> list[Finding]:
        """Returns the candidates that come near the best of their mode by stepping, best first."""
        ceilings = self._ceilings(workload)
        stepper = self._measurer(workload, ceilings.demand, self._runners.stepped)
        return self._stepped(self._priced(ceilings), stepper, ceilings)

    def stepped_rate(self, finding: Finding, workload: Sequence[Arrival]) -> float:
        """Returns about the rate of a finding's candidate by stepping another workload; 0 if it
        does not fit."""
        candidate = finding.candidate
        try:
            ceilings = self._ceilings(workload)
        except NothingFits:
            return 0.0
        fits = candidate.prefill is None or candidate.prefill in ceilings.models
        if candidate.decode not in ceilings.rooms or not fits:
            return 0.0
        bounds, room = ceilings.bounds(candidate), ceilings.rooms[candidate.decode]
        stepper = self._measurer(workload, ceilings.demand, self._runners.stepped)
        expected = finding.rate * bounds.rate / finding.bounds.rate if finding.bounds.rate else 0.0
        coarse = replace(stepper, most_requests=COMPARED_REQUESTS, tolerance=COMPARED_TOLERANCE)
        found = coarse.measured(Task(candidate, bounds, room, expected=expected))
        return found.rate if found else 0.0

    def _stepped(
        self, priced: Sequence[tuple[Candidate, Bounds]], stepper: Measurer, ceilings: RateCeilings
    ) -> list[Finding]:
        told = self._told.progress
        return ranked_by_stepping(priced, stepper, ceilings.rooms, self._spread, told, self._weight)

    def _weight(self, candidate: Candidate) -> float:
        weight = self._site.spent(candidate, self._search.best)
        assert weight, "checked at the start"
        return weight

    def _simulate(
        self, measurer: Measurer, kinds: Sequence[Sequence[Finding]], found: "_Found"
    ) -> None:
        leaders = [_task(kind[0], expected=True) for kind in kinds]
        self._measure(measurer, leaders, found)
        while tasks := [
            _task(item, rival=found.best(kind) * item.weight)
            for kind in kinds
            for item in kind
            if item.candidate not in found.tried
            and item.value > min((1 - TIE) * kind[0].value, (1 + TOLERANCE) * found.best(kind))
        ]:
            self._measure(measurer, tasks, found)

    def _error_bars(self, stepper: Measurer, stepped: Sequence[Finding], best: Finding) -> str:
        own = next((item for item in stepped if item.candidate == best.candidate), None)
        if own is None or not own.rate:
            return ""
        error = self._site.software.engine.step_error
        low, high = (rate_with_error(stepper, own, 1 + part) for part in (error, -error))
        return error_bars(best, low, high, error)

    def _rows(self, stepped: Sequence[Finding], found: "_Found") -> list[Finding]:
        rows: list[Finding] = []
        for mode in self._search.modes:
            of_mode = [item for item in stepped if item.candidate.mode is mode and item.rate]
            best = _layouts_once(of_mode)[: self._search.finalists]
            rows += [item for item in best if item.candidate not in found.tried]
        return sorted(rows, key=lambda item: -item.value)

    def beating(self, workload: Sequence[Arrival], rate: float) -> tuple[list[Finding], int]:
        """Simulates every candidate of every mode, to check the result of `plan`.

        Returns the number of candidates and, best first, the findings of the candidates whose rate
        exceeds (1 + TOLERANCE) x `rate`."""
        ceilings = self._ceilings(workload)
        tasks = [
            Task(candidate, limits, ceilings.rooms[candidate.decode], rate)
            for candidate, limits in self._priced(ceilings)
        ]
        found = _Found(self._site, self._told)
        self._measure(self._measurer(workload, ceilings.demand), tasks, found)
        return found.ranked, len(tasks)

    def _measure(self, measurer: Measurer, tasks: Sequence[Task], found: "_Found") -> None:
        for done, (index, finding) in enumerate(self._spread(measurer, tasks) if tasks else (), 1):
            found.came(tasks[index], finding)
            self._told.progress(found.text, found.count, found.count + len(tasks) - done)

    def _ceilings(self, workload: Sequence[Arrival]) -> RateCeilings:
        demand, site, search = Demand.of(workload), self._site, self._search
        fitting, decoding = (
            fitting_layouts(self._geometry, one, demand.longest_tokens, search.dtype) if one else []
            for one in (site, site.decoding)
        )
        return RateCeilings(site, demand, self._goal, fitting, search.codec, decoding, search.fused)

    def _priced(self, ceilings: RateCeilings) -> list[tuple[Candidate, Bounds]]:
        fitting, site, modes = ceilings.fitting, self._site, self._search.modes
        listed: list[Candidate] = []
        if site.decoding is None:
            listed += one_pool(fitting, site, modes)
            listed += two_pools(fitting, site) if Mode.DISAGGREGATED in modes else ()
        elif Mode.DISAGGREGATED in modes:
            listed += two_kinds(fitting, ceilings.decoding, site, self._search.best)
        priced = [(candidate, ceilings.bounds(candidate)) for candidate in listed]
        return sorted(priced, key=lambda item: -item[1].rate / self._weight(item[0]))

    def _left_out(
        self, fitting: list[Fitting], priced: Sequence[tuple[Candidate, Bounds]]
    ) -> tuple[str, ...]:
        needed = 2 * min(item.layout.devices for item in fitting)
        few = f"two pools need {needed} accelerators at least, there are {self._site.accelerators}"
        staged = "only layouts with pipeline stages fit, and these are planned in two pools alone"
        return tuple(
            f"{mode.value}: {few if mode is Mode.DISAGGREGATED else staged}"
            for mode in self._search.modes
            if not any(candidate.mode is mode for candidate, _ in priced)
        )

    def _measurer(
        self, workload: Sequence[Arrival], demand: Demand, runner: Runner | None = None
    ) -> Measurer:
        search = self._search
        return Measurer(
            self._goal,
            workload,
            demand,
            self._site.devices,
            runner or self._runners.simulated,
            min(2 * search.most_requests, STEPPED_REQUESTS)
            if runner is self._runners.stepped
            else search.most_requests,
            search.arrivals,
            search.seed,
        )

    def holds(self, finding: Finding, workload: Sequence[Arrival], runner: Runner) -> bool:
        if not finding.rate:
            return True
        shown = next(item for item in finding.trials if item.report is finding.report)
        measurer = self._measurer(workload, Demand.of(workload), runner)
        again = measurer.trial(finding.candidate, shown.rate)
        return again.lasting_attainment >= self._goal.attainment

    def trial(self, candidate: Candidate, workload: Sequence[Arrival], rate: float) -> Trial:
        return self._measurer(workload, Demand.of(workload)).trial(candidate, rate)


class _Found:
    def __init__(self, site: Site, told: Told) -> None:
        self._told = told
        self.tried: set[Candidate] = set()
        self._findings: dict[Candidate, Finding] = {}
        self.text, self.count = "", 0
        self._site = site

    def came(self, task: Task, finding: Finding | None) -> None:
        candidate = task.candidate
        self.tried.add(candidate)
        self.count += 1
        self.text = f"{candidate.mode.value} {candidate.name}"
        if finding is None:
            self._told.answer(f"{self.text}: no more than {task.rival_rate:.3g} requests/s in all")
            return
        self._findings[candidate] = finding
        self._told.answer(
            f"{self.text}: {finding.per_accelerator:.3g} requests/s per accelerator, bound by"
            f" {finding.binding}"
        )

    def best(self, among: Sequence[Finding]) -> float:
        wanted = {item.candidate for item in among}
        values = [item.value for item in self._findings.values() if item.candidate in wanted]
        return max(values, default=0.0)

    @property
    def ranked(self) -> list[Finding]:
        return sorted(
            self._findings.values(),
            key=lambda item: (
                -item.value,
                item.candidate.mode is Mode.DISAGGREGATED,
                -item.bounds.rate,
                item.candidate.name,
            ),
        )


def _by_kind(stepped: Sequence[Finding]) -> list[list[Finding]]:
    every = itertools.product((False, True), repeat=2)
    kinds: dict[tuple[bool, ...], list[Finding]] = {kind: [] for kind in every}
    for item in stepped:
        kinds[bool(item.candidate.prefill), item.candidate.staged].append(item)
    return [kind for kind in kinds.values() if kind]


def _layouts_once(ranked: Sequence[Finding]) -> list[Finding]:
    """Candidates with equal layouts differ in chunk size or numbers of instances."""
    found: dict[object, Finding] = {}
    for item in ranked:
        one = item.candidate
        found.setdefault((one.mode, one.prefill, one.decode), item)
    return list(found.values())


def _task(item: Finding, rival: float = 0.0, *, expected: bool = False) -> Task:
    rate, stay = item.rate if expected else 0.0, item.report.latency.mean or 0.0
    return Task(item.candidate, item.bounds, item.kv_tokens, rival, rate, stay, item.weight)


# ---- unattainable goals


def never(ceilings: RateCeilings, cached: bool) -> str:
    """Checks whether the goal is impossible even without load. Returns the reason why no layout can
    attain it, or "" if a layout may. `cached`: whether prompts may be in the prefix cache. If True,
    TTFT is not checked."""
    demand, goal = ceilings.demand, ceilings.goal
    wanted = goal.attainment - 1 / SAMPLE  # resolution of the sample
    prompts, steps = demand.sample_prompts, demand.sample_outputs - 1
    reasons = []
    if not cached and (
        found := _missed(ceilings.models, prompts, _first, goal.ttft_seconds, wanted)
    ):
        seconds, layout, tokens = found
        reasons.append(
            f"a prompt of {tokens:,} tokens takes {1e3 * seconds:.3g} ms to its first token on"
            f" {layout}, the fastest layout"
        )
    decoded = prompts[steps > 0]
    part = len(decoded) / len(prompts)
    # Requests of one output token always meet the TPOT limit.
    needed = 1 - (1 - wanted) / part if part else 0.0
    if part and (found := _missed(ceilings.decodes, decoded, _step, goal.tpot_seconds, needed)):
        seconds, layout, tokens = found
        reasons.append(
            f"a decode step of one sequence of {tokens:,} tokens takes {1e3 * seconds:.3g} ms on"
            f" {layout}, the fastest layout"
        )
    if not reasons:
        return ""
    return (
        f"nothing fits, because no candidate keeps {goal.attainment:.0%} of requests within TTFT"
        f" {goal.ttft_seconds:g} s and TPOT {goal.tpot_seconds:g} s at any rate: alone on idle"
        f" accelerators {', and '.join(reasons)}; relax that limit, or give faster accelerators"
    )


def _missed(
    models: Mapping[Layout, CostModel],
    prompts: np.ndarray,
    seconds_of: Callable[[CostModel, int], float],
    limit: float,
    wanted: float,
) -> tuple[float, str, int] | None:
    at = min(len(prompts) - 1, max(0, int(np.ceil(wanted * len(prompts))) - 1))
    tokens = int(np.sort(prompts)[at])
    # Seconds increase with length: if this prompt meets the limit, so do all shorter ones.
    seconds_by_layout = {layout: seconds_of(model, tokens) for layout, model in models.items()}
    best = min(seconds_by_layout, key=seconds_by_layout.__getitem__)
    seconds = seconds_by_layout[best]
    return (seconds, short(best), tokens) if seconds > limit else None


def _first(model: CostModel, tokens: int) -> float:
    return alone_seconds(model, tokens, WHOLE_CHUNK)


def _step(model: CostModel, tokens: int) -> float:
    return model.decode_of(1, tokens).seconds
