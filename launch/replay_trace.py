"""Sends a real trace to a running server (launch.serve, launch.cluster, launch.router) and reports how it was served.

    python -m launch.replay_trace --target=localhost:8700 --trace=conversation.csv.gz --speed=0.5 --limit=200
    python -m launch.replay_trace --trace=mooncake.jsonl --max_prompt_tokens=512 --ttft=0.5 --tpot=0.05 --requests=requests.csv

Traces are those that launch.simulate reads: Azure, Mooncake, and one's own CSV or JSONL (docs/simulator.md). They hold lengths, not text:
prompts are random token ids of those lengths, the same for blocks of the same hash; answers go on to the trace's length, past end tokens.
What the server's context does not hold is cut, and counted. Requests are sent at the trace's times divided by --speed, whatever became
of those before. On stdout: percentiles of TTFT, TPOT and TBT as the client saw them, and with --ttft or --tpot attainment and goodput; a
progress bar on stderr. Ends with 0 when every request got an answer or a refusal, with 1 when some failed.
"""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from jdisagg.client import AsyncClient
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.simulator.report import Outcome, Slo, summarise
from jdisagg.simulator.tables import check_table, text_of, write_outcomes
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, at_rate, spread_ticks
from launch.console import quiet_end, refuse_words
from launch.papers import credentials
from launch.trace_sender import Progress, PromptMaker, TraceSender
from launch.workload_inputs import check_output, check_positive, reasons

_TARGET = flags.DEFINE_string("target", "localhost:8700", "Address of the server, host:port.")
_TRACE = flags.DEFINE_string("trace", None, "A .csv or .jsonl file, .gz or not.", required=True)
_SPEED = flags.DEFINE_float("speed", 1.0, "How much faster than the trace requests are sent.")
_RATE = flags.DEFINE_float("rate", None, "Requests a second on average, instead of --speed.")
_LIMIT = flags.DEFINE_integer("limit", None, "The trace's first so many requests alone.")
_TICK = flags.DEFINE_float("spread_tick_seconds", None, "Where the trace's clock is coarse: spread arrivals over ticks of so many seconds.")
_MAX_PROMPT = flags.DEFINE_integer("max_prompt_tokens", None, "Cut longer prompts.")
_MAX_OUTPUT = flags.DEFINE_integer("max_output_tokens", None, "Cut longer answers.")
_BLOCK = flags.DEFINE_integer("block_tokens", 512, "Tokens of one hashed block of the trace (Mooncake: 512).")
_SEED = flags.DEFINE_integer("seed", 0, "Of the prompts' token ids.", lower_bound=0)
_DEADLINE = flags.DEFINE_float("deadline_seconds", None, "Of each request, where the trace gives none; default: the server's.")
_TTFT = flags.DEFINE_float("ttft", None, "Seconds within which the first token must come, for attainment and goodput.")
_TPOT = flags.DEFINE_float("tpot", None, "Seconds a token after the first, likewise.")
_REQUESTS = flags.DEFINE_string("requests", None, "Write one row a request to this .csv or .parquet.")
_JSON = flags.DEFINE_string("json", None, "Write the figures to this file.")
_NAME = flags.DEFINE_string("name", "trace", "What request ids begin with; two replays at once need different ones.")
_TOKEN_FILE = flags.DEFINE_string("token_file", "", "Our bearer token, where the server asks for one.")


def main(argv: list[str]) -> int:
    try:
        refuse_words(argv)
        with quiet_end():
            outcomes = asyncio.run(_replay(_workload()))
    except JdisaggError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 1 if any(outcome.end == "failed" for outcome in outcomes) else 0


def _workload() -> list[Arrival]:
    """The arrivals as the flags want them, --speed left to the sender. Raises ConfigError, WorkloadError."""
    for flag in (_SPEED, _RATE, _TICK):
        check_positive(flag)
    if _RATE.value is not None and flags.FLAGS["speed"].present:
        raise ConfigError(f"--speed={_SPEED.value:g} and --rate={_RATE.value:g} say the same thing twice; give one of them")
    if _REQUESTS.value:
        check_table(Path(_REQUESTS.value))
    check_output(_JSON.value, ".json")
    arrivals = read_trace(_TRACE.value, _LIMIT.value)
    if _TICK.value is not None:
        arrivals = spread_ticks(arrivals, _TICK.value, _SEED.value)
    return arrivals if _RATE.value is None else at_rate(arrivals, _RATE.value)


async def _replay(arrivals: Sequence[Arrival]) -> list[Outcome]:
    slo = Slo(_TTFT.value, _TPOT.value) if _TTFT.value is not None or _TPOT.value is not None else None
    async with AsyncClient(_TARGET.value, credentials=credentials(_TOKEN_FILE.value)) as client:
        model = await client.model()
        maker = PromptMaker(
            model.vocabulary,
            model.context_tokens,
            block_tokens=_BLOCK.value,
            max_prompt_tokens=_MAX_PROMPT.value,
            max_output_tokens=_MAX_OUTPUT.value,
            seed=_SEED.value,
        )
        sender = TraceSender(client, maker, speed=_SPEED.value, deadline_seconds=_DEADLINE.value, name=_NAME.value)
        watch = _Watch(len(arrivals))
        with watch.bars:
            outcomes = await sender.run(arrivals, watch.show)
    _tell(outcomes, slo, watch.last)
    return outcomes


class _Watch:
    """The progress bar on stderr."""

    def __init__(self, total: int) -> None:
        columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TextColumn("ended, {task.fields[said]}"), TimeElapsedColumn())
        self.bars = Bars(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self.bars.add_task("", total=total, said="")
        self.last = Progress(total)

    def show(self, progress: Progress) -> None:
        self.last = progress
        said = f"{progress.sent - progress.ended} under way, {progress.failed} refused or failed, {progress.tokens} tokens"
        self.bars.update(self._task, completed=progress.ended, said=said)


def _tell(outcomes: Sequence[Outcome], slo: Slo | None, progress: Progress) -> None:
    report = summarise(outcomes, slo)
    print(text_of(report))
    if progress.cut:
        print(f"{progress.cut} of {progress.total} requests were cut to what the server's context or the flags allow", file=sys.stderr)
    if progress.lag_seconds > 0.05:
        print(f"the sender was late by up to {progress.lag_seconds:.2f} s; TTFT counts from when requests were due", file=sys.stderr)
    for line in reasons(outcomes):
        print(line, file=sys.stderr)
    if _JSON.value:
        told = {
            "trace": Path(_TRACE.value).name,
            "speed": _SPEED.value,
            "rate": _RATE.value,
            "slo": dataclasses.asdict(slo) if slo else None,
            "cut": progress.cut,
            "lag_seconds": progress.lag_seconds,
            **report.as_fields(),
        }
        Path(_JSON.value).write_text(json.dumps(told, indent=1) + "\n")
    if _REQUESTS.value:
        write_outcomes(outcomes, _REQUESTS.value, slo)


if __name__ == "__main__":
    app.run(main)
