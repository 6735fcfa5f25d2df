from collections.abc import AsyncIterator

import pytest

from tests.service.http_doors import HttpDoor, http_door


@pytest.fixture
async def door() -> AsyncIterator[HttpDoor]:
    async with http_door() as one:
        yield one
