"""The requests of a decode worker that wait for pages. Each `reserve` call waits until its request
has pages.

`scheduler/reservations.py` decides which requests get pages and identifies them by tickets. This
module maps tickets to the waiting calls."""

import asyncio
from collections.abc import Callable

from jdisagg.clock import within
from jdisagg.errors import (
    DeadlineExceededError,
    HandoffError,
    JdisaggError,
    OverloadedError,
    UnavailableError,
)
from jdisagg.messages.ports import ReserveCall
from jdisagg.request import Request
from jdisagg.scheduler.handoff import HandoffState
from jdisagg.scheduler.reservations import Reservations
from jdisagg.scheduler.sequences import SequenceGroup

_OVERDUE = {
    HandoffState.RESERVED: "its lease passed before generate took it over",
    HandoffState.ORPHANED: "its source failed, and its lease passed before another came",
}


class PageRequests:
    """The waiting `reserve` calls of one decode mesh.

    Args:
        limit: Largest number of waiting requests of the new request's priority or higher. The
            number of all waiting requests may be twice as large.
        drop: Function that is called with the ticket of an abandoned request. The request may
            already have pages.
    """

    def __init__(
        self, worker: str, reservations: Reservations, limit: int, drop: Callable[[int], None]
    ) -> None:
        self._worker = worker
        self._reservations = reservations
        self._limit = limit
        self._drop = drop
        self._tickets: dict[int, asyncio.Future[SequenceGroup]] = {}

    def check(self, call: ReserveCall) -> None:
        """Raises InvalidRequestError if even an idle worker has no room for the request, and
        OverloadedError if too many requests wait."""
        self._reservations.check(call.request, _children(call))
        waiting, before = len(self._reservations), self._reservations
        if before.waiting_with(call.request.priority) >= self._limit or waiting >= 2 * self._limit:
            raise OverloadedError(
                f"worker {self._worker!r}: {len(self._reservations)} requests wait for pages, the"
                " queue's limit; try again later",
                retry_after_seconds=1.0,
            )

    def enqueue(
        self, call: ReserveCall, arrival: float
    ) -> "tuple[int, asyncio.Future[SequenceGroup]]":
        """Returns the ticket, and a future that `grant` sets."""
        since = None
        if call.aside_seconds is not None:
            since = arrival + max(0.0, call.age_seconds - call.aside_seconds)
        ticket = self._reservations.enqueue(
            call.request, call.attempt, _children(call), arrival, call.whole, call.computes, since
        )
        granted = self._tickets[ticket] = asyncio.get_running_loop().create_future()
        return ticket, granted

    async def wait(
        self, ticket: int, granted: "asyncio.Future[SequenceGroup]", seconds: float
    ) -> SequenceGroup:
        """Abandons the request after `seconds`, or if the wait is cancelled."""
        try:
            return await within(granted, seconds)
        except TimeoutError:
            self._give_up(ticket)
            raise DeadlineExceededError(
                f"worker {self._worker!r} had no free pages for the request within its"
                f" {seconds:g} s"
            ) from None
        except asyncio.CancelledError:
            self._give_up(ticket)
            raise
        except JdisaggError:
            self._drop(ticket)
            raise

    def grant(self, group: SequenceGroup) -> None:
        self._tickets.pop(group.key).set_result(group)

    def supersede(self, request: Request, indices: set[int], attempt: int) -> int:
        """Ends waiting requests that a new attempt replaces: those of earlier attempts for the same
        request and children. Returns their number."""
        tickets = self._reservations.earlier(request, indices, attempt)
        for ticket in tickets:
            self._reservations.withdraw(ticket)
            error = HandoffError(f"the attempt was superseded by attempt {attempt}")
            self._tickets.pop(ticket).set_exception(error)
        return len(tickets)

    def end_all(self, error: UnavailableError) -> None:
        for ticket, granted in list(self._tickets.items()):
            self._reservations.withdraw(ticket)
            if not granted.done():
                granted.set_exception(UnavailableError(error.message))
        self._tickets.clear()

    def _give_up(self, ticket: int) -> None:
        self._reservations.withdraw(ticket)
        self._tickets.pop(ticket, None)
        self._drop(ticket)


def _children(call: ReserveCall) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple([(child.index, child.accepted) for child in call.children])


def overdue_error(group: SequenceGroup) -> JdisaggError:
    if reason := _OVERDUE.get(group.handoff.state):
        return HandoffError(f"reservation {group.key}: {reason}")
    return DeadlineExceededError(
        "the request's deadline passed while its tokens were being generated"
    )
