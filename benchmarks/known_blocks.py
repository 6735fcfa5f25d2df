"""How long does a placement decision take with an index of the cached blocks of a thousand workers?

    python -m benchmarks.known_blocks --name=known_blocks

The cluster is that of benchmarks/placement.py. Its workers have reported a million blocks (of 128
tokens, counted per worker): chains of conversations of 10 to 60 blocks. All chains begin with one
of 20 system prompts of 4 to 24 blocks, so many workers have cached a request's first blocks, and
one or two workers the rest. Half of the requests continue a conversation and half begin one. Three
parts are measured separately, in CPU seconds of the thread: hashing the prompt (once per request),
matching it with the index, and the decision. Memory is that of the process before and after the
index is built."""

import gc
import os
import random
import statistics
import time

import psutil
from absl import app, flags

from benchmarks.measure import save
from benchmarks.placement import NAME, ROUNDS, RULES, cluster
from jdisagg.messages.kept_blocks import TOLD_BYTES, KeptNews, KeptScheme
from jdisagg.request import Request
from jdisagg.router.accounts import Work
from jdisagg.router.decision import Decision, PlacementQuery
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.router.placement import decide
from jdisagg.scheduler.residency import BlockNames

_INSTANCES = flags.DEFINE_integer("instances", 1000, "Workers, half of each kind.")
_BLOCKS = flags.DEFINE_integer("blocks", 1_000_000, "Blocks of all workers together.")

GRAIN = 128
SCHEME = KeptScheme("model", GRAIN, GRAIN)
NAMES = BlockNames(b"secret", SCHEME.model, GRAIN)

Conversation = tuple[int, int, int]  # system prompt, seed, blocks


class Prompts:
    """Token ids of conversations, generated again when they are needed."""

    def __init__(self, draw: random.Random) -> None:
        self._systems = [
            tuple(draw.randrange(100_000) for _ in range(GRAIN * draw.randint(4, 24)))
            for _ in range(20)
        ]

    def request(self, conversation: Conversation, more_tokens: int = 0) -> Request:
        system, seed, blocks = conversation
        start = self._systems[system]
        own = range(seed * 7919, seed * 7919 + blocks * GRAIN + more_tokens)
        return Request("r", start + tuple([token % 100_003 for token in own]))


def fill(
    known: KnownBlocks, workers: list[str], blocks: int, prompts: Prompts, draw: random.Random
) -> list[Conversation]:
    """Reports this many blocks to `known`. Returns the conversations that they belong to."""
    conversations: list[Conversation] = []
    for worker in workers:
        known.joined(worker, SCHEME)
        told: dict[bytes, None] = {}
        while len(told) < blocks // len(workers):
            talk = draw.randrange(20), draw.randrange(1 << 40), draw.randint(10, 60)
            if conversations and draw.random() < 0.2:
                talk = draw.choice(conversations)  # two workers have it
            conversations.append(talk)
            request = prompts.request(talk)
            chain = NAMES.chain(request, request.prompt_token_ids, GRAIN)
            told |= {name[:TOLD_BYTES]: None for name in chain}
        names = list(told)[: blocks // len(workers)]
        known.told(KeptNews(worker, 1, len(names), b"".join(names), whole=True))
    return conversations


def measure(instances: int, blocks: int, rounds: int) -> dict[str, float]:
    draw = random.Random(instances)
    accounts, workers = cluster(instances, draw)
    prompts, known = Prompts(draw), KnownBlocks(b"secret")
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    talks = fill(known, [name for name, _ in workers], blocks, prompts, draw)
    found = {
        "index_bytes": float(process.memory_info().rss - before),
        "entries": float(sum(known.blocks(name) for name, _ in workers)),
        "distinct_blocks": float(len(known)),
    }
    times: dict[str, list[float]] = {"hash": [], "match": [], "decision": [], "total": []}
    holders, hits, tokens = 0, 0, 0
    for number in range(rounds):
        fresh = draw.randrange(20), draw.randrange(1 << 40), 1
        request = prompts.request(draw.choice(talks) if number % 2 else fresh, 200)
        prompt = len(request.prompt_token_ids)
        chain = NAMES.chain(request, request.prompt_token_ids, GRAIN)  # what hashing takes
        started = time.thread_time()
        NAMES.chain(request, request.prompt_token_ids, GRAIN)
        hashed = time.thread_time()
        asked = known.known(request)
        asked()  # works the chain out
        ready = time.thread_time()
        cached = asked()
        matched = time.thread_time()
        work = Work(prompt, expected_tokens=200)
        answer = decide(accounts.state, PlacementQuery(work, cached, under_way=True), 0.0, RULES)
        decided = time.thread_time()
        assert isinstance(answer, Decision) and len(chain) == prompt // GRAIN
        times["hash"].append(hashed - started)
        times["match"].append(matched - ready)
        times["decision"].append(decided - matched)
        times["total"].append(decided - ready)
        holders, hits, tokens = (
            holders + len(cached), hits + answer.cached_tokens, tokens + prompt
        )  # fmt: skip
    for what, seconds in times.items():
        ranked = statistics.quantiles(seconds[rounds // 10 :], n=100)
        found |= {f"{what}_p50_seconds": ranked[49], f"{what}_p99_seconds": ranked[98]}
    return found | {
        "holders_mean": holders / rounds,
        "prompt_tokens_mean": tokens / rounds,
        "found_share": hits / tokens,
    }


def main(_: list[str]) -> None:
    gc.disable()
    found = measure(_INSTANCES.value, _BLOCKS.value, ROUNDS.value)
    for name, value in found.items():
        shown = f"{value * 1e6:.0f} us" if name.endswith("_seconds") else f"{value:.4g}"
        print(f"{name.removesuffix('_seconds'):<20} {shown}")
    if NAME.value:
        shape = {"instances": _INSTANCES.value, "blocks": _BLOCKS.value, "rounds": ROUNDS.value}
        save(NAME.value, shape | found)


if __name__ == "__main__":
    app.run(main)
