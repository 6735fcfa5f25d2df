"""Searches the mode, layouts and worker counts that serve the most requests per second within a
latency objective.

    jdisagg plan --model=llama-3-70b --hardware=h100 --accelerators=16 --trace=azure.csv.gz
    jdisagg plan --model=DIR --hardware=measured.json --accelerators=8 --output=plan.py
        --mixture=0.8:1000/200,0.2:8000/300 --ttft=1 --tpot=0.05

Disaggregation is compared with the strongest alternative: chunked prefill that runs a chunk and a
decode step as one program, with the best layout and chunk size. --nofused estimates chunks and
decode steps that alternate, as for models with recurrent state.

A simplified simulation ("stepping" the cost model) first ranks all combinations of layouts, worker
counts and chunk sizes. Stderr shows the best of them, which are then simulated with live code in a
minute or two. If that needs too many requests (--most_requests), nothing is simulated. Stdout gets
the table, best first, and a text that compares the modes. --output writes a recipe for `jdisagg
serve`, `cluster` and `router`. --engine plans for vLLM, SGLang or TensorRT-LLM, for which no recipe
is written. Exit status 1: the model does not fit or cannot meet the objective, and the message
gives the reason. docs/planner.md explains the table. Loads neither weights nor JAX."""

import json
import sys
from pathlib import Path
from typing import cast

from rich.console import Console

from jdisagg.config import Mode
from jdisagg.errors import ConfigError
from jdisagg.node.commands.plan_output import context_for, plan_fields, plan_recipe, plan_table
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Plan, Planner, Search
from jdisagg.simulator.planning.trials import Process
from jdisagg.simulator.planning.verdict import devices_for
from launch.console import run
from launch.cost_inputs import find_geometry, software_of
from launch.flags import define
from launch.plan_inputs import block_tokens, check_choice, modes_of, planned_workload, site_of
from launch.processes import on_cores, usable_cores
from launch.progress import aloud
from launch.workload_inputs import check_output

FLAGS = (
    "model", "hardware", "accelerators", "devices_per_node", "domain_devices", "link", "trace",
    "mixture", "limit", "shared_tokens", "hit_rate", "arrivals", "ttft", "tpot", "attainment",
    "modes", "finalists",
    "most_requests", "engine", "speculation", "dtype", "weights", "kv_dtype", "codec", "fused",
    "prefix_cache", "seed", "processes", "serve_rate", "dollars_per_hour", "output", "choose",
    "model_directory", "json",
)  # fmt: skip
flags = define(
    *FLAGS,
    required=("model", "hardware"),
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
    geometry = find_geometry(flags.model, flags.kv_dtype, software)
    site = site_of(flags, software)
    goal = Goal(flags.ttft, flags.tpot, flags.attainment)
    check_output(flags.output, ".py")
    if flags.output and software.engine.name != "jdisagg":
        raise ConfigError(
            f"--output writes a recipe of jdisagg, and --engine={flags.engine}; leave one out"
        )
    check_output(flags.json, ".json")
    modes = modes_of(flags)
    check_choice(flags, flags.finalists * len(modes))
    workload, left_out = planned_workload(flags, geometry.context_tokens)
    sizes = flags.dtype, flags.codec, flags.fused, flags.prefix_cache, flags.seed, flags.hardware
    maker = FleetMaker(geometry, site, *sizes, block_tokens=block_tokens(flags))
    search = Search(
        dtype=flags.dtype,
        codec=flags.codec,
        modes=tuple(modes),
        finalists=flags.finalists,
        most_requests=flags.most_requests,
        fused=flags.fused,
        arrivals=cast(Process, flags.arrivals),
        seed=flags.seed,
    )
    spread = on_cores(flags.processes or usable_cores())
    with aloud() as told:
        planner = Planner(geometry, site, goal, maker.runners, search, told, spread)
        plan = planner.plan(workload)
    table = plan_table(plan, geometry, site, goal, flags.dtype)
    Console(width=None if sys.stdout.isatty() else 80).print(table)
    _tell(plan, left_out, geometry.context_tokens)
    if flags.serve_rate is not None:
        best = plan.findings[0]
        needed = devices_for(best, flags.serve_rate)
        print(
            f"{flags.serve_rate:g} requests/s need {needed} {site.accelerator.name}:"
            f" {best.candidate.mode.value} in groups like {best.candidate.name}."
        )
    if flags.json:
        fields = plan_fields(plan, geometry, site, goal)
        fields["defaults"] = flags.defaults_text()
        Path(flags.json).write_text(json.dumps(fields, indent=1) + "\n")
    if flags.output:
        check_choice(flags, len(plan.findings))
        directory = flags.model_directory or (flags.model if Path(flags.model).is_dir() else "")
        chosen = plan.findings[flags.choose - 1]
        sized = maker.sized(chosen, lambda runner: planner.holds(chosen, workload, runner))
        context = context_for(workload, geometry)
        Path(flags.output).write_text(
            plan_recipe(chosen, sized, goal, directory, context, flags.output)
        )
        print(f"Row {flags.choose} is written to {flags.output}.")


def _tell(plan: Plan, left_out: int, context_tokens: int) -> None:
    if left_out:
        print(
            f"{left_out} requests beyond the model's context of {context_tokens:,} tokens were left"
            " out."
        )
    for text in plan.left_out:
        print(text)
    print(plan.verdict)
    print(flags.defaults_text())


if __name__ == "__main__":
    run(main, flags)
