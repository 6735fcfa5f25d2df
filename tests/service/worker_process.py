"""A decode worker of its own process, for the tests that stop it: prints its port, says a token
every few milliseconds for ever."""

import asyncio
from collections.abc import AsyncIterator

from jdisagg.config import ServiceConfig
from jdisagg.messages.ports import GenerateCall, Span
from jdisagg.service.internal.worker_service import decode_service
from jdisagg.service.server import GrpcServer
from tests.service.port_worker import Worker


class Talker(Worker):
    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        index = 0
        while True:
            yield Span(0, index, (index,))
            index += 1
            await asyncio.sleep(0.01)


async def main() -> None:
    server = GrpcServer((decode_service(Talker()),), ServiceConfig(port=0))
    print(await server.start(), flush=True)
    await asyncio.sleep(120)


asyncio.run(main())
