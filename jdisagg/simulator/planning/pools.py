"""Plans several pools of accelerators, each pool of one kind.

Each pool prefills, decodes, does both, or is not used. A pool that does both is planned by itself,
and each ordered pair of pools as a site whose decode instances run on other accelerators
(`Site.decoding`). What pools that do both carry together is the sum of what each of them carries.

The verdict compares the best plan with disaggregation to the best without, and steps both again
with another link and other prompt lengths, to tell what would change the order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from jdisagg.costs.hardware import Link
from jdisagg.simulator.planning.candidates import Best, Candidate, NothingFits, Site, handoff_path
from jdisagg.simulator.planning.planner import TIE, UNTOLD, Plan, Planner, Searched, Told
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.workloads import Arrival

OTHER_LINK = 8.0  # factor on the speed of the link with which both modes are stepped again
OTHER_PROMPTS = 4.0  # factor on the prompt lengths
UNITS = {"rate": "requests/s", "dollars": "requests per dollar", "joules": "requests per joule"}


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate and the accelerators for which it was found."""

    site: Site
    finding: Finding

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
    left_out: list[str] = []

    def leaves_out(site: Site, error: NothingFits) -> None:
        left_out.append(error.message if len(pools) == 1 else f"{site.text}: {error.message}")

    for site in sites:
        if len(pools) > 1:
            told.answer(f"On {site.text}{', prefill on the first' if site.decoding else ''}:")
        try:
            planner = planner_of(site)
            searches.append((site, planner, planner.searched(workload)))
        except NothingFits as error:
            leaves_out(site, error)
    wanted = _worth_simulating(searches, pools, best)
    for site, planner, search in searches:
        try:
            plan = planner.simulated(
                search, lambda finding, site=site: (site, finding.candidate) in wanted
            )
        except NothingFits as error:
            leaves_out(site, error)
            continue
        plans.append(plan)
        rows += [Row(site, finding) for finding in plan.findings]
        left_out += plan.left_out
    if not rows:
        raise NothingFits("; ".join(left_out))
    if len(pools) > 1:
        rows.sort(key=lambda row: (not row.finding.simulated, -row.finding.value))
    said = plans[0].verdict if len(pools) == 1 else ""
    stepped = {
        (site, finding.candidate): finding.rate
        for site, _, search in searches
        for finding in search.stepped
    }
    compared = _compared(planner_of, rows, pools, workload, best, stepped)
    verdict = f"{said} {compared}".strip()
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
    for two in (False, True):
        of_mode = [row for row in rows if (row.finding.candidate.prefill is not None) is two]
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
    known: Mapping[tuple[Site, Candidate], float],
) -> str:
    one, two = (
        most_of(
            [row for row in rows if (row.finding.candidate.prefill is not None) is both],
            pools,
            best,
        )
        for both in (False, True)
    )
    said: list[str] = []
    if len(pools) > 1:
        said.append(f"Best: {_said(most_of(rows, pools, best), best)}.")
    if not one or not two:
        return " ".join(said)
    gain = worth(two, best) / worth(one, best)
    error = pools[0].software.engine.step_error
    if len(pools) > 1 and gain > 1 + error:
        said.append(f"Disaggregate: without, the best is {_said(one, best)}.")
    elif len(pools) > 1:
        close = f", within the {error:.0%} by which predicted steps are wrong"
        said.append(
            f"Do not disaggregate: {_said(one, best)}; with it, {_said(two, best)}"
            f"{close if gain > 1 / (1 + error) else ''}."
        )
    if gain > 1:
        said.append(f"Up to {rate_of(one):.3g} requests/s, one pool meets the limits as well.")
    said += _changes(planner_of, one, two, workload, best, known)
    return " ".join(said)


def _said(rows: Rows, best: Best) -> str:
    value = worth(rows, best) * (3600.0 if best == "dollars" else 1.0)
    names = (f"{row.finding.candidate.mode.value} {row.named()}" for row in rows)
    return f"{' beside '.join(names)} carries {value:.3g} {UNITS[best]}"


def _changes(
    planner_of: Callable[[Site], Planner],
    one: Rows,
    two: Rows,
    workload: Sequence[Arrival],
    best: Best,
    known: Mapping[tuple[Site, Candidate], float],
) -> Iterator[str]:
    """Steps the best rows of both modes with a link and with prompts that favour the loser. `known`
    are the stepped rates without a change."""
    two_win = worth(two, best) > worth(one, best)
    speed = 1 / OTHER_LINK if two_win else OTHER_LINK
    length = 1 / OTHER_PROMPTS if two_win else OTHER_PROMPTS
    scaled = [
        replace(item, prompt_tokens=max(1, round(length * item.prompt_tokens)), block_hashes=())
        for item in workload
    ]

    def stepped(rows: Rows, asked: Sequence[Arrival], factor: float = 1.0) -> float:
        found = []
        for row in rows:
            planner = planner_of(_with_link(row.site, row.finding.candidate, factor))
            found.append(row.at(planner.stepped_rate(row.finding, asked)))
        return worth(tuple(found), best)

    unchanged = tuple([row.at(known[row.site, row.finding.candidate]) for row in one])
    of_link = worth(unchanged, best), stepped(two, workload, speed)
    tried = (
        (f"a link {_times(speed)} as fast", *of_link),
        (f"prompts {_times(length)} as long", stepped(one, scaled), stepped(two, scaled)),
    )
    for changed, first, second in tried:
        if not first and not second:
            yield f"With {changed}, these two miss the limits."
            continue
        wins = f"{'two pools' if second > first else 'one pool'} would carry"
        turned = "still " if (second > first) == two_win else ""
        low, high = sorted((first, second))
        more = f"{high / low:.2f} times as much" if low else "more, the other nothing"
        yield f"With {changed}, {turned}{wins} {more}."


def _times(factor: float) -> str:
    return f"{factor:g} times" if factor > 1 else f"1/{1 / factor:g} times"


def _with_link(site: Site, candidate: Candidate, factor: float) -> Site:
    if candidate.prefill is None or factor == 1.0:
        return site
    link = handoff_path(site, candidate)[0]
    return replace(site, between=replace(link, bytes_per_second=factor * link.bytes_per_second))
