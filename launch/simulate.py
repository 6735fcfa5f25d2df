"""Simulates a cluster on virtual time: the live path, router, schedulers and workers, on meshes that take the cost model's seconds.

    python -m launch.simulate --trace=conversation.csv.gz --mode=disaggregated --prefill=2 --decode=2
    python -m launch.simulate --rate=6 --requests=2000 --prompt_tokens=1024 --output_tokens=128 --mode=chunked --ttft=0.5 --tpot=0.05
    python -m launch.simulate --trace=mooncake.jsonl.gz --spread_tick_seconds=3 --cache_blocks=50000 --prefill=6 --decode=6 --out=run/

Without --trace arrivals are a Poisson process (--variation: gamma gaps, bursts above 1) of one length. On stdout the report: TTFT, TPOT and
TBT percentiles, goodput at the SLO, utilisation, cost a million tokens; --out writes one row a request, the figures as JSON and pictures.
The same flags give the same result. docs/simulator.md says what is modelled and what is not.
"""

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

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from jdisagg.config import LimitsConfig, Mode, RoutingConfig, override
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.router.elastic import ElasticConfig
from jdisagg.router.hardware import link
from jdisagg.simulator.elastic import elastic
from jdisagg.simulator.fault_words import parse_fault
from jdisagg.simulator.faults import schedule
from jdisagg.simulator.fleet import INSTANCE, LIMITS, Fleet, Pool
from jdisagg.simulator.report import Report, Slo, summarise
from jdisagg.simulator.run import Hook, Result, simulate
from jdisagg.simulator.tables import check_table, text_of, write_outcomes
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, Fixed, at_rate, faster, gamma, spread_ticks
from launch.console import quiet_end, refuse_words
from launch.cost_inputs import find_accelerator, find_geometry
from launch.workload_inputs import check_positive, reasons

_TRACE = flags.DEFINE_string("trace", None, "A .csv or .jsonl file, .gz or not: Azure, Mooncake, Splitwise, or one's own.")
_MODE = flags.DEFINE_enum(
    "mode", "disaggregated", [mode.value for mode in Mode], "Two pools, or one where prefill chunks alternate with steps."
)
_PREFILL = flags.DEFINE_integer("prefill", 1, "Prefill instances (in the one-mesh modes: none).")
_DECODE = flags.DEFINE_integer("decode", 1, "Decode instances; in the one-mesh modes, instances.")
_MODEL = flags.DEFINE_string("model", "llama-3.1-70b", "A name of the catalogue, or a model directory.")
_PREFILL_HARDWARE = flags.DEFINE_string("prefill_hardware", "h100", "A name of the table, or a file that launch.measure_costs wrote.")
_DECODE_HARDWARE = flags.DEFINE_string("decode_hardware", None, "Default: as for prefill.")
_PREFILL_LAYOUT = flags.DEFINE_string("prefill_layout", "tp=4", "dp=N,tp=N,ep=N of one prefill instance.")
_DECODE_LAYOUT = flags.DEFINE_string("decode_layout", None, "Default: as for prefill.")
_PREFILL_STAGES = flags.DEFINE_integer("prefill_stages", 1, "Pipeline stages of a prefill instance, each of the layout's devices.")
_DECODE_STAGES = flags.DEFINE_integer("decode_stages", 1, "Likewise.")
_CHUNK = flags.DEFINE_integer("chunk_tokens", None, "Of a prefill chunk; default 8192, in chunked mode 2048.")
_SLOTS = flags.DEFINE_integer("slots", INSTANCE.slots_per_rank, "Sequences that a dp rank decodes at once.")
_FUSED = flags.DEFINE_bool("fused", False, "A prefill chunk and a decode step run as one; else one after the other, as the live mesh does.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights and KV.")
_CODEC = flags.DEFINE_enum("codec", "none", ["none", "int8", "int4", "fp8"], "How KV travels.")
_LINK = flags.DEFINE_string("link", None, "Between all instances; default: scale-up within a host, scale-out beyond.")
_HOST = flags.DEFINE_integer("host_devices", 0, "Devices that share the fast link; 0: as the hardware's domain.")
_CACHE = flags.DEFINE_integer("cache_blocks", 0, "Blocks of the trace that each prefilling instance keeps for reuse.")
_BLOCK = flags.DEFINE_integer("block_tokens", 512, "Tokens of one hashed block of the trace (Mooncake: 512).")
_RATE = flags.DEFINE_float("rate", None, "Requests a second on average; of a trace: its times are stretched to it.")
_SPEED = flags.DEFINE_float("speed", None, "How much faster than the trace requests come.")
_REQUESTS = flags.DEFINE_integer("requests", None, "The first so many of the trace; without a trace, how many there are (1000).")
_TICK = flags.DEFINE_float("spread_tick_seconds", None, "Where the trace's clock is coarse: spread arrivals over ticks of so many seconds.")
_VARIATION = flags.DEFINE_float("variation", 1.0, "Without a trace: coefficient of variation of the gaps; 0 even, 1 Poisson, above bursts.")
_PROMPT = flags.DEFINE_integer("prompt_tokens", 1024, "Without a trace: of each prompt.")
_OUTPUT = flags.DEFINE_integer("output_tokens", 128, "Without a trace: of each answer.")
_TTFT = flags.DEFINE_float("ttft", None, "Seconds within which the first token must come, for attainment and goodput.")
_TPOT = flags.DEFINE_float("tpot", None, "Seconds a token after the first, likewise.")
_SEED = flags.DEFINE_integer("seed", 0, "Everything random follows from it.", lower_bound=0)
_ELASTIC = flags.DEFINE_bool("elastic", False, "Workers change their roles as the load asks for it, so that --ttft and --tpot are met.")
_SWITCH = flags.DEFINE_float("switch_seconds", 20.0, "With --elastic: how long a drained worker needs to come back in its other role.")
_FAULT = flags.DEFINE_multi_string(
    "fault", [], "death:decode-0:10:5, stall:W:at:back, slow:W:at:factor:seconds, cancels:at:part; repeatable."
)
_SET = flags.DEFINE_multi_string("set", [], "FIELD=value of limits., routing. or elastic., as in the live configuration; may be repeated.")
_DECISIONS = flags.DEFINE_string("decision_log", "", "File for every decision of the router; launch.replay_decisions makes them again.")
_OUT = flags.DEFINE_string("out", None, "A folder for requests.csv (or .parquet), report.json and the pictures.")
_FORMAT = flags.DEFINE_enum("format", "csv", ["csv", "parquet"], "Of the table of requests.")
_PLOTS = flags.DEFINE_bool("plots", True, "Pictures in --out; by default where matplotlib is installed.")


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What --set reaches."""

    limits: LimitsConfig = LIMITS
    routing: RoutingConfig = RoutingConfig()
    elastic: ElasticConfig = ElasticConfig()


def main(argv: list[str]) -> int:
    try:
        refuse_words(argv)
        with quiet_end():
            _run()
    except JdisaggError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


def _run() -> None:
    slo = Slo(_TTFT.value, _TPOT.value) if _TTFT.value is not None or _TPOT.value is not None else None
    arrivals, fleet = _workload(), _fleet()
    faults = [parse_fault(text) for text in _FAULT.value]
    out = _folder()
    pictures = out is not None and _pictures()
    began = time.monotonic()
    with _bars() as bars:
        task = bars.add_task("", total=len(arrivals))
        progress = _every(max(1, len(arrivals) // 500), lambda done: bars.update(task, completed=done))
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(DecisionLog(_DECISIONS.value)) if _DECISIONS.value else None
            result = simulate(
                fleet,
                arrivals,
                _SEED.value,
                hooks=[*([schedule(faults)] if faults else []), *_controllers(slo)],
                mortal=bool(faults),
                on_answer=log.write if log else None,
                progress=progress,
            )
    seconds = time.monotonic() - began
    report = summarise(result.outcomes, slo, result.usage)
    print(text_of(report))
    per_second = len(arrivals) / seconds if seconds else 0.0
    print(f"simulated {result.seconds:.1f} s in {seconds:.1f} s ({per_second:.0f} requests a second)")
    for line in reasons(result.outcomes):
        print(line, file=sys.stderr)
    if out is not None:
        _write(out, result, report, slo, pictures)


def _controllers(slo: Slo | None) -> list[Hook]:
    if not (math.isfinite(_SWITCH.value) and _SWITCH.value >= 0):
        raise ConfigError(f"--switch_seconds must be 0 or more, got {_SWITCH.value:g}")
    if not _ELASTIC.value:
        return []
    config = override(_Settings(), _SET.value).elastic
    if slo is not None:
        wanted = {"ttft_seconds": slo.ttft_seconds, "tpot_seconds": slo.tpot_seconds}
        config = replace(config, slo=replace(config.slo, **{name: value for name, value in wanted.items() if value is not None}))
    return [elastic(config, _SWITCH.value, lambda now, text: print(f"{now:.0f} s: {text}", file=sys.stderr))]


def _workload() -> list[Arrival]:
    """The arrivals as the flags want them. Raises ConfigError, WorkloadError."""
    if _RATE.value is not None and _SPEED.value is not None:
        raise ConfigError(f"--speed={_SPEED.value:g} and --rate={_RATE.value:g} say the same thing twice; give one of them")
    if _REQUESTS.value is not None and _REQUESTS.value < 1:
        raise ConfigError(f"--requests must be at least 1, got {_REQUESTS.value}")
    for flag in (_RATE, _SPEED, _TICK):
        check_positive(flag)
        if flag is not _RATE and flag.value is not None and _TRACE.value is None:
            raise ConfigError(f"--{flag.name}={flag.value:g} is of a trace's times, and there is no --trace; give one, or leave it out")
    if _TRACE.value is None:
        lengths = Fixed(_PROMPT.value, _OUTPUT.value)
        rate = 1.0 if _RATE.value is None else _RATE.value
        return gamma(rate, _REQUESTS.value or 1000, lengths, _VARIATION.value, _SEED.value)
    arrivals = read_trace(_TRACE.value, _REQUESTS.value)
    if _TICK.value is not None:
        arrivals = spread_ticks(arrivals, _TICK.value, _SEED.value)
    if _RATE.value is not None:
        return at_rate(arrivals, _RATE.value)
    return arrivals if _SPEED.value is None else faster(arrivals, _SPEED.value)


def _fleet() -> Fleet:
    mode = Mode(_MODE.value)
    for flag in (_PREFILL, _PREFILL_STAGES):
        if mode is not Mode.DISAGGREGATED and flag.present:
            raise ConfigError(f"--{flag.name}={flag.value} means nothing in mode {mode.value}: its one pool is --decode's; leave it out")
    chunk = (2048 if mode is Mode.CHUNKED else INSTANCE.chunk_tokens) if _CHUNK.value is None else _CHUNK.value
    instance = replace(INSTANCE, slots_per_rank=_SLOTS.value, chunk_tokens=chunk, codec=_CODEC.value)
    first = find_accelerator(_PREFILL_HARDWARE.value)
    second = find_accelerator(_DECODE_HARDWARE.value) if _DECODE_HARDWARE.value else first
    prefill = replace(instance, layout=Layout.parse(_PREFILL_LAYOUT.value))
    decode = replace(instance, layout=Layout.parse(_DECODE_LAYOUT.value or _PREFILL_LAYOUT.value))
    settings = override(_Settings(), _SET.value)
    return Fleet(
        find_geometry(_MODEL.value),
        Pool(_DECODE.value, second, decode, _DECODE_STAGES.value),
        Pool(_PREFILL.value, first, prefill, _PREFILL_STAGES.value) if mode is Mode.DISAGGREGATED else None,
        mode,
        limits=settings.limits,
        routing=settings.routing,
        dtype=_DTYPE.value,
        host_devices=_HOST.value,
        link=link(_LINK.value) if _LINK.value else None,
        fused=_FUSED.value,
        cache_blocks=_CACHE.value,
        block_tokens=_BLOCK.value,
    )


def _folder() -> Path | None:
    """Where results go; refused before the work where they cannot."""
    if _OUT.value is None:
        return None
    try:
        Path(_OUT.value).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={_OUT.value} is no folder that can be made ({error}); choose another") from error
    check_table(_table(Path(_OUT.value)))
    return Path(_OUT.value)


def _table(out: Path) -> Path:
    return out / f"requests.{_FORMAT.value}"


def _pictures() -> bool:
    """Whether pictures are drawn. Without matplotlib they are left out, and refused before the work where they were asked for."""
    if not _PLOTS.value or importlib.util.find_spec("matplotlib") is not None:
        return _PLOTS.value
    if flags.FLAGS["plots"].present:
        raise ConfigError("--plots needs matplotlib, which is not installed; pip install 'jdisagg[notebooks]' or leave it out")
    print("no pictures: matplotlib is not installed (pip install 'jdisagg[notebooks]')", file=sys.stderr)
    return False


def _write(out: Path, result: Result, report: Report, slo: Slo | None, pictures: bool) -> None:
    usage = [dataclasses.asdict(item) for item in result.usage]
    figures = {"report": report.as_fields(), "usage": usage, "counters": result.counters, "flags": _said()}
    (out / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_outcomes(result.outcomes, _table(out), slo)
    if not pictures:
        return
    from jdisagg.simulator import plots  # matplotlib is asked for only here

    runs = {_MODE.value: result.outcomes}
    plots.save(plots.ttft_distribution(runs), out / "ttft.png")
    plots.save(plots.tbt_distribution(runs), out / "tbt.png")
    plots.save(plots.timelines(result.outcomes), out / "timelines.png")
    plots.save(plots.load(result.outcomes), out / "load.png")


def _said() -> dict[str, object]:
    """The flags of this script that were given."""
    ours = flags.FLAGS.flags_by_module_dict().get(sys.argv[0], [])
    return {flag.name: flag.value for flag in ours if flag.present}


def _bars() -> Bars:
    columns: Sequence[TextColumn | BarColumn | MofNCompleteColumn | TimeElapsedColumn | TimeRemainingColumn] = (
        TextColumn("simulate"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Bars(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _every(count: int, tell: Callable[[int], None]) -> Callable[[int, int], None]:
    """Progress is told every so many requests: a bar need not be drawn for each."""

    def told(done: int, total: int) -> None:
        if done % count == 0 or done == total:
            tell(done)

    return told


if __name__ == "__main__":
    app.run(main)
