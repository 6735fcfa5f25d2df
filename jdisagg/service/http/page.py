"""The web page at `/` and the JSON data that it shows: the cluster's status, the router's last
decisions, and timelines of traced requests.

The page consists of HTML, CSS and JavaScript files in `web/`. The content security policy allows
them to contact this server only. The files need no token, while the JSON data requires a client
token. A timeline is requested by its trace id, which the client chose. A token that belongs to a
tenant cannot list the latest timelines, because the list covers all tenants."""

import dataclasses
import functools
import importlib.resources
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from jdisagg import __version__
from jdisagg.chat.messages import ChatMessage, ChatPrompt
from jdisagg.dispatch import caller
from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.routing_status import PastDecision, WorkerAccount
from jdisagg.errors import InvalidRequestError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.observe.metrics import Traffic
from jdisagg.observe.recent_requests import RecentRequests
from jdisagg.observe.sources import pages_by_state
from jdisagg.service.http.errors import Header, HttpRefusal
from jdisagg.service.http.exchange import Exchange
from jdisagg.service.http.guard import Endpoint, HttpGuard

TYPES = {".html": b"text/html", ".css": b"text/css", ".js": b"text/javascript"}
HEADERS: tuple[Header, ...] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        b" img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
FRESH: tuple[Header, ...] = ((b"cache-control", b"no-store"),)
SHOWN_DECISIONS = 64
SHOWN_REQUESTS = 50
SHOWN_STATUS = (
    *("name", "layout", "running", "waiting", "slots", "handoffs", "preemptions"),
    *("queued_tokens", "draining", "kv_channels", "page_size"),
)
SHOWN_DECISION = tuple(
    spec.name for spec in dataclasses.fields(PastDecision) if spec.name != "request_id"
)
SHOWN_MODEL = ("name", "family", "context_tokens", "dtype", "kv_bytes_per_token")

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class PageSources:
    """Data sources of the page in addition to the frontend.

    Attributes:
        recent: Timelines of recent requests, or None if requests are not traced.
    """

    recent: RecentRequests | None = None
    traffic: Callable[[], Traffic] | None = None


class Page:
    """The attribute `ready` is the server's readiness, which /api/status reports."""

    def __init__(self, frontend: Frontend, sources: PageSources) -> None:
        self.ready = False
        self._frontend = frontend
        self._sources = sources
        self._chats: dict[str, bool] = {}

    def endpoints(self, guard: HttpGuard) -> dict[str, Endpoint]:
        return {
            "/": Endpoint(guard, "GET", self._index, open=True),
            "/docs": Endpoint(guard, "GET", self._docs, open=True),
            "/web/{name}": Endpoint(guard, "GET", self._file, open=True),
            "/api/status": Endpoint(guard, "GET", self._status),
            "/api/timelines": Endpoint(guard, "GET", self._timelines),
            "/api/timelines/{trace}": Endpoint(guard, "GET", self._timeline),
        }

    async def _index(self, exchange: Exchange) -> None:
        await _reply_file(exchange, "index.html")

    async def _docs(self, exchange: Exchange) -> None:
        await _reply_file(exchange, "docs.html")

    async def _file(self, exchange: Exchange) -> None:
        await _reply_file(exchange, exchange.scope["path_params"]["name"])

    async def _status(self, exchange: Exchange) -> None:
        workers, routing = await self._frontend.status(), self._frontend.routing()
        accounts = {account.worker: account for account in routing.accounts}
        await _reply(
            exchange,
            {
                "version": __version__,
                "ready": self.ready,
                "model": await self._model(),
                "waiting": routing.waiting,
                "workers": [_worker(worker, accounts.get(worker.name)) for worker in workers],
                "traffic": self._sources.traffic and self._sources.traffic(),
                "decisions": self._decisions(routing.decisions[:SHOWN_DECISIONS]),
            },
        )

    def _decisions(self, decisions: Sequence[PastDecision]) -> list[dict[str, object]]:
        recent = self._sources.recent
        known = recent.requests() if recent and not caller.current().tenant else ()
        traces = {one.request: one.trace for one in known}
        return [
            {
                **{name: getattr(item, name) for name in SHOWN_DECISION},
                "trace": traces.get(item.request_id, ""),
            }
            for item in decisions
        ]

    async def _timelines(self, exchange: Exchange) -> None:
        """The list covers all tenants. A token that belongs to a tenant therefore gets an empty
        list."""
        recent = self._sources.recent
        known = recent.requests() if recent and not caller.current().tenant else ()
        await _reply(exchange, {"requests": known[:SHOWN_REQUESTS]})

    async def _timeline(self, exchange: Exchange) -> None:
        recent, trace = self._sources.recent, exchange.scope["path_params"]["trace"]
        await _reply(exchange, {"spans": recent.spans(trace) if recent else ()})

    async def _model(self) -> dict[str, object]:
        model = self._frontend.model
        return {
            **{name: getattr(model, name) for name in SHOWN_MODEL},
            "mode": model.mode.value,
            "chat": await self._can_chat(model.name),
        }

    async def _can_chat(self, model: str) -> bool:
        if model not in self._chats:
            try:
                await self._frontend.tokenize(ChatPrompt((ChatMessage("user", "Hello"),)))
                self._chats[model] = True
            except InvalidRequestError:
                self._chats[model] = False
        return self._chats[model]


def _worker(status: WorkerStatus, account: WorkerAccount | None) -> dict[str, object]:
    pages: list[dict[str, int]] = [{} for _ in status.free_pages]
    for rank, state, count in pages_by_state(status):
        pages[rank][state] = count
    return {
        **{name: getattr(status, name) for name in SHOWN_STATUS},
        "role": status.role.value,
        "pages": pages,
        "attempts": account.attempts if account else 0,
        "barred_seconds": account.barred_seconds if account else 0.0,
        "prices": account.prices if account else "assumed",
    }


async def _reply(exchange: Exchange, fields: object) -> None:
    await exchange.reply(_encode(fields), headers=FRESH)


async def _reply_file(exchange: Exchange, name: str) -> None:
    body = _files().get(name)
    if body is None:
        raise HttpRefusal(
            f"Not found: {name[:80]!r} is not a file of the web page, which is at /",
            404,
            "not_found",
        )
    kind = TYPES[name[name.rindex(".") :]] + b"; charset=utf-8"
    await exchange.reply(body, content_type=kind, headers=HEADERS)


@functools.cache
def _files() -> dict[str, bytes]:
    folder = importlib.resources.files("jdisagg.service.http") / "web"
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if any(file.name.endswith(ending) for ending in TYPES)
    }
