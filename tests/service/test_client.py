"""The sync client, both clients without a server, and `launch.ask`, which uses them."""

import asyncio
import pathlib
import sys
from asyncio.subprocess import PIPE
from typing import Any

import pytest

from jdisagg.client import AsyncClient, ChatMessage, Client
from jdisagg.config import ServiceConfig
from jdisagg.errors import ConfigError, InvalidRequestError, OverloadedError, UnavailableError
from jdisagg.node.cluster_plan import free_ports
from jdisagg.service.server import GenerationServer
from tests.service.doors import FakePath, expected_tokens, make_frontend, text_of
from tests.service.http_doors import HttpDoor

ROOT = pathlib.Path(__file__).resolve().parents[2]


async def test_the_sync_client_does_all_that_the_service_offers(door: HttpDoor) -> None:
    def use() -> None:
        with Client(door.target) as client:
            events = list(client.generate("Once", max_tokens=4))
            assert tuple(token for event in events for token in event.token_ids) == expected_tokens(
                door.path.requests[0], 0
            )
            completion = client.complete(messages=[ChatMessage("user", "hi")], max_tokens=3, n=2)
            assert [choice.text for choice in completion.choices] == [
                text_of(expected_tokens(door.path.requests[1], c)) for c in (0, 1)
            ]
            assert completion.text == completion.choices[0].text
            assert completion.usage is not None and completion.usage.completion_tokens == 6
            assert client.detokenize(client.tokenize("naïve")) == "naïve"
            assert client.model() == door.frontend.model
            assert client.status()[0].free_pages == (3, 4)
            with pytest.raises(OverloadedError):
                client.complete("x", tenant="crowd")
            with pytest.raises(InvalidRequestError, match="max_tokens=600"):
                client.complete("x", max_tokens=600)

    await asyncio.to_thread(use)


async def test_a_client_learns_what_the_server_calls_its_request(door: HttpDoor) -> None:
    async with AsyncClient(door.target) as client:
        assert (await client.complete("x", request_id="mine")).request_id == "mine"
        drawn = (await client.complete("x", max_tokens=2)).request_id
        events = [event async for event in client.generate("x", max_tokens=3)]
    assert drawn == door.path.requests[1].request_id
    assert [event.request_id for event in events] == [door.path.requests[2].request_id, "", ""]


async def test_a_bias_is_given_by_a_mapping_or_by_pairs(door: HttpDoor) -> None:
    async with AsyncClient(door.target) as client:
        for biases in ({3: 100.0, 5: -1.0}, [(3, 100.0), (5, -1.0)]):
            await client.complete("x", max_tokens=1, logit_bias=biases)
    assert [request.sampling.logit_bias for request in door.path.requests] == [
        ((3, 100.0), (5, -1.0))
    ] * 2
    request = await door.frontend.build_request("x", logit_bias={3: 100.0})
    assert request.sampling.logit_bias == ((3, 100.0),)


async def test_a_target_that_is_no_address_is_refused_at_once() -> None:
    for target in ("", " "):
        for kind in (Client, AsyncClient):
            with pytest.raises(
                ConfigError, match="target must be an address, got '.?'; give host:port"
            ):
                kind(target)


async def test_without_a_server_both_clients_say_so() -> None:
    target = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"

    def use() -> None:
        with (
            Client(target, connect_seconds=0.2) as client,
            pytest.raises(UnavailableError, match=f"no server answered at {target}"),
        ):
            client.model()

    await asyncio.to_thread(use)
    async with AsyncClient(target, connect_seconds=0.2) as client:
        with pytest.raises(UnavailableError, match=f"no server answered at {target}"):
            await client.complete("x")


async def test_a_client_waits_for_a_server_that_comes_late_and_for_one_that_comes_back() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    async with AsyncClient(f"127.0.0.1:{port}", connect_seconds=30) as client:
        answer = asyncio.ensure_future(client.complete("x", max_tokens=2))
        await asyncio.sleep(0.1)
        for _ in range(2):
            server = GenerationServer(make_frontend(FakePath()), ServiceConfig(port=port))
            await server.start()
            assert len((await answer).choices[0].token_ids) == 2
            await server.drain()
            answer = asyncio.ensure_future(client.complete("x", max_tokens=2))
        answer.cancel()


S = "\ud800"  # half of a surrogate pair
USER: Any = {"role": "user"}
UNSENDABLE: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of prompt, token_ids, messages"),
    ({"prompt": "x", "token_ids": [1]}, "exactly one of"),
    ({"prompt": "x" + S}, "cannot be sent"),
    ({"prompt": b"\xff\xfe"}, "prompt must be text, got bytes"),
    ({"prompt": [1, 2, 3]}, "prompt must be text, got list; for ids, pass token_ids="),
    ({"prompt": "x", "request_id": "a\udfff"}, "character 1, is half of a surrogate pair"),
    ({"prompt": "x", "tenant": 5}, "tenant must be text, got int"),
    ({"prompt": "x", "logit_bias": {"a": 1.0}}, "logit_bias={'a': 1.0} cannot be sent"),
    ({"token_ids": "abc"}, "token_ids must be a sequence of values, got str"),
    ({"messages": "hi"}, "messages must be a sequence of values, got str"),
    ({"messages": USER | {"content": "hi"}}, "got dict; give a sequence of messages"),
    ({"messages": [USER | {"content": "a" + S}]}, "messages[0] cannot be sent: '.ud800'"),
    ({"messages": [], "chat_template_kwargs": {"a": object()}}, "chat_template_kwargs cannot be"),
    ({"prompt": "x", "documents": [{"text": "a"}]}, "are for chats; give messages"),
    ({"prompt": "x", "beams": 4}, "unknown sampling option beams"),
    ({"token_ids": ["a"]}, "cannot be sent"),
]


def test_what_cannot_be_sent_is_refused_before_anything_is() -> None:
    wrong = []
    with Client("127.0.0.1:1") as client:
        for options, message in UNSENDABLE:
            with pytest.raises(InvalidRequestError) as refused:
                client.generate(**options)
            if message not in refused.value.message.replace("\\", "."):
                wrong.append((message, refused.value.message))
    assert not wrong


async def test_a_closed_client_says_that_it_is_closed(door: HttpDoor) -> None:
    closed = f"this client of {door.target} is closed; make a new one"

    def use() -> None:
        with Client(door.target) as client:
            begun = client.generate("x")
        for call in (client.model, lambda: client.generate("x"), lambda: next(begun)):
            with pytest.raises(InvalidRequestError, match=closed):
                call()

    await asyncio.to_thread(use)
    async with AsyncClient(door.target) as client:
        await client.model()
    for call in (client.model, lambda: client.complete("x")):
        with pytest.raises(InvalidRequestError, match=closed):
            await call()


async def ask(*flags: str, stdin: bytes = b"") -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "launch.ask", *flags),
        cwd=ROOT,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), 60)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.ci
async def test_ask_writes_the_text_to_stdout_and_timings_and_errors_to_stderr(
    door: HttpDoor,
) -> None:
    flags = ("--prompt=-", "--chat", "--system=be", "--n=2", "--max_tokens=12", "--seed=3")
    code, out, err = await ask(f"--target={door.target}", *flags, stdin="né".encode())
    (request,) = door.path.requests
    assert bytes(request.prompt_token_ids).decode() == "<system>be<user>né<assistant>"
    texts = [text_of(expected_tokens(request, child)) for child in (0, 1)]
    assert (code, out) == (0, "\n\n".join(texts) + "\n")
    assert request.sampling.seed == 3
    assert "30 + 24 tokens, TTFT 250 ms" in err and "640 KV bytes moved" in err
    code, out, err = await ask(f"--target={door.target}", "--prompt=x", "--max_tokens=600")
    assert (code, out) == (1, "")
    assert err.startswith("error: max_tokens=600"), "no empty line before it where no text came"
