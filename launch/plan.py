"""Should one disaggregate, with how many of each, in which layout? Searches, simulates, ranks, and writes a recipe of the best.

    python -m launch.plan --model=llama-3-70b --hardware=h100 --accelerators=16 --trace=conversation.csv.gz --ttft=1 --tpot=0.05
    python -m launch.plan --model=DIR --hardware=measured.json --accelerators=8 --mixture=0.8:1000/200,0.2:8000/300 --output=plan.py

Layouts (dp, tp, ep) of both sides, the ratio of prefill to decode instances and the chunk size are searched by arithmetic over all that
fits, then the best few of each mode by simulation: the highest rate at which --attainment of the requests keep --ttft and --tpot. On
stdout a table, best first, and which mode wins by how much; a progress bar on stderr. --output writes a recipe for launch.serve,
launch.cluster and launch.router. Where nothing fits, one line says because of what, and the exit status is 1. Loads no weights and no
JAX. docs/planner.md says how to read it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from jdisagg.config import Mode
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.router.cost_model import CODEC_BITS
from jdisagg.router.hardware import HARDWARE, LINKS, link
from jdisagg.simulator.plan_bounds import Goal
from jdisagg.simulator.plan_candidates import PAGE_TOKENS, Site
from jdisagg.simulator.plan_fleet import FleetMaker
from jdisagg.simulator.plan_trials import Process
from jdisagg.simulator.planner import Planner
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, poisson, within_context
from launch.console import quiet_end, refuse_words
from launch.cost_inputs import find_accelerator, find_geometry
from launch.plan_output import plan_fields, plan_recipe, plan_table
from launch.workload_inputs import check_output, mixture

_MODEL = flags.DEFINE_string(
    "model", None, "Model directory, or a name of the catalogue (launch.kv_calculator --model=help).", required=True
)
_HARDWARE = flags.DEFINE_string("hardware", None, f"{', '.join(HARDWARE)}, or a file of launch.measure_costs.", required=True)
_ACCELERATORS = flags.DEFINE_integer("accelerators", 8, "How many there are in all.")
_NODE = flags.DEFINE_integer("devices_per_node", None, "Of them in a host; default: as the hardware is usually built.")
_DOMAIN = flags.DEFINE_integer("domain_devices", None, "Of them joined by NVLink or ICI; default: as the hardware is usually built.")
_LINK = flags.DEFINE_string("link", None, f"Of each device beyond that: {', '.join(LINKS)}.")
_TRACE = flags.DEFINE_string("trace", None, "The workload: a .csv or .jsonl trace, .gz or not (docs/simulator.md).")
_MIXTURE = flags.DEFINE_list(
    "mixture", None, "The workload without a trace: weight:prompt/output,... in tokens, such as 0.8:1000/200,0.2:8000/300."
)
_LIMIT = flags.DEFINE_integer("limit", 20000, "The trace's first so many requests.")
_ARRIVALS = flags.DEFINE_enum("arrivals", "poisson", ["poisson", "trace"], "Random arrivals, or the trace's own times, stretched.")
_TTFT = flags.DEFINE_float("ttft", 1.0, "Seconds within which the first token must come.")
_TPOT = flags.DEFINE_float("tpot", 0.05, "Seconds a token after the first.")
_ATTAINMENT = flags.DEFINE_float("attainment", 0.9, "Part of the requests that must keep both.")
_MODES = flags.DEFINE_list("modes", [mode.value for mode in Mode], "Modes to look at.")
_FINALISTS = flags.DEFINE_integer("finalists", 3, "Candidates of each mode that are simulated.")
_REQUESTS = flags.DEFINE_integer("most_requests", 4000, "Of one simulated run; up to eight times as many where fewer cannot tell.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights and KV.")
_CODEC = flags.DEFINE_enum("codec", "none", list(CODEC_BITS), "How KV travels.")
_FUSED = flags.DEFINE_bool(
    "fused_chunks", False, "Price chunked prefill as engines that run a chunk and a decode step as one; ours takes turns."
)
_CACHE = flags.DEFINE_integer(
    "cache_blocks", 0, "Prefix reuse: blocks of 512 tokens that each prefilling instance keeps, if the trace has hashes."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of arrivals and ids: the same seed, the same plan.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", None, "Write a recipe of the best (or of --choose) to this .py file.")
_CHOOSE = flags.DEFINE_integer("choose", 1, "Which row of the table --output writes.")
_DIRECTORY = flags.DEFINE_string("model_directory", "", "Checkpoint that the recipe names; default: --model where it is a directory.")
_JSON = flags.DEFINE_string("json", None, "Write the table's figures and all runs' to this file.")


def main(argv: list[str]) -> int:
    try:
        refuse_words(argv)
        with quiet_end():
            _plan()
    except JdisaggError as error:
        print(error.message if error.message.startswith("nothing fits") else f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


def _plan() -> None:
    geometry = find_geometry(_MODEL.value)
    site = Site(
        find_accelerator(_HARDWARE.value), _ACCELERATORS.value, _NODE.value, _DOMAIN.value, link(_LINK.value) if _LINK.value else None
    )
    goal = Goal(_TTFT.value, _TPOT.value, _ATTAINMENT.value)
    check_output(_OUTPUT.value, ".py")
    check_output(_JSON.value, ".json")
    modes = _modes()
    _check_choice(_FINALISTS.value * len(modes))
    workload, left_out = _workload(geometry.context_tokens)
    maker = FleetMaker(geometry, site, _DTYPE.value, _CODEC.value, _FUSED.value, _CACHE.value, _SEED.value, _HARDWARE.value)
    with _bar() as progress:
        planner = Planner(
            geometry, site, goal, maker.run, dtype=_DTYPE.value, codec=_CODEC.value, modes=modes, finalists=_FINALISTS.value,
            most_requests=_REQUESTS.value, arrivals=cast(Process, _ARRIVALS.value), seed=_SEED.value, progress=progress,
        )  # fmt: skip
        plan = planner.plan(workload)
    table = plan_table(plan, geometry, site, goal, _DTYPE.value)
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    if left_out:
        print(f"{left_out} requests beyond the model's context of {geometry.context_tokens:,} tokens were left out.")
    for text in plan.left_out:
        print(text)
    print(plan.verdict)
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(plan_fields(plan, geometry, site, goal), indent=1) + "\n")
    if _OUTPUT.value:
        _check_choice(len(plan.findings))
        longest = max(item.prompt_tokens + item.output_tokens for item in workload)
        context = min(geometry.context_tokens, -(-longest // PAGE_TOKENS) * PAGE_TOKENS)
        directory = _DIRECTORY.value or (_MODEL.value if Path(_MODEL.value).is_dir() else "")
        chosen = plan.findings[_CHOOSE.value - 1]
        sized = maker.sized(chosen, lambda runner: planner.holds(chosen, workload, runner))
        Path(_OUTPUT.value).write_text(plan_recipe(chosen, sized, goal, directory, context, _OUTPUT.value))
        print(f"Row {_CHOOSE.value} is written to {_OUTPUT.value}.")


def _check_choice(rows: int) -> None:
    """Before the search against the most rows that the table may have, after it against those that it has."""
    if _OUTPUT.value and rows > 0 and not 1 <= _CHOOSE.value <= rows:
        raise ConfigError(f"--choose={_CHOOSE.value} must be a row of the table, 1 to {rows}")


def _modes() -> list[Mode]:
    known = {mode.value: mode for mode in Mode}
    if unknown := [name for name in _MODES.value if name not in known]:
        raise ConfigError(f"--modes: no mode named {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(_MODES.value)]


def _workload(context_tokens: int) -> tuple[list[Arrival], int]:
    """(requests, how many were beyond the context). Raises ConfigError, WorkloadError."""
    if bool(_TRACE.value) == bool(_MIXTURE.value):
        raise ConfigError("the workload: give either --trace=FILE or --mixture=weight:prompt/output,...")
    if _MIXTURE.value and _LIMIT.present:
        raise ConfigError("--limit counts the requests of a trace, and --mixture has none; leave it out, or see --most_requests")
    listed = read_trace(_TRACE.value, _LIMIT.value) if _TRACE.value else poisson(1.0, 4000, mixture(_MIXTURE.value or ()), _SEED.value)
    kept = within_context(listed, context_tokens)
    return kept, len(listed) - len(kept)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda said, done, total: bar.update(task, description=said, completed=done, total=total)


if __name__ == "__main__":
    app.run(main)
