"""Measures what the defaults of `jdisagg serve` give conversations, and what they cost other
traffic.

    python -m benchmarks.conversations --name=conversations
    python -m benchmarks.conversations --models=measured --first=1400 --new=100 \
        --context_tokens=2304

Two servers with one model run side by side: one with the defaults, and one without any cache
(`--prefix_cache=false`, no host memory, no appended turns). Both get the same prompts in
alternating order, over gRPC, from this process.

- conversations: eight turns, one request at a time. Each turn's prompt is the conversation so far
  and a few new tokens. Figures: the client's median TTFT of turns 2 to 8, and the part of the
  prompt tokens that was cached.
- distinct: prompts without a common prefix, eight at a time. Figure: tokens per second.
- start: seconds from the start of the process until it has answered a request, with a warm
  compilation cache.

Models: `shipped` (a Llama that is part of the repository) and `measured` (124.7M random weights).
Ratios above 1 favour the defaults."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import numpy as np
from absl import app, flags

from benchmarks.clusters import ready, server
from benchmarks.measure import save
from benchmarks.peers.checkpoint import measured_checkpoint
from jdisagg.client import AsyncClient

_MODELS = flags.DEFINE_list("models", ["shipped"], "Which models: shipped, measured.")
_ROUNDS = flags.DEFINE_integer("rounds", 4, "Rounds of conversations, of traffic and of starts.")
_TURNS = flags.DEFINE_integer("turns", 8, "Turns of a conversation.")
_FIRST = flags.DEFINE_integer("first", 480, "Tokens of a conversation's first prompt.")
_NEW = flags.DEFINE_integer("new", 40, "New tokens of each later turn.")
_ANSWER = flags.DEFINE_integer("answer", 16, "Tokens of an answer.")
_TALKS = flags.DEFINE_integer("talks", 4, "Conversations of a round.")
_SETTLE = flags.DEFINE_float(
    "settle", 30.0, "Seconds before the first round, in which optional programs are compiled."
)
_CONTEXT = flags.DEFINE_integer("context_tokens", 1024, "Longest prompt and answer.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

ROOT = Path(__file__).resolve().parents[1]
OFF = ("--prefix_cache=false", "--host_cache_gib=0", "--append_tokens=0")
ARGUMENTS = {"defaults": (), "off": OFF}
COMMON = ("--prefill=tp=1", "--decode=tp=1")


def folder(model: str) -> Path:
    """Returns the checkpoint folder of a model."""
    return ROOT / "models" / "tiny" / "llama" if model == "shipped" else measured_checkpoint()


async def first_token(client: AsyncClient, prompt: list[int]) -> tuple[float, list[int], int]:
    """Sends a prompt. Returns the seconds to the first token, the answer and the cached tokens."""
    started, first, tokens = time.perf_counter(), 0.0, []
    cached = 0
    async for event in client.generate(
        token_ids=prompt, max_tokens=_ANSWER.value, temperature=0.0, ignore_eos=True
    ):
        first = first or time.perf_counter() - started
        tokens += event.token_ids
        cached = event.usage.cached_tokens if event.usage else cached
    return first, tokens, cached


async def talk(
    clients: dict[str, AsyncClient], rng: np.random.Generator, vocabulary: int
) -> dict[str, list[tuple[float, int, int]]]:
    """Returns, of each server, (TTFT, cached tokens, prompt tokens) of turns 2 and later."""
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in clients}
    history = rng.integers(3, vocabulary, _FIRST.value).tolist()
    for turn in range(_TURNS.value):
        order = list(clients) if rng.integers(2) else list(clients)[::-1]
        for name in order:
            seconds, answer, cached = await first_token(clients[name], history)
            if turn:
                found[name].append((seconds, cached, len(history)))
            await asyncio.sleep(0.05)
        history = [*history, *answer, *rng.integers(3, vocabulary, _NEW.value).tolist()]
    return found


async def distinct(client: AsyncClient, rng: np.random.Generator, vocabulary: int) -> float:
    """Returns tokens (prompt and answer) a second of 48 prompts without a common prefix."""
    prompts = [
        rng.integers(3, vocabulary, int(n)).tolist()
        for n in rng.integers(100, _FIRST.value + 200, 48)
    ]
    gate = asyncio.Semaphore(8)

    async def one(prompt: list[int]) -> int:
        async with gate:
            return len(prompt) + len((await first_token(client, prompt))[1])

    started = time.perf_counter()
    tokens = await asyncio.gather(*map(one, prompts))
    return sum(tokens) / (time.perf_counter() - started)


def started(model: Path, name: str) -> AbstractContextManager[str]:
    """Context manager that yields the address of a running server."""
    context = f"--context_tokens={_CONTEXT.value}"
    return server(f"--model={model}", context, *COMMON, *ARGUMENTS[name])


@asynccontextmanager
async def both(model: Path) -> AsyncIterator[dict[str, AsyncClient]]:
    """Yields clients of both servers."""
    with started(model, "defaults") as one, started(model, "off") as other:
        async with ready(one) as defaults, ready(other) as off:
            yield {"defaults": defaults, "off": off}


async def starts(model: Path, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ARGUMENTS}
    for number in range(rounds):
        for name in list(ARGUMENTS)[:: 1 if number % 2 else -1]:
            begun = time.perf_counter()
            with started(model, name) as address:
                async with ready(address):
                    found[name].append(time.perf_counter() - begun)
    return found


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over pairs of ours / theirs."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4)


async def measure(model: str, path: Path) -> dict[str, object]:
    rng = np.random.default_rng(0)
    turns: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ARGUMENTS}
    speeds: dict[str, list[float]] = {name: [] for name in ARGUMENTS}
    async with both(path) as clients:
        vocabulary = (await clients["off"].model()).vocabulary
        await asyncio.sleep(_SETTLE.value)
        for number in range(_ROUNDS.value + 1):  # the first round is not counted
            for _ in range(_TALKS.value):
                for name, rows in (await talk(clients, rng, vocabulary)).items():
                    turns[name] += rows if number else []
            for name in list(ARGUMENTS)[:: 1 if number % 2 else -1]:
                speed = await distinct(clients[name], rng, vocabulary)
                speeds[name] += [speed] if number else []
    begun = await starts(path, _ROUNDS.value + 1)
    begun = {name: seconds[1:] for name, seconds in begun.items()}
    ttft = {name: statistics.median(row[0] for row in rows) for name, rows in turns.items()}
    kept = turns["defaults"]
    figures: dict[str, object] = {
        "ttft ms": {name: round(1e3 * seconds, 2) for name, seconds in ttft.items()},
        "ttft ratio": round(ttft["off"] / ttft["defaults"], 2),
        "cached share": round(sum(r[1] for r in kept) / sum(r[2] for r in kept), 3),
        "distinct tokens/s": {n: round(statistics.median(v)) for n, v in speeds.items()},
        "distinct ratio": ratio(speeds["defaults"], speeds["off"]),
        "start seconds": {n: [round(s, 2) for s in v] for n, v in begun.items()},
        "start ratio": ratio(begun["off"], begun["defaults"]),
    }
    print(model, figures, flush=True)
    return figures


def main(_: list[str]) -> None:
    figures = {model: asyncio.run(measure(model, folder(model))) for model in _MODELS.value}
    if _NAME.value:
        print(save(_NAME.value, dict(figures)))


if __name__ == "__main__":
    app.run(main)
