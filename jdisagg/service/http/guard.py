"""The guard of the HTTP door: what holds for every request, whichever its path is.

Refuses requests without the service's token and, while draining, all; turns our errors into typed
statuses, anything else into 500 and a log entry; cancels what a client that went away had asked
for; knows which requests run, and can cut them short. As `guard.py` is for gRPC."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from jdisagg.caller import Caller, calling
from jdisagg.errors import JdisaggError, UnauthenticatedError
from jdisagg.service.bearer import Tokens, identify
from jdisagg.service.draining import DrainingGuard, cut_short, shutting_down
from jdisagg.service.http.errors import HttpRefusal, error_body, error_headers, http_status
from jdisagg.service.http.exchange import Exchange, Receive, Scope, Send
from jdisagg.trace_context import incoming, within

Handler = Callable[[Exchange], Awaitable[None]]
# How long a client that does not read may keep an error from being its last event.
LAST_SECONDS = 1.0
ANY_METHOD = ""

log = logging.getLogger(__name__)


class HttpGuard(DrainingGuard):
    """`refused` gets the path and the error of every request that is answered before it reaches its
    handler."""

    def __init__(self, tokens: Tokens, refused: Callable[[str, JdisaggError], None]) -> None:
        super().__init__()
        self._tokens = tokens
        self._refused = refused

    async def run(self, endpoint: "Endpoint", exchange: Exchange) -> None:
        """Answers one request."""
        task = asyncio.current_task()
        assert task is not None
        served = False
        try:
            caller = self._check(endpoint, exchange)
            if not endpoint.open:
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
            await self._fail(exchange, cut_short())
        except JdisaggError as error:
            if not served or not endpoint.logs:
                self._refused(exchange.scope["path"], error)
            await self._fail(exchange, error)
        except Exception as error:
            log.exception("%s failed", exchange.scope["path"])
            name = type(error).__name__
            await self._fail(
                exchange, JdisaggError(f"internal error ({name}); the server's log says more")
            )
        finally:
            self._running.discard(task)

    def _check(self, endpoint: "Endpoint", exchange: Exchange) -> Caller:
        """Who calls. Raises what refuses the request."""
        method = exchange.scope["method"]
        asked = "GET" if method == "HEAD" else method
        if endpoint.method not in (asked, ANY_METHOD):
            exchange.reply_headers.append((b"allow", endpoint.method.encode()))
            raise HttpRefusal(
                f"method must be {endpoint.method} here, got {method}", 405, "method_not_allowed"
            )
        if endpoint.open:
            return Caller()
        caller = identify(self._tokens, exchange.headers.get("authorization", ""))
        if caller is None:
            raise UnauthenticatedError(
                "the server asks for an API key; send one that it knows as `authorization: Bearer"
                " ...`"
            )
        if self._refusing or self._cutting:
            raise shutting_down()
        return caller

    async def _fail(self, exchange: Exchange, error: JdisaggError) -> None:
        """The error as the reply, or, in a stream that had begun, as its last event."""
        body = error_body(error, exchange.fields)
        try:
            async with asyncio.timeout(LAST_SECONDS):
                if not exchange.begun:
                    await exchange.reply(body, http_status(error), headers=error_headers(error))
                elif not exchange.ended:
                    await exchange.frame(b"data: " + body + b"\n\n")
                    await exchange.end_stream()
        except TimeoutError:
            exchange.abort()


class Endpoint:
    """An ASGI application: `handle` for requests of one method, behind the guard.

    open: no token is asked for, and a drain neither refuses nor waits for it. logs: the handler
    counts its requests' errors itself."""

    def __init__(
        self,
        guard: HttpGuard,
        method: str,
        handle: Handler,
        *,
        open: bool = False,
        logs: bool = False,
    ) -> None:
        self.method = method
        self.handle = handle
        self.open = open
        self.logs = logs
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard.run(self, Exchange(scope, receive, send))
