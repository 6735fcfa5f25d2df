"""Conversations of agents in a flood of other prompts, with and without hints, in the simulator and
on real workers.

    python -m benchmarks.retention --name=retention
    python -m benchmarks.retention --live --name=retention

Each cell is simulated in a process of its own.

Conversations of ten turns begin one after the other. Between two turns a tool runs for a minute or
two, in which prompts that nobody repeats come and fill the caches several times. The same arrivals
are simulated three times: without hints, with a session key, and with a key and a retention of one
hour (OpenAI's `prompt_cache_key`, Anthropic's `cache_control` with `ttl`). The fleet has a prefill
and a decode pool; workers cache KV in pages alone, or also in host memory.

Figures: of turns 2 to 10 the part of the prompt tokens that was cached, the tokens that were
computed though an earlier turn had them, and the TTFT; of other prompts the TTFT.

`--live` runs a smaller load on an embedded prefill and decode worker with the shipped model: four
conversations take turns, and between two turns come more other prompts than the pages of a worker
hold. Its fourth way sends a session's key and a pause, and calls `prefetch` before the next turn.
The figures are counts of tokens, which do not depend on the machine."""

import asyncio
import itertools
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import jax
import numpy as np
from absl import app, flags

from benchmarks.measure import RESULTS, machine, save
from benchmarks.measured_model import NoText
from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig, PrefixConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.engine.embedded import EmbeddedCluster
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import SessionAction, SessionCall
from jdisagg.prompt.hints import Hints, Retention
from jdisagg.request import Request, SamplingParams
from jdisagg.service.http.hints import SECONDS, USUAL_WEIGHT
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.workloads import Arrival
from launch.model import loader
from launch.shipped import SHIPPED_MODEL

_REQUESTS = flags.DEFINE_integer("requests", 5000, "Requests of the flood.")
_TALKS = flags.DEFINE_integer("talks", 24, "Conversations.")
_RATE = flags.DEFINE_float("rate", 4.0, "Requests of the flood in a second.")
_CACHE = flags.DEFINE_integer("cache_tokens", 400_000, "Tokens of KV that a worker's pages hold.")
_HOST = flags.DEFINE_list("host_gib", ["0", "32"], "Host memory of each worker, one run each.")
_LIVE = flags.DEFINE_bool("live", False, "Real workers and a small load.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

TURNS, BLOCK, GRAIN = 10, 512, 128
FIRST, NEW, ANSWER = 6144, 512, 256  # tokens of a conversation's first prompt and of later turns
FLOOD, FLOOD_ANSWER = 4096, 64  # mean tokens of other prompts and of their answers
PAUSE_SECONDS = (40.0, 120.0)  # of a tool
_NAME_OF = "host {} GiB, {}".format
WAYS = ("without hints", "session key", "key and retention")
PAUSED = "key and pause"
LIVE_CELLS = (("0", WAYS[0]), ("0", WAYS[2]), ("0.1", WAYS[0]), ("0.1", WAYS[2]), ("0.1", PAUSED))
AT_ONCE = 4  # prompts of the live flood
TOOL_SECONDS = 2.5  # in which nothing comes, after the turns of all conversations


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


@dataclass(frozen=True, slots=True)
class LiveLoad:
    """`flood`: prompts between two turns. The other numbers are tokens, and `page` also those of a
    block."""

    talks: int = 4
    flood: int = 24
    flood_prompt: int = 192
    first: int = 192
    new: int = 16
    answer: int = 9
    cache_tokens: int = 4096
    page: int = 16


class LiveTalks:
    """Conversations with one embedded prefill and decode worker."""

    def __init__(self, host_gib: float, way: str, load: LiveLoad) -> None:
        pages = load.cache_tokens // load.page
        instance = InstanceConfig(
            layout=Layout(), page_size=load.page, pages_per_rank=pages, speculate="off"
        )
        prefix = PrefixConfig(True, load.page, host_gib=host_gib, restores="always")
        model = ModelConfig(SHIPPED_MODEL, context_tokens=1024, dtype="float32")
        config = EngineConfig(
            model=model, prefill=instance, decode=instance, prefix=prefix, warm_up=False
        )
        read = loader(SHIPPED_MODEL, model.dtype)
        self.cluster = EmbeddedCluster(config, read, NoText(), jax.devices())
        self._way, self._load = way, load
        self._random = np.random.default_rng(7)
        self._histories = [self._words(load.first) for _ in range(load.talks)]
        self._count = self._asked = self._cached = self._again = 0

    def _words(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._random.integers(3, 1000, tokens).tolist())

    def _hints(self, talk: int) -> Hints | None:
        if self._way == WAYS[0]:
            return None
        if self._way == PAUSED:
            return Hints(f"agent {talk}", pause_seconds=3600.0)
        return Hints(f"agent {talk}", Retention(USUAL_WEIGHT, SECONDS["1h"]))

    async def _ask(
        self, prompt: tuple[int, ...], answer: int, hints: Hints | None = None
    ) -> tuple[tuple[int, ...], int]:
        """Returns the answer, and the number of cached tokens of the prompt."""
        self._count += 1
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        said, cached = (), 0
        request = Request(f"r{self._count}", prompt, params, hints=hints)
        async for event in self.cluster.stream(request):
            said += event.token_ids
            cached = event.usage.cached_tokens if event.usage else cached
        return said, cached

    async def _turn(self, talk: int, later: bool) -> None:
        load, history = self._load, self._histories[talk]
        if later and self._way == PAUSED:
            call = SessionCall("", "", f"agent {talk}", SessionAction.PREFETCH, 60.0)
            await self.cluster.path.session(call)
        prompt = history + self._words(load.new) if later else history
        said, cached = await self._ask(prompt, load.answer, self._hints(talk))
        if later:
            self._asked += len(prompt)
            self._cached += cached
            self._again += max(0, len(history) // load.page * load.page - cached)
        self._histories[talk] = prompt + said

    async def run(self) -> dict[str, float]:
        """Runs all turns, and returns the figures of the later ones."""
        load = self._load
        await self.cluster.start()
        try:
            for turn in range(TURNS):
                for talk in range(load.talks):
                    await self._turn(talk, later=turn > 0)
                if turn < TURNS - 1:
                    await asyncio.sleep(TOOL_SECONDS)
                    flood = [self._words(load.flood_prompt) for _ in range(load.flood)]
                    for at in range(0, load.flood, AT_ONCE):
                        some = flood[at : at + AT_ONCE]
                        await asyncio.gather(*(self._ask(prompt, 2) for prompt in some))
        finally:
            await self.cluster.stop()
        return {
            "later_turns": (TURNS - 1) * load.talks,
            "requests": self._count,
            "hit_rate": self._cached / self._asked,
            "recomputed_tokens": self._again,
        }


def live(load: LiveLoad) -> dict[str, dict[str, float]]:
    """Runs the cells of the live load, and returns their figures."""
    jax.config.update("jax_num_cpu_devices", 2)
    use_compilation_cache("~/.cache/jdisagg/xla")
    return {
        _NAME_OF(host_gib, way): asyncio.run(LiveTalks(float(host_gib), way, load).run())
        for host_gib, way in LIVE_CELLS
    }


def simulated(load: Load) -> dict[str, dict[str, float]]:
    names = [*itertools.product(_HOST.value, WAYS)]
    with ProcessPoolExecutor(len(names), mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {name: pool.submit(cell, *name, load) for name in names}
        return {_NAME_OF(*name): one.result() for name, one in running.items()}


def main(_: list[str]) -> None:
    simulates = Load(_REQUESTS.value, _TALKS.value, _RATE.value, _CACHE.value)
    load = LiveLoad() if _LIVE.value else simulates
    cells = live(load) if isinstance(load, LiveLoad) else simulated(load)
    for name, found in cells.items():
        print(f"{name}: " + ", ".join(f"{figure} {value:.4g}" for figure, value in found.items()))
    if not _NAME.value:
        return
    path, figures = RESULTS / f"{_NAME.value}.json", {"load": asdict(load), "cells": cells}
    known = json.loads(path.read_text()) if path.exists() else {}
    if _LIVE.value:
        live_figures = {"machine": machine(), **figures}
        path.write_text(json.dumps(known | {"live": live_figures}, indent=1) + "\n")
    else:
        save(_NAME.value, figures | {name: known[name] for name in ("live",) if name in known})


if __name__ == "__main__":
    app.run(main)
