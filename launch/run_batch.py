"""Answers the requests of a batch file, in OpenAI's form (docs/batches.md).

    jdisagg run_batch -i in.jsonl -o out.jsonl --target=http://localhost:8000
    jdisagg run_batch -i in.jsonl -o out.jsonl --model=DIR

--target is the HTTP address of a running server. Without it, the model runs in this process. Each
answer is appended to the output as it arrives. A run that was killed continues if it is started
again: requests that have an answer in the output are not sent again."""

import asyncio
import contextlib
import http.client
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec

from jdisagg.errors import ConfigError
from jdisagg.node.deployment import prepare_engine
from jdisagg.node.signals import end_at_once
from jdisagg.observe.request_log import RequestLog
from jdisagg.service.batch_lines import (
    Answer,
    AnswerFile,
    BatchLine,
    BatchReply,
    answer_line,
    checked,
    read_lines,
    send_lines,
)
from jdisagg.service.http.embeddings import Embeddings
from jdisagg.service.http.generation import HttpGeneration
from jdisagg.service.http.inside import InsideDoor
from jdisagg.service.internal.connection import first_token
from launch.console import run
from launch.flags import ENGINE, define
from launch.model import deployment as deployment_of
from launch.progress import counted
from launch.settings import engine_config

AT_ONCE = 64
PATIENCE_SECONDS = 600.0  # without any reply
REPLY_SECONDS = 3600.0
LIMIT_BYTES = 1 << 30  # of a line

flags = define(
    *("input", "output", "target", "token_file", "authority", "concurrency"),
    *(*ENGINE, "devices"),
    required=("input", "output"),
    target=(None, "HTTP address of a server. Default: the model runs in this process."),
    token_file="",
    concurrency=(None, "Requests at the same time. Default: 64, or two for each decode slot."),
)


def main() -> None:
    end_at_once()
    source = Path(flags.input)
    try:
        ids, faults = checked(source)
    except OSError as error:
        raise ConfigError(f"--input={source} cannot be read: {error}") from error
    if faults:
        raise ConfigError(f"--input={source}: {faults[0].message}; correct the file")
    with contextlib.closing(AnswerFile(Path(flags.output))) as output:
        if foreign := output.ids - set(ids):
            raise ConfigError(
                f"--output={output.path} has an answer to {min(foreign)!r}, which is no request of"
                f" {source}; give another file"
            )
        asyncio.run(_run(source, len(ids), output))


async def _run(source: Path, total: int, output: AnswerFile) -> None:
    answered, failed = set(output.ids), 0
    with counted("requests") as bar:
        task = bar.add_task("", total=total, completed=len(answered))

        def take(line: BatchLine, reply: BatchReply) -> None:
            nonlocal failed
            output.add(answer_line(line, reply))
            answered.add(line.custom_id)
            failed += reply.failed
            bar.advance(task)

        every = (one for one in read_lines(source) if isinstance(one, BatchLine))
        lines = (one for one in every if one.custom_id not in output.ids)
        if len(answered) < total:
            async with _remote() if flags.target else _engine() as (answer, at_once):
                at_once = flags.concurrency or at_once
                await send_lines(lines, answer, take, at_once, PATIENCE_SECONDS)
    kept = f" ({len(output.ids)} of them before)" if output.ids else ""
    wrong = f", {failed} with an error" if failed else ""
    print(f"{len(answered)} requests answered{kept}{wrong}", file=sys.stderr)


@contextlib.asynccontextmanager
async def _engine() -> AsyncIterator[tuple[Answer, int]]:
    config = replace(engine_config(flags), warm_up=False)  # only some of the programs are needed
    prepare_engine(config, flags.devices)
    deployment = deployment_of(config, tell=lambda text: print(text, file=sys.stderr, flush=True))
    await deployment.start()
    try:
        generation = HttpGeneration(deployment.frontend, RequestLog(), LIMIT_BYTES)
        door = InsideDoor(generation, Embeddings(deployment.frontend, LIMIT_BYTES))

        async def answer(line: BatchLine) -> BatchReply:
            return await door.answer(line.url, msgspec.json.encode(line.body))

        slots = config.decode.slots_per_rank * config.decode.layout.dp
        yield answer, min(2 * slots, config.limits.max_waiting_requests)
    finally:
        await deployment.stop()


def base_url(target: str, tls: bool) -> str:
    base = target if "://" in target else f"{'https' if tls else 'http'}://{target}"
    return base.rstrip("/").removesuffix("/v1")


@contextlib.asynccontextmanager
async def _remote() -> AsyncIterator[tuple[Answer, int]]:
    base = base_url(flags.target, tls=bool(flags.authority))
    headers = {"content-type": "application/json"}
    if flags.token_file:
        headers["authorization"] = f"Bearer {first_token(flags.token_file)}"
    tls = ssl.create_default_context(cafile=flags.authority or None)

    def post(line: BatchLine) -> BatchReply:
        body = msgspec.json.encode(line.body)
        request = urllib.request.Request(f"{base}{line.url}", body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=REPLY_SECONDS, context=tls) as reply:
                return BatchReply(reply.status, reply.read())
        except urllib.error.HTTPError as error:
            after = error.headers.get("retry-after", "")
            return BatchReply(error.code, error.read(), float(after) if after.isdigit() else None)
        except (OSError, http.client.HTTPException) as error:
            return BatchReply(0, str(error).encode())

    at_once = cast(int, flags.concurrency or AT_ONCE)
    with ThreadPoolExecutor(at_once) as threads:
        loop = asyncio.get_running_loop()

        async def answer(line: BatchLine) -> BatchReply:
            return await loop.run_in_executor(threads, post, line)

        yield answer, at_once


if __name__ == "__main__":
    run(main, flags)
