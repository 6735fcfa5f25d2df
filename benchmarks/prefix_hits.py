"""Hit rate of a prefix cache on the Mooncake traces, by the number of blocks that it holds.

    python -m benchmarks.prefix_hits --traces=DIR --name=prefix_hits

DIR holds mooncake_conversation.jsonl.gz and mooncake_synthetic.jsonl.gz (kvcache-ai/Mooncake). Each
request's blocks are looked up and then used. Compares two orders of use: plain LRU, by which the
published figures were computed, and children first, as jdisagg evicts. Prints the published hit
rates beside them."""

import gzip
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks.measure import save

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, None)
PUBLISHED = {
    "conversation": (4.5, 21.1, 32.6, 35.5, 36.4, 36.6),
    "synthetic": (8.3, 42.4, 62.4, 64.0, 64.0, 64.0),
}


class BlockStore:
    """An LRU cache of block names.

    Args:
        capacity: Largest number of blocks; None is no limit.
        children_first: Whether the end of a chain counts as used before its start, so that eviction
            never removes a block in the middle of a chain."""

    def __init__(self, capacity: int | None = None, *, children_first: bool = True) -> None:
        self._capacity = capacity
        self._children_first = children_first
        self._blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def match(self, chain: Sequence[int]) -> int:
        """Returns the number of leading blocks of a chain that are cached."""
        return next((at for at, one in enumerate(chain) if one not in self._blocks), len(chain))

    def touch(self, chain: Sequence[int]) -> None:
        """Uses all blocks of a chain and adds missing ones."""
        for block in reversed(chain) if self._children_first else chain:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._capacity is not None and len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def hit_percent(
    requests: list[list[int]], capacity: int | None, children_first: bool
) -> tuple[float, float]:
    """Returns the percentage of blocks found, and the seconds taken."""
    store = BlockStore(capacity, children_first=children_first)
    started, hits = time.perf_counter(), 0
    for blocks in requests:
        hits += store.match(blocks)
        store.touch(blocks)
    return 100 * hits / sum(map(len, requests)), time.perf_counter() - started


def main(argv: list[str]) -> None:
    del argv
    figures: dict[str, object] = {}
    for name, published in PUBLISHED.items():
        with gzip.open(Path(flags.FLAGS.traces) / f"mooncake_{name}.jsonl.gz", "rt") as lines:
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
    if flags.FLAGS.name:
        print(save(flags.FLAGS.name, figures))


if __name__ == "__main__":  # other benchmarks that import `BlockStore` have flags of these names
    flags.DEFINE_string("traces", None, "Folder with the Mooncake traces.", required=True)
    flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")
    app.run(main)
