"""Sends a real trace to a running server (launch.serve, launch.cluster, launch.router) and reports
how it was served.

    python -m launch.replay_trace --target=localhost:8700 --trace=conversation.csv.gz --speed=0.5
    --limit=200 python -m launch.replay_trace --trace=mooncake.jsonl --max_prompt_tokens=512
    --ttft=0.5 --tpot=0.05 --requests_table=requests.csv

Traces are those that launch.simulate reads: Azure, Mooncake, and one's own CSV or JSONL
(docs/simulator.md). They hold lengths, not text: prompts are random token ids of those lengths, the
same for blocks of the same hash; answers go on to the trace's length, past end tokens. What the
server's context does not hold is cut, and counted. Requests are sent at the trace's times divided
by --speed, whatever became of those before. On stdout: percentiles of TTFT, TPOT and TBT as the
client saw them, and with --ttft or --tpot attainment and goodput; a progress bar on stderr. Ends
with 0 when every request got an answer or a refusal, with 1 when some failed."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from jdisagg.client import AsyncClient
from jdisagg.errors import ConfigError
from jdisagg.node.trace_sender import PromptMaker, ReplayProgress, TraceSender
from jdisagg.simulator.report import RequestOutcome, SloLimits, summarise
from jdisagg.simulator.tables import check_table, text_of, write_outcomes
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, at_rate, spread_ticks
from launch.console import run
from launch.flags import CLIENT, define
from launch.settings import credentials
from launch.workload_inputs import check_output, check_positive, reasons

flags = define(
    "target",
    "trace",
    "speed",
    "rate",
    "limit",
    "spread_tick_seconds",
    "max_prompt_tokens",
    "max_output_tokens",
    "block_tokens",
    "seed",
    "deadline_seconds",
    "ttft",
    "tpot",
    "requests_table",
    "json",
    "name",
    "token_file",
    *CLIENT[1:],
    required=("trace",),
    speed=1.0,
    seed=0,
    name="trace",
    token_file="",
)


def main() -> int:
    outcomes = asyncio.run(_replay(_workload()))
    return 1 if any(outcome.end == "failed" for outcome in outcomes) else 0


def _workload() -> list[Arrival]:
    """The arrivals as the flags want them, --speed left to the sender. Raises ConfigError,
    WorkloadError."""
    for name in ("speed", "rate", "spread_tick_seconds"):
        check_positive(name, getattr(flags, name))
    if flags.rate is not None and flags.present("speed"):
        raise ConfigError(
            f"--speed={flags.speed:g} and --rate={flags.rate:g} say the same thing twice; give"
            " one of them"
        )
    if flags.requests_table:
        check_table(Path(flags.requests_table))
    check_output(flags.json, ".json")
    arrivals = read_trace(flags.trace, flags.limit)
    if flags.spread_tick_seconds is not None:
        arrivals = spread_ticks(arrivals, flags.spread_tick_seconds, flags.seed)
    return arrivals if flags.rate is None else at_rate(arrivals, flags.rate)


async def _replay(arrivals: Sequence[Arrival]) -> list[RequestOutcome]:
    slo = (
        SloLimits(flags.ttft, flags.tpot)
        if flags.ttft is not None or flags.tpot is not None
        else None
    )
    async with AsyncClient(
        flags.target, credentials=credentials(flags, flags.token_file)
    ) as client:
        model = await client.model()
        maker = PromptMaker(
            model.vocabulary,
            model.context_tokens,
            block_tokens=flags.block_tokens,
            max_prompt_tokens=flags.max_prompt_tokens,
            max_output_tokens=flags.max_output_tokens,
            seed=flags.seed,
        )
        sender = TraceSender(
            client,
            maker,
            speed=flags.speed,
            deadline_seconds=flags.deadline_seconds,
            name=flags.name,
        )
        watch = _Watch(len(arrivals))
        with watch.bars:
            outcomes = await sender.run(arrivals, watch.show)
    _tell(outcomes, slo, watch.last)
    return outcomes


class _Watch:
    """The progress bar on stderr."""

    def __init__(self, total: int) -> None:
        columns = (
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("ended, {task.fields[said]}"),
            TimeElapsedColumn(),
        )
        self.bars = Bars(
            *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        )
        self._task = self.bars.add_task("", total=total, said="")
        self.last = ReplayProgress(total)

    def show(self, progress: ReplayProgress) -> None:
        self.last = progress
        said = (
            f"{progress.sent - progress.ended} under way, {progress.failed} refused or failed,"
            f" {progress.tokens} tokens"
        )
        self.bars.update(self._task, completed=progress.ended, said=said)


def _tell(
    outcomes: Sequence[RequestOutcome], slo: SloLimits | None, progress: ReplayProgress
) -> None:
    report = summarise(outcomes, slo)
    print(text_of(report))
    if progress.cut:
        print(
            f"{progress.cut} of {progress.total} requests were cut to what the server's context or"
            " the flags allow",
            file=sys.stderr,
        )
    if progress.lag_seconds > 0.05:
        print(
            f"the sender was late by up to {progress.lag_seconds:.2f} s; TTFT counts from when"
            " requests were due",
            file=sys.stderr,
        )
    for line in reasons(outcomes):
        print(line, file=sys.stderr)
    if flags.json:
        told = {
            "trace": Path(flags.trace).name,
            "speed": flags.speed,
            "rate": flags.rate,
            "slo": dataclasses.asdict(slo) if slo else None,
            "cut": progress.cut,
            "lag_seconds": progress.lag_seconds,
            **report.as_fields(),
        }
        Path(flags.json).write_text(json.dumps(told, indent=1) + "\n")
    if flags.requests_table:
        write_outcomes(outcomes, flags.requests_table, slo)


if __name__ == "__main__":
    run(main, flags)
