"""A server process whose tokens are known, for tests that kill it: prints its HTTP port."""

import asyncio

from jdisagg.config import ServiceConfig
from jdisagg.node.serving import serve_until_signalled
from tests.service.doors import FakePath, make_frontend

asyncio.run(
    serve_until_signalled(
        make_frontend(FakePath(pause_seconds=0.2)),
        ServiceConfig(port=0, http_port=0, drain_seconds=0.1),
        lambda service: print(service.http_port, flush=True),
    )
)
