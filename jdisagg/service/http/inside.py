"""Answers requests of the HTTP API within the process, without a connection."""

import asyncio

from jdisagg.errors import JdisaggError
from jdisagg.service.batch_lines import BatchReply
from jdisagg.service.calls import internal_error
from jdisagg.service.http.embeddings import Embeddings
from jdisagg.service.http.errors import error_body, http_status
from jdisagg.service.http.exchange import Exchange, Message
from jdisagg.service.http.generation import HttpGeneration
from jdisagg.service.http.guard import Handler


class InsideDoor:
    """The endpoints that batches may use. The caller of a request is that of the calling code
    (`jdisagg.dispatch.caller`)."""

    def __init__(self, generation: HttpGeneration, embeddings: Embeddings) -> None:
        self._handlers: dict[str, Handler] = {
            "/v1/chat/completions": generation.chats,
            "/v1/completions": generation.completions,
            "/v1/responses": generation.responses,
            "/v1/embeddings": embeddings.embeddings,
        }

    async def answer(self, path: str, body: bytes) -> BatchReply:
        """Returns the reply. An error is a reply too, unless the calling task is cancelled."""
        exchange = _Inside(path, body)
        try:
            await self._handlers[path](exchange)
        except JdisaggError as error:
            return BatchReply(
                http_status(error), error_body(error, exchange.fields), error.retry_after_seconds
            )
        except Exception as error:
            return BatchReply(500, error_body(internal_error(error)))
        return BatchReply(exchange.status, exchange.written)


class _Inside(Exchange):
    def __init__(self, path: str, body: bytes) -> None:
        scope = {"method": "POST", "path": path, "headers": [], "query_string": b"", "state": {}}
        super().__init__(scope, _nothing, self._take)
        self.read_body = body
        self.status, self.written = 0, b""

    async def _take(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.written += message.get("body", b"")


async def _nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
