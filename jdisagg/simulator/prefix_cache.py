"""The prefix cache of a simulated worker: a `PrefixTree` over blocks of prompts, fed by the rows
that the mesh computes.

The tokens of a simulated prompt say which block they belong to (`prompt_of`), so that a row's
blocks are read off its tokens, as content hashes are of real ones. Cached positions cost nothing to
compute. Adds and evictions go to whoever takes the tree's events. Knows no requests."""

from collections.abc import Sequence
from itertools import chain, islice, repeat

from jdisagg.messages.step_commands import PrefillRow
from jdisagg.scheduler.prefix_tree import PrefixTree

# Sequences whose first rows were priced and whose last was not: more than a mesh has prompts begun.
# Older ones were cancelled.
MOST_BEGUN = 4096


def prompt_of(
    block_hashes: Sequence[int], prompt_tokens: int, block_tokens: int
) -> tuple[int, ...]:
    """A prompt whose tokens are the names of their blocks, counted from 1; what the names do not
    cover is 0."""
    named = chain.from_iterable(repeat(name + 1, block_tokens) for name in block_hashes)
    return tuple(islice(chain(named, repeat(0)), prompt_tokens))


def blocks_of(tokens: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """The names of a prompt's blocks, from its first token on; none where the workload names
    none."""
    return tuple(name for name in tokens[::block_tokens] if name)


class PrefixCache:
    """Of one mesh: up to `capacity` blocks of `block_tokens`. Of the `asked_tokens` that were to be
    computed `hit_tokens` were cached."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.tree = PrefixTree(capacity)
        self.block_tokens = block_tokens
        self.hit_tokens = 0
        self.asked_tokens = 0
        self._chains: dict[int, tuple[int, tuple[int, ...]]] = {}

    def cached_tokens(self, row: PrefillRow) -> int:
        """Positions of the row's sequence, from its first on, that need not be computed: as far as
        its blocks were known when its first row was priced, and their chain is whole."""
        known, names = self._chains.get(row.sequence, (0, ()))
        before = len(names)
        names += self._blocks(row)
        whole = known == before * self.block_tokens
        if whole:
            known = self.tree.match(names) * self.block_tokens
        self._chains[row.sequence] = (known, names)
        if len(self._chains) > MOST_BEGUN:
            del self._chains[next(iter(self._chains))]
        end = row.start + len(row.tokens)
        self.hit_tokens += max(0, min(known, end) - row.start)
        self.asked_tokens += len(row.tokens)
        return known

    def computed(self, row: PrefillRow) -> None:
        """The row's KV is there; after its last row a sequence's blocks may be found by others."""
        if row.samples:
            _, names = self._chains.pop(row.sequence, (0, ()))
            if names:
                self.tree.touch(names)

    def _blocks(self, row: PrefillRow) -> tuple[int, ...]:
        """The blocks that begin within the row; a prompt's last one may be shorter, and has a name
        of its own in the traces."""
        size = self.block_tokens
        first = -(-row.start // size) * size
        end = row.start + len(row.tokens)
        return tuple(
            row.tokens[at - row.start]
            for at in range(first, end, size)
            if row.tokens[at - row.start]
        )
