"""The guard of the HTTP API: code that every request passes through before its handler.

The guard refuses requests without a valid token and, during a drain, all new requests. It converts
jdisagg errors to HTTP statuses, and any other exception to status 500 and a log entry. It cancels
the request of a client that disconnected. It tracks running requests and can cancel them. The guard
for gRPC is `service/guard.py`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from jdisagg.dispatch.caller import Caller, calling
from jdisagg.errors import JdisaggError, UnauthenticatedError
from jdisagg.messages.trace_context import incoming, within
from jdisagg.service.bearer import Tokens, identify
from jdisagg.service.calls import DrainingGuard, cut_short, internal_error, shutting_down
from jdisagg.service.http.errors import OPENAI_ERRORS, ErrorForm, HttpRefusal, error_headers
from jdisagg.service.http.exchange import Exchange, Receive, Scope, Send

Handler = Callable[[Exchange], Awaitable[None]]
# Time limit for sending the final error to a client that does not read.
LAST_SECONDS = 1.0
ANY_METHOD = ""

log = logging.getLogger(__name__)


class HttpGuard(DrainingGuard):
    """The guard of one HTTP server.

    Args:
        tokens: Bearer tokens that are accepted. Without tokens, all requests are accepted.
        refused: Callback for each request whose error its handler does not log. Its arguments are
            the path and the error.
    """

    def __init__(self, tokens: Tokens, refused: Callable[[str, JdisaggError], None]) -> None:
        super().__init__()
        self._tokens = tokens
        self._refused = refused

    async def run(self, endpoint: "Endpoint", exchange: Exchange) -> None:
        task = asyncio.current_task()
        assert task is not None
        served = False
        try:
            caller = self._check(endpoint, exchange)
            if not endpoint.lasting:
                self._running.add(task)
            served = True
            with within(incoming(exchange.headers)), calling(caller):
                await endpoint.handle(exchange)
        except asyncio.CancelledError:
            if exchange.disconnected:
                task.uncancel()
                return
            if not self._cutting:
                raise
            task.uncancel()
            await self._fail(endpoint, exchange, cut_short())
        except JdisaggError as error:
            if not served or not endpoint.logs:
                self._refused(exchange.scope["path"], error)
            await self._fail(endpoint, exchange, error)
        except Exception as error:
            log.exception("%s failed", exchange.scope["path"])
            await self._fail(endpoint, exchange, internal_error(error))
        finally:
            self._running.discard(task)

    def _check(self, endpoint: "Endpoint", exchange: Exchange) -> Caller:
        method = exchange.scope["method"]
        asked = "GET" if method == "HEAD" else method
        if endpoint.method != ANY_METHOD and asked not in endpoint.method.split(", "):
            exchange.reply_headers.append((b"allow", endpoint.method.encode()))
            raise HttpRefusal(
                f"method must be {endpoint.method} here, got {method}", 405, "method_not_allowed"
            )
        if endpoint.open:
            return Caller()
        tokens, headers = self._tokens, exchange.headers
        caller = identify(tokens, headers.get("authorization", ""))
        caller = caller or identify(tokens, headers.get("x-api-key", ""))
        if caller is None:
            raise UnauthenticatedError(
                "the server requires an API key; send a valid one as `authorization: Bearer ...` or"
                " as `x-api-key: ...`"
            )
        if self._cutting or (self._refusing and not endpoint.lasting):
            raise shutting_down()
        return caller

    async def _fail(self, endpoint: "Endpoint", exchange: Exchange, error: JdisaggError) -> None:
        form = endpoint.errors
        body = form.body(error, exchange.fields)
        try:
            async with asyncio.timeout(LAST_SECONDS):
                if not exchange.begun:
                    await exchange.reply(body, form.status(error), headers=error_headers(error))
                elif not exchange.ended:
                    await exchange.frame(form.event + b"data: " + body + b"\n\n")
                    await exchange.end_stream()
        except TimeoutError:
            exchange.abort()


class Endpoint:
    """An ASGI application that passes requests of one HTTP method through the guard to `handle`.

    Args:
        method: HTTP methods, separated by ", ", or ANY_METHOD.
        open: Whether requests need no token, and are always answered. Implies `lasting`.
        lasting: Whether a drain neither refuses requests nor waits for them, because running
            requests may need them.
        logs: Whether the handler itself logs and counts its errors.
    """

    def __init__(
        self,
        guard: HttpGuard,
        method: str,
        handle: Handler,
        *,
        open: bool = False,
        lasting: bool = False,
        logs: bool = False,
        errors: ErrorForm = OPENAI_ERRORS,
    ) -> None:
        self.method = method
        self.handle = handle
        self.open = open
        self.lasting = open or lasting
        self.logs = logs
        self.errors = errors
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard.run(self, Exchange(scope, receive, send))
