"""Formats a capacity plan as a ranked table or as data for JSON. Also formats one candidate of the
plan as a recipe (configuration file). Prints nothing."""

import dataclasses
from collections.abc import Sequence

from rich import box
from rich.table import Table

from jdisagg.config import EngineConfig
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.node.recipes import ClusterShape, recipe_text
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import PAGE_TOKENS, Candidate, Site
from jdisagg.simulator.planning.pools import PoolPlan, Row
from jdisagg.simulator.report import Percentiles
from jdisagg.simulator.workloads import Arrival


def plan_table(
    plan: PoolPlan, geometry: CostGeometry, pools: Sequence[Site], goal: Goal, dtype: str
) -> Table:
    """Returns a table of the candidates, the best one first. It is at most 80 columns wide. Times
    are in milliseconds. Figures are never truncated."""
    kept = geometry.kv_bytes_per_token(dtype)
    limits = (
        f"{goal.attainment:.0%} within TTFT {1e3 * goal.ttft_seconds:g} ms and TPOT"
        f" {1e3 * goal.tpot_seconds:g} ms"
    )
    simulated = sum(row.finding.simulated for row in plan.rows)
    found = f"{plan.considered} candidates, {simulated} simulated"
    several, on = len(pools) > 1, " and ".join(pool.text for pool in pools)
    title = f"{geometry.name} on {on}: {limits}; {found}"
    table = Table(
        box=box.SIMPLE_HEAD, title_justify="left", title=title, padding=(0, 1, 0, 0), leading=1
    )
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("mode,\ninstances", overflow="fold", min_width=len("disaggregated"))
    for name in (
        "used,\n$/M out,\nJ/token",
        "req/s" if several else "req/s a\ndevice",
        "TTFT ms\np50\np90\np99",
        "TPOT ms\np50\np90\np99",
        "link\nload",
        "KV room\na rank,\nused",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("binds first", overflow="fold")
    for index, row in enumerate(plan.rows, 1):
        item, candidate = row.finding, row.finding.candidate
        table.add_row(
            str(index),
            f"{candidate.mode.value}\n{row.named(several).replace(' -> ', f' ->{chr(10)}')}",
            "\n".join(
                [
                    str(candidate.devices),
                    *("-" if value is None else f"{value:.3g}" for value in costs_of(row)),
                ]
            ),
            f"{item.rate if several else item.per_accelerator:.3g}",
            _three(item.report.ttft),
            _three(item.report.tpot),
            f"{100 * item.link_share:.1f} %" if candidate.prefill else "-",
            f"{item.kv_tokens * kept / 1e9:.0f} GB\n{100 * item.kv_share:.0f} %",
            item.binding if item.simulated else f"{item.binding} (stepped)",
        )
    return table


def costs_of(row: Row) -> tuple[float | None, float | None]:
    """Returns the cost of a candidate: dollars for a million output tokens, and joules for one
    output token. The accelerators that it uses are counted, at full board power. A value is None if
    the price, the power or the output rate is unknown."""
    candidate, tokens = row.finding.candidate, row.finding.tokens_per_second
    if not tokens:
        return None, None
    dollars, watts = (row.site.spent(candidate, what) for what in ("dollars", "joules"))
    return (
        None if dollars is None else 1e6 * dollars / 3600 / tokens,
        None if watts is None else watts / tokens,
    )


def _three(values: Percentiles) -> str:
    return "\n".join(
        "-" if value is None else _milliseconds(value)
        for value in (values.p50, values.p90, values.p99)
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def plan_fields(
    plan: PoolPlan, geometry: CostGeometry, pools: Sequence[Site], goal: Goal
) -> dict[str, object]:
    return {
        "model": geometry.name,
        "pools": [
            {
                "hardware": pool.accelerator.name,
                "accelerators": pool.accelerators,
                "domain_devices": pool.domain,
            }
            for pool in pools
        ],
        "goal": dataclasses.asdict(goal),
        "verdict": plan.verdict,
        "left_out": list(plan.left_out),
        "considered": plan.considered,
        "findings": [_finding_fields(row) for row in plan.rows],
    }


def _finding_fields(row: Row) -> dict[str, object]:
    item = row.finding
    return {
        **_candidate_fields(item.candidate),
        "prefill_hardware": row.site.accelerator.name if item.candidate.prefill else None,
        "decode_hardware": row.site.decodes.accelerator.name,
        "simulated": item.simulated,
        "requests_per_second": item.rate,
        "per_accelerator": item.per_accelerator,
        "binding": item.binding,
        "link_share": item.link_share,
        "kv_tokens_per_rank": item.kv_tokens,
        "kv_share": item.kv_share,
        "tokens_per_second": item.tokens_per_second,
        "dollars_per_million_output_tokens": costs_of(row)[0],
        "joules_per_output_token": costs_of(row)[1],
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
    row: Row, engine: EngineConfig, geometry: CostGeometry, goal: Goal, path: str
) -> str:
    item, candidate, site = row.finding, row.finding.candidate, row.site
    one_pool = candidate.prefill is None
    shape = (
        ClusterShape(mixed=candidate.decode_instances)
        if one_pool
        else ClusterShape(candidate.prefill_instances, candidate.decode_instances)
    )
    model = "" if engine.model.directory else " --model=DIR"
    used, name = f"{candidate.devices} of {site.text}", row.named(site.decoding is not None)
    rate, share = f"{item.per_accelerator:.3g}", f"{goal.attainment:.0%}"
    limits = f"TTFT {1e3 * goal.ttft_seconds:g} ms and TPOT {1e3 * goal.tpot_seconds:g} ms"
    text = f"""{geometry.name} on {used}: {candidate.mode.value}, {name}.

{_commands(candidate, site, f"--config={path}{model}")}

PREDICTED by jdisagg plan, not measured: {rate} requests/s per accelerator, {share} of them within
{limits}; bound by {item.binding}.
"""
    return recipe_text(engine, shape, text)


def _commands(candidate: Candidate, site: Site, given: str) -> str:
    if site.decoding is None and candidate.devices <= site.node:
        return f"""    jdisagg cluster {given}
    jdisagg serve {given}        (one instance of each role, in one process)"""
    roles = [("decode" if candidate.prefill else "mixed", candidate.decode, site.decodes)]
    counts = [candidate.decode_instances]
    if candidate.prefill:
        roles.insert(0, ("prefill", candidate.prefill, site))
        counts.insert(0, candidate.prefill_instances)
    commands = [f"jdisagg router {given} --port=8700"]
    for (role, layout, where), count in zip(roles, counts, strict=True):
        processes, of_hosts = _processes(layout.devices, where)
        on = f"({count} times, each on {layout.devices} {where.accelerator.name}{of_hosts})"
        commands.append(
            f"jdisagg worker --role={role} {given} --router=ROUTER:8700{processes}    {on}"
        )
    return "\n".join(f"    {command}" for command in commands)


def _processes(devices: int, site: Site) -> tuple[str, str]:
    """Returns the flags of a worker that spans several hosts, and the remark for which I."""
    if devices <= site.node or devices % site.node:
        return "", ""
    count = devices // site.node
    flags = f" --num_processes={count} --process_id=I --coordinator=FIRST_HOST:PORT"
    return flags, f" of {count} hosts, with I from 0 to {count - 1}"
