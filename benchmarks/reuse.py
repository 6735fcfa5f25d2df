"""Simulates prefix reuse on real traces: ten prefill workers of 3,000 blocks each, against one pool
of 30,000 blocks, and the seconds that reuse saves.

    python -m benchmarks.reuse --traces=DIR --name=reuse
    python -m benchmarks.reuse --only=made-up --requests=1000      # needs no trace

DIR contains mooncake_conversation.jsonl.gz and mooncake_synthetic.jsonl.gz (kvcache-ai/Mooncake,
with blocks of 512 tokens named by `hash_ids`). Without it, conversations are generated
(`simulator/conversations.py`). Simulated: Llama-3.1-70B on 10 prefill and 10 decode instances of 8
H200, with the live request path, router, workers and prefix index. Pages have 512 tokens; each
prefill instance has 3,000, which are also its working memory. Arrivals are those of the trace
(conversation: spread over its ticks of 3 s), accelerated so that prefill workers with an unlimited
cache would be busy for a fraction `load` of the time. Generated conversations arrive more often,
each with its own think time. Contenders, each with all of the previous features: no cache; pages;
--host_gib of host memory; fetches between prefill workers and from decode workers; decode workers
that append up to two blocks; and the defaults of `jdisagg serve`.

For comparison the table has the hit rates of one store of 30,000 blocks and of an unlimited store,
which receive the prompts in order of arrival without overlap (`prefix_hits.BlockStore`). It also
has the wait before the prefill, and the busiest prefill worker's prompt tokens and seconds relative
to the mean."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from absl import app, flags

from benchmarks.measure import save
from benchmarks.prefix_hits import BlockStore
from jdisagg.config import Mode, PrefixConfig, RoutingConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.engine.prefix_defaults import HOST_SHARE, with_defaults
from jdisagg.layout.axes import Layout
from jdisagg.simulator.conversations import ConversationTurns, conversations
from jdisagg.simulator.fleet import INSTANCE, LIMITS, Fleet, Pool
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, LogNormal, faster, spread_ticks, within_context
from launch.fleet_inputs import HOST_BYTES_OF_DEVICE

_TRACES = flags.DEFINE_string("traces", None, "Folder with the Mooncake traces.")
_ONLY = flags.DEFINE_list("only", None, "These workloads alone.")
_REQUESTS = flags.DEFINE_integer("requests", None, "The first so many of each.")
_LOADS = flags.DEFINE_list("loads", ["0.6", "0.85"], "Of a prefill side that never forgets.")
_HOST_GIB = flags.DEFINE_float("host_gib", 500.0, "Of each prefill instance; 0: no such run.")
_CONTENDERS = flags.DEFINE_list("contenders", None, "These alone.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

# of how much faster than as it is
Workload = Callable[[float], list[Arrival]]
BLOCK, BLOCKS, INSTANCES = 512, 3_000, 10
MODEL = geometry("llama-3.1-70b")


def workloads() -> dict[str, Workload]:
    """Returns the available workloads by name."""
    words = LogNormal(3000, 1.0, 200, 0.8, longest=16_000)
    turns = ConversationTurns(6.0, 30.0, 2048, BLOCK, MODEL.context_tokens)
    count = _REQUESTS.value or 6000
    found: dict[str, Workload] = {
        "made-up": lambda speed: conversations(4.0 * speed, count, words, turns)
    }
    if _TRACES.value:
        folder = Path(_TRACES.value)
        for name, ticks in (("conversation", 3.0), ("synthetic", None)):
            path = folder / f"mooncake_{name}.jsonl.gz"
            found[name] = functools.partial(traced, path, ticks)
    return found


def traced(path: Path, ticks: float | None, speed: float) -> list[Arrival]:
    arrivals = read_trace(path, _REQUESTS.value)
    return faster(spread_ticks(arrivals, ticks) if ticks else arrivals, speed)


def fleet_of(prefix: PrefixConfig, fetches: bool = False, returns: bool = False) -> Fleet:
    instance = replace(INSTANCE, layout=Layout(tp=8), page_size=BLOCK)
    card = accelerator("h200")
    return Fleet(
        MODEL,
        prefill=Pool(INSTANCES, card, replace(instance, pages_per_rank=BLOCKS)),
        decode=Pool(INSTANCES, card, instance),
        # nobody is refused or given up for waiting, so that all contenders serve the same requests
        limits=replace(LIMITS, default_deadline_seconds=36_000.0, handoff_lease_seconds=36_000.0),
        routing=RoutingConfig(peer_fetch=fetches, fetch_from_decode=returns),
        prefix=prefix,
        block_tokens=BLOCK,
    )


def one_store(arrivals: Sequence[Arrival], blocks: int | None) -> list[int]:
    """Returns, for each prompt, the number of tokens that one cache of this many blocks has at its
    arrival. At least one token of each prompt is computed."""
    tree = BlockStore(blocks)
    found = []
    for item in arrivals:
        names = item.block_hashes[: item.prompt_tokens // BLOCK]
        known = tree.match(names) * BLOCK
        tree.touch(names)
        found.append(min(known, (item.prompt_tokens - 1) // BLOCK * BLOCK))
    return found


def speed_of(arrivals: Sequence[Arrival], load: float) -> float:
    """Returns the factor by which arrivals must be accelerated."""
    fleet = fleet_of(PrefixConfig())
    assert fleet.prefill is not None
    costs = fleet.costs_of(fleet.prefill)
    known = one_store(arrivals, None)
    busy = sum(
        costs.prefill([(item.prompt_tokens - cached, cached)])[0]
        for item, cached in zip(arrivals, known, strict=True)
    )
    seconds = arrivals[-1].at_seconds - arrivals[0].at_seconds
    return load * INSTANCES * seconds / busy


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 90, 99)}


def figures_of(result: Result) -> dict[str, object]:
    outcomes, counters = result.outcomes, result.counters
    asked: dict[str, int] = {}
    for one in outcomes:
        asked[one.prefill] = asked.get(one.prefill, 0) + one.prompt_tokens
    busy = [one.busy_seconds for one in result.usage if one.role == "prefill"]
    tokens = [float(asked.get(one.worker, 0)) for one in result.usage if one.role == "prefill"]
    return {
        "hit_rate": _part(counters, ""),
        "decode_hit_rate": _part(counters, "decode_"),
        "host_tokens_restored": counters.get("host_tokens_restored", 0),
        "peer_tokens_restored": counters.get("peer_tokens_restored", 0),
        "peer_fetch_failed": counters.get("peer_fetch_failed", 0),
        "prompts_appended": counters.get("prompts_appended", 0),
        "ttft_seconds": percentiles([one.ttft for one in outcomes if one.ttft is not None]),
        "queue_seconds": percentiles([one.queue_seconds for one in outcomes]),
        "latency_seconds": percentiles([one.latency for one in outcomes]),
        "handoff_gigabytes": round(counters["kv_bytes_received"] / 1e9, 1),
        "busiest_by_tokens": round(max(tokens) / (sum(tokens) / len(tokens)), 3),
        "busiest_by_seconds": round(max(busy) / (sum(busy) / len(busy)), 3),
        "prefill_busy": round(sum(busy) / len(busy) / result.seconds, 3),
        "finished": sum(one.end == "finished" for one in outcomes),
        "pages_lost": result.pages_lost,
    }


def _part(counters: Mapping[str, int], side: str) -> float:
    asked = counters.get(f"{side}prefix_asked_tokens", 0)
    return round(counters.get(f"{side}prefix_hit_tokens", 0) / asked, 4) if asked else 0.0


def contenders() -> dict[str, Fleet]:
    kept = PrefixConfig(reuse=True, grain_tokens=BLOCK)
    found = {"nothing stays": fleet_of(PrefixConfig()), "pages": fleet_of(kept)}
    found["pages of all"] = fleet_of(kept, fetches=True)
    found["pages of all and of decode"] = fleet_of(kept, fetches=True, returns=True)
    appends = replace(kept, append_tokens=2 * BLOCK)
    found["decode appends"] = fleet_of(appends, fetches=True, returns=True)
    if _HOST_GIB.value:
        hosted = replace(kept, host_gib=_HOST_GIB.value)
        found["pages and host memory"] = fleet_of(hosted)
        found["pages and host memory of all"] = fleet_of(hosted, fetches=True)
    usual = with_defaults(
        PrefixConfig(), Mode.DISAGGREGATED, host_bytes=int(HOST_SHARE * HOST_BYTES_OF_DEVICE * 8)
    )
    found["defaults"] = fleet_of(usual, fetches=True, returns=True)
    wanted = _CONTENDERS.value or found
    return {name: fleet for name, fleet in found.items() if name in wanted}


def study(make: Workload) -> dict[str, object]:
    arrivals = make(1.0)
    fitting = within_context(arrivals, MODEL.context_tokens)
    tokens = sum(one.prompt_tokens for one in fitting)
    pool, endless = (
        sum(one_store(fitting, blocks)) / tokens for blocks in (INSTANCES * BLOCKS, None)
    )
    found: dict[str, object] = {
        "requests": len(fitting),
        "beyond_the_context": len(arrivals) - len(fitting),
        "prompt_tokens": tokens,
        "one_pool_hit_rate": round(pool, 4),
        "endless_hit_rate": round(endless, 4),
    }
    print(f"  one pool {pool:.4f}, without end {endless:.4f}", flush=True)
    for load in map(float, _LOADS.value):
        speed, rows = speed_of(fitting, load), {}
        timed = within_context(make(speed), MODEL.context_tokens)
        for name, fleet in contenders().items():
            began = time.process_time()
            figures = figures_of(simulate(fleet, timed))
            rate = figures["hit_rate"]
            assert isinstance(rate, float)
            figures["of_one_pool"] = round(rate / pool, 3) if pool else 0.0
            figures["requests_a_processor_second"] = round(
                len(timed) / (time.process_time() - began), 1
            )
            rows[name] = figures
            print(f"  load {load:g}, {name}: {figures}", flush=True)
        found[f"load {load:g}"] = {"speed": round(speed, 3), **rows}
    return found


def main(argv: list[str]) -> None:
    del argv
    figures: dict[str, object] = {
        "fleet": f"{INSTANCES} + {INSTANCES} x 8 H200, {MODEL.name}, {BLOCKS} blocks of {BLOCK}"
        f" tokens a prefill instance, {_HOST_GIB.value:g} GiB of host memory where there is any"
    }
    for name, make in workloads().items():
        if not _ONLY.value or name in _ONLY.value:
            print(name, flush=True)
            figures[name] = study(make)
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
