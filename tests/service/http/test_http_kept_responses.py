"""Kept responses by OpenAI's own client: continued, read, listed, deleted and cancelled, within
limits, and by their owner alone."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.caller import Caller, calling
from jdisagg.errors import InvalidRequestError
from jdisagg.service.http.response_store import KeptResponse, ResponseStore
from tests.service.chats import CALLS, FLAT, TEMPLATE, Script, prompts, say
from tests.service.doors import FakePath, eventually
from tests.service.http_doors import HttpDoor, http_door, request

KEEPS = ServiceConfig(kept_responses_mib=1)
TINY: Any = {"model": "tiny"}


def opens() -> AbstractAsyncContextManager[HttpDoor]:
    return http_door(Script(text="ok"), KEEPS, template=TEMPLATE)


def strict(reply: Any, kind: type) -> None:
    kind.model_validate(reply.model_dump(warnings=False, by_alias=True), strict=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued_with_all_that_was_said(
    door: HttpDoor, client: openai.AsyncOpenAI, stream: bool
) -> None:
    say(door, "<think>\nhm\n</think>\n\nWell." + CALLS[: CALLS.index("\n<tool_call>")])

    async def ask(**asked: Any) -> Response:
        if not stream:
            return await client.responses.create(**TINY, tools=[FLAT], **asked)
        async with client.responses.stream(**TINY, tools=[FLAT], **asked) as events:
            return await events.get_final_response()

    first = await ask(input="hi", instructions="Be brief", metadata={"a": "b"})
    assert first.store is True and first.metadata == {"a": "b"}
    *_, call = first.output
    assert call.type == "function_call"
    say(door, "ok")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    second = await ask(input=[result], previous_response_id=first.id)
    strict(second, Response)
    assert second.previous_response_id == first.id
    third = await ask(input="so?", previous_response_id=second.id)
    shown = prompts(door)[-1]
    assert shown.endswith(
        "<user>hi<assistant><think>hm</think>Well.<tool_call>weather Köln"
        f" {call.call_id}</tool_call><tool>wet({call.call_id})<assistant>ok<user>so?<assistant>"
    )
    assert "brief" not in shown
    items = await client.responses.input_items.list(third.id, order="asc")
    kinds = [item.type for item in items.data]
    assert kinds == [
        *("message", "reasoning", "message", "function_call"),
        *("function_call_output", "message", "message"),
    ]
    for item in items.data:
        shown = item.model_dump(warnings=False, by_alias=True)
        TypeAdapter(ResponseItem).validate_python(shown, strict=True)
    assert items.data[-1].content[0].text == "so?"


async def test_a_response_is_read_again_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(**TINY, input="hi")
    found = await client.responses.retrieve(made.id)
    strict(found, Response)
    assert found == made and found.output_text == "ok"
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as failed:
        await client.responses.create(**TINY, input="hi", previous_response_id=made.id)
    assert failed.value.code == "previous_response_not_found"


async def test_a_response_that_must_not_be_stored_is_not(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(**TINY, input="hi", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


async def test_input_items_come_in_pages(client: openai.AsyncOpenAI) -> None:
    said: Any = [{"role": "user", "content": text} for text in "abcde"]
    made = await client.responses.create(**TINY, input=said)
    pages = client.responses.input_items.list(made.id, limit=2)
    texts = [item.content[0].text async for item in pages]
    assert texts == [*"edcba"]
    for wrong in ({"limit": 0}, {"after": "x"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            await client.responses.input_items.list(made.id, **wrong)


async def test_input_items_have_numbers_as_they_were_sent(door: HttpDoor) -> None:
    item: Any = {"role": "user", "content": "a", "note": -12.5}
    sent = request("/v1/responses", {**TINY, "input": [item]}, connection="close")
    made = (await door.send(sent.replace(b"-12.5", b"1e999"))).fields
    listed = await door.served(f"/v1/responses/{made['id']}/input_items")
    assert b'"note":1e999' in listed.body.replace(b" ", b"")


async def test_a_response_in_the_background_is_finished_and_read_during_a_drain() -> None:
    service = replace(KEEPS, drain_seconds=3600)
    async with http_door(FakePath(), service) as door, door.client() as client:
        door.path.gate.clear()
        asked: Any = {**TINY, "input": "hi", "max_output_tokens": 4, "background": True}
        kept, dropped = [await client.responses.create(**asked) for _ in range(2)]
        draining = asyncio.create_task(door.server.drain())
        await eventually(lambda: not door.server.ready)
        assert (await client.responses.retrieve(kept.id)).status == "in_progress"
        assert (await client.responses.cancel(dropped.id)).status == "cancelled"
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await client.responses.create(**asked)
        door.path.gate.set()
        await draining
        assert door.path.closed == [one.id.removeprefix("resp_") for one in (dropped, kept)]


async def test_a_response_is_made_in_the_background() -> None:
    async with http_door(FakePath(), KEEPS) as door, door.client() as client:
        door.path.gate.clear()
        asked: Any = {**TINY, "input": "hi", "max_output_tokens": 4, "background": True}
        begun = await client.responses.create(**asked)
        strict(begun, Response)
        assert (begun.status, begun.background) == ("in_progress", True)
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        door.path.gate.set()
        await eventually(lambda: begun.id.removeprefix("resp_") in door.path.closed)

        done = begun
        while done.status == "in_progress":
            done = await client.responses.retrieve(begun.id)
        assert done.status == "incomplete" and len(done.output_text) == 4

        door.path.gate.clear()
        begun = await client.responses.create(**asked)
        cancelled = await client.responses.cancel(begun.id)
        assert cancelled.status == "cancelled"
        assert begun.id.removeprefix("resp_") in door.path.closed
        for ended in (cancelled, done):
            assert await client.responses.cancel(ended.id) == ended

        door.path.gate.set()
        failed = await client.responses.create(**asked, extra_body={"tenant": "lost"})
        while failed.status == "in_progress":
            failed = await client.responses.retrieve(failed.id)
        assert failed.status == "failed" and failed.error and failed.error.message == "lost"
        for wrong, words in (
            ({"temperature": -1}, "temperature"),
            ({"store": False}, "store"),
            ({"stream": True}, "background and stream"),
        ):
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                await client.responses.create(**asked | wrong)
            assert refused.value.param in (*wrong, "background")


async def test_without_a_store_what_needs_one_is_refused_by_name() -> None:
    async with http_door() as door:
        for field, value in (("previous_response_id", "resp_1"), ("background", True)):
            answer = await door.ask("/v1/responses", {"input": "hi", field: value})
            assert answer.status == 400 and answer.error["param"] == field
        made = (await door.ask("/v1/responses", {"input": "hi", "store": True})).fields
        assert made["store"] is False
        assert (await door.ask(f"/v1/responses/{made['id']}")).status == 404


async def test_a_response_is_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a tenant=one\nb tenant=two\n")
    config = replace(KEEPS, token_file=str(tmp_path / "tokens"))
    async with (
        http_door(Script(text="ok"), config) as door,
        door.client("a") as own,
        door.client("b") as other,
    ):
        made = await own.responses.create(**TINY, input="hi")
        assert (await own.responses.retrieve(made.id)).id == made.id
        for refused in (
            lambda: other.responses.retrieve(made.id),
            lambda: other.responses.delete(made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await refused()
        with pytest.raises(openai.BadRequestError):
            await other.responses.create(**TINY, input="hi", previous_response_id=made.id)


def test_the_store_has_limits_of_size_and_time() -> None:
    now = 0.0
    one = KeptResponse(b"x" * 1000, (), 0)
    store = ResponseStore(3 * one.size_bytes, 60.0, lambda: now)
    for name in "abc":
        store.put(name, KeptResponse(one.body, (), 0))
    assert store.find("a") is not None  # and is now the one used last
    store.put("d", KeptResponse(one.body, (), 0))
    assert [name for name in "abcd" if store.find(name)] == ["a", "c", "d"]
    store.put("huge", KeptResponse(b"x" * 10_000, (), 0))
    assert store.find("huge") is None
    store.put("e", KeptResponse(one.body, (), 0))
    with calling(Caller(tenant="another")):
        assert store.find("e") is None
    now = 60.0
    assert store.find("e") is None
    with pytest.raises(InvalidRequestError, match="'e' not found"):
        store.given("e")
