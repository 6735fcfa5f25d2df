"""Formats a capacity plan as a ranked table or as data for JSON. Also formats one candidate of the
plan as a recipe (configuration file). Prints nothing."""

import dataclasses
from collections.abc import Sequence

from rich import box
from rich.table import Table

from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.node.recipes import ClusterShape, recipe_text
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import PAGE_TOKENS, Candidate, Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Plan
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.report import Percentiles
from jdisagg.simulator.workloads import Arrival


def plan_table(plan: Plan, geometry: CostGeometry, site: Site, goal: Goal, dtype: str) -> Table:
    """Returns a table of the candidates, the best one first. It is at most 80 columns wide. Times
    are in milliseconds. Figures are never truncated."""
    kept = geometry.kv_bytes_per_token(dtype)
    limits = (
        f"{goal.attainment:.0%} within TTFT {1e3 * goal.ttft_seconds:g} ms and TPOT"
        f" {1e3 * goal.tpot_seconds:g} ms"
    )
    simulated = sum(item.simulated for item in plan.findings)
    found = f"{plan.considered} candidates, {simulated} simulated"
    title = f"{geometry.name} on {site.accelerators} {site.accelerator.name}: {limits}; {found}"
    table = Table(
        box=box.SIMPLE_HEAD, title_justify="left", title=title, padding=(0, 1, 0, 0), leading=1
    )
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("mode,\ninstances", overflow="fold", min_width=len("disaggregated"))
    for name in (
        "used,\n$/M out,\nJ/token",
        "req/s a\ndevice",
        "TTFT ms\np50\np90\np99",
        "TPOT ms\np50\np90\np99",
        "link\nload",
        "KV room\na rank,\nused",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("binds first", overflow="fold")
    for index, item in enumerate(plan.findings, 1):
        candidate = item.candidate
        table.add_row(
            str(index),
            f"{candidate.mode.value}\n" + candidate.name.replace(" -> ", " ->\n"),
            "\n".join(
                [
                    str(candidate.devices),
                    *("-" if value is None else f"{value:.3g}" for value in costs_of(item, site)),
                ]
            ),
            f"{item.per_accelerator:.3g}",
            _three(item.report.ttft),
            _three(item.report.tpot),
            f"{100 * item.link_share:.1f} %" if candidate.prefill else "-",
            f"{item.kv_tokens * kept / 1e9:.0f} GB\n{100 * item.kv_share:.0f} %",
            item.binding if item.simulated else f"{item.binding} (stepped)",
        )
    return table


def costs_of(item: Finding, site: Site) -> tuple[float | None, float | None]:
    """Returns the cost of a candidate: dollars for a million output tokens, and joules for one
    output token. All accelerators of the site are counted, at full board power. A value is None if
    the price, the power or the output rate is unknown."""
    card = site.accelerator
    if not item.tokens_per_second:
        return None, None
    seconds = site.accelerators / item.tokens_per_second  # of accelerators, per output token
    dollars, watts = card.dollars_per_hour, card.watts
    return (
        None if dollars is None else 1e6 * seconds * dollars / 3600,
        None if watts is None else seconds * watts,
    )


def _three(values: Percentiles) -> str:
    return "\n".join(
        "-" if value is None else _milliseconds(value)
        for value in (values.p50, values.p90, values.p99)
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def plan_fields(plan: Plan, geometry: CostGeometry, site: Site, goal: Goal) -> dict[str, object]:
    return {
        "model": geometry.name,
        "hardware": site.accelerator.name,
        "accelerators": site.accelerators,
        "domain_devices": site.domain,
        "goal": dataclasses.asdict(goal),
        "verdict": plan.verdict,
        "left_out": list(plan.left_out),
        "considered": plan.considered,
        "findings": [
            {
                **_candidate_fields(item.candidate),
                "simulated": item.simulated,
                "requests_per_second": item.rate,
                "per_accelerator": item.per_accelerator,
                "binding": item.binding,
                "link_share": item.link_share,
                "kv_tokens_per_rank": item.kv_tokens,
                "kv_share": item.kv_share,
                "tokens_per_second": item.tokens_per_second,
                "dollars_per_million_output_tokens": costs_of(item, site)[0],
                "joules_per_output_token": costs_of(item, site)[1],
                "bounds": dict(item.bounds.limits),
                "trials": [
                    {
                        "rate": trial.rate,
                        "attainment": trial.attainment,
                        "overload": trial.overload,
                        "short": trial.short,
                    }
                    for trial in item.trials
                ],
                "report": item.report.as_fields(),
            }
            for item in plan.findings
        ],
    }


def _candidate_fields(candidate: Candidate) -> dict[str, object]:
    return {
        "mode": candidate.mode.value,
        "decode_layout": str(candidate.decode),
        "decode_instances": candidate.decode_instances,
        "prefill_layout": str(candidate.prefill) if candidate.prefill else None,
        "prefill_instances": candidate.prefill_instances,
        "chunk_tokens": candidate.chunk_tokens,
        "gather_steps": candidate.gather_steps,
        "devices": candidate.devices,
    }


def context_for(workload: Sequence[Arrival], geometry: CostGeometry) -> int:
    """Returns the context length for a recipe, in tokens. It is the longest request of the
    workload, rounded up to a multiple of the page size, and at most the model's context length."""
    longest = max(item.prompt_tokens + item.output_tokens for item in workload)
    return min(geometry.context_tokens, -(-longest // PAGE_TOKENS) * PAGE_TOKENS)


def plan_recipe(
    item: Finding,
    maker: FleetMaker,
    goal: Goal,
    model_directory: str,
    context_tokens: int,
    path: str,
) -> str:
    candidate, site = item.candidate, maker.site
    engine = maker.engine(candidate, model_directory, context_tokens)
    one_pool = candidate.prefill is None
    shape = (
        ClusterShape(mixed=candidate.decode_instances)
        if one_pool
        else ClusterShape(candidate.prefill_instances, candidate.decode_instances)
    )
    largest = max(candidate.decode.devices, candidate.prefill.devices if candidate.prefill else 0)
    hosts = (
        f" --processes_per_instance={largest // site.node}"
        if largest > site.node and largest % site.node == 0
        else ""
    )
    model = "" if model_directory else " --model=DIR"
    used = f"{candidate.devices} of {site.accelerators} {site.accelerator.name}"
    rate, share = f"{item.per_accelerator:.3g}", f"{goal.attainment:.0%}"
    limits = f"TTFT {1e3 * goal.ttft_seconds:g} ms and TPOT {1e3 * goal.tpot_seconds:g} ms"
    text = f"""{maker.geometry.name} on {used}: {candidate.mode.value}, {candidate.name}.

    jdisagg cluster --config={path}{model}{hosts}
    jdisagg serve --config={path}{model}        (one instance of each role, in one process)

PREDICTED by jdisagg plan, not measured: {rate} requests/s per accelerator, {share} of them within
{limits}; bound by {item.binding}.
"""
    return recipe_text(engine, shape, text)
