"""KV that stays: which pages of a mesh hold which beginnings of sequences, and who may use them
again.

A block is `block_tokens` positions, the least that are whole blocks of the fleet's grain and whole
pages. It is named by a keyed chain of 32-byte hashes (`BlockNames`): the hash of its tokens under
the name of the block before it, from a root that is the namespace. So a name says all that lies
before its block, and blocks of two namespaces never meet. A shorter digest or one without a key
would let a client make prompts that meet.

`ResidencyTree` is one dp rank's: it names pages that its ledger keeps. A sequence that begins with
known blocks adopts their pages, read-only, and computes or receives the rest. When a sequence ends
its full blocks stay. Kept pages that nobody holds are free pages to everyone else and are given
away when no other is left: least recently used first, and of a chain its end before its beginning
(unless the beginning was computed twice and somebody holds the end with the other copy: what is
left of such a chain is not found until its beginning is known again).

`Residency` is a mesh's: the trees of its ranks, or none (nothing is kept). What they gain and lose
is on record for routers (`KeptLog`). Pure: knows no arrays, clocks or random sources.

Invariants (each is a test of the same name in tests/scheduler/test_residency.py):
- free_held_and_kept_pages_are_all_pages
- a_held_page_is_never_given_away
- every_kept_page_has_one_name
- a_block_holds_what_its_name_says
- namespaces_never_meet"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from jdisagg.config import PrefixConfig
from jdisagg.messages.kept_blocks import KeptScheme
from jdisagg.request import Request
from jdisagg.scheduler.kept_log import KeptLog
from jdisagg.scheduler.page_ledger import LedgerError, PageLedger

NAME_BYTES = 32

Chain = tuple[bytes, ...]
# (name, index in its chain, pages): what lies there will be written over by commands issued later
Evicted = Callable[[bytes, int, tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class BlockNames:
    """How blocks are named, alike on all workers of a fleet.

    Args:
        secret: keys all names, up to 64 bytes: who does not know it cannot tell from names what
            was asked.
        model: what must be equal for KV to be: the model's fingerprint and the type of its KV.
        grain_tokens: of a block.
        grid_tokens: prefill chunks are cut, and computing goes on behind a hit, at multiples of it
            (None: the grain). Where it is the largest chunk, a hit runs the same programs on the
            same rows as a miss and gives the same bits; then what decode steps computed is not
            kept, for a prefill rounds otherwise.
    """

    secret: bytes
    model: str
    grain_tokens: int = 128
    grid_tokens: int | None = None

    @classmethod
    def of(cls, config: PrefixConfig, secret: bytes, model: str) -> "BlockNames | None":
        """None where nothing stays."""
        if not config.reuse:
            return None
        return cls(secret, model, config.grain_tokens, config.grid_tokens)

    @property
    def cut_tokens(self) -> int:
        return self.grid_tokens or self.grain_tokens

    def chain(
        self, request: Request, tokens: Sequence[int], block_tokens: int, known: Chain = ()
    ) -> Chain:
        """The names of the full blocks of `tokens`, a sequence of this request's, where a block is
        `block_tokens`, a multiple of the grain. `known`: those of its first blocks, so that they
        need not be worked out again."""
        known = known[: len(tokens) // block_tokens]
        content = np.asarray(tokens[len(known) * block_tokens :], "<u4").tobytes()
        step, every = 4 * self.grain_tokens, block_tokens // self.grain_tokens
        link, names = known[-1] if known else self._root(request), []
        for end in range(step, len(content) + 1, step):
            link = blake2b(content[end - step : end], key=link, digest_size=NAME_BYTES).digest()
            names.append(link)
        return (*known, *names[every - 1 :: every])

    def digest(self, purpose: bytes, *parts: str) -> bytes:
        """Of what distinguishes this model's blocks and these parts, under the secret, up to 16
        bytes of purpose apart. Each part is told with its length, so that no two lists of parts
        read alike."""
        root = blake2b(key=self.secret, digest_size=NAME_BYTES, person=purpose)
        for part in (self.model, str(self.grain_tokens), *parts):
            text = part.encode("utf-8", "surrogatepass")
            root.update(len(text).to_bytes(8, "little") + text)
        return root.digest()

    def _root(self, request: Request) -> bytes:
        """The namespace."""
        return self.digest(b"jdisagg kv", request.tenant, request.cache_scope)


class ResidencyTree:
    """Which pages of one rank hold which blocks of `block_pages` pages each."""

    def __init__(self, ledger: PageLedger, block_pages: int, log: KeptLog) -> None:
        self._ledger = ledger
        self._block_pages = block_pages
        self._log = log
        self._blocks: dict[bytes, tuple[int, ...]] = {}
        self._indices: dict[bytes, int] = {}  # in their chains
        self._names: dict[int, bytes] = {}
        self.evicted_blocks = 0  # for want of room
        self.on_evicted: Evicted | None = None
        ledger.on_given_away(self._given_away)

    def __len__(self) -> int:
        """Blocks known."""
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def match(self, chain: Chain) -> int:
        """How many blocks of the chain are known, from its first on. Counts as no use."""
        for count, name in enumerate(chain):
            if name not in self._blocks:
                return count
        return len(chain)

    def pages(self, chain: Iterable[bytes]) -> tuple[int, ...]:
        """Of known blocks."""
        return tuple(page for name in chain for page in self._blocks[name])

    def held_pages(self, chain: Iterable[bytes]) -> int:
        """Of known blocks, the pages that some owner holds: to adopt these costs nothing."""
        return sum([self._ledger.references(page) > 0 for page in self.pages(chain)])

    def adopt(self, owner: int, chain: Iterable[bytes]) -> tuple[int, ...]:
        """Makes `owner` hold the pages of known blocks."""
        return self._ledger.adopt(owner, self.pages(chain))

    def let_go(self, owner: int, chain: Chain) -> None:
        """`owner` holds no pages any more; its first ones are full of the blocks of `chain`, and
        stay. Where a block is known already, the pages that it is known by do."""
        pages, size = self._ledger.pages(owner), self._block_pages
        if len(pages) < len(chain) * size:
            raise LedgerError(
                f"owner {owner} holds {len(pages)} pages, fewer than {len(chain)} blocks"
            )
        for index, name in enumerate(chain):
            if name in self._blocks:
                continue
            block = pages[index * size : (index + 1) * size]
            if not self._names.keys().isdisjoint(block):
                # of two that went apart within a block, a page that both began with: the first has
                # kept it
                break
            for page in block:
                self._ledger.keep(page)
                self._names[page] = name
            self._blocks[name] = block
            self._indices[name] = index
            self._log.gained(name)
        self._ledger.free(owner)
        # also those that were known, so that every block lies behind all that continue it
        self._ledger.touch(reversed(self.pages(chain[: self.match(chain)])))

    def by_last_use(self) -> Iterator[tuple[bytes, int, bool]]:
        """Name, index in its chain, and whether an owner holds all of it: of each block, that which
        is given away first first, those that are held last."""
        idle = dict.fromkeys(self._names[page] for page in self._ledger.idle())
        for name in (*idle, *(name for name in self._blocks if name not in idle)):
            yield name, self._indices[name], name not in idle

    def clear(self) -> int:
        """Forgets all blocks; returns how many there were."""
        blocks = len(self._blocks)
        for page in self._names:
            self._ledger.keep_no_longer(page)
        for name in self._blocks:
            self._log.lost(name)
        self._blocks.clear()
        self._indices.clear()
        self._names.clear()
        return blocks

    def _given_away(self, page: int) -> tuple[int, ...]:
        """The ledger gave a page to somebody: its block is gone."""
        name = self._names.pop(page)
        pages, index = self._blocks.pop(name), self._indices.pop(name)
        if self.on_evicted is not None:
            self.on_evicted(name, index, pages)
        others = tuple(other for other in pages if other != page)
        for other in others:
            del self._names[other]
        self.evicted_blocks += 1
        self._log.lost(name)
        return others


class Residency:
    """What stays on one mesh. `names` None: nothing does."""

    def __init__(
        self, ledgers: Sequence[PageLedger], page_size: int, names: BlockNames | None = None
    ) -> None:
        self._ledgers = ledgers
        self._names = names
        self._page_size = page_size
        self.block_tokens = math.lcm(names.grain_tokens, page_size) if names else 0
        block_pages = self.block_tokens // page_size
        self.log = KeptLog()
        self._trees = (
            [ResidencyTree(ledger, block_pages, self.log) for ledger in ledgers] if names else []
        )
        self.cut_tokens = names.cut_tokens if names else None
        self._guests = 0
        self.epoch = 0  # counts how often it was cleared: what began before is not kept either

    @property
    def on(self) -> bool:
        return self._names is not None

    @property
    def keeps_answers(self) -> bool:
        """Whether what decode steps computed is kept too."""
        return self._names is not None and self._names.grid_tokens is None

    @property
    def scheme(self) -> KeptScheme | None:
        """How blocks are named here; None where nothing stays."""
        if self._names is None:
            return None
        return KeptScheme(self._names.model, self._names.grain_tokens, self.block_tokens)

    def digest(self, purpose: bytes, *parts: str) -> bytes:
        """As `BlockNames.digest`; the same in each life of a worker whose secret is."""
        assert self._names is not None, "nothing stays"
        return self._names.digest(purpose, *parts)

    def pages(self, rank: int, name: bytes) -> tuple[int, ...]:
        """Of a block, where it is known on a rank; else none."""
        tree = self._trees[rank]
        return tree.pages((name,)) if name in tree else ()

    @property
    def kept_pages(self) -> tuple[int, ...]:
        """By rank, pages that stay and that nobody holds."""
        return tuple([ledger.idle_pages for ledger in self._ledgers])

    @property
    def trees(self) -> Sequence[ResidencyTree]:
        """By rank; none where nothing stays."""
        return self._trees

    @property
    def blocks(self) -> int:
        """Known, on all ranks."""
        return sum([len(tree) for tree in self._trees])

    @property
    def evicted_blocks(self) -> int:
        """That were given away for want of room."""
        return sum([tree.evicted_blocks for tree in self._trees])

    def guest(self) -> int:
        """An owner of pages that is no sequence: those count upwards."""
        self._guests -= 1
        return self._guests

    def hold(self, rank: int, owner: int, chain: Chain) -> tuple[int, ...]:
        """Makes `owner` hold the pages of known blocks, so that they stay until it lets go."""
        return self._trees[rank].adopt(owner, chain)

    def on_evicted(self, told: Callable[[int, bytes, int, tuple[int, ...]], None]) -> None:
        """`told` is called with the rank, the name, the index in its chain and the pages of each
        block that is given away for want of room, before anything is written there."""
        for rank, tree in enumerate(self._trees):
            tree.on_evicted = functools.partial(told, rank)

    def match(self, rank: int, chain: Chain) -> int:
        """How many blocks of the chain are known on a rank, from its first on."""
        return self._trees[rank].match(chain) if chain else 0

    def chain(self, request: Request, tokens: Sequence[int], known: Chain = ()) -> Chain:
        """The names of the full blocks of a sequence of this request's, which begin with those that
        are known."""
        if self._names is None:
            return ()
        return self._names.chain(request, tokens, self.block_tokens, known)

    def cached_tokens(self, rank: int, chain: Chain, most: int, to_compute: bool) -> int:
        """How many positions of a sequence are known on a rank, `most` at the most. `to_compute`:
        computing goes on behind them, where a chunk may begin."""
        if not chain:
            return 0
        known = min(most, self._trees[rank].match(chain) * self.block_tokens)
        return self.usable_tokens(known, to_compute)

    def usable_tokens(self, tokens: int, to_compute: bool) -> int:
        """Of so many positions from the first on, those that are whole blocks, behind which
        computing goes on if it is `to_compute`."""
        multiple = math.lcm(self.block_tokens, self.cut_tokens or 1) if to_compute else 1
        return tokens // multiple * multiple // self.block_tokens * self.block_tokens

    def held_pages(self, rank: int, chain: Chain, tokens: int) -> int:
        """Of the pages of the first `tokens` known positions, those that cost no free page."""
        return self._trees[rank].held_pages(self._first(chain, tokens)) if tokens else 0

    def reserve(
        self, rank: int, owner: int, chain: Chain, tokens: int, pages: int
    ) -> tuple[int, ...] | None:
        """Makes `owner` with `pages` pages, the first of which hold the first `tokens` positions of
        the chain; None, and no change, where there are not so many."""
        ledger = self._ledgers[rank]
        if not tokens:
            return ledger.reserve(owner, pages)
        tree, known = self._trees[rank], self._first(chain, tokens)
        if pages - tree.held_pages(known) > ledger.free_pages:
            return None
        adopted = tree.adopt(owner, known)
        return ledger.extend(owner, pages - len(adopted))

    def let_go(self, rank: int, owner: int, chain: Chain = ()) -> None:
        """`owner` is done; the blocks of `chain`, with which its pages begin, stay."""
        if chain:
            self._trees[rank].let_go(owner, chain)
        else:
            self._ledgers[rank].free(owner)

    def clear(self, rank: int | None = None) -> int:
        """Nothing that lies here is used again, on a rank or on all; returns how many blocks were
        forgotten. What sequences hold, they go on with; whoever keeps an `epoch` of before lets go
        of it without a chain."""
        self.epoch += 1
        trees = self._trees if rank is None else self._trees[rank : rank + 1]
        blocks = sum([tree.clear() for tree in trees])
        if rank is None:
            self.log.cleared()
        return blocks

    def _first(self, chain: Chain, tokens: int) -> Chain:
        return chain[: tokens // self.block_tokens]
