"""OpenAI's Batch API through OpenAI's client: files, batches, owners, cancellation, restarts."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.frontend import MAX_PRIORITY
from jdisagg.errors import ConfigError
from jdisagg.service import batch_jobs
from jdisagg.service.http import batches
from tests.service.batch_requests import line, text_of
from tests.service.doors import FakePath, eventually
from tests.service.http_doors import CHATS, HI, HttpDoor, http_door, with_tokens

ENDED = ("completed", "failed", "cancelled", "expired")


@asynccontextmanager
async def door_with(
    folder: Path, path: FakePath | None = None, service: ServiceConfig | None = None
) -> AsyncIterator[HttpDoor]:
    config = replace(service or ServiceConfig(), batch_folder=str(folder))
    async with http_door(path, service=config) as door:
        yield door


async def begun(client: openai.AsyncOpenAI, text: str, **more: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=CHATS, completion_window="24h", **more
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(30):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.01)
    return batch


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(text) for text in content.text.splitlines()]


async def test_a_batch_is_answered(tmp_path: Path) -> None:
    async with door_with(tmp_path) as door, door.client() as client:
        text = text_of(60) + json.dumps(line(77, temperature=-1)) + "\n"
        batch = await begun(client, text, metadata={"run": "7"})
        assert (batch.status, batch.metadata) == ("validating", {"run": "7"})
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.total) == ("completed", 61)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (60, 1)
        assert batch.in_progress_at and batch.completed_at and batch.errors is None
        found = await answers(client, batch.output_file_id)
        assert sorted(one["custom_id"] for one in found) == sorted(f"r{at}" for at in range(60))
        for one in found:
            body = one["response"]["body"]
            number = one["custom_id"].removeprefix("r")
            alone = await door.served(CHATS, line(int(number))["body"])
            assert body["choices"][0]["message"] == alone.fields["choices"][0]["message"]
        (wrong,) = await answers(client, batch.error_file_id)
        assert wrong["response"]["status_code"] == 400
        assert wrong["response"]["body"]["error"]["param"] == "temperature"
        ours = [one for one in door.path.requests if one.request_id.startswith(batch.id)]
        assert {one.priority for one in ours} == {-MAX_PRIORITY} and len(ours) == 60
        assert all(one.deadline_seconds and one.deadline_seconds > 80_000 for one in ours)


async def test_a_faulty_file_fails_its_batch_with_the_lines(tmp_path: Path) -> None:
    async with door_with(tmp_path) as door, door.client() as client:
        batch = await ended(client, (await begun(client, text_of(1) + text_of(1) + "{\n")).id)
        assert batch.status == "failed" and batch.output_file_id is None
        assert [one.line for one in batch.errors.data] == [2, 3]
        assert not door.path.requests


async def test_files_and_batches_are_listed_and_deleted(tmp_path: Path) -> None:
    async with door_with(tmp_path) as door, door.client() as client:
        made = [await ended(client, (await begun(client, text_of(1))).id) for _ in range(3)]
        page = await client.batches.list(limit=2)
        assert len(page.data) == 2 and page.has_more
        every = [one.id async for one in client.batches.list(limit=2)]
        assert sorted(every) == sorted(one.id for one in made)
        files = [one async for one in await client.files.list()]
        assert [one.purpose for one in files].count("batch") == 3 and len(files) == 6
        await client.files.delete(files[0].id)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(files[0].id)
        assert len((await client.files.list(purpose="batch")).data) == 2


async def test_an_owner_sees_only_what_is_his(tmp_path: Path) -> None:
    service = with_tokens(tmp_path, "one tenant=a", "two tenant=b", "three")
    async with (
        door_with(tmp_path / "b", service=service) as door,
        door.client("one") as one,
        door.client("two") as two,
        door.client("three") as three,
        door.client("four") as four,
    ):
        batch = await ended(one, (await begun(one, text_of(2))).id)
        assert {request.tenant for request in door.path.requests} == {"a"}
        for other in (two, three):
            for refused in (
                other.batches.retrieve(batch.id),
                other.batches.cancel(batch.id),
                other.files.retrieve(batch.input_file_id),
                other.files.content(batch.output_file_id),
                other.files.delete(batch.output_file_id),
                other.batches.create(
                    input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    await refused
            assert not (await other.batches.list()).data and not (await other.files.list()).data
        with pytest.raises(openai.AuthenticationError):
            await four.batches.list()
        assert (await one.batches.list()).data[0].id == batch.id


async def test_a_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    path = FakePath(pause_seconds=0.01)
    async with door_with(tmp_path, path) as door, door.client() as client:
        batch = await begun(client, text_of(500))
        await eventually(lambda: len(path.closed) > 40)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled" and batch.cancelled_at
        found = await answers(client, batch.output_file_id)
        assert 0 < len(found) == batch.request_counts.completed < 500
        sent = len(path.requests)
        await asyncio.sleep(0.05)
        assert len(path.requests) == sent


async def test_a_restart_loses_and_repeats_no_answer(tmp_path: Path) -> None:
    """Over 500 requests, twice within them. An answer that was not written is asked for again."""
    batch_id, asked = "", 0
    for stop_at in (120, 150, None):
        path = FakePath(pause_seconds=0.002)
        async with door_with(tmp_path, path) as door, door.client() as client:
            if not batch_id:
                batch_id = (await begun(client, text_of(500))).id
            if stop_at is not None:
                await eventually(lambda path=path, most=stop_at: len(path.closed) > most)
            else:
                batch = await ended(client, batch_id)
                found = await answers(client, batch.output_file_id)
        asked += len(path.requests)
    assert sorted(one["custom_id"] for one in found) == sorted(f"r{at}" for at in range(500))
    assert (batch.status, batch.request_counts.completed) == ("completed", 500)
    assert 500 <= asked <= 500 + 2 * batch_jobs.AT_ONCE


async def test_a_batch_that_is_late_says_so_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_jobs, "AT_ONCE", 4)
    monkeypatch.setattr(batches, "WINDOW_SECONDS", 2)  # of whole seconds, so at least one
    path = FakePath(pause_seconds=0.05)
    async with door_with(tmp_path, path) as door, door.client() as client:
        batch = await begun(client, text_of(200))
        batch = await ended(client, batch.id)
        assert batch.status == "expired" and batch.expired_at
        done = await answers(client, batch.output_file_id)
        late = await answers(client, batch.error_file_id)
        assert {one["error"]["code"] for one in late} == {"batch_expired"} and done
        assert len(done) + len(late) == 200 == len({one["custom_id"] for one in done + late})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/models"}, "endpoint must be one of"),
    ({"completion_window": "1h"}, "completion_window must be 24h"),
    ({"input_file_id": "file_x"}, "No such file"),
    ({"input_file_id": "../lock"}, "No such file"),
]


async def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    async with door_with(tmp_path) as door, door.client() as client:
        file = await client.files.create(file=("in", b"{}"), purpose="batch")
        usual = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"}
        for more, words in REFUSED:
            answer = await door.ask("/v1/batches", usual | more)
            assert answer.status in (400, 404) and words in answer.error["message"]
        with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
            await client.files.create(file=("in", b"{}"), purpose="assistants")
        for raw, kind in ((b"{}", "application/json"), (b"--a\r\n", "multipart/form-data")):
            answer = await door.ask("/v1/files", raw=raw, content_type=kind)
            assert answer.status == 400
        with pytest.raises(ConfigError, match="used by another server"):
            async with door_with(tmp_path):
                pass
    async with http_door() as door:
        answer = await door.ask("/v1/batches")
        assert answer.status == 404 and "batch_folder" in answer.error["message"]
        assert (await door.ask(CHATS, {"messages": HI, "max_tokens": 1})).status == 200
