"""Who is let in at the HTTP door, what becomes of a request whose client goes away, stops reading
or comes too late, and how the door closes."""

import asyncio
import logging

import openai
import pytest

from jdisagg.config import ServiceConfig
from jdisagg.errors import ConfigError
from jdisagg.observe.request_log import RequestLog
from jdisagg.service.http import generation as http_generation
from jdisagg.service.http import guard as http_guard
from jdisagg.service.server import GenerationServer, check_address
from tests.service.doors import FakePath, eventually, make_frontend
from tests.service.http_doors import (
    COMPLETIONS,
    HttpDoor,
    events,
    http_door,
    parse,
    request,
    with_tokens,
)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_closes_the_streams_of_all_its_prompts(
    door: HttpDoor, stream: bool
) -> None:
    door.path.gate.clear()
    _, writer = await door.connect()
    asked = {"prompt": ["x", "y", "z"], "request_id": "gone", "stream": stream}
    writer.write(request(COMPLETIONS, asked))
    await eventually(lambda: door.path.made_events == 3)
    writer.close()
    await eventually(lambda: sorted(door.path.closed) == ["gone", "gone-1", "gone-2"])
    await door.served("/health")


async def test_a_client_that_does_not_read_holds_the_path_back(door: HttpDoor) -> None:
    door.path.filler = "." * 100_000
    reader, writer = await door.connect()
    asked = {"prompt": "x", "max_tokens": 400, "stream": True}
    writer.write(request(COMPLETIONS, asked, connection="close"))
    await eventually(lambda: door.path.made_events > 0)
    made = 0
    while made != door.path.made_events:
        made = door.path.made_events
        await asyncio.sleep(0.3)
    assert made < 300
    data = events(parse(await reader.read()).body)
    assert len(data) == 401 and data[-1] == "[DONE]"
    writer.close()


async def test_a_client_that_never_reads_is_let_go_of_at_its_deadline(
    door: HttpDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "LAST_SECONDS", 0.1)
    door.path.filler = "." * 1_000_000
    _, writer = await door.connect()
    asked = {"prompt": "x", "max_tokens": 400, "stream": True, "deadline_seconds": 1.5}
    writer.write(request(COMPLETIONS, asked | {"request_id": "deaf"}))
    await eventually(lambda: door.path.closed == ["deaf"])
    state = door.server.http._server.server_state
    await eventually(lambda: not state.tasks and not state.connections)
    writer.close()


async def test_an_error_before_the_first_token_is_a_status_and_after_it_the_last_event() -> None:
    async with http_door() as door, door.client() as client:
        asked = {"prompt": "x", "max_tokens": 4, "stream": True}
        busy = await door.ask(COMPLETIONS, asked | {"tenant": "crowd"})
        assert (busy.status, busy.headers["retry-after"]) == (429, "3")
        assert busy.headers["retry-after-ms"] == "2500"
        assert busy.error["message"] == "the queue holds 4 of 4 requests"
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(
                model="tiny", prompt="x", extra_body={"tenant": "crowd"}
            )
        lost = await door.ask(COMPLETIONS, asked | {"tenant": "lost"})
        *some, last = events(lost.body)
        assert lost.status == 200 and len(some) == 2
        assert '"message":"lost"' in last and '"type":"server_error"' in last
        whole = await door.ask(COMPLETIONS, asked | {"tenant": "lost", "stream": False})
        assert (whole.status, whole.error["message"]) == (500, "lost")
        stream = await client.completions.create(
            model="tiny", prompt="x", stream=True, extra_body={"tenant": "lost"}
        )
        with pytest.raises(openai.APIError, match="lost"):
            async for _ in stream:
                pass


async def test_a_bug_of_ours_is_an_internal_error_that_the_log_explains(
    door: HttpDoor, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await door.ask(COMPLETIONS, {"prompt": "x", "tenant": "bug"})
    assert answer.status == 500
    assert "ZeroDivisionError" in answer.error["message"]
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("strips", [False, True])
async def test_a_client_that_waits_long_is_kept_by_comments(
    monkeypatch: pytest.MonkeyPatch, strips: bool
) -> None:
    """`strips`: as `vllm bench serve` does, what it reads, of its line breaks."""
    monkeypatch.setattr(http_generation, "COMMENT_SECONDS", 0.05)

    class Late(FakePath):
        async def stream(self, request):
            await self.gate.wait()
            async for event in super().stream(request):
                yield event

    async with http_door(Late()) as door:
        door.path.gate.clear()
        reader, writer = await door.connect()
        asked = {"prompt": "x", "max_tokens": 2, "stream": True}
        writer.write(request(COMPLETIONS, asked, connection="close"))
        began = await reader.readuntil(b": waiting\n\n")
        for _ in range(2):
            began += await reader.readuntil(b": waiting\n\n")
        door.path.gate.set()
        body = parse(began + await reader.read()).body
        if strips:
            body = body.replace(b": waiting\n\n", b": waiting")
        assert len(events(body)) == 3
        writer.close()


async def test_a_request_needs_a_key_that_the_token_file_holds(tmp_path) -> None:
    asked = {"prompt": "x", "max_tokens": 1}
    async with http_door(service=with_tokens(tmp_path, "secret", "other")) as door:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            for path, fields in ((COMPLETIONS, asked), ("/v1/models", None), ("/metrics", None)):
                answer = await door.ask(path, fields, **headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        await door.served("/health")
        async with door.client("other") as client:
            await client.completions.create(model="tiny", **asked)
        assert len(door.path.requests) == 1


async def test_requests_are_logged_and_errors_counted_as_those_of_grpc(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    counted: list[tuple[str, str]] = []
    log = RequestLog(True, lambda code, name: counted.append((code, name)))
    async with http_door(log=log) as door:
        await door.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "request_id": "r"})
        await door.ask(COMPLETIONS, {"prompt": "x", "n": 0})
        await door.ask(COMPLETIONS, {"prompt": "x", "tenant": "crowd"})
        await door.ask("/nowhere")
    ended = [one for one in caplog.records if one.getMessage() == "request ended"]
    assert [one.code for one in ended] == ["OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]
    assert (ended[0].request_id, ended[0].generated_tokens) == ("r", 2)
    assert counted == [
        ("INVALID_ARGUMENT", "InvalidRequestError"),
        ("RESOURCE_EXHAUSTED", "OverloadedError"),
        ("INVALID_ARGUMENT", "HttpRefusal"),
    ]


async def test_a_drain_that_is_forced_cuts_streams_short_with_a_typed_error() -> None:
    async with http_door(service=ServiceConfig(drain_seconds=3600)) as door:
        door.path.gate.clear()
        asked = {"prompt": "x", "max_tokens": 3}
        tasks = [
            asyncio.create_task(door.ask(COMPLETIONS, asked | {"stream": stream}))
            for stream in (True, False)
        ]
        await eventually(lambda: door.path.made_events == 2)
        door.server.force()
        await door.server.drain()
        streamed, whole = [await task for task in tasks]
        assert "the server shut down" in events(streamed.body)[-1]
        assert (whole.status, whole.error["code"]) == (503, "ShutDownError")
        assert len(door.path.closed) == 2


async def test_a_port_that_is_taken_is_refused_by_name_and_leaves_nothing_behind(
    door: HttpDoor,
) -> None:
    taken = ServiceConfig(port=0, http_port=door.port)
    with pytest.raises(ConfigError, match=f"port {door.port} is in use; .* --http_port"):
        check_address(taken)
    server = GenerationServer(make_frontend(FakePath()), taken)
    with pytest.raises(ConfigError, match="--http_port"):
        await server.start()
    await server.drain()
    first = ServiceConfig(port=door.server.listens.port, http_port=0)
    second = GenerationServer(make_frontend(FakePath()), first)
    with pytest.raises(ConfigError, match="cannot listen on .* --port"):
        await second.start()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", second.http.port)
    await second.drain()


async def test_scripts_of_the_pages_that_are_named_may_use_the_door() -> None:
    config = ServiceConfig(http_cors_origins="https://a.example, http://b.example:80")
    async with http_door(service=config) as door:
        body = {"prompt": "x", "max_tokens": 1}
        for origin in ("https://a.example", "http://b.example:80"):
            reply = await door.ask(COMPLETIONS, body, origin=origin)
            assert reply.headers["access-control-allow-origin"] == origin
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
            assert reply.fields["choices"]
        other = await door.ask(COMPLETIONS, body, origin="https://c.example")
        assert "access-control-allow-origin" not in other.headers
        asked = "origin: https://a.example\r\naccess-control-request-method: POST\r\n"
        asked += "access-control-request-headers: authorization, content-type\r\n"
        head = f"OPTIONS {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{asked}\r\n"
        answer = await door.send(head.encode())
        assert answer.status == 200
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert "POST" in answer.headers["access-control-allow-methods"]
