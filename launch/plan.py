"""Searches the mode, layouts and worker counts that serve the most requests per second within a
latency objective.

    jdisagg plan --model=llama-3-70b --hardware=h100 --accelerators=16 --trace=azure.csv.gz
    jdisagg plan --model=DIR --hardware=measured.json --accelerators=8 --output=plan.py
        --mixture=0.8:1000/200,0.2:8000/300 --ttft=1 --tpot=0.05
    jdisagg plan --model=llama-3-70b --mixture=1:2000/500 --best=dollars
        --pool=h100:16@2.5 --pool=h200:8@3.2 --between=infiniband-ndr

Disaggregation is compared with the strongest alternative: chunked prefill that runs a chunk and a
decode step as one program, with the best layout and chunk size. --nofused estimates chunks and
decode steps that alternate, as for models with recurrent state.

With several --pool, each pool of accelerators prefills, decodes, does both, or is not used. --best
ranks by requests per dollar or joule of the accelerators that are used.

A simplified simulation ("stepping" the cost model) first ranks all combinations of layouts, worker
counts and chunk sizes. Stderr shows the best of them, which are then simulated with live code in a
minute or two. If that needs too many requests (--most_requests), nothing is simulated. Stdout gets
the table, best first, and a text that compares the modes. --output writes a recipe for `jdisagg
serve`, `cluster` and `router`. --engine plans for vLLM, SGLang or TensorRT-LLM, for which no recipe
is written. Exit status 1: the model does not fit or cannot meet the objective, and the message
gives the reason. docs/planner.md explains the table. Loads no weights, and JAX only for
--output."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

from rich.console import Console

from jdisagg.config import Mode
from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.commands.plan_output import context_for, plan_fields, plan_recipe, plan_table
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import Best, Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Planner, Search
from jdisagg.simulator.planning.pools import PoolPlan, Row, plan_pools
from jdisagg.simulator.planning.trials import Process
from jdisagg.simulator.planning.verdict import devices_for
from launch.console import run
from launch.cost_inputs import find_geometry, software_of
from launch.flags import ESTIMATED_WEIGHTS, define
from launch.plan_inputs import (
    block_tokens,
    check_choice,
    defaults_text,
    modes_of,
    planned_workload,
    pools_of,
    sites_of,
)
from launch.processes import on_cores, usable_cores
from launch.progress import aloud
from launch.workload_inputs import check_output

FLAGS = (
    "model", "hardware", "accelerators", "pool", "between", "best", "devices_per_node",
    "domain_devices", "link", "trace",
    "mixture", "limit", "shared_tokens", "hit_rate", "arrivals", "ttft", "tpot", "attainment",
    "modes", "finalists", "most_requests",
    "engine", "speculation", "draft", "dtype", "weights", "kv_dtype", "codec", "fused",
    "prefix_cache", "seed", "processes", "serve_rate", "dollars_per_hour", "output", "choose",
    "model_directory", "json",
)  # fmt: skip
flags = define(
    *FLAGS,
    weights=ESTIMATED_WEIGHTS,
    required=("model",),
    limit=20000,
    ttft=1.0,
    tpot=0.05,
    fused=True,
    modes=[mode.value for mode in Mode],
    dtype="bfloat16",
    codec="none",
    prefix_cache=True,
    seed=0,
)


def main() -> None:
    software = software_of(flags)
    geometry = find_geometry(flags.model, flags.kv_dtype, software, flags.draft)
    pools = pools_of(flags, software)
    goal = Goal(flags.ttft, flags.tpot, flags.attainment)
    check_output(flags.output, ".py")
    if flags.output and software.engine.name != "jdisagg":
        raise ConfigError(
            f"--output writes a recipe of jdisagg, and --engine={flags.engine}; leave one out"
        )
    check_output(flags.json, ".json")
    modes = modes_of(flags)
    sites = sites_of(flags, pools, modes)
    check_choice(flags, flags.finalists * len(modes) * len(sites))
    workload, left_out = planned_workload(flags, geometry.context_tokens)
    sizes = flags.dtype, flags.codec, flags.fused, flags.prefix_cache, flags.seed
    search = Search(
        dtype=flags.dtype,
        codec=flags.codec,
        modes=tuple(modes),
        finalists=flags.finalists,
        most_requests=flags.most_requests,
        fused=flags.fused,
        arrivals=cast(Process, flags.arrivals),
        seed=flags.seed,
        best=cast(Best, flags.best),
    )
    spread = on_cores(flags.processes or usable_cores())

    def maker_of(site: Site) -> FleetMaker:
        blocks, draft = block_tokens(flags), flags.draft or ""
        return FleetMaker(geometry, site, *sizes, block_tokens=blocks, draft=draft)

    with aloud() as told:

        def planner_of(site: Site) -> Planner:
            asked = replace(search, modes=(Mode.DISAGGREGATED,)) if site.decoding else search
            return Planner(geometry, site, goal, maker_of(site).runners, asked, told, spread)

        plan = plan_pools(planner_of, sites, workload, search.best, told)
    table = plan_table(plan, geometry, pools, goal, flags.dtype)
    Console(width=None if sys.stdout.isatty() else 80).print(table)
    _tell(plan, left_out, geometry.context_tokens)
    if flags.serve_rate is not None:
        print(_needed(plan.rows[0], len(pools) > 1))
    if flags.json:
        fields = plan_fields(plan, geometry, pools, goal)
        fields["defaults"] = defaults_text(flags)
        Path(flags.json).write_text(json.dumps(fields, indent=1) + "\n")
    if flags.output:
        check_choice(flags, len(plan.rows))
        row = plan.rows[flags.choose - 1]
        chosen, planner = row.finding, planner_of(row.site)
        maker = maker_of(row.site).sized(
            chosen, lambda runner: planner.holds(chosen, workload, runner)
        )
        _write(row, maker, goal, context_for(workload, geometry))


def _write(row: Row, maker: FleetMaker, goal: Goal, context_tokens: int) -> None:
    from launch.fitted_pages import with_fitting_pages  # JAX, which only recipes need

    directory = flags.model_directory or (flags.model if Path(flags.model).is_dir() else "")
    prefills, decodes = row.site.accelerator, row.site.decodes.accelerator
    cards = {WorkerRole.PREFILL: prefills, WorkerRole.DECODE: decodes, WorkerRole.MIXED: decodes}
    planned = maker.engine(row.finding.candidate, directory, context_tokens)
    fitted = with_fitting_pages(planned, maker.geometry, cards)
    text = plan_recipe(row, fitted, maker.geometry, goal, flags.output)
    Path(flags.output).write_text(text)
    print(f"Row {flags.choose} is written to {flags.output}.")


def _needed(best: Row, several: bool) -> str:
    needed = devices_for(best.finding, flags.serve_rate)
    kinds = dict.fromkeys((best.site.accelerator.name, best.site.decodes.accelerator.name))
    return (
        f"{flags.serve_rate:g} requests/s need {needed} {' and '.join(kinds)}:"
        f" {best.finding.candidate.mode.value} in groups like {best.named(several)}."
    )


def _tell(plan: PoolPlan, left_out: int, context_tokens: int) -> None:
    if left_out:
        print(
            f"{left_out} requests beyond the model's context of {context_tokens:,} tokens were left"
            " out."
        )
    for text in plan.left_out:
        print(text)
    print(plan.verdict)
    print(defaults_text(flags))


if __name__ == "__main__":
    run(main, flags)
