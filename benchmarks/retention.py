"""Simulates conversations of agents in a flood of other prompts, with and without hints.

    python -m benchmarks.retention --name=retention

Each cell is simulated in a process of its own.

Conversations of ten turns begin one after the other. Between two turns a tool runs for a minute or
two, in which prompts that nobody repeats come and fill the caches several times. The same arrivals
are simulated three times: without hints, with a session key, and with a key and a retention of one
hour (OpenAI's `prompt_cache_key`, Anthropic's `cache_control` with `ttl`). The fleet has a prefill
and a decode pool; workers cache KV in pages alone, or also in host memory.

Figures: of turns 2 to 10 the part of the prompt tokens that was cached, the tokens that were
computed though an earlier turn had them, and the TTFT; of other prompts the TTFT."""

import itertools
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np
from absl import app, flags

from benchmarks.measure import save
from jdisagg.config import PrefixConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.prompt.hints import Hints, Retention
from jdisagg.service.http.hints import SECONDS, USUAL_WEIGHT
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.workloads import Arrival

_REQUESTS = flags.DEFINE_integer("requests", 5000, "Requests of the flood.")
_TALKS = flags.DEFINE_integer("talks", 24, "Conversations.")
_RATE = flags.DEFINE_float("rate", 4.0, "Requests of the flood in a second.")
_CACHE = flags.DEFINE_integer("cache_tokens", 400_000, "Tokens of KV that a worker's pages hold.")
_HOST = flags.DEFINE_list("host_gib", ["0", "32"], "Host memory of each worker, one run each.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

TURNS, BLOCK, GRAIN = 10, 512, 128
FIRST, NEW, ANSWER = 6144, 512, 256  # tokens of a conversation's first prompt and of later turns
FLOOD, FLOOD_ANSWER = 4096, 64  # mean tokens of other prompts and of their answers
PAUSE_SECONDS = (40.0, 120.0)  # of a tool
_NAME_OF = "host {} GiB, {}".format
WAYS = ("without hints", "session key", "key and retention")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of each cell; the fields are the flags."""

    requests: int
    talks: int
    rate: float
    cache_tokens: int


def talk(number: int, begin: float, random: np.random.Generator, way: str) -> list[Arrival]:
    """Returns the turns of a conversation. An open loop: a turn comes when its tool has ended."""
    found, said, at = [], 0, begin
    retention = Retention(USUAL_WEIGHT, SECONDS["1h"]) if way == WAYS[2] else None
    hints = None if way == WAYS[0] else Hints(f"agent {number}", retention)
    for turn in range(TURNS):
        prompt = said + (NEW if turn else FIRST)
        end = prompt + ANSWER
        blocks = tuple(((number + 1) << 24) | block for block in range(-(-end // BLOCK)))
        found.append(Arrival(at, prompt, ANSWER, blocks, "agents", hints=hints))
        said = end
        at += random.uniform(*PAUSE_SECONDS)
    return found


def flood(random: np.random.Generator, count: int, seconds: float) -> list[Arrival]:
    """Returns prompts without a common prefix, as a Poisson process of `seconds` seconds."""
    times = np.sort(random.uniform(0.0, seconds, count))
    lengths = random.lognormal(np.log(FLOOD), 0.5, count).clip(256, 16_384).astype(int)
    return [
        Arrival(float(at), int(length), FLOOD_ANSWER)
        for at, length in zip(times, lengths, strict=True)
    ]


def arrivals(way: str, load: Load) -> list[Arrival]:
    """Returns the same arrivals for each way, but for their hints."""
    random = np.random.default_rng(7)
    seconds = load.requests / load.rate
    last = max(0.0, seconds - TURNS * sum(PAUSE_SECONDS) / 2)
    begins = np.sort(random.uniform(0.0, last, load.talks)).tolist()
    talks = [one for at, begin in enumerate(begins) for one in talk(at, begin, random, way)]
    return sorted(talks + flood(random, load.requests, seconds), key=lambda one: one.at_seconds)


def fleet(host_gib: float, cache_tokens: int) -> Fleet:
    """Returns two prefill workers and two decode workers with small caches."""
    pages = cache_tokens // INSTANCE.page_size
    instance = replace(INSTANCE, pages_per_rank=pages)
    pool = Pool(2, accelerator("h100"), instance)
    prefix = PrefixConfig(True, GRAIN, host_gib=host_gib, peer_fetch=True)
    return Fleet(geometry("llama-3.1-8b"), pool, pool, prefix=prefix, block_tokens=BLOCK)


def figures(result: Result, arrived: list[Arrival]) -> dict[str, float]:
    """Returns the figures of a run."""
    seen: dict[str, int] = {}
    asked = cached = again = 0
    later, others = [], []
    for one, arrival in zip(result.outcomes, arrived, strict=True):
        assert one.end == "finished" and (ttft := one.ttft) is not None, one
        if not arrival.block_hashes:
            others.append(ttft)
            continue
        of_talk = str(arrival.block_hashes[0])
        known = seen.get(of_talk, 0)
        if known:
            later.append(ttft)
            asked += arrival.prompt_tokens
            cached += one.cached_tokens
            again += max(0, known // GRAIN * GRAIN - one.cached_tokens)
        seen[of_talk] = arrival.prompt_tokens + arrival.output_tokens
    assert result.pages_lost == 0
    return {
        "later_turns": len(later),
        "hit_rate": cached / asked,
        "recomputed_tokens": again,
        "later_ttft_p50_ms": 1e3 * statistics.median(later),
        "later_ttft_p95_ms": 1e3 * float(np.percentile(later, 95)),
        "others_ttft_p50_ms": 1e3 * statistics.median(others),
        "others_ttft_p95_ms": 1e3 * float(np.percentile(others, 95)),
    }


def cell(host_gib: str, way: str, load: Load) -> dict[str, float]:
    """Simulates one cell, and returns its figures."""
    arrived = arrivals(way, load)
    return figures(simulate(fleet(float(host_gib), load.cache_tokens), arrived), arrived)


def main(_: list[str]) -> None:
    load = Load(_REQUESTS.value, _TALKS.value, _RATE.value, _CACHE.value)
    names = [*itertools.product(_HOST.value, WAYS)]
    with ProcessPoolExecutor(len(names), mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {name: pool.submit(cell, *name, load) for name in names}
        cells = {_NAME_OF(*name): one.result() for name, one in running.items()}
    for name, found in cells.items():
        print(f"{name}: " + ", ".join(f"{figure} {value:.4g}" for figure, value in found.items()))
    if _NAME.value:
        save(_NAME.value, {"load": asdict(load), "cells": cells})


if __name__ == "__main__":
    app.run(main)
