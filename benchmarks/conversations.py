"""Measures what the defaults of `jdisagg serve` give conversations, and what they cost other
traffic.

    python -m benchmarks.conversations --name=conversations
    python -m benchmarks.conversations --models=measured --first=1400 --new=100 \
        --context_tokens=2304 --talks=1 --rounds=2 --batches=0 --server=--slots_per_rank=2

Two servers with one model run side by side: one with the defaults, and one without any cache
(`--prefix_cache=false`, no host memory, no appended turns). Both get the same prompts in
alternating order, over gRPC, from this process.

- conversations: eight turns, one request at a time. Each turn's prompt is the conversation so far
  and a few new tokens. Figures: the client's median TTFT of turns 2 to 8, and the part of the
  prompt tokens that was cached.
- distinct: prompts without a common prefix, eight at a time. Figures: tokens per second, and the
  server's processor milliseconds per prompt, which depend less on the load of the machine.

Models: `shipped` (a Llama that is part of the repository), `measured` (124.7M random weights) and
`hybrid` (126.6M, gated delta nets in three of four layers).
Ratios above 1 favour the defaults."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import numpy as np
from absl import app, flags

from benchmarks.clusters import processor_seconds, ready, server
from benchmarks.measure import save
from benchmarks.peers.checkpoint import FOLDER, HYBRID_MODEL, measured_checkpoint
from jdisagg.client import AsyncClient

_MODELS = flags.DEFINE_list("models", ["shipped"], "Which models: shipped, measured, hybrid.")
_ROUNDS = flags.DEFINE_integer("rounds", 4, "Rounds of conversations and of traffic.")
_TURNS = flags.DEFINE_integer("turns", 8, "Turns of a conversation.")
_FIRST = flags.DEFINE_integer("first", 480, "Tokens of a conversation's first prompt.")
_NEW = flags.DEFINE_integer("new", 40, "New tokens of each later turn.")
_ANSWER = flags.DEFINE_integer("answer", 16, "Tokens of an answer.")
_TALKS = flags.DEFINE_integer("talks", 4, "Conversations of a round.")
_BATCHES = flags.DEFINE_integer("batches", 3, "Batches of distinct prompts of a round; 0: none.")
_SETTLE = flags.DEFINE_float(
    "settle", 30.0, "Seconds before the first round, in which optional programs are compiled."
)
_CONTEXT = flags.DEFINE_integer("context_tokens", 1024, "Longest prompt and answer.")
_SERVER = flags.DEFINE_multi_string("server", [], "A further flag of both servers.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

ROOT = Path(__file__).resolve().parents[1]
OFF = ("--prefix_cache=false", "--host_cache_gib=0", "--append_tokens=0")
ARGUMENTS = {"defaults": (), "off": OFF}
COMMON = ("--prefill=tp=1", "--decode=tp=1")


def folder(model: str) -> Path:
    """Returns the checkpoint folder of a model."""
    if model == "hybrid":
        return measured_checkpoint(FOLDER.with_name("hybrid_model"), HYBRID_MODEL)
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


def distinct_prompts(rng: np.random.Generator, vocabulary: int) -> list[list[int]]:
    """Returns 48 prompts without a common prefix."""
    lengths = rng.integers(100, _FIRST.value + 200, 48)
    return [rng.integers(3, vocabulary, int(length)).tolist() for length in lengths]


async def distinct(
    client: AsyncClient, address: str, prompts: list[list[int]]
) -> tuple[float, float]:
    """Returns tokens (prompt and answer) a second, and processor milliseconds per prompt."""
    gate = asyncio.Semaphore(8)

    async def one(prompt: list[int]) -> int:
        async with gate:
            return len(prompt) + len((await first_token(client, prompt))[1])

    started, used = time.perf_counter(), processor_seconds(address)
    tokens = await asyncio.gather(*map(one, prompts))
    speed = sum(tokens) / (time.perf_counter() - started)
    return speed, 1e3 * (processor_seconds(address) - used) / len(prompts)


def started(model: Path, name: str) -> AbstractContextManager[str]:
    """Context manager that yields the address of a running server."""
    context = f"--context_tokens={_CONTEXT.value}"
    return server(f"--model={model}", context, *COMMON, *_SERVER.value, *ARGUMENTS[name])


@asynccontextmanager
async def both(model: Path) -> AsyncIterator[tuple[dict[str, AsyncClient], dict[str, str]]]:
    """Yields clients and addresses of both servers."""
    with started(model, "defaults") as one, started(model, "off") as other:
        async with ready(one) as defaults, ready(other) as off:
            yield {"defaults": defaults, "off": off}, {"defaults": one, "off": other}


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over pairs of ours / theirs."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4)


async def traffic(path: Path) -> dict[str, object]:
    """Returns the figures of conversations and of distinct prompts."""
    rng = np.random.default_rng(0)
    turns: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ARGUMENTS}
    speeds: dict[str, list[float]] = {name: [] for name in ARGUMENTS}
    used: dict[str, list[float]] = {name: [] for name in ARGUMENTS}
    async with both(path) as (clients, addresses):
        vocabulary = (await clients["off"].model()).vocabulary
        await asyncio.sleep(_SETTLE.value)
        for number in range(_ROUNDS.value + 1):  # the first round is not counted
            for _ in range(_TALKS.value):
                for name, rows in (await talk(clients, rng, vocabulary)).items():
                    turns[name] += rows if number else []
            for part in range(_BATCHES.value):
                prompts = distinct_prompts(rng, vocabulary)
                for name in list(ARGUMENTS)[:: 1 if (number + part) % 2 else -1]:
                    speed, ms = await distinct(clients[name], addresses[name], prompts)
                    speeds[name] += [speed] if number else []
                    used[name] += [ms] if number else []
    ttft = {name: statistics.median(row[0] for row in rows) for name, rows in turns.items()}
    kept = turns["defaults"]
    figures: dict[str, object] = {
        "ttft ms": {name: round(1e3 * seconds, 2) for name, seconds in ttft.items()},
        "ttft ratio": round(ttft["off"] / ttft["defaults"], 2),
        "cached share": round(sum(r[1] for r in kept) / sum(r[2] for r in kept), 3),
    }
    if _BATCHES.value:
        figures |= {
            "distinct tokens/s": {n: round(statistics.median(v)) for n, v in speeds.items()},
            "distinct ratio": ratio(speeds["defaults"], speeds["off"]),
            "distinct processor ms": {n: round(statistics.median(v), 2) for n, v in used.items()},
            "distinct processor ratio": ratio(used["off"], used["defaults"]),
        }
    return figures


async def measure(model: str, path: Path) -> dict[str, object]:
    figures = await traffic(path)
    print(model, figures, flush=True)
    return figures


def main(_: list[str]) -> None:
    figures = {model: asyncio.run(measure(model, folder(model))) for model in _MODELS.value}
    if _NAME.value:
        print(save(_NAME.value, dict(figures)))


if __name__ == "__main__":
    app.run(main)
