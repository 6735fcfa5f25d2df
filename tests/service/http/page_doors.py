"""A door with a page, over a path whose tokens, workers and decisions are known, observed as a
server's is."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec

from jdisagg.config import LimitsConfig, ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.routing_status import PastDecision, RoutingStatus, WorkerAccount
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.node.serving import page_sources
from jdisagg.observe import wrap
from jdisagg.observe.observer import Observer
from jdisagg.service.server import GenerationServer
from tests.service.doors import MODEL, STATUS, TEMPLATE, FakePath, byte_tokenizer
from tests.service.http_doors import HttpDoor, running

PLACED = replace(
    PastDecision(1.5, "disaggregated", "the soonest", "prefill-0", "decode-1", 300, 0.2, 0.02),
    request_id="seen",
)
REFUSED = PastDecision(9.0, "refused: overload", "256 requests wait", "", "", 12)
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@dataclass
class ManyWorkers(FakePath):
    """`workers` of them, a third for prefill."""

    workers: tuple[WorkerStatus, ...] = field(default_factory=lambda: some_workers(3))

    async def status(self) -> tuple[WorkerStatus, ...]:
        return self.workers


def some_workers(count: int) -> tuple[WorkerStatus, ...]:
    roles = (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE)
    return tuple(
        msgspec.structs.replace(
            STATUS,
            name=f"{roles[number % 3].value}-{number}",
            role=roles[number % 3],
            reserved_pages=(1, 0),
        )
        for number in range(count)
    )


@asynccontextmanager
async def page_door(
    path: ManyWorkers | None = None,
    service: ServiceConfig | None = None,
    template: str | None = TEMPLATE,
    name: str = MODEL.name,
    waiting: int = 7,
) -> AsyncIterator[HttpDoor]:
    path, observer = path or ManyWorkers(), Observer("page", recent=True)
    account = WorkerAccount("decode-1", 3, 0, 0, 0, 2.5)
    routing = RoutingStatus(waiting, (PLACED, REFUSED), (account,))
    frontend = Frontend(
        wrap.path(path, observer),
        byte_tokenizer(template),
        replace(MODEL, name=name),
        LimitsConfig(),
        lambda: routing,
    )
    config = replace(service or ServiceConfig(), port=0, http_port=0)
    scrape = observer.metrics.scrape
    server = GenerationServer(frontend, config, (), None, scrape, page_sources(observer))
    async with running(path, server) as door:
        yield door
