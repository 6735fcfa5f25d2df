"""A server process with a folder of batches, for tests that kill it: prints its HTTP port. Its
arguments are the folder, the port, and the pause before each token, in seconds."""

import asyncio
import sys

from jdisagg.config import ServiceConfig
from jdisagg.node.serving import serve_until_signalled
from tests.service.doors import FakePath, make_frontend

folder, port, pause_seconds = sys.argv[1:]
asyncio.run(
    serve_until_signalled(
        make_frontend(FakePath(pause_seconds=float(pause_seconds))),
        ServiceConfig(port=0, http_port=int(port), batch_folder=folder, drain_seconds=0.1),
        lambda service: print(service.http_port, flush=True),
    )
)
