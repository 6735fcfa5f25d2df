"""How fast does the simulator simulate? Requests a second on one core, iteration level, the live
path, router and workers included.

    python -m benchmarks.simulator_speed --trace=splitwise_rr_conv_70_2min_npseed0.csv.gz             # 40 instances
    python -m benchmarks.simulator_speed --trace=... --instances=1000 --rate=1750 --requests=100000   # pairs drawn from the trace's lengths

Processor seconds of one process, from the first event to the last, without the reading of the
trace; peak memory. The fleet is Llama-3.1-70B on H100, one instance an 8-GPU host, two thirds of
them prefill. Prints a JSON object; --json adds it to a file."""  # noqa: E501

import json
import platform
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

from absl import app, flags

from benchmarks.commits import commit
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.layout.axes import Layout
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.report import SloLimits, summarise
from jdisagg.simulator.run import simulate
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Resampled, poisson

_TRACE = flags.DEFINE_string(
    "trace", None, "The workload, or where its lengths are drawn from.", required=True
)
_INSTANCES = flags.DEFINE_integer("instances", 40, "Of both pools together.")
_REQUESTS = flags.DEFINE_integer(
    "requests", None, "The first so many; with --rate, how many there are."
)
_RATE = flags.DEFINE_float(
    "rate",
    None,
    "Draw pairs of lengths from the trace, and arrivals of a Poisson process of this rate.",
)
_JSON = flags.DEFINE_string("json", None, "Add the figures to this file.")
_LABEL = flags.DEFINE_string("label", None, "Under this name.")


def main(_: list[str]) -> None:
    arrivals = read_trace(_TRACE.value, None if _RATE.value else _REQUESTS.value)
    if _RATE.value:
        arrivals = poisson(_RATE.value, _REQUESTS.value or len(arrivals), Resampled(arrivals))
    instance = replace(INSTANCE, layout=Layout(tp=8))
    prefill = round(_INSTANCES.value * 0.65)
    pools = [
        Pool(count, accelerator("h100"), instance)
        for count in (prefill, _INSTANCES.value - prefill)
    ]
    fleet = Fleet(geometry("llama-3.1-70b"), prefill=pools[0], decode=pools[1])
    began, wall = time.process_time(), time.perf_counter()
    result = simulate(fleet, arrivals)
    seconds, wall = time.process_time() - began, time.perf_counter() - wall
    report = summarise(result.outcomes, SloLimits(1.0, 0.1), result.usage)
    figures = {
        "requests": len(arrivals),
        "instances": _INSTANCES.value,
        "processor_seconds": round(seconds, 2),
        "wall_seconds": round(wall, 2),
        "requests_per_second": round(len(arrivals) / seconds, 1),
        "simulated_seconds": round(result.seconds, 1),
        "decode_steps": result.steps,
        "peak_memory_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "pages_lost": result.pages_lost,
        "ends": report.ends,
        "ttft_p50_p99": [report.ttft.p50, report.ttft.p99],
        "tpot_p50_p99": [report.tpot.p50, report.tpot.p99],
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, one core",
        "commit": commit(),
    }
    print(json.dumps(figures, indent=1))
    if _JSON.value:
        path = Path(_JSON.value)
        known = json.loads(path.read_text()) if path.exists() else {}
        known[_LABEL.value or f"{_INSTANCES.value} instances"] = figures
        path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(app.run(main))
