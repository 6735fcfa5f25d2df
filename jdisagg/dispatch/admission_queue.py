"""Queue of requests that wait at the router for workers, in the fair order of router/admission.py.

The queue tries to place its first request again whenever a worker has reported its status, a prompt
was prefilled, or an attempt (one execution of a request on chosen workers) ended. No request
overtakes the first one, so small requests do not starve a large one. The exception is a request of
higher priority, which may be placed first."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from jdisagg.clock import Clock
from jdisagg.router.admission import Drain, FairQueue, Ticket
from jdisagg.settings.timeouts import RequestTimeouts


class Endable(Protocol):
    """A request's placement on workers. `end` releases the workers' capacity."""

    def end(self) -> None: ...


Item = TypeVar("Item")
PlacedT = TypeVar("PlacedT", bound=Endable)


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Item, PlacedT]):
    item: Item
    answer: "asyncio.Future[PlacedT]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        self.answer.set_exception(error)
        self.answer.exception()  # marks the error as retrieved, because the caller may be gone


class AdmissionQueue(Generic[Item, PlacedT]):
    """Fair queue of the requests that wait for placement.

    Args:
        weights: Weight of each tenant in the fair order. Tenants that are not listed have weight 1.
        place: Function that returns a request's placement, or None if the request must wait. Raises
            an error if the request is refused.

    Attributes:
        absent: Whether the first request waits for a role without workers. `place` sets this flag.
            Such periods are left out of the queue's service rate.
    """

    def __init__(
        self,
        weights: dict[str, float],
        clock: Clock,
        timeouts: RequestTimeouts,
        place: Callable[[Item], PlacedT | None],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._queue = FairQueue(weights)
        self._clock = clock
        self._timeouts = timeouts
        self._place = place
        self._refresh = refresh
        self.absent = False
        self._waiting: dict[int, _Waiting[Item, PlacedT]] = {}
        self._drain = Drain()
        self._last_key = 0
        self._news = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def seconds_ahead(self, tenant: str, cost: float, due: float, priority: int) -> float:
        if not self._queue:
            return 0.0
        return self._drain.seconds(self._queue.ahead(tenant, cost, due, priority))

    def overtakes(self, priority: int) -> bool:
        return self._queue.overtakes(priority)

    def first(self, most: int) -> list[Item]:
        return [self._waiting[ticket.key].item for ticket in self._queue.first(most)]

    def changed(self) -> None:
        if self._waiting:
            self._news.set()

    async def wait(
        self, item: Item, tenant: str, cost: float, due: float, priority: int
    ) -> PlacedT:
        """Raises the errors of `place`."""
        self._last_key += 1
        key = self._last_key
        waiting = self._waiting[key] = _Waiting[Item, PlacedT](item)
        self._queue.add(Ticket(key, tenant, due, cost, priority))
        if self._serving is None:
            self._drain.busy(self._clock.now())
            self._serving = asyncio.create_task(self._serve())
        try:
            return await asyncio.shield(waiting.answer)
        except asyncio.CancelledError:
            if waiting.answer.done() and waiting.answer.exception() is None:
                waiting.answer.result().end()  # the item was placed just before the cancellation
            raise
        finally:
            self._queue.remove(key)
            del self._waiting[key]
            self._news.set()

    async def _serve(self) -> None:
        try:
            while self._waiting:
                await self._refresh()
                self._news.clear()  # the refresh must not wake the queue again
                self.absent = False
                self._serve_heads()
                (self._drain.idle if self.absent else self._drain.busy)(self._clock.now())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._timeouts.queue_look_seconds):
                        await self._news.wait()
                        await asyncio.sleep(self._timeouts.queue_pause_seconds)
        except Exception as error:
            for waiting in self._waiting.values():
                if not waiting.answer.done():
                    waiting.fail(error)
        finally:
            self._serving = None
            self._drain.idle(self._clock.now())

    def _serve_heads(self) -> None:
        while (head := self._queue.head()) is not None:
            if self._serve_one(head):
                continue
            pressing = self._queue.pressing()
            if pressing is None or not self._serve_one(pressing):
                return

    def _serve_one(self, ticket: Ticket) -> bool:
        waiting = self._waiting[ticket.key]
        try:
            placed = self._place(waiting.item)
        except Exception as error:  # a refusal or a bug is raised at the caller
            self._queue.remove(ticket.key)
            waiting.fail(error)
            return True
        if placed is None:
            return False
        self._queue.serve(ticket)
        self._drain.served(ticket.cost, self._clock.now())
        waiting.answer.set_result(placed)
        return True
