"""Simulates a cluster on virtual time: the live path, router, schedulers and workers, on meshes
that take the cost model's seconds.

    python -m launch.simulate --trace=conversation.csv.gz --prefill_workers=2 --decode_workers=2
    python -m launch.simulate --rate=6 --requests=2000 --mode=chunked --ttft=0.5 --tpot=0.05
    python -m launch.simulate --trace=mooncake.jsonl.gz --spread_tick_seconds=3 --out=run/

Without --trace arrivals are a Poisson process (--variation: gamma gaps, bursts above 1) of one
length. On stdout the report: what was simulated, TTFT, TPOT and TBT percentiles, goodput at the
SLO, utilisation, cost a million tokens; --out writes one row a request, the figures as JSON and
pictures. The same flags give the same result. docs/simulator.md says what is modelled and what is
not."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from jdisagg.config import LimitsConfig, Mode, RoutingConfig, override
from jdisagg.costs.hardware import link
from jdisagg.dispatch.router_events import NO_ROUTER_EVENTS
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node.hardware_files import find_accelerator
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.router.elastic import ElasticConfig
from jdisagg.simulator.elastic import elastic
from jdisagg.simulator.fault_words import parse_fault
from jdisagg.simulator.faults import schedule
from jdisagg.simulator.fleet import INSTANCE, LIMITS, Fleet, Pool
from jdisagg.simulator.report import Report, SloLimits, summarise
from jdisagg.simulator.run import Hook, Result, simulate
from jdisagg.simulator.tables import check_table, fleet_text, text_of, write_outcomes
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, Fixed, at_rate, faster, gamma, spread_ticks
from launch.console import run
from launch.cost_inputs import find_geometry
from launch.flags import define
from launch.workload_inputs import check_positive, reasons

flags = define(
    "trace",
    "mode",
    "prefill_workers",
    "decode_workers",
    "model",
    "prefill_hardware",
    "decode_hardware",
    "prefill",
    "decode",
    "prefill_stages",
    "decode_stages",
    "chunk_tokens",
    "slots_per_rank",
    "fused",
    "dtype",
    "codec",
    "link",
    "host_devices",
    "cache_blocks",
    "block_tokens",
    "rate",
    "speed",
    "requests",
    "spread_tick_seconds",
    "variation",
    "prompt_tokens",
    "output_tokens",
    "ttft",
    "tpot",
    "seed",
    "elastic",
    "switch_seconds",
    "fault",
    "set",
    "decision_log",
    "out",
    "format",
    "plots",
    mode="disaggregated",
    prefill_workers=1,
    decode_workers=1,
    model="llama-3.1-70b",
    prefill="tp=4",
    prefill_stages=1,
    slots_per_rank=INSTANCE.slots_per_rank,
    dtype="bfloat16",
    codec="none",
    requests=None,
    prompt_tokens=1024,
    seed=0,
)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What --set reaches."""

    limits: LimitsConfig = LIMITS
    routing: RoutingConfig = RoutingConfig()
    elastic: ElasticConfig = ElasticConfig()


def main() -> None:
    _run()


def _run() -> None:
    slo = (
        SloLimits(flags.ttft, flags.tpot)
        if flags.ttft is not None or flags.tpot is not None
        else None
    )
    arrivals, fleet = _workload(), _fleet()
    faults = [parse_fault(text) for text in flags.fault]
    out = _folder()
    pictures = out is not None and _pictures()
    began = time.monotonic()
    with _bars() as bars:
        task = bars.add_task("", total=len(arrivals))
        progress = _every(
            max(1, len(arrivals) // 500), lambda done: bars.update(task, completed=done)
        )
        with contextlib.ExitStack() as stack:
            log = (
                stack.enter_context(DecisionLog(flags.decision_log)) if flags.decision_log else None
            )
            result = simulate(
                fleet,
                arrivals,
                flags.seed,
                hooks=[*([schedule(faults)] if faults else []), *_controllers(slo)],
                mortal=bool(faults),
                events=log or NO_ROUTER_EVENTS,
                progress=progress,
            )
    seconds = time.monotonic() - began
    report = summarise(result.outcomes, slo, result.usage)
    print(fleet_text(fleet))
    print(text_of(report))
    per_second = len(arrivals) / seconds if seconds else 0.0
    print(
        f"simulated {result.seconds:.1f} s in {seconds:.1f} s ({per_second:.0f} requests a second)"
    )
    for line in reasons(result.outcomes):
        print(line, file=sys.stderr)
    if out is not None:
        _write(out, result, report, slo, pictures)


def _controllers(slo: SloLimits | None) -> list[Hook]:
    if not (math.isfinite(flags.switch_seconds) and flags.switch_seconds >= 0):
        raise ConfigError(f"--switch_seconds must be 0 or more, got {flags.switch_seconds:g}")
    if not flags.elastic:
        return []
    config = override(_Settings(), flags.set).elastic
    if slo is not None:
        wanted = {"ttft_seconds": slo.ttft_seconds, "tpot_seconds": slo.tpot_seconds}
        config = replace(
            config,
            slo=replace(
                config.slo, **{name: value for name, value in wanted.items() if value is not None}
            ),
        )
    return [
        elastic(
            config,
            flags.switch_seconds,
            lambda now, text: print(f"{now:.0f} s: {text}", file=sys.stderr),
        )
    ]


def _workload() -> list[Arrival]:
    """The arrivals as the flags want them. Raises ConfigError, WorkloadError."""
    if flags.rate is not None and flags.speed is not None:
        raise ConfigError(
            f"--speed={flags.speed:g} and --rate={flags.rate:g} say the same thing twice; give"
            " one of them"
        )
    if flags.requests is not None and flags.requests < 1:
        raise ConfigError(f"--requests must be at least 1, got {flags.requests}")
    for name in ("rate", "speed", "spread_tick_seconds"):
        value = getattr(flags, name)
        check_positive(name, value)
        if name != "rate" and value is not None and flags.trace is None:
            raise ConfigError(
                f"--{name}={value:g} is of a trace's times, and there is no --trace; give"
                " one, or leave it out"
            )
    if flags.trace is None:
        lengths = Fixed(flags.prompt_tokens, flags.output_tokens)
        rate = 1.0 if flags.rate is None else flags.rate
        return gamma(rate, flags.requests or 1000, lengths, flags.variation, flags.seed)
    arrivals = read_trace(flags.trace, flags.requests)
    if flags.spread_tick_seconds is not None:
        arrivals = spread_ticks(arrivals, flags.spread_tick_seconds, flags.seed)
    if flags.rate is not None:
        return at_rate(arrivals, flags.rate)
    return arrivals if flags.speed is None else faster(arrivals, flags.speed)


def _fleet() -> Fleet:
    mode = Mode(flags.mode)
    for name in ("prefill_workers", "prefill_stages"):
        if mode is not Mode.DISAGGREGATED and flags.present(name):
            raise ConfigError(
                f"--{name}={getattr(flags, name)} means nothing in mode {mode.value}: its one"
                " pool is --decode_workers'; leave it out"
            )
    chunk = (
        (2048 if mode is Mode.CHUNKED else INSTANCE.chunk_tokens)
        if flags.chunk_tokens is None
        else flags.chunk_tokens
    )
    instance = replace(
        INSTANCE, slots_per_rank=flags.slots_per_rank, chunk_tokens=chunk, codec=flags.codec
    )
    first = find_accelerator(flags.prefill_hardware)
    second = find_accelerator(flags.decode_hardware) if flags.decode_hardware else first
    prefill = replace(instance, layout=Layout.parse(flags.prefill))
    decode = replace(instance, layout=Layout.parse(flags.decode or flags.prefill))
    settings = override(_Settings(), flags.set)
    return Fleet(
        find_geometry(flags.model),
        Pool(flags.decode_workers, second, decode, flags.decode_stages),
        (
            Pool(flags.prefill_workers, first, prefill, flags.prefill_stages)
            if mode is Mode.DISAGGREGATED
            else None
        ),
        mode,
        limits=settings.limits,
        routing=settings.routing,
        dtype=flags.dtype,
        host_devices=flags.host_devices,
        link=link(flags.link) if flags.link else None,
        fused=flags.fused,
        cache_blocks=flags.cache_blocks,
        block_tokens=flags.block_tokens,
    )


def _folder() -> Path | None:
    """Where results go; refused before the work where they cannot."""
    if flags.out is None:
        return None
    try:
        Path(flags.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out={flags.out} is no folder that can be made ({error}); choose another"
        ) from error
    check_table(_table(Path(flags.out)))
    return Path(flags.out)


def _table(out: Path) -> Path:
    return out / f"requests.{flags.format}"


def _pictures() -> bool:
    """Whether pictures are drawn. Without matplotlib they are left out, and refused before the work
    where they were asked for."""
    if not flags.plots or importlib.util.find_spec("matplotlib") is not None:
        return flags.plots
    if flags.present("plots"):
        raise ConfigError(
            "--plots needs matplotlib, which is not installed; pip install 'jdisagg[notebooks]' or"
            " leave it out"
        )
    print(
        "no pictures: matplotlib is not installed (pip install 'jdisagg[notebooks]')",
        file=sys.stderr,
    )
    return False


def _write(
    out: Path, result: Result, report: Report, slo: SloLimits | None, pictures: bool
) -> None:
    usage = [dataclasses.asdict(item) for item in result.usage]
    figures = {
        "report": report.as_fields(),
        "usage": usage,
        "counters": result.counters,
        "flags": flags.given(),
    }
    (out / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_outcomes(result.outcomes, _table(out), slo)
    if not pictures:
        return
    from jdisagg.simulator import plots  # matplotlib is asked for only here

    runs = {flags.mode: result.outcomes}
    plots.save(plots.ttft_distribution(runs), out / "ttft.png")
    plots.save(plots.tbt_distribution(runs), out / "tbt.png")
    plots.save(plots.timelines(result.outcomes), out / "timelines.png")
    plots.save(plots.load(result.outcomes), out / "load.png")


def _bars() -> Bars:
    columns: Sequence[
        TextColumn | BarColumn | MofNCompleteColumn | TimeElapsedColumn | TimeRemainingColumn
    ] = (
        TextColumn("simulate"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Bars(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


def _every(count: int, tell: Callable[[int], None]) -> Callable[[int, int], None]:
    """Progress is told every so many requests: a bar need not be drawn for each."""

    def told(done: int, total: int) -> None:
        if done % count == 0 or done == total:
            tell(done)

    return told


if __name__ == "__main__":
    run(main, flags)
