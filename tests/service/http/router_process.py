"""A server process whose tokens are known, for tests that kill it: prints its HTTP port. With
`held` as its argument it gives the first token of each answer and no other."""

import asyncio
import sys

from jdisagg.config import ServiceConfig
from jdisagg.node.serving import serve_until_signalled
from tests.service.doors import FakePath, make_frontend

path = FakePath()
if sys.argv[1:] == ["held"]:
    path.gate.clear()
asyncio.run(
    serve_until_signalled(
        make_frontend(path),
        ServiceConfig(port=0, http_port=0, drain_seconds=0.1),
        lambda service: print(service.http_port, flush=True),
    )
)
