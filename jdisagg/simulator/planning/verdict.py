"""Describes the planner's results as text: the limit that binds each candidate, the best mode, and
the reasons.

The text uses only the figures of a `Finding`, and states a reason only if a figure supports it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.config import Mode
from jdisagg.simulator.planning.bounds import Bounds, Goal, RateCeilings
from jdisagg.simulator.planning.candidates import Candidate, short
from jdisagg.simulator.planning.changes import nearly_equal
from jdisagg.simulator.report import Report

NEAR = 0.7  # fraction of a ceiling from which on its resource is named as the cause
HEADROOM = 0.8  # fraction of the highest rate at which the verdict reports latencies
FUSED = "Chunked prefill is priced as a chunk and a decode step in one program."
TURNS = (
    "Chunked prefill is priced as a chunk and a decode step in turns; in one program they carry"
    " more."
)
MORE = (
    "give a longer workload, or one that names no blocks and may be repeated, or more requests a"
    " run (most_requests)"
)


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of simulating a candidate at one rate.

    Attributes:
      late_first, late_tokens: Fractions of the counted requests that missed the TTFT and the TPOT
        limit.
      unfinished: Fraction of the counted requests that did not finish; `reason` is the most
        frequent reason.
      overload: Whether the queue grew so fast that the goal would be missed with more arrivals.
      short: Whether the run had too few arrivals for a conclusion.
    """

    rate: float
    attainment: float
    late_first: float
    late_tokens: float
    unfinished: float
    report: Report
    overload: bool = False
    short: bool = False
    reason: str = ""

    @property
    def lasting_attainment(self) -> float:
        """Attainment that the candidate sustains for any number of arrivals. It is 0 if the trial
        is an `overload` or `short`."""
        return 0.0 if self.overload or self.short else self.attainment


@dataclass(frozen=True, slots=True)
class Finding:
    """A candidate with the highest rate that it reached, simulated or stepped.

    Attributes:
      rate: Highest rate of the whole candidate that attains the goal, in requests per second.
      report: Report at `rate`, or at the lowest tried rate if none attains the goal.
      kv_share: Mean fraction of the decode instances' KV memory that requests hold at `rate`.
      short: Whether there were too few arrivals to decide if a higher rate is possible. simulated:
        Whether the rate was found by simulating live code. If False, it was found by stepping the
        cost model. weight: What the candidate spends (`Site.spent`).
    """

    candidate: Candidate
    bounds: Bounds
    rate: float
    per_accelerator: float
    trials: tuple[Trial, ...]
    report: Report
    binding: str
    link_share: float
    kv_share: float
    kv_tokens: int
    tokens_per_second: float
    short: bool = False
    simulated: bool = True
    weight: float = 1.0

    @property
    def value(self) -> float:
        """Rate per unit of what is scarce (`Site.spent`), by which candidates are ranked."""
        return self.rate / self.weight


def binding_limit(trial: Trial, limits: Bounds) -> str:
    """Names the limit that most requests of a failed trial missed, and the resource that causes it
    if the trial's rate is near the ceiling of one."""
    if trial.short:
        return "too few requests to tell"
    if trial.unfinished > max(trial.late_first, trial.late_tokens):
        return "requests refused or unfinished"
    # In an overload the wait for the first token grows, even if few requests have missed it yet.
    kind = "TPOT" if trial.late_tokens >= trial.late_first and not trial.overload else "TTFT"
    causes = ("hand-off", "link") if kind == "TPOT" else ("prefill", "KV memory", "link")
    near = [(rate, name) for name, rate in limits.limits if name.startswith(causes)]
    rate, name = min(near, default=(math.inf, ""))
    return f"{kind}, by {name}" if trial.rate >= NEAR * rate else kind


def stepped_answer(stepped: Sequence[Finding]) -> str:
    best: dict[Mode, Finding] = {}
    for item in stepped:
        best.setdefault(item.candidate.mode, item)
    lines = [f"  {_said(item)}, bound by {item.binding}" for item in best.values()]
    return "\n".join(["By stepping the cost model:", *lines])


def verdict(
    findings: Sequence[Finding], ceilings: RateCeilings, left_out: Sequence[str], fused: bool
) -> str:
    said = _compared(findings, ceilings, left_out)
    said += _stages(findings, ceilings)
    if any(item.candidate.mode is Mode.CHUNKED for item in findings):
        said += f" {FUSED if fused else TURNS}"
    if too_few := [
        f"{item.candidate.mode.value} {item.candidate.name}"
        for item in findings
        if item.short and item.rate
    ]:
        said += (
            f" These rates are lower bounds, because the requests end too soon at higher ones"
            f" ({'; '.join(too_few)}); {MORE}."
        )
    return said


def _stages(findings: Sequence[Finding], ceilings: RateCeilings) -> str:
    two = [item for item in findings if item.candidate.prefill and item.rate]
    staged = next((item for item in two if item.candidate.staged), None)
    plain = next((item for item in two if not item.candidate.staged), None)
    if staged is None or plain is None:
        return ""
    said = (
        f" With pipeline stages two pools serve {staged.per_accelerator:.3g} requests/s an"
        f" accelerator ({staged.candidate.name}), without {plain.per_accelerator:.3g}"
        f" ({plain.candidate.name})."
    )
    if staged.candidate.prefill == plain.candidate.prefill:
        return said
    tokens = int(ceilings.demand.prompt_mean)
    shares = []
    for item in (staged, plain):
        layout = item.candidate.prefill
        assert layout is not None
        cost = ceilings.models[layout].prefill([(tokens, 0)])
        shares.append(f"{short(layout)} {100 * cost.communication / cost.seconds:.0f} %")
    return (
        f"{said} Of the prefill of {tokens:,} tokens, {shares[0]} and {shares[1]} is communication"
        f" over {ceilings.site.described.scale_up.name}."
    )


def _compared(findings: Sequence[Finding], ceilings: RateCeilings, left_out: Sequence[str]) -> str:
    two = next((item for item in findings if item.candidate.prefill), None)
    one = next((item for item in findings if not item.candidate.prefill), None)
    best = findings[0]
    if two is None or one is None:
        only = f"Best: {_said(best)}."
        return (
            f"{only} Nothing to compare with ({'; '.join(left_out)})."
            if left_out
            else f"{only} No other mode was compared."
        )
    if not two.rate:
        never = f"Two pools do not attain the goal at any rate (first to bind: {two.binding})."
        return f"One pool: {_said(one)}. {never} {_why(one, two, ceilings)}".strip()
    if not one.rate:
        return (
            f"Two pools: {_said(two)}. One pool does not attain the goal at any rate (first to"
            f" bind: {one.binding})."
        )
    gain = two.rate / one.rate
    error = ceilings.site.software.engine.step_error
    if nearly_equal(gain, error):
        return (
            f"No clear winner: {_said(two)}; {_said(one)}. Their difference is within the"
            f" {error:.0%} by which predicted steps are wrong: take one pool, which is simpler."
        )
    if gain > 1:
        return (
            f"Two pools win by {gain - 1:.0%} against {one.candidate.mode.value}: {_said(two)};"
            f" best of one pool: {_said(one)}, bound by {one.binding}."
        )
    rival = f"best of two pools: {_said(two)}, bound by {two.binding}."
    why = _why(one, two, ceilings)
    wins = f"One pool wins by {1 / gain - 1:.0%}, {one.candidate.mode.value}"
    return f"{wins}: {_said(one)}; {rival} {why}".strip()


def headroom(report: Report) -> str:
    ttft, tpot = report.ttft.p90, report.tpot.p90
    parts = [
        f"{name} p90 {1e3 * value:.0f} ms"
        for name, value in (("TTFT", ttft), ("TPOT", tpot))
        if value is not None
    ]
    return (
        f"At {HEADROOM:.0%} of the first row's rate: {', '.join(parts)}; the rate"
        " itself is where the goal begins to fail."
    )


def not_simulated(requests: int) -> str:
    return (
        "All rates are from the stepped cost model, because a simulated run needs"
        f" {requests:,} requests; --most_requests={requests} permits it."
    )


def error_bars(best: Finding, low: float, high: float, error: float) -> str:
    each = best.per_accelerator
    return (
        f"If all steps take {error:.0%} more or {error:.0%} less time than predicted, the first row"
        f" carries {low * each:.3g} or {high * each:.3g} requests/s per accelerator."
    )


def devices_for(finding: Finding, rate: float) -> int:
    """Returns the number of accelerators that are needed to serve `rate` requests per second. The
    deployment consists of copies of the smallest group of instances that has the finding's ratio of
    prefill to decode instances."""
    unit = finding.candidate.unit_devices()
    groups = finding.candidate.devices // unit
    return math.ceil(rate * groups / finding.rate - 1e-9) * unit


def no_rate(findings: Sequence[Finding], goal: Goal) -> str:
    best = max(findings, key=lambda item: max(trial.attainment for trial in item.trials))
    trial = max(best.trials, key=lambda item: item.attainment)
    name = f"{best.candidate.mode.value} {best.candidate.name}"
    if trial.short:
        return (
            f"nothing fits, because no rate is known to be carried: {name} keeps"
            f" {trial.attainment:.0%} at {trial.rate:.3g} requests/s, but the requests end too soon"
            f" to tell for how long; {MORE}"
        )
    missed, remedy = (
        f"{trial.late_first:.0%} miss TTFT, {trial.late_tokens:.0%} TPOT",
        "relax what is missed, or give faster accelerators or links",
    )
    if trial.unfinished > max(trial.late_first, trial.late_tokens):
        missed, remedy = (
            f"{trial.unfinished:.0%} do not finish",
            f"most of these because: {trial.reason}",
        )
    return (
        f"nothing fits, because no candidate keeps {goal.attainment:.0%} of requests within TTFT"
        f" {goal.ttft_seconds:g} s and TPOT {goal.tpot_seconds:g} s at any rate: the nearest,"
        f" {name}, keeps {trial.attainment:.0%} at {trial.rate:.3g} requests/s ({missed}); {remedy}"
    )


def _said(finding: Finding) -> str:
    return (
        f"{finding.candidate.mode.value} {finding.candidate.name} carries"
        f" {finding.per_accelerator:.3g} requests/s per accelerator"
    )


def _why(one: Finding, two: Finding, ceilings: RateCeilings) -> str:
    reasons = []
    if "hand-off" in two.binding or "link" in two.binding or two.link_share > 0.8:
        reasons.append("the link is slow for the KV that is transferred")
    each = float(ceilings.prefill_seconds(one.candidate.decode, one.candidate.chunk_tokens).mean())
    share = one.rate * each / (one.candidate.decode_instances * one.candidate.decode.dp)
    if share < 0.3:
        reasons.append(f"prefill is {share:.0%} of one pool's time and disturbs decode little")
    idle = ceilings.site.devices - two.candidate.devices
    if idle:
        reasons.append(f"two pools leave {idle} accelerators idle")
    busy = two.report.utilisation
    few = two.candidate.prefill_instances + two.candidate.decode_instances <= 8
    if len(busy) == 2 and max(busy.values()) > 2 * min(busy.values()) and few:
        roles = ", ".join(f"{role} {value:.0%}" for role, value in sorted(busy.items()))
        reasons.append(f"few instances allow no better ratio (busy: {roles})")
    return f"Why: {'; '.join(reasons)}." if reasons else ""
