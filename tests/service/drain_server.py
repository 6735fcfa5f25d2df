"""A server process for the drain test: prints its port and how many objects are exempt from garbage
collection; a line on stdin lets the held streams go
on; ends on SIGTERM."""

import asyncio
import gc
import sys

from jdisagg.config import ServiceConfig
from jdisagg.node.serving import serve_until_signalled
from tests.service.doors import FakePath, make_frontend


async def main() -> None:
    path = FakePath()
    path.gate.clear()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, path.gate.set)
    await serve_until_signalled(
        make_frontend(path),
        ServiceConfig(port=0),
        lambda service: print(service.port, gc.get_freeze_count(), flush=True),
    )
    print("drained", path.closed, flush=True)


asyncio.run(main())
