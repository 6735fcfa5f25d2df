import pytest

from jdisagg.config import ServiceConfig
from jdisagg.service.server import GenerationServer
from tests.service.doors import Door, FakePath, make_frontend


@pytest.fixture
async def door():
    """A real server on a free loopback port, over a path whose tokens are known."""
    path = FakePath()
    frontend = make_frontend(path)
    server = GenerationServer(frontend, ServiceConfig(port=0))
    yield Door(path, frontend, server, await server.start())
    server.force()
    await server.drain()
