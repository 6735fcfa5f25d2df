"""A placer over workers that say what the test makes them say."""

import asyncio
from dataclasses import replace

from jdisagg.config import RoutingConfig
from jdisagg.dispatch.placer import PlacementHandle, PlacementRequest, Placer, PlacerSettings
from jdisagg.messages.ports import Child
from jdisagg.request import Request, SamplingParams
from jdisagg.router.accounts import Accounts
from jdisagg.router.cluster_state import OWN, ClusterState, Description
from jdisagg.router.decision import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS
from jdisagg.telemetry import Counters
from tests.fakes.virtual_time import VirtualClock
from tests.router.fleets import H100, decode_status, prefill_status

LOOK_SECONDS = DEFAULT_TIMEOUTS.request.queue_look_seconds


class Desk:
    """A placer over workers that say what the test makes them say."""

    def __init__(
        self,
        routing: RoutingConfig | None = None,
        decodes: int = 1,
        events: RouterEvents = NO_ROUTER_EVENTS,
        affinity: KnownBlocks | None = None,
    ) -> None:
        self.clock, self.counters = VirtualClock(), Counters()
        self.accounts = Accounts(ClusterState())
        settings = PlacerSettings(routing or RoutingConfig(), affinity=affinity, events=events)
        self.placer = Placer(self.accounts, settings, self.clock, self.counters)
        for status in (
            prefill_status("p0"),
            *(decode_status(f"d{number}") for number in range(decodes)),
        ):
            self.accounts.state.describe(status.name, Description("r", H100))
            self.accounts.heard(status, self.clock.now())

    def fill(self) -> None:
        self.accounts.heard(decode_status("d0", (200,), (60000,), free=(0,)), self.clock.now())

    def free(self) -> None:
        self.accounts.heard(decode_status("d0"), self.clock.now())

    async def keep_alive(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for status in self.accounts.state.statuses():
                self.accounts.heard(status, self.clock.now())

    def seek(
        self, number: int = 0, tenant: str = "", seconds: float = 60.0, **other: object
    ) -> PlacementRequest:
        request = Request(
            f"r{number}", tuple(range(100)), SamplingParams(max_tokens=50), tenant=tenant
        )
        now = self.clock.now()
        return replace(PlacementRequest(request, (Child(0),), now, now + seconds), **other)  # type: ignore[arg-type]

    async def place(self, *args: object, **kwargs: object) -> PlacementHandle:
        return await self.placer.place(self.seek(*args, **kwargs))  # type: ignore[arg-type]

    def owes(self) -> float:
        return sum(float(self.accounts.state.table[column].sum()) for column in OWN)
