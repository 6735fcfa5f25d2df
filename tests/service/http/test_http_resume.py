"""Streams over HTTP that outlive their router: by the helper behind OpenAI's client, token for
token, and by hand at every event."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from jdisagg.request import FinishReason, Request, SamplingParams
from jdisagg.service.client.http_resume import ResumableSse, ResumingTransport
from tests.service.chats import TEMPLATE, THOUGHT, WEATHER, Script
from tests.service.doors import expected_tokens, text_of
from tests.service.http_doors import CHATS, COMPLETIONS, HttpDoor, http_door, taken

TOKENS, STREAMS = 20, 24
CHAT: Any = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def router_process(*how: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.service.http.router_process", *how),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}", process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Counting(httpx2.AsyncHTTPTransport):
    """Counts the calls that resume a stream."""

    resumed = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.resumed += "last-event-id" in request.headers
        return await super().handle_async_request(request)


@pytest.mark.ci
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_streams_go_on_at_another_router_when_theirs_ends(end: signal.Signals) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first, process = await stack.enter_async_context(router_process("held"))
        second, _ = await stack.enter_async_context(router_process())
        counting = Counting(limits=httpx2.Limits(max_connections=None))
        transport = ResumingTransport([first, second], transport=counting)
        http = httpx2.AsyncClient(transport=transport, timeout=60)
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url="http://any/v1", api_key="none", max_retries=0, http_client=http
            )
        )
        begun = set[int]()

        async def completion(number: int) -> tuple[list[str], str]:
            texts = ["", ""]
            usage = None
            async for chunk in await client.completions.create(
                model="tiny",
                prompt=f"prompt {number}",
                max_tokens=TOKENS,
                n=2,
                stream=True,
                stream_options={"include_usage": True},
            ):
                for choice in chunk.choices:
                    begun.add(number)
                    texts[choice.index] += choice.text
                usage = chunk.usage or usage
            assert usage is not None and usage.completion_tokens == 2 * TOKENS
            return texts, f"prompt {number}"

        async def chat(number: int) -> tuple[list[str], str]:
            text, roles, ends = "", 0, 0
            async for chunk in await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"{number}"}],
                stream=True,
                max_tokens=TOKENS,
            ):
                (choice,) = chunk.choices
                text += choice.delta.content or ""
                if text:
                    begun.add(number)
                roles += choice.delta.role is not None
                ends += choice.finish_reason is not None
            assert (roles, ends) == (1, 1)
            return [text], f"<user>{number}<assistant>"

        kinds = (completion, chat)
        streams = [asyncio.ensure_future(kinds[at % 2](at)) for at in range(STREAMS)]
        async with asyncio.timeout(60):
            while len(begun) < STREAMS:
                await asyncio.sleep(0.01)
        process.send_signal(end)
        async with asyncio.timeout(120):
            for texts, prompt in await asyncio.gather(*streams):
                sampling = SamplingParams(max_tokens=TOKENS)
                request = Request("r", tuple(prompt.encode()), sampling)
                for child, text in enumerate(texts):
                    assert text == text_of(expected_tokens(request, child))
        assert counting.resumed >= STREAMS
        assert await process.wait() == (-signal.SIGKILL if end == signal.SIGKILL else 0)


def frames(body: bytes) -> list[tuple[str, Any]]:
    """(id, data) of each event."""
    found: list[tuple[str, Any]] = []
    for event in filter(None, body.decode().split("\n\n")):
        if event.startswith(":"):
            continue
        first, _, rest = event.partition("\n")
        name, data = (first, rest) if rest else ("", first)
        data = data.removeprefix("data: ")
        fields = data if data == "[DONE]" else json.loads(data) | {"created": 0}
        found.append((name.removeprefix("id: "), fields))
    return found


async def asked(door: HttpDoor, number: int, ids: list[str], **more: Any) -> list[tuple[str, Any]]:
    resumption = {"life": 7, "number": number, "event_ids": ids} if number else {"life": 7}
    fields = {
        "messages": CHAT,
        "request_id": "r",
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "resumption": resumption,
    }
    answer = await door.served(CHATS, fields | more)
    return frames(answer.body)


async def test_a_stream_of_thoughts_and_calls_goes_on_at_every_event() -> None:
    path = Script(text=THOUGHT, characters=7)
    async with http_door(path, template=TEMPLATE) as door:
        whole = await asked(door, 0, [], tools=[WEATHER])
        ids = [one for one, _ in whole if one]
        assert len(ids) == len(whole) - 2 > 20  # usage and [DONE] have none
        for at in range(1, len(ids)):
            assert await asked(door, 1, ids[:at], tools=[WEATHER]) == whole[at:]
        ran = len(path.requests)
        *_, last = await asked(door, 2, ids, tools=[WEATHER])
        assert last == ("", "[DONE]") and len(path.requests) == ran  # nothing is left to generate
        resumption = path.requests[-1].resumption
        assert resumption is not None and resumption.number == 1 and path.requests[-1].life == 7


async def test_echoes_and_ended_answers_are_not_repeated(door: HttpDoor) -> None:
    fields: Any = {"prompt": "once", "echo": True, "n": 2, "max_tokens": 4, "stream": True}
    fields |= {"request_id": "r", "seed": 1, "resumption": {"life": 7}}
    whole = frames((await door.ask(COMPLETIONS, fields)).body)
    texts = [data["choices"][0]["text"] for _, data in whole[:-1]]
    assert [text[:4] for text in texts[:2]] == ["once"] * 2
    ids = [one for one, _ in whole if one]
    for at in range(1, len(ids)):
        fields["resumption"] = {"life": 7, "number": at, "event_ids": ids[:at]}
        assert frames((await door.ask(COMPLETIONS, fields)).body) == whole[at:]
    assert len(ids) == 8


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"seed": None}, "resumption needs seed"),
    ({"stream": None}, "resumption needs stream"),
    ({"request_id": None}, "resumption needs request_id"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"resumption": {"number": 1}}, "resumption.life is missing"),
    ({"resumption": {"life": -1}}, "resumption.life"),
    ({"resumption": {"life": 1, "event_ids": ["0:0:1:"]}}, "needs resumption.number"),
    ({"resumption": {"life": 1, "number": 1, "event_ids": ["x"]}}, "'x', which is not the id"),
    ({"resumption": {"life": 1, "number": 1, "event_ids": ["3:0:1:"]}}, "'3:0:1:'"),
    ({"resumption": {"life": 1, "number": 1, "event_ids": ["0:4:1:"]}}, "where 0 is due"),
]


async def test_what_is_wrong_with_a_resumption_is_named(door: HttpDoor) -> None:
    usual: Any = {"messages": CHAT, "request_id": "r", "seed": 1, "stream": True}
    usual |= {"resumption": {"life": 1}}
    assert not await taken(door, [(CHATS, usual | more, words) for more, words in WRONG])
    answer = await door.ask(CHATS, {"messages": CHAT, "stream": True}, last_event_id="0:0:1:")
    assert answer.status == 400 and "needs the field resumption" in answer.error["message"]
    answer = await door.ask("/v1/responses", {"input": "hi", "resumption": {"life": 1}})
    assert answer.status == 400 and answer.error["param"] == "resumption"


def test_the_helper_keeps_whole_events_alone() -> None:
    state = ResumableSse.of("/v1/completions", b'{"stream": true, "prompt": "x"}')
    first = json.loads(state.body())
    assert state.take(b'id: 0:0:5:\ndata: {"a":1}\n\nid: 0:1:6:\nda') == b'data: {"a":1}\n\n'
    state.again()
    again = json.loads(state.body())
    assert again.pop("resumption")["event_ids"] == ["0:0:5:"]
    del first["resumption"]
    assert again == first and again["seed"] is not None and again["request_id"]
    passing = b'data: {"error":{"code":"ShutDownError","message":"x"}}\n\n'
    assert state.take(passing) == b"" and not state.complete
    lasting = b'data: {"error":{"code":"DeadlineExceededError","message":"x"}}\n\n'
    assert state.take(lasting) == lasting and state.complete
    assert state.take(f"id: 0:1:6:{FinishReason.STOP.value}\ndata: [DONE]\n\n".encode())
    for path, body in (("/v1/responses", b'{"stream": true}'), (CHATS, b"{}"), (CHATS, b"x")):
        assert ResumableSse.of(path, body) is None


async def test_a_stream_that_breaks_again_and_again_is_given_up() -> None:
    class Breaks(httpx2.AsyncBaseTransport):
        calls = 0

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            self.calls += 1
            data = b'id: 0:0:5:\ndata: {"a":1}\n\n' if self.calls == 1 else b": waiting\n\n"
            return httpx2.Response(200, stream=httpx2.ByteStream(data))

    breaks = Breaks()
    http = httpx2.AsyncClient(transport=ResumingTransport(["http://a"], 0.3, breaks))
    async with http, asyncio.timeout(20):
        asked = {"prompt": "x", "stream": True}
        with pytest.raises(httpx2.RemoteProtocolError, match="broke"):
            async with http.stream("POST", "http://any/v1/completions", json=asked) as reply:
                async for line in reply.aiter_lines():
                    assert line in ('data: {"a":1}', ": waiting", "")
    assert 2 <= breaks.calls < 20


async def test_other_requests_go_to_a_server_that_answers(door: HttpDoor) -> None:
    servers = ["http://127.0.0.1:1", f"http://127.0.0.1:{door.port}"]
    http = httpx2.AsyncClient(transport=ResumingTransport(servers))
    async with openai.AsyncOpenAI(
        base_url="http://any/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(
                model="tiny", messages=CHAT, stream=True, temperature=-1
            )
