from collections.abc import AsyncIterator

import openai
import pytest

from tests.service.certificates import CertificateFiles, authority
from tests.service.http_doors import HttpDoor, http_door


@pytest.fixture
async def door(request: pytest.FixtureRequest) -> AsyncIterator[HttpDoor]:
    """The server that the module's `opens` makes, else one over a `FakePath`."""
    async with getattr(request.module, "opens", http_door)() as one:
        yield one


@pytest.fixture
async def client(door: HttpDoor) -> AsyncIterator[openai.AsyncOpenAI]:
    async with door.client() as one:
        yield one


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return authority(tmp_path_factory, "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return authority(tmp_path_factory, "theirs")
