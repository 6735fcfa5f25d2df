"""One HTTP request and its answer: the body within limits of size and time, the reply, a stream of
frames, and whether the client is still there.

Over ASGI's `receive` and `send`; a frame of a stream goes straight to its connection while that
takes more. Every wait on a slow client is a wait here: `send` returns when the connection takes
more. Knows no route and no model."""

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
# In the scope's state, where the server puts them: what closes the connection, and what writes a
# chunk of a body that has begun, if the connection takes it now.
ABORT = "jdisagg.abort"
WRITE = "jdisagg.write"
Write = Callable[[bytes], bool]
COMMENT = b": waiting\n\n"


class Exchange:
    """`headers`: of the request, names in lower case, the last of each. `reply_headers`: added to
    the reply's, until it begins."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.reply_headers: list[Header] = []
        self.fields: tuple[str, ...] = ()
        self.begun = self.ended = self.disconnected = False
        self._receive = receive
        self._send = send
        self._lead = b""
        self._write: Write = scope.get("state", {}).get(WRITE, _never)

    async def body(self, limit_bytes: int) -> bytes:
        """All of it. Raises HttpRefusal where it is too large, too slow, or no JSON."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpRefusal(
                f"content-type must be application/json, got {kind[:80]!r}; send the header"
                " `content-type: application/json`",
                415,
                "unsupported_media_type",
            )
        stated = self.headers.get("content-length", "")
        if stated.isdecimal() and len(stated) < 20:
            _check_size(int(stated), limit_bytes)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._whole_body(limit_bytes)
        except TimeoutError:
            raise HttpRefusal(
                f"the body was not complete {BODY_SECONDS:g} s after its headers; send it at once",
                408,
                "request_timeout",
            ) from None

    async def gone(self) -> None:
        """Returns when the client has gone, or the reply has ended. After `body`."""
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
        """The whole answer."""
        await self._begin(
            status, [*headers, (b"content-length", str(len(body)).encode())], content_type
        )
        self.ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        """Of server-sent events."""
        await self._begin(200, [(b"cache-control", b"no-cache")], b"text/event-stream")

    async def comment(self) -> None:
        """Says that the stream lives. There are clients (`vllm bench serve`) that strip what they
        read of its line breaks and then take a comment and the event behind it for one line: an
        empty comment that comes with the next event parts them."""
        await self.frame(COMMENT)
        self._lead = b":\n\n"

    async def frame(self, data: bytes) -> None:
        """One or several server-sent events, as they stand on the wire."""
        if self._lead:
            data, self._lead = self._lead + data, b""
        if not self._write(data):
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes = b"") -> None:
        """After `data`, its last frames."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": data})

    def abort(self) -> None:
        """Closes the connection, whatever was not read of it."""
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
    """Where nobody says how to write."""
    return False


def _check_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise HttpRefusal(
            f"the body has {size_bytes} bytes or more; at most {limit_bytes} are taken"
            " (service.max_message_bytes); send less",
            413,
            "request_too_large",
        )
