"""The requests of a decode worker that wait for blocks of other prompts and for pages. Each
`reserve` call waits until its request has pages.

`scheduler/admission.py` decides which requests get pages and identifies them by tickets. This
module maps tickets to the waiting calls."""

import asyncio
from collections.abc import Callable

from jdisagg.clock import within
from jdisagg.errors import DeadlineExceededError, HandoffError, JdisaggError, UnavailableError
from jdisagg.messages.ports import ReserveCall
from jdisagg.request import Request
from jdisagg.scheduler.admission import Admission
from jdisagg.scheduler.handoff import HandoffState
from jdisagg.scheduler.prompt import Prompt
from jdisagg.scheduler.prompts import check_queue
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
        self, worker: str, admission: Admission, limit: int, drop: Callable[[int], None]
    ) -> None:
        self._worker = worker
        self._admission = admission
        self._limit = limit
        self._drop = drop
        self._waiting: dict[int, tuple[Prompt, asyncio.Future[SequenceGroup]]] = {}  # by ticket

    def __len__(self) -> int:
        """Returns the number of calls that wait."""
        return len(self._waiting)

    def check(self, call: ReserveCall) -> None:
        """Raises InvalidRequestError if even an idle worker has no room for the request, and
        OverloadedError if too many requests wait."""
        self._admission.check(call.request, call.children)
        waiting = [prompt for prompt, _ in self._waiting.values()]
        check_queue(self._worker, waiting, call.request.priority, self._limit)

    def open(self, prompt: Prompt) -> "asyncio.Future[SequenceGroup]":
        """Returns a future that `grant` sets, some time after `enqueue` was called."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting[prompt.key] = prompt, granted
        return granted

    def enqueue(self, prompt: Prompt) -> None:
        if prompt.key in self._waiting:
            self._admission.enqueue(prompt)

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
        _, granted = self._waiting.pop(group.key)
        if not granted.done():  # otherwise the call has been given up
            granted.set_result(group)

    def supersede(self, request: Request, indices: set[int], attempt: int) -> int:
        """Ends waiting requests that a new attempt replaces: those of earlier attempts for the same
        request and children. Returns their number."""
        tickets = [
            ticket
            for ticket, (prompt, _) in self._waiting.items()
            if prompt.request.identity == request.identity
            and prompt.attempt < attempt
            and indices & {child.index for child in prompt.children}
        ]
        for ticket in tickets:
            self._end(ticket, HandoffError(f"the attempt was superseded by attempt {attempt}"))
        return len(tickets)

    def end_all(self, error: UnavailableError) -> None:
        for ticket in list(self._waiting):
            self._end(ticket, UnavailableError(error.message))

    def _end(self, ticket: int, error: JdisaggError) -> None:
        self._admission.withdraw(ticket)
        _, granted = self._waiting.pop(ticket)
        if not granted.done():
            granted.set_exception(error)

    def _give_up(self, ticket: int) -> None:
        self._admission.withdraw(ticket)
        self._waiting.pop(ticket, None)
        self._drop(ticket)


def overdue_error(group: SequenceGroup) -> JdisaggError:
    if reason := _OVERDUE.get(group.handoff.state):
        return HandoffError(f"reservation {group.key}: {reason}")
    return DeadlineExceededError(
        "the request's deadline passed while its tokens were being generated"
    )
