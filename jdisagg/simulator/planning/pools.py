"""Plans several pools of accelerators, each pool of one kind.

Each pool prefills, decodes, does both, or is not used. A pool that does both is planned by itself,
and each ordered pair of pools as a site whose decode instances run on other accelerators
(`Site.decoding`). What pools that do both carry together is the sum of what each of them carries.

The verdict compares the best plan with disaggregation to the best without, and steps both again
with another link and other prompt lengths, to tell what would change the order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from jdisagg.costs.hardware import Link
from jdisagg.simulator.planning.candidates import Best, Candidate, NothingFits, Site, handoff_path
from jdisagg.simulator.planning.changes import Changes, rounded, with_prompts
from jdisagg.simulator.planning.planner import TIE, UNTOLD, Plan, Planner, Searched, Told
from jdisagg.simulator.planning.verdict import Finding, not_simulated
from jdisagg.simulator.workloads import Arrival

UNITS = {"rate": "requests/s", "dollars": "requests per dollar", "joules": "requests per joule"}


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate and the accelerators for which it was found."""

    site: Site
    finding: Finding

    @property
    def disaggregated(self) -> bool:
        return self.finding.candidate.prefill is not None

    def at(self, rate: float) -> "Row":
        return replace(self, finding=replace(self.finding, rate=rate))

    def named(self, several: bool = True) -> str:
        """Returns the candidate's name; with `several` pools also the kind of accelerators."""
        site, candidate = self.site, self.finding.candidate
        if not several:
            return candidate.name
        kinds = site.accelerator.name, site.decodes.accelerator.name
        parts = candidate.name.split(" -> ")
        named = [f"{kind} {part}" for kind, part in zip(kinds, parts, strict=False)]
        return " -> ".join(named if site.decoding else [f"{kinds[0]} {candidate.name}"])


Rows = tuple[Row, ...]  # one row, or a row of each pool, side by side


def rate_of(rows: Rows) -> float:
    return sum(row.finding.rate for row in rows)


def worth(rows: Rows, best: Best) -> float:
    return rate_of(rows) / (1.0 if best == "rate" else sum(row.finding.weight for row in rows))


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The result for all pools. `rows`: simulated candidates, best first, and then the others."""

    rows: tuple[Row, ...]
    considered: int
    verdict: str
    left_out: tuple[str, ...] = ()


def uses(pools: Sequence[Site], between: Link | None = None) -> Iterator[Site]:
    """Yields each pool by itself, and each ordered pair of pools: prefill on the first and decode
    on the second, over the link `between`."""
    yield from pools
    for first, second in permutations(pools, 2):
        yield replace(first, between=between, decoding=second)


def plan_pools(
    planner_of: Callable[[Site], Planner],
    sites: Sequence[Site],
    workload: Sequence[Arrival],
    best: Best = "rate",
    told: Told = UNTOLD,
) -> PoolPlan:
    """Plans each of the sites, which are uses of the pools. Raises NothingFits, with the reasons,
    if none can be planned."""
    pools = [site for site in sites if site.decoding is None]
    searches: list[tuple[Site, Planner, Searched]] = []
    plans: list[Plan] = []
    rows: list[Row] = []
    reasons: dict[str, list[str]] = {}  # of what is left out: the accelerators

    def leaves_out(site: Site, *why: str) -> None:
        for reason in why:
            reasons.setdefault(reason, []).append(site.text)

    for site, planner in [(site, planner_of(site)) for site in sites]:
        if len(pools) > 1:
            told.answer(f"On {site.text}{', prefill on the first' if site.decoding else ''}:")
        try:
            searches.append((site, planner, planner.searched(workload)))
        except NothingFits as error:
            leaves_out(site, error.message)
    wanted = _worth_simulating(searches, pools, best)
    used = {site for site, _ in wanted}
    # A comparison of simulated with stepped rates would mean little.
    excess = max(
        (planner.excess(search) for site, planner, search in searches if site in used), default=0
    )
    for site, planner, search in searches:
        try:
            plan = planner.simulated(
                search, lambda finding, site=site: (site, finding.candidate) in wanted, excess
            )
        except NothingFits as error:
            leaves_out(site, error.message)
            continue
        plans.append(plan)
        rows += [Row(site, finding) for finding in plan.findings]
        leaves_out(site, *plan.left_out)
    left_out = [
        reason if len(pools) == 1 else f"{'; '.join(on)}: {reason}"
        for reason, on in reasons.items()
    ]
    if not rows:
        raise NothingFits("; ".join(left_out))
    if len(pools) > 1:
        rows.sort(key=lambda row: (not row.finding.simulated, -row.finding.value))
    said = plans[0].verdict if len(pools) == 1 else not_simulated(excess) if excess else ""
    compared = _compared(planner_of, rows, pools, workload, best)
    parts = (said, compared) if len(pools) == 1 else (compared, said)
    verdict = " ".join(filter(None, parts))
    return PoolPlan(tuple(rows), sum(plan.considered for plan in plans), verdict, tuple(left_out))


def _worth_simulating(
    searches: Sequence[tuple[Site, Planner, Searched]], pools: Sequence[Site], best: Best
) -> set[tuple[Site, Candidate]]:
    """Returns the candidates to simulate: with one kind of accelerators the best of each mode, else
    those that by stepping are the best of all kinds, or the best of a mode, alone or as one of each
    pool side by side."""
    rows = [Row(site, finding) for site, _, search in searches for finding in search.stepped]
    if len(pools) == 1:
        return {(row.site, row.finding.candidate) for row in rows}
    wanted = [max(rows, key=lambda row: row.finding.value)] if rows else []
    wanted += most_of(rows, pools, best)
    for two in (False, True):
        of_mode = [row for row in rows if row.disaggregated is two]
        leaders = most_of(of_mode, pools, best)
        least = (1 - TIE) * worth(leaders, best) if leaders else 0.0
        wanted += [*leaders, *(row for row in of_mode if worth((row,), best) >= least)]
    return {(row.site, row.finding.candidate) for row in wanted}


def most_of(rows: Sequence[Row], pools: Sequence[Site], best: Best) -> Rows:
    """Returns the best of the rows: a single one, or one of each pool side by side. Those that were
    only stepped count if none was simulated; () if no row has a rate."""
    simulated = [row for row in rows if row.finding.simulated]
    fitting = [row for row in simulated or rows if row.finding.rate]
    each = [[row for row in fitting if row.site == pool] for pool in pools]
    listed: list[Rows] = [(row,) for row in fitting]
    if all(each) and len(pools) > 1:
        listed.append(tuple(max(some, key=lambda row: row.finding.value) for some in each))
    return max(listed, key=lambda some: worth(some, best), default=())


def _compared(
    planner_of: Callable[[Site], Planner],
    rows: Sequence[Row],
    pools: Sequence[Site],
    workload: Sequence[Arrival],
    best: Best,
) -> str:
    first = most_of(rows, pools, best)
    one, two = (
        most_of([row for row in rows if row.disaggregated is both], pools, best)
        for both in (False, True)
    )
    if any(row.disaggregated for row in first):
        two = first  # also if some of its pools do both
    said: list[str] = []
    if len(pools) > 1:
        said.append(f"Best: {_said(first, best)}.")
        if len(first) > 1:
            numbers = " and ".join(str(rows.index(row) + 1) for row in first)
            said.append(f"These are clusters of their own, rows {numbers}.")
    if not one or not two:
        return " ".join(said)
    gain = worth(two, best) / worth(one, best)
    error = pools[0].software.engine.step_error
    if len(pools) > 1:
        other = f"{'without' if first == two else 'with it'}, the best is"
        if gain > 1 + error:
            said.append(f"Disaggregate: {other} {_said(one, best)}.")
        elif gain > 1 / (1 + error):
            rest = f"the difference is within the {error:.0%} by which predicted steps are wrong"
            shown = _said(one if first == two else two, best)
            said.append(f"Do not disaggregate: {other} {shown}, and {rest}.")
        else:
            said.append(f"Do not disaggregate: {other} {_said(two, best)}.")
    if gain > 1:
        also = "one pool meets" if len(pools) == 1 else "plans without meet"
        said.append(f"Up to {rate_of(one):.3g} requests/s, {also} the limits as well.")
    said += _changes(planner_of, one, two, workload, best).said()
    return " ".join(said)


def _said(rows: Rows, best: Best) -> str:
    value = worth(rows, best) * (3600.0 if best == "dollars" else 1.0)
    names = (f"{row.finding.candidate.mode.value} {row.named()} ({_bound(row)})" for row in rows)
    return f"{' beside '.join(names)} carries {rounded(value, 3)} {UNITS[best]}"


def _bound(row: Row) -> str:
    if row.finding.short:
        return "at least, because the requests end too soon at higher rates"
    return f"bound by {row.finding.binding}"


def _changes(
    planner_of: Callable[[Site], Planner],
    one: Rows,
    two: Rows,
    workload: Sequence[Arrival],
    best: Best,
) -> Changes:
    planners = {row.site: planner_of(row.site) for row in (*one, *two)}
    context_tokens = next(iter(planners.values())).context_tokens

    def asked(length: float) -> Sequence[Arrival]:
        return with_prompts(workload, length, context_tokens)

    def stepped(disaggregated: bool, speed: float, length: float) -> float:
        found = []
        for row in two if disaggregated else one:
            site = _with_link(row.site, row.finding.candidate, speed)
            planner = planners.get(site) or planner_of(site)
            found.append(row.at(planner.stepped_rate(row.finding, asked(length))))
        return worth(tuple(found), best)

    links = {handoff_path(row.site, row.finding.candidate)[0] for row in two if row.disaggregated}
    return Changes(
        worth(two, best) / worth(one, best),
        two[0].site.software.engine.step_error,
        stepped,
        links.pop() if len(links) == 1 else None,
        lambda length: sum(item.prompt_tokens for item in asked(length)) / len(workload),
    )


def _with_link(site: Site, candidate: Candidate, factor: float) -> Site:
    if candidate.prefill is None or factor == 1.0:
        return site
    link = handoff_path(site, candidate)[0]
    return replace(site, between=replace(link, bytes_per_second=factor * link.bytes_per_second))
