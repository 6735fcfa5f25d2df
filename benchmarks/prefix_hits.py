"""How often does the prefix tree know a block of the Mooncake traces, by the number of pages it
keeps?

    python -m benchmarks.prefix_hits --traces=DIR --name=prefix_hits

DIR holds mooncake_conversation.jsonl.gz and mooncake_synthetic.jsonl.gz (kvcache-ai/Mooncake). Each
request's blocks are looked up in the router's index, which learns of the tree by its events alone,
and then touched. Both orders of use: plain LRU, as published figures are computed, and children
first, as pages are kept here. Published hit rates stand beside."""

import gzip
import json
import time
from pathlib import Path

from absl import app, flags

from benchmarks.measure import save
from jdisagg.router.prefix_index import PrefixIndex
from jdisagg.scheduler.prefix_tree import PrefixTree

_TRACES = flags.DEFINE_string("traces", None, "Folder with the Mooncake traces.", required=True)
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, None)
PUBLISHED = {
    "conversation": (4.5, 21.1, 32.6, 35.5, 36.4, 36.6),
    "synthetic": (8.3, 42.4, 62.4, 64.0, 64.0, 64.0),
}


def hit_percent(
    requests: list[list[int]], capacity: int | None, children_first: bool
) -> tuple[float, float]:
    """(percent of blocks found by the index, seconds)."""
    tree, index = PrefixTree(capacity, children_first=children_first), PrefixIndex()
    started, hits = time.perf_counter(), 0
    for blocks in requests:
        hits += index.matches(blocks).get("worker", 0)
        tree.touch(blocks)
        if not index.apply("worker", tree.take_events()):
            raise RuntimeError("events of the tree are missing")
    return 100 * hits / sum(map(len, requests)), time.perf_counter() - started


def main(argv: list[str]) -> None:
    del argv
    figures: dict[str, object] = {}
    for name, published in PUBLISHED.items():
        with gzip.open(Path(_TRACES.value) / f"mooncake_{name}.jsonl.gz", "rt") as lines:
            requests = [json.loads(line)["hash_ids"] for line in lines]
        rows = []
        for capacity, expected in zip(CAPACITIES, published, strict=True):
            plain, seconds = hit_percent(requests, capacity, False)
            ours, _ = hit_percent(requests, capacity, True)
            rows.append(
                {
                    "pages": capacity,
                    "published": expected,
                    "plain_lru": round(plain, 3),
                    "children_first": round(ours, 3),
                }
            )
            per_block = 1e6 * seconds / sum(map(len, requests))
            print(
                f"{name} {capacity}: published {expected}, plain {plain:.2f}, children first"
                f" {ours:.2f}; {per_block:.1f} us a block"
            )
        figures[name] = rows
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
