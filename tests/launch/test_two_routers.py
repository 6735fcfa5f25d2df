"""Two routers as processes of their own over the same toy workers."""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jdisagg.client import AsyncClient
from jdisagg.errors import QuotaExceededError
from tests import time_scale
from tests.end_to_end.clusters import LLAMA
from tests.launch.registered import registered
from tests.service.served_cluster import served

ROOT = Path(__file__).resolve().parents[2]
BURST_SECONDS = 2e6  # 2,000 tokens: 40 requests of 48 or more, which do not come back
FLAGS = [
    "--set=routing.tenant_quotas=free=0.001",
    f"--set=routing.quota_burst_seconds={BURST_SECONDS:.0f}",
]


@contextlib.contextmanager
def router() -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "launch.router", f"--model={LLAMA}", "--http_port=-1"]
    command += ["--host=127.0.0.1", "--port=0", "--canary_seconds=0", *FLAGS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    while "listens on" not in (line := process.stdout.readline()):
        assert line, "the router ended"
    return re.findall(r"127\.0\.0\.1:\d+", line)[0]


async def let_in(client: AsyncClient, pause: float = 0.0) -> int:
    """Returns how many requests of a tenant are served before one is refused."""
    count = 0
    while True:
        try:
            await client.complete(token_ids=[1] * 40, max_tokens=4, ignore_eos=True, tenant="free")
        except QuotaExceededError as error:
            assert error.retry_after_seconds
            return count
        count += 1
        await asyncio.sleep(pause)


@pytest.mark.ci
async def test_a_tenant_that_has_spent_its_quota_at_one_router_is_refused_at_the_other() -> None:
    with router() as first, router() as second:
        async with asyncio.timeout(time_scale.seconds(120)), served() as workers:
            one, two = [await asyncio.to_thread(address, each) for each in (first, second)]
            async with (
                registered(workers.cluster, workers.addresses, one, two),
                AsyncClient(one) as here,
                AsyncClient(two) as there,
            ):
                assert (spent := await let_in(here)) >= 40
                assert await let_in(there, pause=0.25) < spent / 2, "it would be as many"
