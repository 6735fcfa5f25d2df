"""Splitwise (Patel et al., ISCA'24, arXiv 2311.18677): separate machines for prompts and for
tokens, of one kind or of two, within one budget of power or money.

A machine has eight GPUs and one instance (tp8). Budgets are in units of a DGX-A100's power or
price, and are a fifth of the paper's. The SLO is the paper's: medians and tails of each request's
slowdown relative to the same request alone on an A100 machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.papers.runs import highest
from benchmarks.papers.step_table import Rule, StepTable
from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import Accelerator, Link, accelerator, link
from jdisagg.layout.axes import Layout
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.planning.trials import requests_at, settled
from jdisagg.simulator.report import RequestOutcome
from jdisagg.simulator.run import simulate
from jdisagg.simulator.step_costs import ModelCosts, StepCosts
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival

DATA = Path(__file__).resolve().parent.parent / "data"
TP = Layout(tp=8)
A, H = accelerator("a100"), accelerator("h100")
# Of an H100 machine in A100 machines: dollars an hour of 38 and 17.6, and the paper's power.
COST, POWER = 38 / 17.6, 1.75
CAP = 0.7  # of its power, of a capped token machine
BUDGET_POWER = 14.0  # 14 A100 machines or 8 H100 machines
BUDGET_COST = 8 * COST  # 8 H100 machines, or 17 A100 machines
PROMPT_BATCH = 2048  # tokens of prompts in one step, as the paper's scheduler has it
CONTEXT = 16384  # the traces' prompts are longer than BLOOM's; only sizes matter here
SECONDS = 90.0  # of arrivals in a run
SHARES = (0.25, 0.4, 0.5, 0.6, 0.75)  # of the budget that may go to prompt machines

# Percentile and highest slowdown of TTFT; of the mean time between tokens and of the whole.
FIRST = ((50, 2.0), (90, 3.0), (99, 6.0))
REST = ((50, 1.25), (90, 1.5), (99, 5.0))
LOOSE = ((50, 2.0), (90, 3.0), (99, 10.0))


@dataclass(frozen=True)
class Design:
    """Numbers of machines by role; `tokens` None means that all machines do both. `capped`: token
    machines are limited to the fraction CAP of their power, which does not slow decode down
    according to the paper's measurement."""

    name: str
    prompts: Accelerator
    tokens: Accelerator | None = None
    capped: bool = False

    def weight(self, hardware: Accelerator, unit: str, capped: bool = False) -> float:
        if hardware is A:
            return 1.0
        return COST if unit == "cost" else POWER * (CAP if capped else 1.0)

    def divisions(self, budget: float, unit: str) -> list[tuple[int, int]]:
        """Returns the divisions within the budget as (prompt machines, token machines), or (0, all)
        if machines do both."""
        first = self.weight(self.prompts, unit)
        if self.tokens is None:
            return [(0, int(budget / first + 1e-9))]
        second = self.weight(self.tokens, unit, self.capped)
        found = [
            (prompts, int((budget - prompts * first) / second + 1e-9))
            for prompts in sorted({max(1, round(share * budget / first)) for share in SHARES})
        ]
        return [division for division in found if division[1] >= 1]

    def spent(self, division: tuple[int, int], unit: str) -> float:
        prompts, tokens = division
        if self.tokens is None:
            return tokens * self.weight(self.prompts, unit)
        return prompts * self.weight(self.prompts, unit) + tokens * self.weight(
            self.tokens, unit, self.capped
        )


BASELINES = (Design("Baseline-A100", A), Design("Baseline-H100", H))
RIVALS = tuple(design.name for design in BASELINES)
AA, HH = Design("Splitwise-AA", A, A), Design("Splitwise-HH", H, H)
HA, HHCAP = Design("Splitwise-HA", H, A), Design("Splitwise-HHcap", H, H, True)
TOLD = (*BASELINES, AA, HA, HHCAP)  # of what is changed


@dataclass(frozen=True)
class Setting:
    """Assumptions of a comparison.

    Attributes:
        batching: Batching of machines that do both: "mixed" (prompts of up to PROMPT_BATCH tokens
            in a step with all decodes), "chunks" (the same with 512 tokens), or "prompts first".
        rest: Limits on all tokens but the first.
        slowed: Whether the arithmetic of capped token machines runs at CAP of its speed.
        between: Link of each GPU between machines.
        rule: Steps from the paper's measurements by this rule (`step_table`); None selects the cost
            model."""

    model: str = "bloom-176b"
    trace: str = "conversation"
    batching: str = "mixed"
    rest: Sequence[tuple[int, float]] = REST
    slowed: bool = False
    between: Link | None = None
    rule: Rule | None = None

    def costs(self, hardware: Accelerator) -> StepCosts | None:
        return StepTable(f"{hardware.name}-80gb", self.rule) if self.rule else None

    @property
    def workload(self) -> Sequence[Arrival]:
        name = {"conversation": "conv", "code": "code"}[self.trace]
        arrivals = read_trace(DATA / f"azure2023_{name}_slice.csv.gz")
        return [item for item in arrivals if item.prompt_tokens + item.output_tokens <= CONTEXT]

    def fleet(self, design: Design, division: tuple[int, int]) -> Fleet:
        prompts, tokens = division
        shape, chunk = geometry(self.model), PROMPT_BATCH
        if self.batching == "chunks" and design.tokens is None:
            chunk = 512
        instance = replace(INSTANCE, layout=TP, chunk_tokens=chunk, min_chunk_tokens=256)
        if design.tokens is None:
            mode = Mode.UNIFIED if self.batching == "prompts first" else Mode.CHUNKED
            pool = Pool(tokens, design.prompts, instance, self.costs(design.prompts))
            fused = mode is Mode.CHUNKED
            return Fleet(shape, pool, mode=mode, fused=fused, context_tokens=CONTEXT)
        hardware = design.tokens
        if design.capped and self.slowed:
            hardware = replace(hardware, peak_flops=CAP * hardware.peak_flops)
        return Fleet(
            shape,
            Pool(tokens, hardware, instance, self.costs(hardware)),
            Pool(prompts, design.prompts, instance, self.costs(design.prompts)),
            overlap=4,
            context_tokens=CONTEXT,
            link=self.between,
        )


class Slowdowns:
    """Slowdowns of requests relative to the same requests alone on an A100 machine with the same
    step costs."""

    def __init__(self, setting: Setting) -> None:
        self._alone = setting.costs(A) or ModelCosts(CostModel(geometry(setting.model), A, TP))
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def alone(self, prompt: int, output: int) -> tuple[float, float]:
        """Returns (seconds to the first token, seconds per later token)."""
        key = prompt, output
        if key not in self._known:
            whole, rest = divmod(prompt, PROMPT_BATCH)
            rows = [(PROMPT_BATCH, part * PROMPT_BATCH) for part in range(whole)]
            rows += [(rest, whole * PROMPT_BATCH)] if rest else []
            first = sum(self._alone.prefill([row])[0] for row in rows)
            self._known[key] = first, self._alone.decode(1, prompt + output / 2, 1).first
        return self._known[key]

    def kept(
        self, outcomes: Sequence[RequestOutcome], rest: Sequence[tuple[int, float]]
    ) -> dict[str, float]:
        """Returns, for each limit, the slowdown divided by the allowed slowdown. 1 or less meets
        the limit."""
        firsts, tokens, wholes = [], [], []
        for outcome in outcomes:
            first, token = self.alone(outcome.prompt_tokens, outcome.output_tokens)
            if outcome.ttft is None or outcome.end != "finished":
                return {"unfinished": np.inf}
            firsts.append(outcome.ttft / first)
            if outcome.tpot is not None:
                tokens.append(outcome.tpot / token)
            wholes.append(outcome.latency / (first + (outcome.output_tokens - 1) * token))
        return {
            f"{name} P{percent}": float(np.percentile(values, percent)) / most
            for name, values, limits in (
                ("TTFT", firsts, FIRST),
                ("TBT", tokens, rest),
                ("E2E", wholes, rest),
            )
            for percent, most in limits
        }


class Bench:
    """Finds the rates that designs sustain. `most`: number of requests of a run."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.runs = 0
        self._slowdowns: dict[tuple[str, str | None], Slowdowns] = {}
        self._workloads: dict[str, Sequence[Arrival]] = {}

    def limits(
        self, setting: Setting, design: Design, division: tuple[int, int], rate: float
    ) -> Mapping[str, float]:
        workload = self._workloads.setdefault(setting.trace, setting.workload)
        key = setting.model, setting.rule
        slowdowns = self._slowdowns.setdefault(key, Slowdowns(setting))
        count = int(np.clip(rate * SECONDS, 300, self.most))
        arrivals = requests_at(workload, rate, count, "poisson", seed=0)
        self.runs += 1
        outcomes = self.outcomes(setting.fleet(design, division), arrivals)
        return slowdowns.kept(settled(outcomes, SECONDS / 3), setting.rest)

    def outcomes(self, fleet: Fleet, arrivals: Sequence[Arrival]) -> Sequence[RequestOutcome]:
        return simulate(fleet, arrivals).outcomes

    def carried(
        self, setting: Setting, design: Design, divisions: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, int], float, str]:
        """Returns the division with the highest rate, the rate in requests per second, and the
        limit that is missed beyond it."""
        found, most, broken = divisions[0], 0.0, ""
        for division in divisions:
            first: dict[float, str] = {}

            def met(rate: float, division: tuple[int, int] = division, first=first) -> bool:
                limits = self.limits(setting, design, division, rate)
                worst = max(limits, key=lambda name: limits[name])
                if limits[worst] > 1:
                    first[rate] = worst
                return limits[worst] <= 1

            rate = highest(met, 6.0, most)
            if rate > most:
                found, most, broken = division, rate, first[min(first)] if first else ""
            elif not broken and first:
                broken = first[min(first)]
        return found, most, broken


Found = dict[str, tuple[tuple[int, int], float]]  # by design: its best division, what that carries


def compared(bench: Bench, setting: Setting, unit: str) -> tuple[list[list[object]], Found]:
    """Returns rows of all designs within the budget of power or cost, for one trace."""
    budget = BUDGET_POWER if unit == "power" else BUDGET_COST
    designs = (*BASELINES, AA, HH, HA, HHCAP) if unit == "power" else (*BASELINES, AA, HA)
    rows: list[list[object]] = []
    found: Found = {}
    for design in designs:
        division, rate, broken = bench.carried(setting, design, design.divisions(budget, unit))
        found[design.name] = division, rate
        said = f"{division[0]} + {division[1]}" if division[0] else str(division[1])
        row: list[object] = [setting.trace, design.name, said]
        row += [design.spent(division, "power"), design.spent(division, "cost"), rate]
        rivals = [found[name][1] if name in found else 0.0 for name in RIVALS]
        rows.append([*row, *(_over(rate, rival) for rival in rivals), broken])
    return rows, found


CHANGES: tuple[tuple[str, Setting], ...] = (
    ("as above", Setting()),
    ("baselines put whole prompts first", Setting(batching="prompts first")),
    ("baselines with chunks of 512", Setting(batching="chunks")),
    ("limits on tokens as loose as those on the first", Setting(rest=LOOSE)),
    ("Llama-2-70B: an eighth of the KV heads", Setting(model="llama-2-70b")),
    ("capped machines compute at 70 %", Setting(slowed=True)),
    ("10 GbE a GPU between machines", Setting(between=link("ethernet-10g"))),
)


def changed(bench: Bench, known: Found) -> list[list[object]]:
    """Returns rows for the conversation trace under one power budget, with one assumption changed
    at a time. Each design keeps its best division. A design that a change does not affect is not
    run again."""
    rows: list[list[object]] = []
    for name, setting in CHANGES:
        rates: list[float] = []
        for design in TOLD:
            division, rate = known[design.name]
            if _touches(setting, design):
                rate = bench.carried(setting, design, [division])[1]
            rates.append(rate)
        rows.append([name, *rates, _over(rates[2], rates[0]), _over(max(rates[3:]), rates[1])])
    return rows


def _touches(setting: Setting, design: Design) -> bool:
    base, split = Setting(), design.tokens is not None
    if setting.model != base.model or setting.rest is not base.rest:
        return True
    if split:
        return setting.between is not None or (design.capped and setting.slowed)
    return setting.batching != base.batching


def _over(rate: float, rival: float) -> object:
    return rate / rival if rival else "-"


def tables(small: bool) -> tuple[list[dict[str, object]], int]:
    bench = Bench(100 if small else 800)
    settings = (Setting(), Setting(trace="code"))
    columns = ["trace", "design", "machines (prompt + token)", "power", "cost",
               "requests per second", "over Baseline-A100", "over Baseline-H100",
               "breaks first"]  # fmt: skip
    power = [compared(bench, item, "power") for item in settings]
    cost = [compared(bench, item, "cost") for item in settings]
    return [
        {
            "title": f"The same power, {BUDGET_POWER:g} A100 machines' (BLOOM-176B)",
            "columns": columns,
            "rows": [row for rows, _ in power for row in rows],
        },
        {
            "title": f"The same cost, {BUDGET_COST:.1f} A100 machines' (BLOOM-176B)",
            "columns": columns,
            "rows": [row for rows, _ in cost for row in rows],
        },
        {
            "title": "Conversation, the same power, one thing changed at a time: "
            "requests per second",
            "columns": ["changed", *(design.name for design in TOLD), "AA over A100",
                        "better of HA, HHcap over H100"],
            "rows": changed(bench, power[0][1]),
        },
    ], bench.runs  # fmt: skip
