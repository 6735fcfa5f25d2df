"""Limits on clients: quotas per bearer token, and one limit on tokenizer work that all clients
share.

`KeyUse` enforces the quotas of each bearer token (`KeyLimits`): running streams, requests per
second and tokens per second, at all routers together (spending.py). `LongTexts` tokenizes long
texts in threads, so that they delay no stream, and limits their total size. A text is accepted if
its size is at most half of the limit's unused part, so that small texts are accepted even while the
largest ones are tokenized."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from jdisagg.dispatch.caller import Caller
from jdisagg.errors import OverloadedError, QuotaExceededError
from jdisagg.spending import Spending

BURST_SECONDS = 10.0  # size of a bucket, in seconds of its rate
STREAM_RETRY_SECONDS = 1.0
TEXT_RETRY_SECONDS = 1.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Used = Callable[[int], None]


class KeyUse:
    """Counts the running streams and the recent use of each bearer token. `spending` stores the
    counts of all routers."""

    def __init__(self, spending: Spending | None = None) -> None:
        self._spending = spending or Spending()

    @contextmanager
    def stream(
        self, who: Caller, prompt_tokens: int, now: float, resumed: bool = False
    ) -> Iterator[Used]:
        """Counts one running stream while the context is entered.

        Yields a function, which the caller must call with the number of generated tokens as they
        are streamed. These tokens are charged after they were generated. If the token bucket of a
        client becomes negative, the client's requests are refused until the bucket has refilled.

        Args:
            who: Client, identified by its bearer token. A client without a bearer token has no
                limits.
            resumed: Whether the client resumes a request that was charged before. A resumed request
                counts as a running stream only; it is not charged again.

        Raises:
            QuotaExceededError: A limit of the bearer token is reached. The message names the limit
                and the time until more is available.
        """
        limits, spending = who.limits, self._spending
        streams, requests, tokens = (
            f"{who.key} {name}" for name in ("streams", "requests_per_second", "tokens_per_second")
        )
        running = spending.streams(streams, now)
        if limits.streams is not None and running >= limits.streams:
            raise QuotaExceededError(
                f"this token has {running} running streams and may have at most"
                f" {limits.streams} (streams in the token file); try again when one has ended",
                retry_after_seconds=STREAM_RETRY_SECONDS,
            )
        if not resumed:
            paid = (
                (requests, limits.requests_per_second, 1),
                (tokens, limits.tokens_per_second, prompt_tokens),
            )
            for bucket, rate, cost in paid:
                _check(spending, bucket, rate, cost, now)
            for bucket, _, cost in paid:
                spending.take(bucket, cost)
        counted = limits.streams is not None
        if counted:
            spending.begin(streams)
        try:
            yield lambda count: spending.take(tokens, count)
        finally:
            if counted:
                spending.end(streams)


def _check(spending: Spending, bucket: str, rate: float | None, cost: int, now: float) -> None:
    if rate is None:
        spending.forget(bucket)  # the limit was removed from the token file
        return
    name, full = bucket.rpartition(" ")[2], max(1.0, rate * BURST_SECONDS)
    if wait_seconds := spending.wait_seconds(bucket, cost, rate, full, now):
        raise QuotaExceededError(
            f"this token has used up its {rate:g} {name.replace('_', ' ')} ({name} in the token"
            f" file); more is available in {wait_seconds:.1f} s: try again then",
            retry_after_seconds=wait_seconds,
        )


class LongTexts:
    """The texts that are processed at the same time have at most `room_bytes` bytes."""

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._at_work_bytes = 0

    async def run(
        self,
        size_bytes: int,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        left_bytes = self._room_bytes - self._at_work_bytes
        if size_bytes > left_bytes / 2:
            raise OverloadedError(
                f"texts of {self._at_work_bytes} bytes are being tokenized, and {size_bytes} more"
                f" exceed half of the room left of {self._room_bytes}; try again later, or send"
                " token ids",
                retry_after_seconds=TEXT_RETRY_SECONDS,
            )
        self._at_work_bytes += size_bytes

        def ended() -> None:
            self._at_work_bytes -= size_bytes

        return await to_its_end(asyncio.to_thread(work, *args, **kwargs), ended)


async def to_its_end(work: Awaitable[Result], ended: Callable[[], None]) -> Result:
    """Waits for work that continues even if the caller is cancelled, such as work in a thread.
    Calls `ended` when the work has ended."""
    task = asyncio.ensure_future(work)

    def done(task: asyncio.Future[Result]) -> None:
        ended()
        if not task.cancelled():
            task.exception()  # marks the error as retrieved, because the caller may be gone

    task.add_done_callback(done)
    return await asyncio.shield(task)
