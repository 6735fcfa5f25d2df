"""Should one disaggregate, with how many of each, in which layout? Searches, simulates, ranks, and
writes a recipe of the best.

    python -m launch.plan --model=llama-3-70b --hardware=h100 --accelerators=16
    --trace=conversation.csv.gz --ttft=1 --tpot=0.05 python -m launch.plan --model=DIR
    --hardware=measured.json --accelerators=8 --mixture=0.8:1000/200,0.2:8000/300 --output=plan.py

Layouts (dp, tp, ep) of both sides, the ratio of prefill to decode instances and the chunk size are
searched by arithmetic over all that fits, then the best few of each mode by simulation: the highest
rate at which --attainment of the requests keep --ttft and --tpot. On stdout a table, best first,
and which mode wins by how much; a progress bar on stderr. --output writes a recipe for
launch.serve, launch.cluster and launch.router. Where nothing fits, one line says because of what,
and the exit status is 1. Loads no weights and no JAX. docs/planner.md says how to read it."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from jdisagg.config import Mode
from jdisagg.costs.hardware import link
from jdisagg.errors import ConfigError
from jdisagg.node.hardware_files import find_accelerator
from jdisagg.simulator.plan_bounds import Goal
from jdisagg.simulator.plan_candidates import PAGE_TOKENS, Site
from jdisagg.simulator.plan_fleet import FleetMaker
from jdisagg.simulator.plan_trials import Process
from jdisagg.simulator.planner import Planner, Search
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, poisson, within_context
from launch.console import run
from launch.cost_inputs import find_geometry
from launch.flags import define
from launch.plan_output import plan_fields, plan_recipe, plan_table
from launch.workload_inputs import check_output, mixture

flags = define(
    "model",
    "hardware",
    "accelerators",
    "devices_per_node",
    "domain_devices",
    "link",
    "trace",
    "mixture",
    "limit",
    "arrivals",
    "ttft",
    "tpot",
    "attainment",
    "modes",
    "finalists",
    "most_requests",
    "dtype",
    "codec",
    "fused",
    "cache_blocks",
    "seed",
    "output",
    "choose",
    "model_directory",
    "json",
    required=("model", "hardware"),
    limit=20000,
    ttft=1.0,
    tpot=0.05,
    modes=[mode.value for mode in Mode],
    dtype="bfloat16",
    codec="none",
    seed=0,
)


def main() -> None:
    _plan()


def _plan() -> None:
    geometry = find_geometry(flags.model)
    site = Site(
        find_accelerator(flags.hardware),
        flags.accelerators,
        flags.devices_per_node,
        flags.domain_devices,
        link(flags.link) if flags.link else None,
    )
    goal = Goal(flags.ttft, flags.tpot, flags.attainment)
    check_output(flags.output, ".py")
    check_output(flags.json, ".json")
    modes = _modes()
    _check_choice(flags.finalists * len(modes))
    workload, left_out = _workload(geometry.context_tokens)
    maker = FleetMaker(
        geometry,
        site,
        flags.dtype,
        flags.codec,
        flags.fused,
        flags.cache_blocks,
        flags.seed,
        flags.hardware,
    )
    with _bar() as progress:
        planner = Planner(
            geometry,
            site,
            goal,
            maker.run,
            Search(
                dtype=flags.dtype,
                codec=flags.codec,
                modes=tuple(modes),
                finalists=flags.finalists,
                most_requests=flags.most_requests,
                arrivals=cast(Process, flags.arrivals),
                seed=flags.seed,
            ),
            progress,
        )
        plan = planner.plan(workload)
    table = plan_table(plan, geometry, site, goal, flags.dtype)
    Console(width=None if sys.stdout.isatty() else 80).print(table)
    if left_out:
        print(
            f"{left_out} requests beyond the model's context of {geometry.context_tokens:,} tokens"
            " were left out."
        )
    for text in plan.left_out:
        print(text)
    print(plan.verdict)
    if flags.json:
        Path(flags.json).write_text(
            json.dumps(plan_fields(plan, geometry, site, goal), indent=1) + "\n"
        )
    if flags.output:
        _check_choice(len(plan.findings))
        longest = max(item.prompt_tokens + item.output_tokens for item in workload)
        context = min(geometry.context_tokens, -(-longest // PAGE_TOKENS) * PAGE_TOKENS)
        directory = flags.model_directory or (flags.model if Path(flags.model).is_dir() else "")
        chosen = plan.findings[flags.choose - 1]
        sized = maker.sized(chosen, lambda runner: planner.holds(chosen, workload, runner))
        Path(flags.output).write_text(
            plan_recipe(chosen, sized, goal, directory, context, flags.output)
        )
        print(f"Row {flags.choose} is written to {flags.output}.")


def _check_choice(rows: int) -> None:
    """Before the search against the most rows that the table may have, after it against those that
    it has."""
    if flags.output and rows > 0 and not 1 <= flags.choose <= rows:
        raise ConfigError(f"--choose={flags.choose} must be a row of the table, 1 to {rows}")


def _modes() -> list[Mode]:
    known = {mode.value: mode for mode in Mode}
    if unknown := [name for name in flags.modes if name not in known]:
        raise ConfigError(f"--modes: no mode named {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(flags.modes)]


def _workload(context_tokens: int) -> tuple[list[Arrival], int]:
    """(requests, how many were beyond the context). Raises ConfigError, WorkloadError."""
    if bool(flags.trace) == bool(flags.mixture):
        raise ConfigError(
            "the workload: give either --trace=FILE or --mixture=weight:prompt/output,..."
        )
    if flags.mixture and flags.present("limit"):
        raise ConfigError(
            "--limit counts the requests of a trace, and --mixture has none; leave it out, or see"
            " --most_requests"
        )
    listed = (
        read_trace(flags.trace, flags.limit)
        if flags.trace
        else poisson(1.0, 4000, mixture(flags.mixture or ()), flags.seed)
    )
    kept = within_context(listed, context_tokens)
    return kept, len(listed) - len(kept)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda said, done, total: bar.update(
            task, description=said, completed=done, total=total
        )


if __name__ == "__main__":
    run(main, flags)
