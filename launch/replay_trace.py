"""Sends the requests of a trace to a running server and reports how they were served.

    jdisagg replay_trace --target=localhost:8700 --trace=azure.csv.gz --speed=0.5
    jdisagg replay_trace --trace=mooncake.jsonl --max_prompt_tokens=512 --ttft=0.5

Traces have the formats that `jdisagg simulate` reads (docs/simulator.md). A trace has lengths but
no text, so prompts are random token ids. Prompt blocks with equal hashes get equal token ids.
Answers have the length in the trace, because end tokens are ignored. Requests that exceed the
server's context are shortened, and their number is reported. Requests are sent at the trace's times
divided by --speed, whether or not earlier requests have ended. Stdout gets percentiles of TTFT,
TPOT and TBT, measured by the client. With --ttft or --tpot it also gets attainment and goodput.
Exit status 1: some requests failed."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.progress import TextColumn, TimeElapsedColumn

from jdisagg.client import AsyncClient
from jdisagg.errors import ConfigError
from jdisagg.node.commands.trace_sender import PromptMaker, ReplayProgress, TraceSender
from jdisagg.simulator.report import RequestOutcome, SloLimits, summarise
from jdisagg.simulator.tables import check_table, text_of, write_outcomes
from jdisagg.simulator.workloads import Arrival
from launch.console import run
from launch.flags import CLIENT, define
from launch.progress import counted
from launch.settings import credentials
from launch.workload_inputs import TWICE, check_output, reasons, slo_limits, traced

FLAGS = (
    "target", "trace", "speed", "rate", "limit", "spread_tick_seconds", "max_prompt_tokens",
    "max_output_tokens", "block_tokens", "seed", "deadline_seconds", "ttft", "tpot",
    "requests_table", "json", "name", "token_file",
)  # fmt: skip
flags = define(
    *FLAGS, *CLIENT[1:], required=("trace",), speed=1.0, seed=0, name="trace", token_file=""
)


def main() -> int:
    outcomes = asyncio.run(_replay(_workload()))
    return 1 if any(outcome.end == "failed" for outcome in outcomes) else 0


def _workload() -> list[Arrival]:
    """Checks the flags and returns the arrivals of the trace, before --speed is applied. Raises
    ConfigError or WorkloadError."""
    if flags.rate is not None and flags.present("speed"):
        raise ConfigError(TWICE.format(flags.speed, flags.rate))
    if flags.requests_table:
        check_table(Path(flags.requests_table))
    check_output(flags.json, ".json")
    return traced(flags, flags.limit)


async def _replay(arrivals: Sequence[Arrival]) -> list[RequestOutcome]:
    slo = slo_limits(flags)
    given = credentials(flags, flags.token_file)
    async with AsyncClient(flags.target, credentials=given) as client:
        model = await client.model()
        maker = PromptMaker(
            model.vocabulary,
            model.context_tokens,
            block_tokens=flags.block_tokens,
            max_prompt_tokens=flags.max_prompt_tokens,
            max_output_tokens=flags.max_output_tokens,
            seed=flags.seed,
        )
        deadline_seconds, name = flags.deadline_seconds, flags.name
        sender = TraceSender(
            client, maker, speed=flags.speed, deadline_seconds=deadline_seconds, name=name
        )
        last = ReplayProgress(len(arrivals))
        with counted(
            "replay", TextColumn("ended, {task.fields[said]}"), TimeElapsedColumn()
        ) as bar:
            task = bar.add_task("", total=len(arrivals), said="")

            def show(progress: ReplayProgress) -> None:
                nonlocal last
                last = progress
                bar.update(task, completed=progress.ended, said=progress.text())

            outcomes = await sender.run(arrivals, show)
    _tell(outcomes, slo, last)
    return outcomes


def _tell(
    outcomes: Sequence[RequestOutcome], slo: SloLimits | None, progress: ReplayProgress
) -> None:
    report = summarise(outcomes, slo)
    print(text_of(report))
    for line in (*progress.notes(), *reasons(outcomes)):
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
