"""Ports as they are across a bad network: replies come late, and a caller that goes away is not
noticed on the other side.

Middleware of any port. What the caller does explicitly (cancel calls) still arrives; what rides on
task cancellation or on closing an iterator is lost, so that tests see who frees."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from jdisagg.errors import JdisaggError
from jdisagg.messages.ports import (
    DecodePort,
    GenerateCall,
    PrefillCall,
    PrefillPort,
    PrefillReply,
    Reservation,
    ReserveCall,
    Span,
)
from jdisagg.messages.ports_middleware import through


class Lossy:
    """Replies and spans come `delay_seconds` late; cancelling a prefill, or closing a stream of
    spans, does not reach the worker. `prefills` and `reserves`: the calls, and when."""

    def __init__(self, delay_seconds: float = 0.0) -> None:
        self._delay_seconds = delay_seconds
        self._tasks: set[asyncio.Task[object]] = set()
        self.prefills: list[PrefillCall] = []
        self.reserves: list[tuple[float, ReserveCall]] = []

    async def prefill(
        self, proceed: Callable[[PrefillCall], Awaitable[PrefillReply]], call: PrefillCall
    ) -> PrefillReply:
        self.prefills.append(call)
        task = asyncio.ensure_future(proceed(call))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._tasks.add(task)  # type: ignore[arg-type]
        reply = await asyncio.shield(task)
        await asyncio.sleep(self._delay_seconds)
        return reply

    async def reserve(
        self, proceed: Callable[[ReserveCall], Awaitable[Reservation]], call: ReserveCall
    ) -> Reservation:
        self.reserves.append((asyncio.get_running_loop().time(), call))
        return await proceed(call)

    async def generate(
        self, proceed: Callable[[GenerateCall], AsyncIterator[Span]], call: GenerateCall
    ) -> AsyncIterator[Span]:
        arrived: asyncio.Queue[Span | JdisaggError | None] = asyncio.Queue()

        async def pump() -> None:
            try:
                async for span in proceed(call):
                    arrived.put_nowait(span)
                arrived.put_nowait(None)
            except JdisaggError as error:
                arrived.put_nowait(error)

        self._tasks.add(asyncio.create_task(pump()))  # type: ignore[arg-type]
        while (item := await arrived.get()) is not None:
            await asyncio.sleep(self._delay_seconds)
            if isinstance(item, JdisaggError):
                raise item
            yield item


def lossy_prefill(port: PrefillPort, delay_seconds: float = 0.0) -> PrefillPort:
    return through(PrefillPort, port, Lossy(delay_seconds))


def lossy_decode(port: DecodePort, delay_seconds: float = 0.0) -> DecodePort:
    return through(DecodePort, port, Lossy(delay_seconds))
