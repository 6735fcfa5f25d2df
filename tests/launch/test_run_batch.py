"""Batches whose process is killed: each of 500 requests is answered once."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from launch.run_batch import base_url
from tests import time_scale
from tests.service.batch_requests import line, text_of, written
from tests.service.http_doors import CHATS, http_door

ROOT = Path(__file__).resolve().parents[2]
COUNT = 500
EVERY = sorted(f"r{at}" for at in range(COUNT))


@asynccontextmanager
async def server(
    folder: Path, port: int = 0, pause: float = 0.02
) -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.service.http.batch_process"),
        *(str(folder), str(port), str(pause)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    try:
        yield int(await process.stdout.readline()), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def run_batch(source: Path, output: Path, *more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "launch", "run_batch", "-i", str(source), "-o", str(output), *more),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )


async def until_lines(output: Path, count: int) -> None:
    async with asyncio.timeout(time_scale.seconds(60)):
        while not output.exists() or output.read_bytes().count(b"\n") < count:
            await asyncio.sleep(0.005)


@pytest.mark.ci
async def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text_of(COUNT))
    async with server(tmp_path / "b") as (port, _):
        target = f"--target=http://127.0.0.1:{port}"
        for count in (100, 250):
            process = await run_batch(source, output, target)
            await until_lines(output, count)
            process.kill()
            await process.wait()
            assert output.read_bytes().count(b"\n") < COUNT
        process = await run_batch(source, output, target)
        _, told = await process.communicate()
        assert process.returncode == 0 and b"500 requests answered" in told
    assert sorted(one["custom_id"] for one in written(output)) == EVERY
    assert {one["response"]["status_code"] for one in written(output)} == {200}
    again = await run_batch(source, output, target)  # nothing is left, and no server is asked
    assert await again.wait() == 0 and len(written(output)) == COUNT


@pytest.mark.ci
async def test_a_killed_server_goes_on_with_its_batches(tmp_path: Path) -> None:
    batch_id, port = "", 0
    for seconds in (0.3, 0.5, None):
        async with (
            server(tmp_path, port, 0.05) as (port, process),
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client,
        ):
            if not batch_id:
                data = text_of(COUNT).encode()
                file = await client.files.create(file=("in", data), purpose="batch")
                batch = await client.batches.create(
                    input_file_id=file.id, endpoint=CHATS, completion_window="24h"
                )
                batch_id = batch.id
            if seconds is not None:
                await asyncio.sleep(seconds)
                process.kill()
                continue
            async with asyncio.timeout(time_scale.seconds(60)):
                while (batch := await client.batches.retrieve(batch_id)).status != "completed":
                    await asyncio.sleep(0.05)
            assert batch.output_file_id and batch.error_file_id is None
            found = (await client.files.content(batch.output_file_id)).text.splitlines()
    assert sorted(json.loads(one)["custom_id"] for one in found) == EVERY


@pytest.mark.ci
async def test_a_run_may_have_an_engine_of_its_own(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [*(line(at, "/v1/completions") for at in range(6)), line(6), line(7, temperature=-1)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = await run_batch(source, output)
    _, told = await process.communicate()
    assert process.returncode == 0, told
    assert b"8 requests answered, 1 with an error" in told
    found = {one["custom_id"]: one["response"] for one in written(output)}
    assert {name: one["status_code"] for name, one in found.items()} == {
        **{f"r{at}": 200 for at in range(7)},
        "r7": 400,
    }
    assert all(found[f"r{at}"]["body"]["choices"][0]["text"] for at in range(6))


@pytest.mark.ci
async def test_what_cannot_be_run_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    source, output, other = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "other"
    source.write_text("{\n")
    other.write_text(text_of(1))
    output.write_text('{"custom_id": "x"}\n')
    async with http_door() as door:
        for path, words in (
            (source, b"line 1 must be an object"),
            (tmp_path / "none", b"cannot be read"),
            (other, b"has an answer to 'x', which is no request"),
        ):
            process = await run_batch(path, output, f"--target=127.0.0.1:{door.port}")
            _, told = await process.communicate()
            assert process.returncode != 0 and words in told
        assert not door.path.requests


def test_an_authority_switches_to_tls_unless_the_target_is_a_url() -> None:
    assert base_url("localhost:8000", tls=True) == "https://localhost:8000"
    assert base_url("localhost:8000", tls=False) == "http://localhost:8000"
    assert base_url("http://localhost:8000/v1/", tls=True) == "http://localhost:8000"
