"""Endpoints of stored responses: /v1/responses with a store, and /v1/responses/ID.

A response with `background` is generated after the reply to the request, and the client polls its
state. The code is that of other responses, with an `Exchange` whose reply is discarded."""

import asyncio
import logging
from collections.abc import Callable
from urllib.parse import parse_qs

import msgspec

from jdisagg.errors import InvalidRequestError, JdisaggError
from jdisagg.service.calls import internal_error
from jdisagg.service.http.errors import error_body
from jdisagg.service.http.exchange import Exchange, Message
from jdisagg.service.http.fields import YES, Fields
from jdisagg.service.http.generation import HttpGeneration
from jdisagg.service.http.guard import Endpoint, HttpGuard
from jdisagg.service.http.response_store import Json, KeptResponse, ResponseStore

MOST_LISTED, LISTED = 100, 20

log = logging.getLogger(__name__)

_encode = msgspec.json.encode
_decode: Callable[[bytes | msgspec.Raw], Json] = msgspec.json.Decoder(Json).decode
# Keeps the digits of numbers.
_as_sent = msgspec.json.Decoder(Json, float_hook=lambda text: msgspec.Raw(text.encode())).decode
_PARTS = {"user": "input_text", "system": "input_text", "developer": "input_text"}


class KeptResponses:
    """`guard`: the server's guard. A drain waits for responses in the background."""

    def __init__(
        self, generation: HttpGeneration, store: ResponseStore, guard: HttpGuard, limit_bytes: int
    ) -> None:
        self._generation = generation
        self._store = store
        self._guard = guard
        self._limit_bytes = limit_bytes

    def endpoints(self, guard: HttpGuard) -> dict[str, Endpoint]:
        one = "/v1/responses/{id}"
        return {
            "/v1/responses": Endpoint(guard, "POST", self._create, logs=True),
            one: Endpoint(guard, "GET, DELETE", self._one, lasting=True),
            f"{one}/cancel": Endpoint(guard, "POST", self._cancel, lasting=True),
            f"{one}/input_items": Endpoint(guard, "GET", self._input_items, lasting=True),
        }

    async def _create(self, exchange: Exchange) -> None:
        fields = Fields.of(await exchange.body(self._limit_bytes))
        exchange.fields = fields.names
        if not fields.read("background", YES):
            return await self._generation.responses(exchange, self._store)
        if fields.read("stream", YES):
            raise InvalidRequestError("background and stream exclude each other; send one of them")
        await exchange.reply(await self._begun(exchange))

    async def _begun(self, exchange: Exchange) -> bytes:
        begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def begin(response_id: str, response: Json) -> None:
            body = _encode(response)
            self._store.put(response_id, KeptResponse(body, (), 0, task))
            begun.set_result(body)

        async def run() -> None:
            try:
                await self._generation.responses(_Unconnected(exchange), self._store, begin)
            except asyncio.CancelledError:
                if begun.done():
                    self._end(begun, "cancelled", None)
                raise
            except Exception as error:
                if not isinstance(error, JdisaggError):
                    log.exception("a response in the background failed")
                    error = internal_error(error)
                if begun.done():
                    self._end(begun, "failed", error)
                else:
                    begun.set_exception(error)

        task = asyncio.create_task(run())
        self._guard.wait_for(task)
        return await begun

    def _end(self, begun: "asyncio.Future[bytes]", status: str, error: JdisaggError | None) -> None:
        response = _decode(begun.result())
        kept = self._store.find(str(response["id"]))
        if kept is None:  # deleted
            return
        fault = error and _decode(error_body(error))["error"]
        named = isinstance(fault, dict) and {"code": "server_error", "message": fault["message"]}
        response |= {"status": status, "error": named or None}
        ended = KeptResponse(_encode(response), (), 0, background=True)
        self._store.put(str(response["id"]), ended)

    async def _one(self, exchange: Exchange) -> None:
        response_id = exchange.scope["path_params"]["id"]
        if exchange.scope["method"] == "DELETE":
            self._store.delete(response_id)
            gone = {"id": response_id, "object": "response", "deleted": True}
            return await exchange.reply(_encode(gone))
        if _query(exchange, "stream") == "true":
            raise InvalidRequestError(
                "stream=true is not supported here; ask for the whole response"
            )
        await exchange.reply(self._store.given(response_id).body)

    async def _cancel(self, exchange: Exchange) -> None:
        response_id = exchange.scope["path_params"]["id"]
        kept = self._store.given(response_id)
        if kept.task is not None:
            kept.task.cancel()
            await asyncio.wait((kept.task,))
        elif not kept.background:
            raise InvalidRequestError(
                "the response cannot be cancelled: it was not created with background"
            )
        await exchange.reply(self._store.given(response_id).body)

    async def _input_items(self, exchange: Exchange) -> None:
        kept = self._store.given(exchange.scope["path_params"]["id"])
        items = [_listed(raw, at) for at, raw in enumerate(kept.items[: kept.inputs])]
        if (_query(exchange, "order") or "desc") == "desc":
            items.reverse()
        if after := _query(exchange, "after"):
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequestError(f"after={after[:80]!r} is not the id of an input item")
            items = items[ids.index(after) + 1 :]
        text = _query(exchange, "limit") or str(LISTED)
        limit = int(text) if text.isdecimal() and len(text) < 4 else 0
        if not 1 <= limit <= MOST_LISTED:
            raise InvalidRequestError(f"limit must be in [1, {MOST_LISTED}], got {text[:80]!r}")
        shown = items[:limit]
        await exchange.reply(
            _encode(
                {
                    "object": "list",
                    "data": shown,
                    "first_id": shown[0]["id"] if shown else "",
                    "last_id": shown[-1]["id"] if shown else "",
                    "has_more": len(items) > limit,
                }
            )
        )


class _Unconnected(Exchange):
    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.scope, _nothing, _swallow)
        self.reply_headers = exchange.reply_headers
        self.read_body = exchange.read_body


async def _nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def _swallow(message: Message) -> None:
    del message


def _listed(raw: msgspec.Raw, number: int) -> Json:
    item = _as_sent(raw)
    kind = str(item.setdefault("type", "message"))
    item.setdefault("status", "completed")
    item["id"] = item.get("id") or f"{kind}_{number}"
    if kind == "message":
        role = str(item.get("role"))
        part: Json = {"type": _PARTS.get(role, "output_text"), "text": item.get("content")}
        if role == "assistant":
            part |= {"annotations": [], "logprobs": []}
        if isinstance(item.get("content"), str):
            item["content"] = [part]
    return item


def _query(exchange: Exchange, name: str) -> str:
    found = parse_qs(exchange.scope["query_string"].decode("latin-1")).get(name)
    return found[-1] if found else ""
