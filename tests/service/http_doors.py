"""A real server of both APIs on free loopback ports, over a path with known tokens, and ways to
call it: OpenAI's client, and raw bytes."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.observe.request_log import RequestLog
from jdisagg.service.server import GenerationServer
from tests.service.doors import TEMPLATE, FakePath, make_frontend

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
HI: Any = [{"role": "user", "content": "hi"}]
USUAL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    CHATS: {"messages": HI, "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    MESSAGES: {"messages": HI, "max_tokens": 2},
}


@dataclass
class Answer:
    """A reply as it came; `fields` of its JSON."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.fields["error"]


@dataclass
class HttpDoor:
    """A running server. `port` is that of HTTP, `target` the address of gRPC."""

    path: FakePath
    server: GenerationServer
    made_of: Frontend | None = None

    @property
    def frontend(self) -> Frontend:
        assert self.made_of is not None
        return self.made_of

    @property
    def shown(self) -> str:
        """The text that the model was shown last."""
        return bytes(self.path.requests[-1].prompt_token_ids).decode()

    @property
    def port(self) -> int:
        return self.server.http.port

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def grpc_port(self) -> int:
        return self.server.listens.port

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ask(
        self, path: str, fields: object = None, *, raw: bytes | None = None, **headers: str
    ) -> Answer:
        """A POST of `fields`, or of `raw`; a GET where there is neither."""
        body = raw if raw is not None else b"" if fields is None else json.dumps(fields).encode()
        method = "GET" if fields is None and raw is None else "POST"
        lines = {"content-type": "application/json", "content-length": str(len(body))} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return await self.send(head.encode("latin-1") + b"\r\n" + body)

    async def served(self, path: str, fields: object = None, **headers: str) -> Answer:
        """The answer to what must not be refused."""
        answer = await self.ask(path, fields, **headers)
        assert answer.status == 200, (fields, answer.body)
        return answer

    async def send(self, data: bytes) -> Answer:
        """What is answered to these bytes; the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            return parse(await reader.read())
        finally:
            writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


def with_tokens(folder: Path, *lines: str) -> ServiceConfig:
    """Of a server that asks for one of these tokens."""
    file = folder / "tokens"
    file.write_text("\n".join(lines))
    return ServiceConfig(token_file=str(file))


def parse(data: bytes) -> Answer:
    """A whole reply; chunks are joined."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    if headers.get("transfer-encoding") == "chunked":
        chunks, at = [], 0
        while at < len(body):
            end = body.index(b"\r\n", at)
            size = int(body[at:end], 16)
            chunks.append(body[end + 2 : end + 2 + size])
            at = end + 4 + size
        body = b"".join(chunks)
    return Answer(int(first.split()[1]), headers, body)


async def one_answer(reader: asyncio.StreamReader) -> Answer:
    """The next whole reply of a connection that stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(parse(head).headers["content-length"])
    return parse(head + await reader.readexactly(length))


def request(path: str, fields: object, **headers: str) -> bytes:
    """The bytes of a POST."""
    body = json.dumps(fields).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{lines}\r\n"
    ).encode() + body


def events(body: bytes) -> list[str]:
    """The data of each server-sent event; comments are none."""
    found = [event for event in body.decode().split("\n\n") if event]
    return [event.removeprefix("data: ") for event in found if not event.startswith(":")]


@asynccontextmanager
async def running(
    path: FakePath, server: GenerationServer, frontend: Frontend | None = None
) -> AsyncIterator[HttpDoor]:
    """Starts a server, and shuts it down without waiting for what runs."""
    await server.start()
    try:
        yield HttpDoor(path, server, frontend)
    finally:
        server.force()
        await server.drain()


@asynccontextmanager
async def http_door(
    path: FakePath | None = None,
    service: ServiceConfig | None = None,
    log: RequestLog | None = None,
    template: str = TEMPLATE,
    port: int = 0,
) -> AsyncIterator[HttpDoor]:
    """A server of both APIs. `port` is for gRPC."""
    path = path or FakePath()
    frontend = make_frontend(path, template=template)
    config = replace(service or ServiceConfig(), port=port, http_port=0)
    async with running(path, GenerationServer(frontend, config, log=log), frontend) as door:
        yield door


async def taken(
    door: HttpDoor, rows: Iterable[tuple[str, dict[str, Any], str]], status: int = 400
) -> list[tuple[str, str, bytes]]:
    """Asks (path, fields, words); the rows that were not refused with these words."""
    wrong = []
    for path, fields, words in rows:
        answer = await door.ask(path, fields)
        if answer.status != status or words not in answer.error["message"]:
            wrong.append((path, words, answer.body[:200]))
    return wrong
