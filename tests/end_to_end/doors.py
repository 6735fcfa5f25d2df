"""A real server on a free loopback port over a real embedded cluster."""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from jdisagg.client import AsyncClient, Completion, GenerateOptions
from jdisagg.config import EngineConfig, Mode, ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import ModelInfo
from jdisagg.service.server import GenerationServer
from models.checkpoint import load_config
from tests import time_scale
from tests.end_to_end.clusters import Running, running


@dataclass
class Served:
    run: Running
    server: GenerationServer
    frontend: Frontend
    client: AsyncClient
    port: int

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def complete_all(self, requests: list[GenerateOptions]) -> list[Completion]:
        return list(
            await asyncio.gather(*(self.client.complete(**request) for request in requests))
        )

    async def quiet(self) -> None:
        """Waits until nothing of any request is left: pages, slots, queues, hand-offs, offers,
        blocks on their way, calls."""
        cluster = self.run.cluster
        async with asyncio.timeout(time_scale.seconds(30)):
            while True:
                statuses = await cluster.status()
                busy = any(
                    one.running or one.waiting or one.handoffs or one.free_pages != one.total_pages
                    for one in statuses
                )
                if not busy and not cluster.channel.offered().offers and not requests_alive():
                    return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def served(
    engine: EngineConfig, service: ServiceConfig | None = None
) -> AsyncIterator[Served]:
    """Starts all of it; on leaving, the server is drained and every page must be free."""
    async with running(engine) as run:
        info = ModelInfo(
            name=Path(engine.model.directory).name,
            family=load_config(engine.model.directory).family,
            vocabulary=run.cluster.model.vocabulary,
            context_tokens=run.cluster.context_tokens,
            dtype=engine.model.dtype,
            mode=engine.mode,
            prefill_layout=engine.prefill.layout if engine.mode is Mode.DISAGGREGATED else None,
            decode_layout=engine.decode.layout,
            kv_bytes_per_token=run.cluster.kv_spec.bytes_per_token,
        )
        frontend = Frontend(
            run.cluster.path, run.tokenizer, info, engine.limits, grammars=run.grammars
        )
        run.cluster.path.read_images_with(frontend.prompts.images.pixels)
        server = GenerationServer(frontend, service or ServiceConfig(port=0, drain_seconds=5.0))
        port = await server.start()
        try:
            async with AsyncClient(f"127.0.0.1:{port}") as client:
                yield Served(run, server, frontend, client, port)
        finally:
            await server.drain()


def requests_alive() -> int:
    """Requests, attempts, senders, groups and streams that something still holds on to."""
    names = ("RequestRun", "Attempt", "Sender", "Group", "SpanStream", "Receiver")
    counts = our_objects()
    names += ("PrefillTask", "IncomingHandoff")
    return sum(counts[name] for name in names)


def our_objects() -> "Counter[str]":
    """How many objects of our own classes live, by class, after a full collection."""
    gc.collect()
    return Counter(
        type(item).__name__
        for item in gc.get_objects()
        if str(type(item).__module__).startswith("jdisagg.")
    )


SENTENCE = (
    "once upon a time there was a little dog who lived in the forest and it liked to play with a"
    " red ball"
)


def mixed_requests(count: int, seed: int) -> list[GenerateOptions]:
    """Greedy and seeded, short and long, stop strings, two children, logprobs; each its own."""
    rng, words = random.Random(seed), SENTENCE.split()
    requests: list[GenerateOptions] = []
    for index in range(count):
        text = " ".join(rng.choice(words) for _ in range(rng.choice((1, 3, 9, 30, 80))))
        options = GenerateOptions(
            prompt=text, temperature=0.0, max_tokens=rng.choice((1, 2, 7, 20, 45))
        )  # type: ignore[typeddict-unknown-key]
        if index % 2:
            options |= GenerateOptions(temperature=0.9, top_p=0.95, seed=rng.getrandbits(30))
        if index % 5 == 1:
            options["n"] = 2
        if index % 4 == 2:
            options["stop"] = ["the", "\n"]
        if index % 7 == 3:
            options["logprobs"] = 2
        if index % 3:
            options["ignore_eos"] = True
        requests.append(options)
    return requests


def answers(done: Completion) -> list[tuple[object, ...]]:
    return [(choice.token_ids, choice.text, choice.finish_reason) for choice in done.choices]
