"""The runs of `reuse_papers.py`: the claims of each paper, fleets that differ in one property,
their workloads, and the results of a run. Defines no flags, so that tests can import it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jdisagg.config import Mode, PrefixConfig, RoutingConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import LINKS, Accelerator, Link, accelerator
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.layout.axes import Layout
from jdisagg.simulator.conversations import BLOCKS_OF_ONE, ConversationTurns, conversations
from jdisagg.simulator.fleet import INSTANCE, LIMITS, Fleet, Pool
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.workloads import Arrival, LogNormal

GRAIN = 128
KEPT = PrefixConfig(reuse=True, grain_tokens=GRAIN)
FETCHES = RoutingConfig(peer_fetch=True, fetch_from_decode=True)
PATIENT = replace(LIMITS, default_deadline_seconds=36_000.0, handoff_lease_seconds=36_000.0)
# NVIDIA's data sheet, as retold; what programs reach of it as on H100 (nobody measured it for us)
H20 = replace(
    accelerator("h100"), name="h20", peak_flops=148e12, memory_bytes_per_second=4.0e12,
    memory_bytes=96e9,
)  # fmt: skip


@dataclass(frozen=True)
class Talk:
    """The workload: conversations at `rate` requests per second. `words`: numbers of tokens of a
    turn and of its answer. `opening_tokens`: tokens that only this conversation has at its start,
    in whole blocks."""

    words: LogNormal
    turns: ConversationTurns
    requests: int
    opening_tokens: int = 0

    def at(self, rate: float) -> list[Arrival]:
        found = conversations(rate, self.requests, self.words, self.turns, seed=1)
        return [opened(item, self.opening_tokens, self.turns.block_tokens) for item in found]


@dataclass(frozen=True)
class Run:
    """One run of a case: a fleet, its workload, and the number of repetitions. `differs`: how it
    differs from the run with which it is compared."""

    name: str
    differs: str
    fleet: Fleet
    talk: Talk
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """`claim`: the paper's claim, and its evidence. `limit`: limit on the p90 of TTFT in seconds
    within which throughput is counted; None if it is not counted."""

    claim: str
    setting: str
    runs: Callable[[], list[Run]]
    limit: float | None = None


# ---- the papers


def two_pools(
    model: CostGeometry, card: Accelerator, prefills: int, decodes: int, **more: object
) -> Fleet:
    instance = replace(INSTANCE, layout=Layout(tp=1))
    fleet = Fleet(
        model, prefill=Pool(prefills, card, instance), decode=Pool(decodes, card, instance),
        limits=PATIENT, prefix=KEPT, block_tokens=GRAIN,
    )  # fmt: skip
    return replace(fleet, **more)  # type: ignore[arg-type]


def ppd() -> list[Run]:
    """Chats of eight turns with histories of a few thousand tokens."""
    model, card = geometry("llama-3.1-8b"), accelerator("h100")
    turns = ConversationTurns(8.0, 15.0, 0, GRAIN, 32_000)
    talk = Talk(LogNormal(300, 1.5, 250, 0.6, longest=16_000), turns, 700)
    rates = (18.0,)
    slow = LINKS["ethernet-25g"]
    appends = replace(KEPT, append_tokens=1024)
    fleet = two_pools(model, card, 1, 3)

    def run(name: str, differs: str, **more: object) -> Run:
        return Run(name, differs, replace(fleet, **more), talk, rates)  # type: ignore[arg-type]

    return [
        run("forgetful", "nothing stays: each turn is prefilled and sent whole",
            prefix=PrefixConfig()),
        run("through prefill", "KV stays on both sides; each turn goes through prefill"),
        run("append", "what a decode worker lacks it may compute itself, 1,024 tokens at the most",
            prefix=appends),
        run("append eagerly", "the same, also where it gains little",
            prefix=appends, routing=RoutingConfig(local_gain=0.0)),
        run("fetch", "prefill workers fetch the last answer from decode workers", routing=FETCHES),
        run("forgetful, 25 Gb/s", "nothing stays, slow links", prefix=PrefixConfig(), link=slow),
        run("through prefill, 25 Gb/s", "slow links", link=slow),
        run("append, 25 Gb/s", "slow links", prefix=appends, link=slow),
    ]  # fmt: skip


# of a node's eight devices: one network card of 400 Gb/s to the storage
STORAGE = Link("storage", 50e9 / 8, 1e-3, 0.9)
STORED_GIB = 16_000.0


def dualpath() -> list[Run]:
    """Agents with long contexts, where prefill workers' pages hold only running prompts."""
    model = geometry("llama-3.1-70b")
    card = replace(accelerator("h200"), host=STORAGE)
    turns = ConversationTurns(20.0, 5.0, 0, 512, 64_000)
    talk = Talk(LogNormal(400, 0.7, 150, 0.5, longest=8_000), turns, 300, 48 * 512)
    instance = replace(INSTANCE, layout=Layout(tp=8), page_size=512)
    stored = PrefixConfig(reuse=True, grain_tokens=512, host_gib=STORED_GIB, restores="always")
    fleet = Fleet(
        model, prefill=Pool(2, card, replace(instance, pages_per_rank=300)),
        decode=Pool(2, card, instance), limits=PATIENT, prefix=stored, block_tokens=512,
    )  # fmt: skip
    rates = (1.0, 2.0, 3.0, 4.0, 6.0)
    assert fleet.prefill is not None
    unbound = replace(card, host=replace(STORAGE, bytes_per_second=1e12))
    endless = replace(fleet.prefill, hardware=unbound)
    bound = replace(card, host=replace(STORAGE, bytes_per_second=STORAGE.bytes_per_second / 10))
    slow = replace(fleet.prefill, hardware=bound)

    def run(name: str, differs: str, **more: object) -> Run:
        return Run(name, differs, replace(fleet, **more), talk, rates)  # type: ignore[arg-type]

    pages = PrefixConfig(reuse=True, grain_tokens=512)
    return [
        run("storage", "prefill workers alone load histories, from storage"),
        run("storage and decode", "and fetch what decode workers' pages keep", routing=FETCHES),
        run("decode", "no storage: fetched from decode workers' pages alone",
            prefix=pages, routing=FETCHES),
        run("nothing loaded", "no storage and no fetching", prefix=pages),
        run("slow storage", "a tenth of that: 5 GB/s a node", prefill=slow),
        run("slow storage and decode", "the same, and fetching", prefill=slow, routing=FETCHES),
        run("storage without end", "loading costs nothing", prefill=endless),
    ]  # fmt: skip


def agentic() -> list[Run]:
    """Agents with tools on eight H20, with prompts of about 25,000 tokens and answers of 150."""
    model = geometry("qwen3-30b-a3b")
    turns = ConversationTurns(12.0, 8.0, 64 * GRAIN, GRAIN, 79_000)
    talk = Talk(LogNormal(1500, 0.8, 150, 0.6, longest=30_000), turns, 300)
    rates = (1.6, 4.0)
    one = replace(INSTANCE, layout=Layout(tp=1), chunk_tokens=2048)
    pool = Fleet(
        model, decode=Pool(8, H20, one), mode=Mode.CHUNKED, fused=True, limits=PATIENT,
        prefix=KEPT, block_tokens=GRAIN,
    )  # fmt: skip
    apart = two_pools(model, H20, 4, 4)
    appends = replace(KEPT, append_tokens=4096)

    def run(name: str, differs: str, fleet: Fleet, **more: object) -> Run:
        return Run(name, differs, replace(fleet, **more), talk, rates)  # type: ignore[arg-type]

    roomy = replace(accelerator("h100"), **{
        "name": "h20-192", "peak_flops": H20.peak_flops, "memory_bytes": 192e9,
        "memory_bytes_per_second": H20.memory_bytes_per_second,
    })  # fmt: skip
    fast = Link("free", 1e15, 0.0)
    few = replace(apart.decode.instance, pages_per_rank=5_000)
    short = replace(apart, decode=replace(apart.decode, instance=few), context_tokens=80_000)
    return [
        run("one pool", "8 workers do both, chunked", pool),
        run("4 + 4", "4 prefill, 4 decode workers", apart),
        run("6 + 2", "6 prefill, 2 decode workers", two_pools(model, H20, 6, 2)),
        run("4 + 4, free links", "transfers cost nothing", apart, link=fast),
        run("4 + 4, memory doubled", "each card has 192 GB", two_pools(model, roomy, 4, 4)),
        run("4 + 4, short of pages", "decode workers have pages for 80,000 tokens, kept or not",
            short),
        run("4 + 4, fetch", "prefill workers fetch from one another and from decode workers",
            apart, routing=FETCHES),
        run("4 + 4, append", "decode workers append up to 4,096 tokens", apart, prefix=appends),
    ]  # fmt: skip


CASES = {
    "ppd": Case(
        "Later turns' TTFT falls by 68 % where the decode worker that holds the history computes"
        " what is new of the prompt, chosen per request, at a TPOT that stays competitive (abstract"
        " of arXiv 2603.13358v1; its baseline prefills and sends the whole history each turn).",
        "Llama-3.1-8B, 1 prefill and 3 decode workers of an H100; chats of 8 turns on average, 300"
        " tokens (16,000 at the most) and 250 of an answer (medians), 15 s between turns.",
        ppd,
    ),
    "dualpath": Case(
        "Where histories are loaded from storage, prefill workers' storage links are what all wait"
        " for while decode workers' are idle; loading through these too gives up to 1.87 times the"
        " throughput offline and 1.96 times online within its SLO (abstract of arXiv 2602.21548).",
        "Llama-3.1-70B, 2 + 2 instances of 8 H200; agents that begin with 24,576 tokens of"
        " their own, 20 turns on average that append 400 tokens, 150 of an answer (medians), 5 s"
        " between turns. Prefill workers have pages for 153,600 tokens, and behind them storage at"
        " 50 GB/s a node (live: the tier in host memory, on a slower link).",
        dualpath,
        2.0,
    ),
    "agentic": Case(
        "With a coder's trace (33,600 tokens a prompt, short answers) prefill and decode apart have"
        " a TTFT that is 72 % longer than one pool's and no better TPOT, under the same cache-aware"
        " routing (notes of gahow/agentic-kvc: Qwen3-Coder-30B-A3B on 8 H20, vLLM; TTFT 1.01 s one"
        " pool, 1.99 s 4 + 4, 1.48 s 6 + 2).",
        "Qwen3-30B-A3B on 8 H20 of 1 device; agents of 12 turns on average that append 1,500"
        " tokens, 150 of an answer (medians), 8,192 tokens shared by all, 8 s between turns.",
        agentic,
    ),
}


# ---- what is asked, and what a run gives


def opened(item: Arrival, tokens: int, block_tokens: int) -> Arrival:
    """Returns the request with additional tokens at the start that only its conversation has."""
    whose = item.block_hashes[-1] >> BLOCKS_OF_ONE
    first = (whose << BLOCKS_OF_ONE) + (1 << BLOCKS_OF_ONE - 1)
    names = tuple(range(first, first + tokens // block_tokens))
    return replace(
        item, prompt_tokens=item.prompt_tokens + tokens, block_hashes=names + item.block_hashes
    )


def percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "p50": None, "p90": None, "p99": None}
    found = {f"p{q}": round(float(np.percentile(known, q)), 4) for q in (50, 90, 99)}
    return {"mean": round(float(np.mean(known)), 4), **found}


def later_turns(arrivals: Sequence[Arrival]) -> list[bool]:
    """Returns, for each arrival, whether its conversation has occurred before."""
    seen: set[int] = set()
    found = []
    for item in arrivals:
        whose = item.block_hashes[-1] >> BLOCKS_OF_ONE
        found.append(whose in seen)
        seen.add(whose)
    return found


def figures_of(run: Run, rate: float) -> dict[str, object]:
    arrivals = run.talk.at(rate)
    later, result = later_turns(arrivals), simulate(run.fleet, arrivals)
    outcomes, counters = result.outcomes, result.counters
    firsts = [one.ttft for one, again in zip(outcomes, later, strict=True) if not again]
    others = [one.ttft for one, again in zip(outcomes, later, strict=True) if again]
    prompts = sum(one.prompt_tokens for one in arrivals)
    return {
        "rate": rate,
        "requests": len(arrivals),
        "finished": sum(one.end == "finished" for one in outcomes),
        "pages_lost": result.pages_lost,
        "prompt_tokens_mean": round(prompts / len(arrivals)),
        "ttft_seconds": percentiles([one.ttft for one in outcomes]),
        "first_turn_ttft_seconds": percentiles(firsts),
        "later_turn_ttft_seconds": percentiles(others),
        "second_token_seconds": percentiles(
            [one.ttft + one.gaps.first for one in outcomes if one.ttft is not None and one.gaps]
        ),
        "queue_seconds": percentiles([one.queue_seconds for one in outcomes]),
        "tpot_seconds": percentiles([one.tpot for one in outcomes]),
        "cached": round(sum(one.cached_tokens for one in outcomes) / prompts, 4),
        "appended_requests": counters.get("prompts_appended", 0),
        "fetched_tokens": counters.get("peer_tokens_restored", 0),
        "restored_tokens": counters.get("host_tokens_restored", 0),
        "handoff_gigabytes": round(counters.get("kv_bytes_received", 0) / 1e9, 1),
        "busy": {role: busy_of(result, role) for role in sorted({u.role for u in result.usage})},
        "storage_busy": storage_busy(run.fleet, result),
    }


def busy_of(result: Result, role: str) -> float:
    busy = [one.busy_seconds for one in result.usage if one.role == role]
    return round(sum(busy) / len(busy) / result.seconds, 3)


def storage_busy(fleet: Fleet, result: Result) -> float | None:
    """Returns the fraction of time in which the prefill workers' link from storage is in use."""
    if not fleet.tiers.host_bytes or fleet.prefill is None:
        return None
    tokens = result.counters.get("host_tokens_restored", 0)
    seconds = fleet.host_link(fleet.prefill).seconds(tokens) / fleet.prefill.count
    return round(seconds / result.seconds, 3)
