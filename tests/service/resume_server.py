"""A door in a process of its own, to be killed: `python -m tests.service.resume_server PORT`; says
a token every 10 ms; prints its port."""

import asyncio
import sys

from jdisagg.config import ServiceConfig
from jdisagg.node.serving import serve_until_signalled
from tests.service.doors import FakePath, make_frontend

path = FakePath(pause_seconds=0.01)
asyncio.run(
    serve_until_signalled(
        make_frontend(path),
        ServiceConfig(port=int(sys.argv[1])),
        lambda service: print(service.port, flush=True),
    )
)
