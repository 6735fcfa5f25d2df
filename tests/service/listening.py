"""A gRPC server of some services on a free loopback port."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from jdisagg.config import ServiceConfig
from jdisagg.service.server import GrpcServer


@contextlib.asynccontextmanager
async def listening(
    *services: Any, config: ServiceConfig | None = None, port: int = 0
) -> AsyncIterator[str]:
    """Its address; it drains at once."""
    config = replace(config or ServiceConfig(), port=port, drain_seconds=0.0)
    server = GrpcServer(services, config)
    try:
        yield f"127.0.0.1:{await server.start()}"
    finally:
        await server.drain()
