"""One HTTP request and its reply. Reads the body within limits of size and time, sends a whole
reply or a stream of events, and detects that the client disconnected.

This module uses ASGI's `receive` and `send`. To save time, an event of a stream is written directly
to the connection as long as the connection's buffer has room. If the buffer is full, `send` waits
for the client. Every wait for a slow client thus happens in this module."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from jdisagg.service.http.errors import Header, HttpRefusal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_SECONDS = 60.0
JSON = b"application/json"
# Keys of two functions that the server puts into the scope's state. The first closes the
# connection. The second writes a chunk of a started body if the connection accepts it now, and
# returns whether it did.
ABORT = "jdisagg.abort"
WRITE = "jdisagg.write"
Write = Callable[[bytes], bool]


class Exchange:
    """One HTTP request and its reply.

    Attributes:
        headers: Request headers by lower-case name. A repeated header has its last value.
        fields: Names of the request's fields, for the `param` of an error.
        ended: Whether the last part of the reply was sent.
        disconnected: Whether the client disconnected before that.
        reply_headers: Headers to add to the reply. Headers that are appended after the reply has
            begun have no effect.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.reply_headers: list[Header] = []
        self.fields: tuple[str, ...] = ()
        self.begun = self.ended = self.disconnected = False
        self.read_body: bytes | None = None
        self._receive = receive
        self._send = send
        self._lead = b""
        self._write: Write = scope.get("state", {}).get(WRITE, _never)

    async def body(self, limit_bytes: int) -> bytes:
        """Reads the whole request body. Raises HttpRefusal if the body is too large, too slow, or
        not JSON."""
        if self.read_body is not None:
            return self.read_body
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page of another site can send other content types without a CORS preflight. Programs
        # may omit the header or send curl's default.
        if not kind.endswith(("/json", "+json")) and "origin" in self.headers:
            raise HttpRefusal(
                f"content-type of a web page must be application/json, got {kind[:80]!r}; send the"
                " header"
                " `content-type: application/json`",
                415,
                "unsupported_media_type",
            )
        if (coding := self.headers.get("content-encoding", "identity")) not in ("", "identity"):
            raise HttpRefusal(
                f"content-encoding {coding[:80]!r} is not supported; send the body uncompressed",
                415,
                "unsupported_media_type",
            )
        stated = self.headers.get("content-length", "")
        if stated.isdecimal() and len(stated) < 20:
            _check_size(int(stated), limit_bytes)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                self.read_body = await self._whole_body(limit_bytes)
                return self.read_body
        except TimeoutError:
            raise HttpRefusal(
                f"the body was not complete {BODY_SECONDS:g} s after its headers; send it faster",
                408,
                "request_timeout",
            ) from None

    async def gone(self) -> None:
        """Waits until the client has disconnected or the reply is complete. Call it after
        `body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = not self.ended

    async def reply(
        self,
        body: bytes,
        status: int = 200,
        content_type: bytes = JSON,
        headers: Iterable[Header] = (),
    ) -> None:
        await self._begin(
            status, [*headers, (b"content-length", str(len(body)).encode())], content_type
        )
        self.ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        await self._begin(200, [(b"cache-control", b"no-cache")], b"text/event-stream")

    async def comment(self, comment: bytes) -> None:
        """Sends an SSE comment, so that proxies and clients keep the idle connection open.

        Some clients, such as `vllm bench serve`, strip line breaks and would join the comment with
        the next event. An empty comment before the next event prevents this."""
        await self.frame(comment)
        self._lead = b":\n\n"

    async def frame(self, data: bytes) -> None:
        if self._lead:
            data, self._lead = self._lead + data, b""
        if not self._write(data):
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": data})

    def abort(self) -> None:
        """Closes the connection, even with unread data."""
        self.scope["state"][ABORT]()

    async def _begin(self, status: int, headers: list[Header], content_type: bytes) -> None:
        self.begun = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", content_type), *headers, *self.reply_headers],
            }
        )

    async def _whole_body(self, limit_bytes: int) -> bytes:
        pieces: list[bytes] = []
        size_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected = True
                raise asyncio.CancelledError
            size_bytes += len(message["body"])
            _check_size(size_bytes, limit_bytes)
            pieces.append(message["body"])
            if not message.get("more_body", False):
                return b"".join(pieces)


def _never(data: bytes) -> bool:
    return False


def _check_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise HttpRefusal(
            f"the body has at least {size_bytes} bytes, more than the limit of {limit_bytes}"
            " (service.max_message_bytes); send less",
            413,
            "request_too_large",
        )
