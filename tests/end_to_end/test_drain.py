"""A drain of real processes: every stream that runs when SIGTERM comes ends whole, and new requests
are told to come back."""

import asyncio
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jdisagg.client import AsyncClient
from tests.end_to_end.process_clusters import END_SECONDS, PROMPT, RunningCluster, cluster
from tests.service.doors import eventually
from tests.service.http_doors import Answer, events, parse, request

TOKENS, OVER_HTTP, OVER_GRPC = 900, 6, 2
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
        self._urls = running.urls
        self._client = AsyncClient(running.address, resume_seconds=0.0)
        count = OVER_HTTP + OVER_GRPC
        self.tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    async def tokens(self) -> Sequence[list[int]]:
        """All tokens of each stream, or the error of one that did not end whole."""
        try:
            return await asyncio.wait_for(asyncio.gather(*self.tasks), END_SECONDS)
        finally:
            await self._client.close()

    async def _run(self, number: int) -> list[int]:
        asked = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
        prompt = f"{PROMPT} {number}"
        if number < OVER_HTTP:
            asked |= {"prompt": prompt, "stream": True, "return_token_ids": True}
            return await self._over_http(number, asked)
        tokens: list[int] = []
        async for event in self._client.generate(prompt, **asked):  # type: ignore[arg-type]
            tokens += event.token_ids
            self.begun.add(number)
        return tokens

    async def _over_http(self, number: int, asked: dict[str, Any]) -> list[int]:
        """Parses nothing before the end: a slow client would be behind its server."""
        reader, writer = await connected(self._urls[number % len(self._urls)])
        writer.write(request("/v1/completions", asked, connection="close"))
        head = await reader.readuntil(b"data: ")
        self.begun.add(number)
        answer = parse(head + await reader.read())
        writer.close()
        *chunks, done = events(answer.body)
        assert done == "[DONE]", done
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert choices[-1]["finish_reason"] == "length"
        return [token for choice in choices for token in choice["token_ids"]]


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, port)


async def asked(url: str, path: str, fields: object = None) -> Answer | None:
    """The reply, or None if nobody listens."""
    try:
        reader, writer = await connected(url)
    except OSError:
        return None
    line = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    writer.write(line if fields is None else request(path, fields, connection="close"))
    reply = await reader.read()
    writer.close()
    return parse(reply) if reply else None


async def is_ready(url: str) -> bool:
    answer = await asked(url, "/readyz")
    return answer is not None and answer.status == 200


@pytest.mark.ci
async def test_streams_end_whole_when_a_router_or_the_cluster_is_drained(tmp_path: Path) -> None:
    flags = ("--prefill_workers=1", "--decode_workers=1", "--routers=2", "--http_port=0")
    with cluster(tmp_path, *flags, *IMPATIENT) as running:
        undisturbed = await Streams(running).tokens()
        assert [len(tokens) for tokens in undisturbed] == [TOKENS] * (OVER_HTTP + OVER_GRPC)
        for victim in ("router", "cluster"):
            streams = Streams(running)
            await eventually(lambda: len(streams.begun) == len(streams.tasks), 60.0)
            if victim == "cluster":
                running.process.send_signal(signal.SIGTERM)
            else:
                router = running.worker(victim)
                assert router is not None
                router.send_signal(signal.SIGTERM)
            while await is_ready(running.urls[0]):
                await asyncio.sleep(0.01)
            late = await asked(running.urls[0], "/v1/completions", {"prompt": "late"})
            alive = await asked(running.urls[0], "/livez")
            assert late is not None and alive is not None, "it ended before its streams"
            assert (late.status, late.headers["retry-after"], alive.status) == (503, "5", 200)
            assert await streams.tokens() == undisturbed
            if victim != "cluster":
                async with asyncio.timeout(END_SECONDS):
                    while running.worker(victim) == router or not await is_ready(running.urls[0]):
                        await asyncio.sleep(0.1)
        assert await asyncio.to_thread(running.process.wait, END_SECONDS) == 0
