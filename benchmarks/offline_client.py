"""Client of the gRPC part of `benchmarks.throughput`. For each line of stdin it sends all requests
at once and prints the seconds."""

import asyncio
import sys
import time

import numpy as np
from absl import app, flags

from jdisagg.client import AsyncClient

_TARGET = flags.DEFINE_string("target", None, "host:port", required=True)
_COUNT = flags.DEFINE_integer("count", 32, "Requests.")
_PROMPT = flags.DEFINE_integer("prompt", 512, "Tokens in.")
_OUTPUT = flags.DEFINE_integer("output", 64, "Tokens out.")


async def run() -> None:
    prompts = np.random.default_rng(0).integers(3, 32000, (_COUNT.value, _PROMPT.value)).tolist()
    async with AsyncClient(_TARGET.value) as client:

        async def one(prompt: list[int]) -> None:
            tokens = 0
            async for event in client.generate(
                token_ids=prompt, max_tokens=_OUTPUT.value, temperature=0.0
            ):
                tokens += len(event.token_ids)
            assert tokens == _OUTPUT.value, tokens

        while await asyncio.to_thread(sys.stdin.readline):
            started = time.perf_counter()
            await asyncio.gather(*(one(prompt) for prompt in prompts))
            print(time.perf_counter() - started, flush=True)


def main(_: list[str]) -> None:
    asyncio.run(run())


if __name__ == "__main__":
    app.run(main)
