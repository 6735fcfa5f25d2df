"""The request log of the HTTP and gRPC APIs: a line of totals every ten seconds and, if configured,
a line for each request.

    with log.request(request_id, tenant) as record:
        record.built(request)
        async for event in events:
            record.seen(event)

If an exception leaves the `with` block, the request has failed. `refused` counts calls that failed
before they became requests: calls without a token, malformed calls, and calls during a drain."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jdisagg.errors import JdisaggError
from jdisagg.request import Request, StreamEvent

EVERY_SECONDS = 10.0

_log = logging.getLogger(__name__)


class RequestRecord:
    """Record of one request, from which its log line is built."""

    def __init__(self, request_id: str, tenant: str, now: float, work: "_Work") -> None:
        self.request_id, self.tenant, self.began = request_id, tenant, now
        self.prompt_tokens, self.generated_tokens = 0, 0
        self.first: float | None = None
        self._work = work

    def built(self, request: Request) -> None:
        self.request_id, self.prompt_tokens = request.request_id, len(request.prompt_token_ids)
        self._work.prompt_tokens += self.prompt_tokens

    def seen(self, event: StreamEvent) -> None:
        if event.token_ids:
            self.generated_tokens += len(event.token_ids)
            self._work.generated_tokens += len(event.token_ids)
            if self.first is None:
                self.first = self._work.now()


class _Work:
    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.prompt_tokens = self.generated_tokens = self.ended = self.failed = 0


class RequestLog:
    """The request log of a process. Use it on one event loop."""

    def __init__(
        self,
        each: bool = False,
        errors: Callable[[str, str], None] | None = None,
        waiting: Callable[[], int] | None = None,
    ) -> None:
        self._each = each
        self._errors = errors
        self._waiting = waiting
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._work = _Work(time.monotonic)

    @contextmanager
    def request(self, request_id: str, tenant: str) -> Iterator[RequestRecord]:
        record = RequestRecord(request_id, tenant, time.monotonic(), self._work)
        self._running += 1
        self._start()
        code, name = "OK", ""
        try:
            yield record
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except Exception as error:
            code, name = _code(error), type(error).__name__
            raise
        finally:
            self._running -= 1
            self._work.ended += 1
            self._ended(record, code, name)

    def refused(self, method: str, error: JdisaggError) -> None:
        self._count(_code(error), type(error).__name__)
        if self._each:
            _log.info(
                "%s refused",
                method,
                extra={"code": _code(error), "error_type": type(error).__name__},
            )

    def _count(self, code: str, name: str) -> None:
        self._work.failed += 1
        if self._errors is not None:
            self._errors(code, name)

    def _ended(self, record: RequestRecord, code: str, name: str) -> None:
        if name:
            self._count(code, name)
        if not self._each:
            return
        fields: dict[str, object] = {
            "request_id": record.request_id,
            "tenant": record.tenant,
            "code": code,
            "prompt_tokens": record.prompt_tokens,
            "generated_tokens": record.generated_tokens,
            "e2e_seconds": round(time.monotonic() - record.began, 4),
        }
        if record.first is not None:
            fields["ttft_seconds"] = round(record.first - record.began, 4)
        if name:
            fields["error_type"] = name
        _log.info("request ended", extra=fields)

    def _start(self) -> None:
        if self._timer is None:
            self._since = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(EVERY_SECONDS, self._line)

    def _line(self) -> None:
        self._timer, work = None, self._work
        if not (self._running or work.ended or work.failed):
            return
        seconds = max(time.monotonic() - self._since, 1e-3)
        _log.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s; %d running, %d waiting, %d ended, %d"
            " failed",
            work.prompt_tokens / seconds,
            work.generated_tokens / seconds,
            self._running,
            self._waiting() if self._waiting else 0,
            work.ended,
            work.failed,
        )
        work.prompt_tokens = work.generated_tokens = work.ended = work.failed = 0
        self._start()


def _code(error: Exception) -> str:
    return error.status if isinstance(error, JdisaggError) else "INTERNAL"
