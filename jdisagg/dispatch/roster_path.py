"""The request path over a roster: workers come and go, and what they said in their last heartbeat is their status."""

from collections.abc import Callable

from jdisagg.clock import Clock
from jdisagg.config import LimitsConfig
from jdisagg.dispatch.child_stream import NewTextStream
from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.dispatch.request_path import RequestPath, random_id
from jdisagg.dispatch.roster import Roster


class RosterPath(RequestPath):
    """Asks no worker how it is: a request costs no status calls, and a worker that fell silent delays none."""

    def __init__(
        self, roster: Roster, new_text: NewTextStream, limits: LimitsConfig, clock: Clock, new_id: Callable[[], int] = random_id
    ) -> None:
        super().__init__(roster.prefill, roster.decode, new_text, limits, clock, new_id)
        self._roster = roster

    async def status(self) -> tuple[WorkerStatus, ...]:
        return self._roster.statuses()
