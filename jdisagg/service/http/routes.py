"""The paths of the HTTP API, and the handlers of the small endpoints: models, tokenization, health,
metrics and version. The web page is in `page.py`."""

import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from starlette.routing import Route, Router

from jdisagg import __version__
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.weights_control import control_of, positive_seconds
from jdisagg.errors import InvalidRequestError
from jdisagg.messages.ports import SessionAction, SessionReport
from jdisagg.messages.weights import SLEEP_SECONDS, UPDATE_SECONDS, mode_of
from jdisagg.observe.request_log import RequestLog
from jdisagg.request import Adapter
from jdisagg.service.batch_folder import BatchFolder
from jdisagg.service.batch_jobs import BatchJobs
from jdisagg.service.http.batches import Batches
from jdisagg.service.http.bodies import (
    Detokenize,
    LoadAdapter,
    ModelFields,
    Sleep,
    Tokenize,
    UnloadAdapter,
    UpdateWeights,
    Wake,
)
from jdisagg.service.http.chat import chat_prompt
from jdisagg.service.http.embeddings import Embeddings
from jdisagg.service.http.errors import MESSAGE_ERRORS, HttpRefusal
from jdisagg.service.http.exchange import Exchange, Receive, Scope, Send
from jdisagg.service.http.fields import F, Fields
from jdisagg.service.http.generation import IGNORED, HttpGeneration, check_model, watched
from jdisagg.service.http.guard import ANY_METHOD, Endpoint, HttpGuard
from jdisagg.service.http.inside import InsideDoor
from jdisagg.service.http.kept_responses import KeptResponses
from jdisagg.service.http.messages import message_prompt
from jdisagg.service.http.openapi import openapi_json
from jdisagg.service.http.page import Page, PageSources
from jdisagg.service.http.requests import completion_prompts, ignored_header
from jdisagg.service.http.response_store import ResponseStore
from jdisagg.service.http.responses import response_from
from jdisagg.service.http.scores import Reranker

Scrape = Callable[[], Awaitable[bytes]]
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
OWNER = "jdisagg"

# Other paths for /health, which load balancers and platforms use.
_HEALTH = ("/ping", "/healthz", "/readyz", "/v1/health")
_OF_OTHER_MODELS = (
    *(
        "/pooling",
        "/classify",
        "/v1/moderations",
        "/v1/images/generations",
        "/v1/audio/transcriptions",
    ),
    *("/v1/audio/translations", "/v1/audio/speech"),
)

_encode = msgspec.json.encode


class HttpRoutes:
    """All routes of the HTTP API.

    Args:
        config: Size limits of a request body and of stored responses.
        scrape: Function that returns the metrics text, or None if metrics are off.
    """

    def __init__(
        self,
        frontend: Frontend,
        guard: HttpGuard,
        log: RequestLog,
        config: ServiceConfig,
        scrape: Scrape | None,
        page: PageSources,
    ) -> None:
        self._frontend = frontend
        self._guard = guard
        self._limit_bytes = limit_bytes = config.max_message_bytes
        self._scrape = scrape
        self._since = int(time.time())
        self._generation = HttpGeneration(frontend, log, limit_bytes)
        kept_bytes = (config.kept_responses_mib or 0) << 20
        self._store = ResponseStore(kept_bytes) if kept_bytes else None
        self._page = Page(frontend, page)
        self._embeddings = Embeddings(frontend, limit_bytes)
        self._scores = Reranker(frontend, config.reranker, limit_bytes)
        self._jobs: BatchJobs | None = None
        if config.batch_folder:
            folder = BatchFolder(Path(config.batch_folder).expanduser())
            self._jobs = BatchJobs(folder, InsideDoor(self._generation, self._embeddings).answer)

    @property
    def ready(self) -> bool:
        return self._page.ready

    @ready.setter
    def ready(self, ready: bool) -> None:
        self._page.ready = ready
        if self._jobs is not None:
            self._jobs.start() if ready else self._jobs.stop()

    async def close(self) -> None:
        if self._jobs is not None:
            await self._jobs.close()

    def application(self) -> Router:
        guard, generation = self._guard, self._generation
        endpoints = {
            "/v1/completions": Endpoint(guard, "POST", generation.completions, logs=True),
            "/v1/chat/completions": Endpoint(guard, "POST", generation.chats, logs=True),
            "/v1/chat/completions/render": Endpoint(guard, "POST", generation.rendered_chat),
            "/v1/embeddings": Endpoint(guard, "POST", self._embeddings.embeddings),
            **{
                path: Endpoint(guard, "POST", self._scores.rerank)
                for path in ("/v1/rerank", "/v2/rerank", "/rerank")
            },
            **{
                path: Endpoint(guard, "POST", self._scores.score)
                for path in ("/v1/score", "/score")
            },
            "/v1/responses": Endpoint(guard, "POST", generation.responses, logs=True),
            "/v1/messages": Endpoint(
                guard, "POST", generation.messages, logs=True, errors=MESSAGE_ERRORS
            ),
            "/v1/messages/count_tokens": Endpoint(
                guard, "POST", self._message_tokens, errors=MESSAGE_ERRORS
            ),
            "/v1/responses/input_tokens": Endpoint(guard, "POST", self._input_tokens),
            "/v1/models": Endpoint(guard, "GET", self._models),
            "/v1/models/{name:path}": Endpoint(guard, "GET", self._model),
            "/v1/load_lora_adapter": Endpoint(guard, "POST", self._load_adapter),
            "/v1/unload_lora_adapter": Endpoint(guard, "POST", self._unload_adapter),
            "/update_weights_from_disk": Endpoint(guard, "POST", self._update_weights),
            "/sleep": Endpoint(guard, "POST", self._sleep),
            "/wake_up": Endpoint(guard, "POST", self._wake, lasting=True),
            "/reset_prefix_cache": Endpoint(guard, "POST", self._reset_cache),
            "/v1/sessions/{key:path}/prefetch": Endpoint(guard, "POST", self._prefetch),
            "/v1/sessions/{key:path}": Endpoint(guard, "GET, DELETE", self._session),
            "/is_sleeping": Endpoint(guard, "GET", self._is_sleeping),
            "/tokenize": Endpoint(guard, "POST", self._tokenize),
            "/detokenize": Endpoint(guard, "POST", self._detokenize),
            "/metrics": Endpoint(guard, "GET", self._metrics, lasting=True),
            "/version": Endpoint(guard, "GET", self._version),
            "/health": Endpoint(guard, "GET, POST", self._health, open=True),
            "/livez": Endpoint(guard, "GET, POST", self._alive, open=True),
            "/openapi.json": Endpoint(guard, "GET", self._openapi, open=True),
            **self._page.endpoints(guard),
        }
        if self._store is not None:
            kept = KeptResponses(generation, self._store, guard, self._limit_bytes)
            endpoints |= kept.endpoints(guard)
        if self._jobs is not None:
            batches = Batches(self._jobs.folder, self._jobs, self._limit_bytes)
            endpoints |= batches.endpoints(guard)
        routes = [Route(path, endpoint) for path, endpoint in endpoints.items()]
        unknown = Endpoint(guard, ANY_METHOD, self._unknown, open=True)
        return _Router(routes, redirect_slashes=False, default=unknown)

    async def _models(self, exchange: Exchange) -> None:
        cards = [self._card(), *(self._card(one) for one in self._frontend.adapters.listed)]
        pages = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        await exchange.reply(_encode({"object": "list", "data": cards, **pages}))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["name"]
        check_model(name, self._frontend)
        adapter = self._frontend.adapters.find(name, self._frontend.model.name)
        await exchange.reply(_encode(self._card(adapter)))

    async def _load_adapter(self, exchange: Exchange) -> None:
        asked = await self._filled(exchange, LoadAdapter)
        name, path, replace = asked.lora_name, asked.lora_path, asked.load_inplace
        model = self._frontend.model.name
        adapter = await self._frontend.adapters.load(name, path, model, replace)
        await exchange.reply(_encode(self._card(adapter)))

    async def _unload_adapter(self, exchange: Exchange) -> None:
        name = (await self._filled(exchange, UnloadAdapter)).lora_name
        self._frontend.adapters.unload(name)
        await exchange.reply(_encode({"id": name, "object": "model", "deleted": True}))

    async def _update_weights(self, exchange: Exchange) -> None:
        asked = await self._filled(exchange, UpdateWeights, b"{}")
        seconds = _deadline(asked.deadline_seconds, UPDATE_SECONDS)
        control, mode = control_of(self._frontend.weights), mode_of(asked.mode)
        with watched(exchange):
            report = await control.update(asked.model_path, asked.weight_version, mode, seconds)
        await exchange.reply(_encode({"success": True, **msgspec.structs.asdict(report)}))

    async def _sleep(self, exchange: Exchange) -> None:
        fields = await self._body(exchange, b"{}")
        level, asked = fields.fill(Sleep).level, fields.fill(Wake)
        if level is None:  # vLLM's clients send it in the query
            query = parse_qs(exchange.scope.get("query_string", b"").decode("ascii", "replace"))
            text = query.get("level", ["1"])[-1]
            level = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
        names, seconds = _workers(asked), _deadline(asked.deadline_seconds, SLEEP_SECONDS)
        _note_ignored(exchange, fields)
        await control_of(self._frontend.weights).sleep(level, names, seconds)
        await self._is_sleeping(exchange)

    async def _wake(self, exchange: Exchange) -> None:
        asked = await self._filled(exchange, Wake, b"{}")
        names, seconds = _workers(asked), _deadline(asked.deadline_seconds, UPDATE_SECONDS)
        await control_of(self._frontend.weights).wake(names, seconds)
        await self._is_sleeping(exchange)

    async def _is_sleeping(self, exchange: Exchange) -> None:
        workers = {status.name: status.asleep for status in await self._frontend.status()}
        sleeping = bool(workers) and all(workers.values())
        await exchange.reply(_encode({"is_sleeping": sleeping, "workers": workers}))

    async def _reset_cache(self, exchange: Exchange) -> None:
        await exchange.reply(_encode({"blocks": await self._frontend.reset_cache()}))

    async def _session(self, exchange: Exchange) -> None:
        deletes = exchange.scope["method"] == "DELETE"
        await self._act(exchange, SessionAction.DROP if deletes else SessionAction.SHOW)

    async def _prefetch(self, exchange: Exchange) -> None:
        await self._act(exchange, SessionAction.PREFETCH)

    async def _act(self, exchange: Exchange, action: SessionAction) -> None:
        key = exchange.scope["path_params"]["key"]
        query = parse_qs(exchange.scope["query_string"].decode("latin-1"))
        named = [query.get(name, [""])[-1] for name in ("tenant", "cache_salt")]
        reports = await self._frontend.session(key, action, *named)
        if not reports:
            raise HttpRefusal(
                f"session {key[:80]!r} is unknown: no request with this key reached the present"
                " workers; keys belong to the tenant and cache_salt of their requests",
                404,
                "not_found",
            )
        shown = {"id": key, "object": "session"}
        if action is SessionAction.DROP:
            dropped = sum([one.dropped_tokens for one in reports])
            reply = {**shown, "deleted": True, "dropped_tokens": dropped}
        else:
            reply = {**shown, "workers": [_shown_session(one) for one in reports]}
        await exchange.reply(_encode(reply))

    async def _body(self, exchange: Exchange, empty: bytes = b"") -> Fields:
        """`empty` takes the place of an empty body."""
        fields = Fields.of(await exchange.body(self._limit_bytes) or empty)
        exchange.fields = fields.names
        return fields

    async def _filled(self, exchange: Exchange, form: type[F], empty: bytes = b"") -> F:
        fields = await self._body(exchange, empty)
        filled = fields.fill(form)
        _note_ignored(exchange, fields)
        return filled

    def _card(self, adapter: Adapter | None = None) -> dict[str, object]:
        model = self._frontend.model
        name = model.name if adapter is None else adapter.name
        return {
            "id": name,
            "object": "model",
            "type": "model",  # Anthropic's names begin here
            "display_name": name,
            "lifecycle": "active",
            "max_input_tokens": model.context_tokens,
            "max_tokens": model.context_tokens,
            "created_at": datetime.fromtimestamp(self._since, UTC).isoformat(),
            "created": self._since,
            "owned_by": OWNER,
            "root": name if adapter is None else adapter.path,
            "parent": None if adapter is None else model.name,
            "max_model_len": model.context_tokens,
        }

    async def _tokenize(self, exchange: Exchange) -> None:
        fields = await self._fields(exchange)
        if fields.has("messages"):
            prompt = chat_prompt(fields)
        else:
            prompt, *others = completion_prompts(fields)
            if others:
                raise InvalidRequestError(
                    f"prompt has {1 + len(others)} prompts, and one is tokenized; send one"
                )
        strings = fields.fill(Tokenize).return_token_strs
        _note_ignored(exchange, fields)
        token_ids = await self._frontend.tokenize(prompt)
        await exchange.reply(
            _encode(
                {
                    "count": len(token_ids),
                    "max_model_len": self._frontend.model.context_tokens,
                    "tokens": token_ids,
                    "token_strs": list(map(self._frontend.piece, token_ids)) if strings else None,
                }
            )
        )

    async def _input_tokens(self, exchange: Exchange) -> None:
        fields = await self._fields(exchange)
        (prompt,) = response_from(fields, self._store).prompts
        _note_ignored(exchange, fields)
        counted = len(await self._frontend.tokenize(prompt))
        await exchange.reply(_encode({"object": "response.input_tokens", "input_tokens": counted}))

    async def _message_tokens(self, exchange: Exchange) -> None:
        fields = await self._fields(exchange)
        prompt = message_prompt(fields)
        _note_ignored(exchange, fields)
        await exchange.reply(_encode({"input_tokens": len(await self._frontend.tokenize(prompt))}))

    async def _detokenize(self, exchange: Exchange) -> None:
        fields = await self._fields(exchange)
        asked = fields.fill(Detokenize)
        _note_ignored(exchange, fields)
        text = await self._frontend.detokenize(asked.tokens, asked.skip_special_tokens)
        await exchange.reply(_encode({"prompt": text}))

    async def _fields(self, exchange: Exchange) -> Fields:
        fields = await self._body(exchange)
        check_model(fields.fill(ModelFields).model, self._frontend)
        return fields

    async def _metrics(self, exchange: Exchange) -> None:
        if self._scrape is None:
            raise HttpRefusal(
                "metrics are off; start the server with --metrics_port", 404, "not_found"
            )
        await exchange.reply(await self._scrape(), content_type=METRICS_TYPE)

    async def _version(self, exchange: Exchange) -> None:
        await exchange.reply(_encode({"version": __version__}))

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(b"{}", 200 if self.ready else 503)

    async def _alive(self, exchange: Exchange) -> None:
        """Replies 200 also during a drain and without workers: a restart would mend neither."""
        await exchange.reply(b"{}")

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.reply(openapi_json())

    async def _unknown(self, exchange: Exchange) -> None:
        path = re.sub(r"[^\x20-\x7e]", "?", exchange.scope["path"])[:80]
        if path in _OF_OTHER_MODELS:
            raise HttpRefusal(
                f"{path} is not served: the model generates text, and the path needs a model of"
                " another kind; use another server for it",
                404,
                "not_found",
            )
        if path.startswith(("/v1/files", "/v1/batches")):
            raise HttpRefusal(
                f"{path} is not served: the server has no service.batch_folder; set it, or use"
                " jdisagg run_batch",
                404,
                "not_found",
            )
        raise HttpRefusal(
            f"Not found: {path}. The OpenAI-compatible API is under /v1, such as"
            " /v1/chat/completions, and the web page is at /",
            404,
            "not_found",
        )


class _Router(Router):
    """A router of paths that accepts other paths for /health. It ignores repeated slashes and
    slashes at the end of a path, which result when clients join a base address and a path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = re.sub("/+", "/", scope["path"]).rstrip("/") or "/"
        path = "/health" if path in _HEALTH else path
        await super().__call__({**scope, "path": path}, receive, send)


def _note_ignored(exchange: Exchange, fields: Fields) -> None:
    if ignored := ignored_header(fields):
        exchange.reply_headers.append((IGNORED, ignored))


def _shown_session(report: SessionReport) -> dict[str, object]:
    tiers = ("pages", "host", "disk")
    return {
        "worker": report.worker,
        "tokens": report.tokens,
        **{f"{tier}_tokens": getattr(report, f"{tier}_tokens") for tier in tiers},
        **{
            f"{name}_seconds": round(getattr(report, f"{name}_seconds"), 3)
            for name in ("idle", "retention", "pause")
        },
    }


def _deadline(seconds: float | None, usual: float) -> float:
    return usual if seconds is None else positive_seconds(seconds)


def _workers(asked: Wake) -> tuple[str, ...]:
    return (asked.workers,) if isinstance(asked.workers, str) else tuple(asked.workers)
