"""Bad input at the HTTP door: each has a typed answer that names what is wrong, and a stream beside
it goes on."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from jdisagg.chat.messages import MAX_MESSAGES, MAX_TOOLS
from jdisagg.config import ServiceConfig
from jdisagg.service.http import exchange as http_exchange
from jdisagg.service.http import server as http_server
from jdisagg.service.http.fields import MAX_FIELDS, MAX_PARTS
from tests.service.doors import eventually, expected_tokens, text_of
from tests.service.http_doors import (
    CHATS,
    COMPLETIONS,
    RESPONSES,
    USUAL,
    Answer,
    HttpDoor,
    events,
    http_door,
    one_answer,
    parse,
    request,
    taken,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_BYTES = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[HttpDoor]:
    """With a stream that runs; it must come to its end, whole, whatever is sent beside it."""
    async with http_door(service=ServiceConfig(max_message_bytes=LIMIT_BYTES)) as one:
        one.path.gate.clear()
        asked = {"prompt": "beside", "max_tokens": 20, "stream": True}
        beside = asyncio.create_task(one.ask(COMPLETIONS, asked))
        await eventually(lambda: one.path.requests)
        yield one
        one.path.gate.set()
        *data, last = events((await beside).body)
        texts = [json.loads(event)["choices"][0]["text"] for event in data]
        expected = text_of(expected_tokens(one.path.requests[0], 0))
        assert (len(data), last, "".join(texts)) == (20, "[DONE]", expected)


def named(answer: Answer, status: int, *words: str) -> None:
    """The answer is OpenAI's form of an error, and says these words."""
    assert answer.status == status, answer.body
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert all(word in answer.error["message"] for word in words), answer.error


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", 'must be a number, got "hot"'),
    ({"temperature": -1}, "temperature", "must be in [0.0, 100.0], got -1.0"),
    ({"max_tokens": 1.5}, "max_tokens", "must be an integer, got 1.5"),
    ({"max_tokens": 10**30}, "max_tokens", "must be in [1, 2147483647]"),
    ({"top_k": [1]}, "top_k", "must be an integer, got [1]"),
    ({"n": True}, "n", "must be an integer, got true"),
    ({"stop": [1]}, "stop", "a string or a list of strings"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "a list of integers"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "an object of token ids and numbers"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "is not a token id of the model"),
    ({"stream": "yes"}, "stream", "must be true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": 3}, "stream_options", "must be an object, got 3"),
    ({"allowed_token_ids": [1, 300]}, "allowed_token_ids", "is not a token id"),
    ({"allowed_token_ids": "ab"}, "allowed_token_ids", "must be"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "no token could be chosen"),
    ({"bad_words": [""]}, "bad_words", "non-empty texts"),
    ({"bad_words": ["x"], "allowed_token_ids": [1]}, "allowed_token_ids", "together"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "[0, 20], got 21"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "must be an integer"),
    ({"priority": 1e300}, "priority", "priority"),
    ({"user": {}, "tenant": 3}, "tenant", "must be a string, got 3"),
    ({"deadline_seconds": -3}, "deadline_seconds", "must be positive"),
    ({"model": "other"}, "model", "got 'other'"),
]
WRONG_COMPLETIONS = [
    *WRONG,
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "prompt is empty"),
    ({"prompt": [[]]}, "prompt", "at least one token"),
    ({"prompt": ["a", 1]}, "prompt", "mixes texts and token ids"),
    ({"prompt": {}}, "prompt", "a string, a list of strings"),
    ({"prompt": ["a", ""]}, "prompt", "prompt is empty"),
    ({"prompt": [300]}, "prompt", "is not a token id"),
    ({"prompt": ["x"] * 257}, "prompt", "at most 256, got 257"),
    ({"prompt": "x" * 600}, "prompt", "the model's context of 512"),
    ({"echo": True, "logprobs": 21}, "logprobs", "[0, 20], got 21"),
    ({"guided_regex": 3}, "guided_regex", "must be a string, got 3"),
    ({"guided_choice": []}, "guided_choice", "the list of choices is empty"),
    ({"guided_json": 3}, "guided_json", "must be a JSON schema, got 3"),
    ({"guided_regex": "a", "guided_json": {}}, None, "in 2 ways"),
    ({"structured_outputs": {"regex": "(["}}, "structured_outputs", "invalid regex"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "a structural tag"),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "x"}}},
        "response_format",
        "format.type must be one of const_string",
    ),
    ({"structured_outputs": {"json": "[1"}}, "structured_outputs", "cannot be used"),
    (
        {"structured_outputs": {"grammar": "start: " + "(" * 500 + '"a"' + ")" * 500}},
        "structured_outputs",
        "too deeply nested",
    ),
    ({"structured_outputs": {"regex": "x" * 200_000}}, "structured_outputs", "at most 131072"),
]
WRONG_CHATS = [
    *WRONG,
    ({"messages": None}, "messages", "messages is missing"),
    ({"messages": "hi"}, "messages", "a list of objects"),
    ({"messages": []}, None, "chat messages are empty"),
    ({"messages": [{"content": "x"}]}, "messages", "messages[0].role is missing"),
    ({"messages": [{"role": "a king", "content": "x"}]}, "messages", "got 'a king'"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages", "messages[0].content must be"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "messages[0].content[0].image_url is missing",
    ),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"reasoning": {"exclude": True}}, "reasoning", "reasoning.exclude=true is not supported"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs", "must be an object, got 3"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set 'messages'"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "exclude each other",
    ),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
    ({"response_format": {}, "structured_outputs": {"json_object": 3}}, "structured_outputs", "3"),
    ({"response_format": {"type": "xml"}}, "response_format", "got 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
        "response_format",
        "Invalid type: thing",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "both restrict the answer",
    ),
    ({"modalities": ["audio"]}, "modalities", "is not supported"),
]


WRONG_RESPONSES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": None}, "input", "input is missing"),
    ({"input": 3}, "input", "a string or a list of messages"),
    ({"input": [{"type": "thing"}]}, "input", "type='thing' is not supported"),
    ({"max_output_tokens": "x"}, "max_output_tokens", "must be an integer"),
    ({"previous_response_id": "r"}, "previous_response_id", "the server stores no responses"),
    ({"tools": [{}]}, "tools", "tools[0].name is missing"),
    ({"tools": [{"type": "web_search"}]}, "tools", "type must be function"),
    ({"tools": [{"type": "local_shell"}]}, "tools", "type must be function"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{}]}]}, "tools", "tools[0].tools[0]."),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice", "is not supported"),
    ({"input": [{"type": "function_call"}]}, "input", "input[0].name is missing"),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format.schema is missing"),
    ({"text": {"format": {"type": "json_schema", "schema": {"items": 3}}}}, "text", "cannot be"),
]


async def test_a_wrong_field_is_named_with_its_value_and_the_rule(door: HttpDoor) -> None:
    rows = {RESPONSES: WRONG_RESPONSES, COMPLETIONS: WRONG_COMPLETIONS, CHATS: WRONG_CHATS}
    unnamed = []
    for path, (change, param, words) in ((one, row) for one in rows for row in rows[one]):
        answer = await door.ask(path, USUAL[path] | change)
        named(answer, 404 if param == "model" else 400)
        if words not in answer.error["message"] or answer.error["param"] != param:
            unnamed.append((path, change, answer.error))
    assert not unnamed
    assert len(door.path.requests) == 1, "the one that runs beside"


NO_OBJECTS: list[tuple[bytes, str]] = [
    (b'{"prompt": "\xff"}', "not valid UTF-8 at byte 12"),
    (b"[1, 2]", "must be a JSON object"),
    *(
        (body, "not valid JSON")
        for body in (
            *(b"", b"nonsense", b"\x00" * 100, b'{"prompt": "x"'),
            *(b'{"prompt": NaN}', b'{"prompt": "\\ud800"}'),
            b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        )
    ),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/v1/responses", "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_json_object_is_refused(door: HttpDoor, path: str) -> None:
    for body, words in NO_OBJECTS:
        named(await door.ask(path, raw=body), 400, words)


PART = {"type": "text", "text": ""}
MANY_WORDS = {"role": "user", "content": [PART | {"type": "x"}] * (MAX_PARTS + 1)}
MANY_LINES = {"role": "user", "content": [PART] * (2 * MAX_PARTS)}


TOO_MANY: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "x"} | {f"k{at}": 1 for at in range(MAX_FIELDS)}, "fields of the"),
    (CHATS, {"messages": [{}] * (MAX_MESSAGES + 1)}, "messages may hold at most"),
    (CHATS, {"messages": [MANY_WORDS]}, "messages[0].content may hold at most"),
    (CHATS, {"messages": [{}], "tools": [{}] * (MAX_TOOLS + 1)}, "tools may hold at most"),
    (RESPONSES, {"input": [{}] * (MAX_MESSAGES + 1)}, "input may hold at most"),
    # Parts of text are not too many: they become lines.
    (CHATS, {"messages": [MANY_LINES]}, "the model's context of 512"),
]


async def test_what_is_too_many_is_counted_before_it_is_looked_at(door: HttpDoor) -> None:
    assert not await taken(door, TOO_MANY)


async def test_tokens_that_are_none_are_refused(door: HttpDoor) -> None:
    for value in ({"prompt": [[[1]]]}, {"tokens": "x"}, {"tokens": [-1]}, {}):
        for path in ("/tokenize", "/detokenize"):
            named(await door.ask(path, value), 400)


async def test_a_body_beyond_the_limit_is_refused_before_it_is_read(door: HttpDoor) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    stated = head + b"connection: close\r\ncontent-length: 1000000000\r\n\r\n"
    named(await door.send(stated), 413, "1000000000 bytes", str(LIMIT_BYTES))
    reader, writer = await door.connect()
    writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
    for _ in range(3 * LIMIT_BYTES // 65536):
        writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
    named(await one_answer(reader), 413, str(LIMIT_BYTES))
    writer.close()


async def test_headers_without_an_end_are_refused(door: HttpDoor) -> None:
    many = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 40) for number in range(3000))
    for headers in (many, b"x: " + b"y" * (4 * http_server.HEAD_BYTES)):
        reader, writer = await door.connect()
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + headers)
        named(parse(await reader.read()), 431, str(http_server.HEAD_BYTES))
        writer.close()


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
)
SMALL = b'{"prompt": 3}'


@pytest.mark.parametrize(
    "flood",
    [
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 100_000,
        CHUNKED + b"0\r\na: " + b"b" * 1_000_000,
        CHUNKED + b"1;" + b"x" * 1_000_000,
    ],
    ids=["trailers", "one-trailer", "chunk-extension"],
)
async def test_what_stands_around_a_body_without_an_end_is_refused_and_not_kept(
    door: HttpDoor, flood: bytes
) -> None:
    known = set(connections(door))
    reader, writer = await door.connect()
    writer.write(flood[:4096])
    await eventually(lambda: connections(door) - known)
    (connection,) = connections(door) - known
    await eventually(lambda: connection.scope)
    headers = len(connection.headers)
    for at in range(4096, len(flood), 1 << 16):
        writer.write(flood[at : at + (1 << 16)])
    named(parse(await reader.read()), 431, str(http_server.HEAD_BYTES))
    assert len(connection.headers) == headers
    writer.close()


async def test_a_few_words_around_a_body_do_no_harm(door: HttpDoor) -> None:
    body = b"%x;a=b\r\n%b\r\n0\r\nx-sum: 1\r\n\r\n" % (len(SMALL), SMALL)
    named(await door.send(CHUNKED + body), 400, "prompt must be")


NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"nonsense\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
)
NO_PATHS = (
    *("/v1", "/web", "/web/../page.py", "/v1/../v1/completions", "/v1/%2e%2e/etc/passwd"),
    *("/..%2f..%2fetc/passwd", "/v1/completions%00", "/%ff%fe", "/" + "x" * 5000),
    "/V1/COMPLETIONS",
)


async def test_what_is_no_http_and_no_path_is_refused(door: HttpDoor) -> None:
    for data in NO_HTTP:
        named(await door.send(data), 400, "not valid HTTP/1.1")
    for path in NO_PATHS:
        answer = await door.ask(path, {"prompt": "x"})
        named(answer, 404, "Not found: ")
        assert len(answer.body) < 500


@pytest.mark.parametrize(("path", "allowed"), [(COMPLETIONS, "POST"), ("/v1/models", "GET")])
async def test_another_method_is_refused_with_the_one_to_use(
    door: HttpDoor, path: str, allowed: str
) -> None:
    for method in ("DELETE", "PUT", "OPTIONS", "GET" if allowed == "POST" else "POST"):
        data = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
        answer = await door.send(data)
        named(answer, 405, f"method must be {allowed} here, got {method}")
        assert answer.headers["allow"] == allowed


async def test_a_page_of_another_site_cannot_send_a_form(door: HttpDoor) -> None:
    """A browser sends these types without asking the server first."""
    form = {"prompt": 3}
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = await door.ask(COMPLETIONS, form, content_type=kind, origin="http://evil")
        named(answer, 415, f"must be application/json, got {kind!r}")
        named(await door.ask(COMPLETIONS, form, content_type=kind), 400, "prompt must be")


async def test_a_compressed_body_is_refused_by_its_coding(door: HttpDoor) -> None:
    for coding in ("gzip", "zstd", "br"):
        answer = await door.ask(COMPLETIONS, raw=b"\x1f\x8b", content_encoding=coding)
        named(answer, 415, f"content-encoding {coding!r} is not supported")
    answer = await door.ask(COMPLETIONS, {"prompt": 3}, content_encoding="identity")
    named(answer, 400, "prompt must be")


@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nhost"], ids=["silent", "slow"])
async def test_a_head_that_does_not_come_is_ended(door: HttpDoor, head: bytes) -> None:
    known = set(connections(door))
    reader, writer = await door.connect()
    writer.write(head)
    await eventually(lambda: connections(door) - known)
    (connection,) = connections(door) - known
    await eventually(lambda: connection._head_bytes == len(head))
    assert connection._due.when() - connection.loop.time() <= http_server.HEAD_SECONDS
    connection._late()  # what that timer calls
    answered = await reader.read()
    if head:
        named(parse(answered), 408, "headers were not complete")
    else:
        assert answered == b"", "what asks nothing is told nothing"
    writer.close()


async def test_a_body_that_does_not_come_is_ended(
    door: HttpDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_exchange, "BODY_SECONDS", 0.2)
    reader, writer = await door.connect()
    data = request(COMPLETIONS, {"prompt": "x"}, connection="close")
    writer.write(data[:-3])
    named(parse(await reader.read()), 408, "the body was not complete")
    writer.close()


def connections(door: HttpDoor) -> set[Any]:
    return set(door.server.http._server.server_state.connections)
