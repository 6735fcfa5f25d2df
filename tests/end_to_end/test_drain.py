"""A drain of real processes: every stream that runs when SIGTERM comes ends whole, and new requests
are told to come back."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import openai
import pytest

from jdisagg.client import AsyncClient
from tests import time_scale
from tests.end_to_end.test_cluster import END_SECONDS, PROMPT, RunningCluster, cluster
from tests.service.doors import eventually

TOKENS, OVER_HTTP, OVER_GRPC = 600, 6, 2
# Routers that do not hear their workers forget them long before the streams have ended.
IMPATIENT = (
    "--set=limits.timeouts.membership.suspect_seconds=1.5",
    "--set=limits.timeouts.membership.gone_seconds=2",
    "--drain_seconds=300",
)


class Streams:
    """Streams over HTTP, in turn at each router, and over gRPC, at the first. They run at once,
    each with a prompt of its own."""

    def __init__(self, running: RunningCluster) -> None:
        self.begun: set[int] = set()
        self._clients = [client_of(url) for url in running.urls]
        self._grpc = AsyncClient(running.address, resume_seconds=0.0)
        count = OVER_HTTP + OVER_GRPC
        self.tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    async def tokens(self) -> Sequence[list[int]]:
        """All tokens of each stream, or the error of one that did not end whole."""
        try:
            return await asyncio.wait_for(asyncio.gather(*self.tasks), END_SECONDS)
        finally:
            for client in (*self._clients, self._grpc):
                await client.close()

    async def _run(self, number: int) -> list[int]:
        tokens: list[int] = []
        prompt = f"{PROMPT} {number}"
        if number >= OVER_HTTP:
            asked = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
            async for event in self._grpc.generate(prompt, **asked):  # type: ignore[arg-type]
                tokens += event.token_ids
                self.begun.add(number)
            return tokens
        async for chunk in await self._clients[number % len(self._clients)].completions.create(
            model="",
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        ):
            tokens += chunk.choices[0].token_ids  # type: ignore[attr-defined]
            self.begun.add(number)
        return tokens


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def refused(url: str) -> bool:
    """Whether a new request is refused with a time to come back, while the server says that it is
    alive and not ready."""
    async with client_of(url) as client:
        try:
            await client.completions.create(model="", prompt="late", max_tokens=1)
        except openai.InternalServerError as error:
            assert error.status_code == 503 and error.response.headers["retry-after"]
        else:
            return False
        alive = await client._client.get(f"{url}/livez")
        ready = await client._client.get(f"{url}/readyz")
        assert (alive.status_code, ready.status_code) == (200, 503)
    return True


@pytest.mark.ci
async def test_streams_end_whole_when_a_router_or_the_cluster_is_drained(tmp_path: Path) -> None:
    flags = ("--prefill_workers=1", "--decode_workers=1", "--routers=2", "--http_port=0")
    with cluster(tmp_path, *flags, *IMPATIENT) as running:
        undisturbed = await Streams(running).tokens()
        assert [len(tokens) for tokens in undisturbed] == [TOKENS] * (OVER_HTTP + OVER_GRPC)
        for victim in ("router", "cluster"):
            streams = Streams(running)
            await eventually(lambda: len(streams.begun) == len(streams.tasks), END_SECONDS)
            if victim == "cluster":
                running.process.send_signal(signal.SIGTERM)
            else:
                router = running.worker(victim)
                assert router is not None
                router.send_signal(signal.SIGTERM)
            async with asyncio.timeout(time_scale.seconds(10)):
                while not await refused(running.urls[0]):
                    await asyncio.sleep(0.02)
            assert not all(task.done() for task in streams.tasks)
            assert await streams.tokens() == undisturbed
            if victim != "cluster":
                await eventually(lambda: running.worker(victim) != router, END_SECONDS)
                await until_ready(running.urls[0])
        assert await asyncio.to_thread(running.process.wait, END_SECONDS) == 0


async def until_ready(url: str) -> None:
    async with client_of(url) as client, asyncio.timeout(END_SECONDS):
        while True:
            try:
                if (await client._client.get(f"{url}/readyz")).status_code == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.1)
