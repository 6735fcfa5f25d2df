"""Simulates a cluster in virtual time. Runs the real router, schedulers and workers, with step
times from the cost model.

    jdisagg simulate --trace=conversation.csv.gz --prefill_workers=2 --decode_workers=2
    jdisagg simulate --rate=6 --requests=2000 --mode=chunked --ttft=0.5 --tpot=0.05
    jdisagg simulate --trace=mooncake.jsonl.gz --host_cache_gib=200
    jdisagg simulate --turns=6 --system_tokens=2048
    jdisagg simulate --concurrency=64 --prompt_tokens=4096

Without --trace, arrivals are a Poisson process, or a closed loop of --concurrency users, and all
prompts have the same length. Stdout gets the report: percentiles of TTFT, TPOT and TBT, goodput,
utilisation and cost per million tokens. --out writes a table of requests, the report as JSON, and
plots. The same flags give the same result. docs/simulator.md describes the model."""

import sys
import time
from contextlib import nullcontext

from rich.progress import TimeElapsedColumn, TimeRemainingColumn

from jdisagg.observe.decision_log import DecisionLog
from jdisagg.router.decision import NO_ROUTER_EVENTS
from jdisagg.simulator.faults import parse_fault, schedule
from jdisagg.simulator.fleet import INSTANCE
from jdisagg.simulator.report import summarise
from jdisagg.simulator.result_files import ResultFolder, can_draw
from jdisagg.simulator.run import simulate
from jdisagg.simulator.tables import fleet_text, reuse_text, text_of
from launch.console import run
from launch.flags import ESTIMATED_WEIGHTS, define
from launch.fleet_inputs import controllers, simulated_fleet
from launch.progress import counted
from launch.workload_inputs import arrivals_of, reasons, slo_limits

FLAGS = (
    "trace", "mode", "prefill_workers", "decode_workers", "model", "prefill_hardware",
    "decode_hardware", "prefill", "decode", "chunk_tokens", "slots_per_rank", "fused",
    "engine", "speculation", "draft", "dtype", "weights", "kv_dtype", "codec",
    "link", "host_devices", "prefix_cache", "host_cache_gib", "append_tokens", "block_tokens",
    "rate", "speed", "requests", "spread_tick_seconds", "variation", "turns", "think_seconds",
    "system_tokens", "concurrency", "prompt_tokens", "output_tokens", "ttft", "tpot", "seed",
    "elastic", "switch_seconds", "fault", "set", "decision_log", "out", "format", "plots",
)  # fmt: skip
flags = define(
    *FLAGS,
    weights=ESTIMATED_WEIGHTS,
    mode="disaggregated",
    prefill_workers=1,
    decode_workers=1,
    model="llama-3.1-70b",
    prefill="tp=4",
    slots_per_rank=INSTANCE.slots_per_rank,
    dtype="bfloat16",
    codec="none",
    requests=None,
    prompt_tokens=1024,
    seed=0,
)


def main() -> None:
    slo = slo_limits(flags)
    fleet = simulated_fleet(flags)
    arrivals = arrivals_of(flags, fleet.context)
    faults = [parse_fault(text) for text in flags.fault]
    out = ResultFolder(flags.out, flags.format) if flags.out is not None else None
    pictures = out is not None and flags.plots and can_draw(asked=flags.present("plots"))
    hooks = [*([schedule(faults)] if faults else []), *controllers(flags, slo)]
    began = time.monotonic()
    with (
        counted("simulate", TimeElapsedColumn(), TimeRemainingColumn()) as bar,
        DecisionLog(flags.decision_log) if flags.decision_log else nullcontext() as log,
    ):
        task, every = bar.add_task("", total=len(arrivals)), max(1, len(arrivals) // 500)

        def progress(done: int, total: int) -> None:  # redrawing the bar per request is slow
            if done % every == 0 or done == total:
                bar.update(task, completed=done)

        result = simulate(
            fleet,
            arrivals,
            flags.seed,
            hooks=hooks,
            mortal=bool(faults),
            events=log or NO_ROUTER_EVENTS,
            progress=progress,
            concurrency=flags.concurrency,
        )
    seconds = time.monotonic() - began
    report = summarise(result.outcomes, slo, result.usage)
    print(fleet_text(fleet))
    print(text_of(report))
    if fleet.prefix.reuse:
        print(reuse_text(result.counters))
    per_second = len(arrivals) / seconds if seconds else 0.0
    print(f"simulated {result.seconds:.1f} s in {seconds:.1f} s ({per_second:.0f} requests/s)")
    print(flags.defaults_text())
    for line in reasons(result.outcomes):
        print(line, file=sys.stderr)
    if out is not None:
        out.write(result, report, slo, flags.given())
    if out is not None and pictures:
        out.draw(flags.mode, result)


if __name__ == "__main__":
    run(main, flags)
