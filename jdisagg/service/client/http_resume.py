"""A transport for OpenAI's Python client that resumes broken streams at another router.

    transport = ResumingTransport(["http://10.0.0.1:8000", "http://10.0.0.2:8000"])
    client = openai.AsyncOpenAI(
        base_url="http://jdisagg/v1", http_client=httpx2.AsyncClient(transport=transport)
    )

Requests go to the first reachable server. If the connection of a streamed chat or completion
breaks, or the server shuts down, the request is sent again with the ids of the received events
(`service/http/resumption.py`). The caller gets one stream with each token once. A request that is
not such a stream is sent again only if no connection was made. This module needs httpx2, which is
installed with `openai`."""

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx2

from jdisagg.request import MAX_SEED

PATHS = ("/v1/chat/completions", "/v1/completions")
# Error codes at the end of a stream after which the stream is resumed at another server.
PASSING = ("ShutDownError", "UnavailableError", "HandoffError")
PASSING_STATUSES = (502, 503)
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
_UNSENT = ("content-length", "host", "transfer-encoding")


class ResumableSse:
    """`complete` is True once the caller has received the last event of the stream, or an error
    that ends the stream."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = {
            **fields,
            "request_id": fields.get("request_id") or uuid.uuid4().hex,
            "seed": secrets.randbelow(MAX_SEED) if fields.get("seed") is None else fields["seed"],
        }
        self._life = secrets.randbits(62)
        self._number = 0
        self._ids: list[str] = []
        self._rest = b""
        self._begun_at = time.monotonic()
        self._broken_at: float | None = None  # until the next event
        self.complete = False

    @classmethod
    def of(cls, path: str, body: bytes) -> "ResumableSse | None":
        """Returns the state of a request. Returns None if the request is not a streamed chat or
        completion, or if it already has the field `resumption`."""
        if not path.endswith(PATHS):
            return None
        try:
            fields = json.loads(body)
        except ValueError:
            return None
        streams = isinstance(fields, dict) and fields.get("stream") is True
        return cls(fields) if streams and "resumption" not in fields else None

    def body(self) -> bytes:
        resumption: dict[str, Any] = {"life": self._life}
        fields = self._fields | {"resumption": resumption}
        if self._number:
            resumption |= {"number": self._number, "event_ids": self._ids}
            seconds = fields.get("deadline_seconds")
            if isinstance(seconds, int | float):
                left = seconds - (time.monotonic() - self._begun_at)
                fields["deadline_seconds"] = max(0.001, left)
        return json.dumps(fields).encode()

    @property
    def resuming(self) -> bool:
        return self._number > 0

    @property
    def last_id(self) -> str:
        return self._ids[-1] if self._ids else ""

    def again(self) -> None:
        self._number += 1
        self._rest = b""
        if self._broken_at is None:
            self._broken_at = time.monotonic()

    def until(self, seconds: float) -> float:
        """Returns the time `seconds` after the stream broke, or after now if it is not broken."""
        return seconds + (time.monotonic() if self._broken_at is None else self._broken_at)

    def take(self, data: bytes) -> bytes:
        """Returns the complete events in the received `data`, without their ids. An incomplete
        event is kept until the next call."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(map(self._event, events))

    def _event(self, event: bytes) -> bytes:
        lines = event.split(b"\n")
        kept = [line for line in lines if not line.startswith(b"id: ")]
        shown = b"\n".join(kept)
        if shown == b"data: [DONE]":
            self.complete = True
        elif shown.startswith(b'data: {"error":'):
            code = json.loads(shown.removeprefix(b"data: "))["error"].get("code")
            if code in PASSING:
                return b""
            self.complete = True
        if ids := [line[4:].decode() for line in lines if line.startswith(b"id: ")]:
            self._ids += ids
            self._broken_at = None
        return shown + b"\n\n"


class ResumingTransport(httpx2.AsyncBaseTransport):
    """Sends requests to one of several servers, and resumes broken streams. `resume_seconds`: time
    for which a broken stream without a further event is retried."""

    def __init__(
        self,
        servers: Sequence[str],
        resume_seconds: float = 30.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._servers = [httpx2.URL(server) for server in servers]
        self._at = 0
        self._resume_seconds = resume_seconds
        self._transport = transport or httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        state = ResumableSse.of(request.url.path, body)
        if state is None:
            return await self._send(request, body)
        response = await self._sent(request, state)
        if response.status_code != 200:
            return response
        events = _Events(self._resumed(request, state, response))
        return httpx2.Response(200, headers=response.headers, stream=events)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _resumed(
        self, request: httpx2.Request, state: ResumableSse, response: httpx2.Response
    ) -> AsyncIterator[bytes]:
        pause = 0.0
        while True:
            before, broke = state.last_id, httpx2.RemoteProtocolError("the stream broke off")
            try:
                async for data in response.aiter_raw():
                    if events := state.take(data):
                        yield events
            except httpx2.TransportError as error:
                broke = error
            finally:
                await response.aclose()
            if state.complete:
                return
            state.again()
            if time.monotonic() >= state.until(self._resume_seconds):
                raise broke
            pause = 0.0 if state.last_id != before else _longer(pause)
            await asyncio.sleep(pause)
            response = await self._sent(request, state)
            if response.status_code != 200:
                yield b"data: " + await response.aread() + b"\n\n"
                return

    async def _sent(self, request: httpx2.Request, state: ResumableSse) -> httpx2.Response:
        until, pause = state.until(self._resume_seconds), PAUSE_SECONDS
        while True:
            final = time.monotonic() >= until
            try:
                response = await self._send(request, state.body(), state.last_id)
                passing = response.status_code in PASSING_STATUSES
                if not (passing or (state.resuming and response.status_code == 429)) or final:
                    return response
                await response.aclose()
            except httpx2.TransportError:
                if final:
                    raise
            self._at += 1
            await asyncio.sleep(pause)
            pause = _longer(pause)

    async def _send(
        self, request: httpx2.Request, body: bytes, last_id: str = ""
    ) -> httpx2.Response:
        headers = [
            (name, value) for name, value in request.headers.multi_items() if name not in _UNSENT
        ]
        if last_id:
            headers.append(("last-event-id", last_id))
        for left in reversed(range(len(self._servers))):
            server = self._servers[self._at % len(self._servers)]
            url = request.url.copy_with(scheme=server.scheme, host=server.host, port=server.port)
            again = httpx2.Request(
                request.method, url, headers=headers, content=body, extensions=request.extensions
            )
            try:
                return await self._transport.handle_async_request(again)
            except httpx2.ConnectError:
                if not left:
                    raise
                self._at += 1
        raise AssertionError("servers is not empty")


def _longer(pause: float) -> float:
    return min(max(2 * pause, PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)


class _Events(httpx2.AsyncByteStream):
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._events:
            yield data

    async def aclose(self) -> None:
        close = getattr(self._events, "aclose", None)
        if close is not None:
            await close()
