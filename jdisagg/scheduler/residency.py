"""The prefix cache: tracks which pages of a mesh hold which blocks of KV.

`ResidencyTree` maps block names to pages of one data-parallel rank.

Some models have layers that keep recurrent state or only the KV of a sliding window. For them, a
hit also needs a snapshot of the state or of the window at the end of the cached prefix
(`scheduler/snapshots.py`, `scheduler/window_pages.py`).

Invariants (each is a test of the same name in tests/scheduler/test_residency.py):
- free_held_and_kept_pages_are_all_pages
- a_held_page_is_never_given_away
- every_kept_page_has_one_name
- a_block_holds_what_its_name_says
- namespaces_never_meet
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from jdisagg.messages.kept_blocks import KeptScheme
from jdisagg.request import Request
from jdisagg.scheduler.block_names import BlockNames, Chain, Tail, Tails
from jdisagg.scheduler.kept_log import KeptEvents, KeptLog
from jdisagg.scheduler.page_ledger import LedgerError, PageLedger, pages_for
from jdisagg.scheduler.retention import EvictionOrder, Retained, SessionBlocks
from jdisagg.scheduler.snapshots import Snapshots, wanted_snapshots


@dataclass(slots=True)
class PagedBlock:
    """A block that is cached in pages, or was until now, at this index of its sequence. `awaited`:
    whether a preempted sequence will use it again. `tail`: number of its positions if it is a tail
    (`scheduler/block_names.py`), otherwise 0."""

    rank: int
    name: bytes
    index: int
    pages: tuple[int, ...]
    awaited: bool = False
    tail: int = 0


class ResidencyTree:
    """The cached blocks of one data-parallel rank. Each block takes `block_pages` pages."""

    def __init__(
        self,
        rank: int,
        ledger: PageLedger,
        block_pages: int,
        evicted: Callable[[PagedBlock], None],
        changed: Callable[[int, bytes, bool], None],  # (rank, name, whether it was added)
        snapshots: Snapshots | None,
        retained: Retained,
    ) -> None:
        self._rank = rank
        self._ledger = ledger
        self._block_pages = block_pages
        self._blocks: dict[bytes, PagedBlock] = {}
        self._names: dict[int, bytes] = {}  # by page
        self.evicted_blocks = 0  # blocks evicted for lack of room
        self._evicted = evicted
        self._changed = changed
        self.snapshots = snapshots
        order = EvictionOrder[int](retained, self._names.__getitem__, ledger.total_pages // 2)
        ledger.on_given_away(self._given_away, order)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def match(self, chain: Chain) -> int:
        for count, name in enumerate(chain):
            if name not in self._blocks:
                return count
        return len(chain)

    def pages(self, chain: Iterable[bytes]) -> tuple[int, ...]:
        """Returns the pages of the blocks named in `chain`, all of which must be cached."""
        return tuple(page for name in chain for page in self._blocks[name].pages)

    def held_pages(self, chain: Iterable[bytes]) -> int:
        return sum([self._ledger.references(page) > 0 for page in self.pages(chain)])

    def adopt(self, owner: int, chain: Chain) -> tuple[int, ...]:
        return self._ledger.adopt(owner, self._use(chain))

    def _use(self, chain: Chain) -> tuple[int, ...]:
        for name in chain:
            self._blocks[name].awaited = False
        return self.pages(chain)

    def take(self, owner: int, chain: Chain, tail: bytes, most_pages: int) -> tuple[int, ...]:
        """Like `adopt`, with the first pages of a tail, which is cached no longer."""
        pages = self._use(chain) + self._blocks[tail].pages[:most_pages]
        self._ledger.adopt(owner, pages)
        self.drop((tail,))
        return pages

    def keep(self, owner: int, chain: Chain) -> None:
        """Caches the blocks of `chain`, which are in the first pages of `owner`. A block that is
        already cached in other pages is not cached twice."""
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
                # Two sequences diverged within this block and share its first page, which is
                # already kept for the other sequence's block.
                break
            for page in block:
                self._ledger.keep(page)
                self._names[page] = name
            self._blocks[name] = PagedBlock(self._rank, name, index, block)
            self._changed(self._rank, name, True)

    def let_go(
        self,
        owner: int,
        chain: Chain,
        awaited: bool = False,
        tail: Tail | None = None,
        tail_pages: int = 0,
    ) -> None:
        """Releases the pages of `owner`. The first pages hold the blocks of `chain`, which remain
        cached, and the `tail_pages` pages behind them hold `tail`. If a block is already cached in
        other pages, those pages stay cached and the owner's pages become free. `awaited`: whether
        the sequence will use these blocks again. They then stay longer than blocks that nobody
        waits for."""
        self.keep(owner, chain)
        if tail is not None:
            self._keep_tail(owner, chain, tail, tail_pages)
        self._ledger.free(owner)
        cached = chain[: self.match(chain)]
        # Blocks that were cached before are touched, too, so that a block is evicted after its
        # successors.
        self._ledger.touch(reversed(self.pages(cached)))
        if tail is not None and tail.name in self._blocks:
            cached = (*cached, tail.name)
        if awaited:
            for name in cached:
                self._blocks[name].awaited = True
            self._ledger.spare(self.pages(cached))

    def _keep_tail(self, owner: int, chain: Chain, tail: Tail, count: int) -> None:
        """A tail in pages of others, too, is not cached, because its next owner writes to them."""
        first, ledger = len(chain) * self._block_pages, self._ledger
        pages = ledger.pages(owner)[first : first + count]
        shared = any([ledger.references(page) > 1 or page in self._names for page in pages])
        if shared or tail.name in self._blocks or self.match(chain) < len(chain):
            return
        for page in pages:
            ledger.keep(page)
            self._names[page] = tail.name
        block = PagedBlock(self._rank, tail.name, len(chain), pages, tail=tail.tokens)
        self._blocks[tail.name] = block

    def by_last_use(self) -> Iterator[tuple[bytes, int, bool]]:
        """Yields (name, index in its sequence, whether an owner holds it) of each block in order of
        eviction. Held blocks come last."""
        idle = dict.fromkeys(self._names[page] for page in self._ledger.idle())
        for name in (*idle, *(name for name in self._blocks if name not in idle)):
            yield name, self._blocks[name].index, name not in idle

    def drop(self, names: Iterable[bytes]) -> None:
        """Caches these blocks no longer. Sequences keep their pages."""
        for name in self._blocks.keys() & names:
            block = self._blocks.pop(name)
            for page in block.pages:
                del self._names[page]
                self._ledger.keep_no_longer(page)
            self._lost(block)
            if self.snapshots is not None:
                self.snapshots.drop(name)

    def clear(self) -> int:
        blocks = len(self._blocks)
        for page in self._names:
            self._ledger.keep_no_longer(page)
        for block in self._blocks.values():
            self._lost(block)
        if self.snapshots is not None:
            self.snapshots.clear()
        self._blocks.clear()
        self._names.clear()
        return blocks

    def _given_away(self, page: int) -> tuple[int, ...]:
        block = self._blocks.pop(self._names.pop(page))
        if self.snapshots is not None:
            self.snapshots.drop(block.name)
        self._evicted(block)
        others = tuple(other for other in block.pages if other != page)
        for other in others:
            del self._names[other]
        self.evicted_blocks += 1
        self._lost(block)
        return others

    def _lost(self, block: PagedBlock) -> None:
        if not block.tail:
            self._changed(self._rank, block.name, False)


class Residency:
    """The prefix cache of one mesh; off if `names` is None.

    Args:
        snapshots: Snapshots of recurrent state or of windows of each rank, from which a hit
            continues. Empty if a hit needs none.

    Attributes:
        evicted: What `take_evicted` returns next.
        closed_until: Time until which no cached block is sent to other workers or fetched from
            them. While a reset of all workers runs, some still hold blocks that others dropped.
    """

    def __init__(
        self,
        ledgers: Sequence[PageLedger],
        page_size: int,
        names: BlockNames | None = None,
        snapshots: Sequence[Snapshots] = (),
    ) -> None:
        self._ledgers = ledgers
        self._names = names
        self.on = names is not None
        self._page_size = page_size
        self.block_tokens = math.lcm(names.grain_tokens, page_size) if names else 0
        self.log = KeptLog()
        self.retained = Retained()
        self.tails = Tails()
        self.sessions = SessionBlocks(self.log.__contains__)
        self.snapshots: tuple[Snapshots, ...] = tuple(snapshots) if names else ()
        self.trees = [self._tree(rank) for rank in range(len(ledgers))] if names else []
        self.cut_tokens = names.cut_tokens if names else None
        self._events: KeptEvents | None = None
        self.evicted: list[PagedBlock] = []
        self._guests = 0
        self._holds: dict[int, int] = {}  # ranks of the owners that `hold` made, newest last
        self.closed_until = 0.0
        self.epoch = 0  # counts clears; pages filled in an earlier epoch are not cached

    def _tree(self, rank: int) -> ResidencyTree:
        return ResidencyTree(
            rank,
            self._ledgers[rank],
            self.block_tokens // self._page_size,
            lambda one: self.evicted.append(one),
            self._changed,
            self.snapshots[rank] if self.snapshots else None,
            self.retained,
        )

    def _changed(self, rank: int, name: bytes, added: bool) -> None:
        if added:
            self.log.gained(name)
        else:
            self.log.lost(name)
        if self._events is not None:
            self._events.changed(rank, name, added)

    @property
    def keeps_answers(self) -> bool:
        return self._names is not None and self._names.grid_tokens is None

    @property
    def scheme(self) -> KeptScheme | None:
        """Parameters of this mesh's block names, for routers. They describe the worker's initial
        weights. None if the cache is off."""
        if self._names is None:
            return None
        return KeptScheme(self._names.model, self._names.grain_tokens, self.block_tokens)

    def rename(self, weights: str) -> None:
        """Uses new weights in the names of blocks from now on. The cache must have been cleared."""
        if self._names is not None:
            self._names = replace(self._names, weights=weights)

    def digest(self, purpose: bytes, *parts: str) -> bytes:
        assert self._names is not None, "nothing stays"
        return self._names.digest(purpose, *parts)

    def pages(self, rank: int, name: bytes) -> tuple[int, ...]:
        tree = self.trees[rank]
        return tree.pages((name,)) if name in tree else ()

    def demote(self, rank: int, name: bytes) -> None:
        """Lets a cached block be evicted before all others until it is used or promoted. Another
        tier has it."""
        self._ledgers[rank].demote(self.pages(rank, name))

    def promote(self, name: bytes) -> None:
        for rank, ledger in enumerate(self._ledgers):
            ledger.promote(self.pages(rank, name))

    @property
    def blocks(self) -> int:
        return sum([len(tree) for tree in self.trees])

    @property
    def evicted_blocks(self) -> int:
        return sum([tree.evicted_blocks for tree in self.trees])

    def guest(self) -> int:
        """Returns a new owner for temporary use of pages. It is a negative number, because keys of
        sequences are positive."""
        self._guests -= 1
        return self._guests

    def hold(self, rank: int, chain: Chain) -> tuple[int, tuple[int, ...]]:
        """Keeps cached blocks from eviction until `release`, or until `release_newest` needs their
        pages. Returns their temporary owner and their pages."""
        owner = self.guest()
        self._holds[owner] = rank
        return owner, self.trees[rank].adopt(owner, chain)

    def release(self, owner: int) -> None:
        """Releases the pages of an owner that `hold` made. Idempotent."""
        rank = self._holds.pop(owner, None)
        if rank is not None:
            self.let_go(rank, owner)

    def release_newest(self, rank: int) -> int | None:
        """Releases the newest hold of a rank. Returns its owner, or None if there is none."""
        owner = next((one for one in reversed(self._holds) if self._holds[one] == rank), None)
        if owner is not None:
            self.release(owner)
        return owner

    def take_evicted(self) -> list[PagedBlock]:
        """Returns the blocks that were evicted for lack of room since the last call. They can still
        be copied before the next command is issued."""
        evicted, self.evicted = self.evicted, []
        return evicted

    def report(self, pending: Callable[[], None]) -> KeptEvents | None:
        """Starts the collection of events about cached blocks, for routers of other projects.
        Returns None if the cache is off."""
        if self.on:
            self._events = KeptEvents(len(self.trees), self.block_tokens, pending)
        return self._events

    def match(self, rank: int, chain: Chain) -> int:
        return self.trees[rank].match(chain) if chain else 0

    def chain(self, request: Request, tokens: Sequence[int], known: Chain = ()) -> Chain:
        if self._names is None:
            return ()
        chain = self._names.chain(request, tokens, self.block_tokens, known)
        self.retained.asked(request, chain, self.block_tokens)
        self.sessions.noted(request, chain, self.retained.now)
        if self._events is not None:
            # Other projects' routers see only placeholder tokens and would treat different images
            # as equal.
            text = request.images[0].start // self.block_tokens if request.images else len(chain)
            self._events.named(chain[:text], min(len(known), len(chain)), tokens)
        return chain

    def tail(self, request: Request, chain: Chain, end: int, answer: Sequence[int]) -> Tail | None:
        """Returns the tail of a sequence whose full blocks are `chain` and whose KV ends at
        position `end`, or None if it is not cached. `answer`: tokens after the prompt."""
        start = len(chain) * self.block_tokens
        if self._names is None or not self.keeps_answers or end <= start:
            return None
        first = max(0, start - len(request.prompt_token_ids))
        stem = self._names.stem(request, chain, start)
        return Tail.of(stem, start, end, answer[first : end - len(request.prompt_token_ids)])

    def find_tail(
        self, request: Request, chain: Chain, end: int, answer: Sequence[int]
    ) -> Tail | None:
        """Returns a tail that begins as that of a sequence would (`tail`), or None."""
        wanted = self.tail(request, chain, end, answer)
        return wanted and self.tails.find(wanted.stem, wanted.answer)

    def cached_tokens(self, rank: int, chain: Chain, most: int, to_compute: bool) -> int:
        """Returns the number of leading positions of a sequence that a rank caches, at most `most`.
        If `to_compute` is set, the number is rounded down to a position at which a prefill chunk
        can start. If the model needs snapshots, such a position has one."""
        if not chain:
            return 0
        known = min(most, self.trees[rank].match(chain) * self.block_tokens)
        tokens = self.usable_tokens(known, to_compute)
        if to_compute and self.snapshots:
            snapshots, step = self.snapshots[rank], self.snapshot_tokens
            while tokens and self._name_at(chain, tokens) not in snapshots:
                tokens -= step
        return tokens

    def usable_tokens(self, tokens: int, to_compute: bool) -> int:
        """Rounds `tokens` down to whole blocks. If `to_compute` is set, rounds down to a position
        at which a prefill chunk may start."""
        multiple = self.snapshot_tokens if to_compute else self.block_tokens
        return tokens // multiple * multiple

    def held_pages(self, rank: int, chain: Chain, tokens: int) -> int:
        return self.trees[rank].held_pages(self._first(chain, tokens)) if tokens else 0

    def reserve(
        self, rank: int, owner: int, chain: Chain, tokens: int, pages: int, tail: bytes = b""
    ) -> tuple[int, ...] | None:
        """Creates `owner` with `pages` pages. The first of them hold the first `tokens` positions
        of the chain, which are cached, and then those of `tail`, if it is in pages of the rank.
        Returns the pages, or None if too few are free. Then nothing changes."""
        ledger = self._ledgers[rank]
        if not tokens and not tail:
            return ledger.reserve(owner, pages)
        tree, known = self.trees[rank], self._first(chain, tokens)
        if pages - tree.held_pages(known) > ledger.free_pages:
            return None
        if tail in tree:
            adopted = tree.take(owner, known, tail, pages - len(tree.pages(known)))
        else:
            adopted = tree.adopt(owner, known)
        return ledger.extend(owner, pages - len(adopted))

    def keep(self, rank: int, owner: int, chain: Chain) -> None:
        """Caches the blocks of `chain` while `owner` still holds the pages. Commands that were
        already issued write the KV of the blocks to the owner's first pages."""
        if chain:
            self.trees[rank].keep(owner, chain)

    def let_go(
        self,
        rank: int,
        owner: int,
        chain: Chain = (),
        awaited: bool = False,
        tail: Tail | None = None,
    ) -> None:
        if tail is not None:
            self.tails.add(tail)
        if chain or tail is not None:
            tail_pages = pages_for(tail.tokens, self._page_size) if tail else 0
            self.trees[rank].let_go(owner, chain, awaited, tail, tail_pages)
        else:
            self._ledgers[rank].free(owner)
        self.settle_snapshots(rank, owner, chain)

    # ---- snapshots, of models that need them

    @property
    def snapshot_tokens(self) -> int:
        """Number of tokens at whose multiples snapshots are made. After a cache hit, a prefill
        chunk may start only at such a multiple."""
        return math.lcm(self.block_tokens, self.cut_tokens or 1)

    def use_snapshot(self, rank: int, chain: Chain, tokens: int) -> tuple[int, ...]:
        """Records that a sequence continues after the first `tokens` cached positions. Returns the
        pages or slot (`Snapshots.place`) of the snapshot there. The commands that read it must be
        issued immediately."""
        return self.snapshots[rank].use(self._name_at(chain, tokens))

    def wanted_snapshots(
        self, rank: int, chain: Chain, tokens: int, cached_tokens: int
    ) -> tuple[int, ...]:
        if not self.snapshots or not chain:
            return ()
        matched = self.trees[rank].match(chain) * self.block_tokens
        found = wanted_snapshots(tokens, cached_tokens, matched, self.snapshot_tokens)
        return tuple([at for at in found if self._name_at(chain, at) not in self.snapshots[rank]])

    def begin_snapshot(
        self, rank: int, owner: int, tokens: int, rolling: bool = False
    ) -> int | None:
        return self.snapshots[rank].begin(owner, tokens, rolling) if self.snapshots else None

    def begin_all_snapshots(self, rank: int, owner: int, cached: int, tokens: int) -> None:
        if self.snapshots:
            self.snapshots[rank].begin_all(owner, cached, tokens, self.snapshot_tokens)

    def release_root(self, rank: int, owner: int, heir: int | None) -> None:
        """Releases the pages of `owner`, which the sequences of a group share. The snapshots of
        `owner` then belong to the sequence `heir`. If `heir` is None, they are dropped."""
        self._ledgers[rank].free(owner)
        if self.snapshots and heir is not None:
            self.snapshots[rank].pass_on(owner, heir)
        else:
            self.settle_snapshots(rank, owner)

    def settle_snapshots(
        self, rank: int, owner: int, chain: Chain = (), goes_on: bool = False
    ) -> None:
        """Caches the snapshots of `owner` at the ends of blocks of `chain`. Drops its others, if
        it does not go on after the chain."""
        if not self.snapshots:
            return
        tree, size = self.trees[rank], self.block_tokens

        def name_at(tokens: int) -> bytes | None:
            known = tokens <= len(chain) * size and chain[tokens // size - 1] in tree
            return self._name_at(chain, tokens) if known else None

        most = len(chain) * size if goes_on else None
        self.snapshots[rank].settle(owner, name_at, most)

    def _name_at(self, chain: Chain, tokens: int) -> bytes:
        return chain[tokens // self.block_tokens - 1]

    def clear(self, rank: int | None = None, closed_until: float = 0.0) -> int:
        """Drops all blocks of a rank, or of all ranks if `rank` is None, and returns their number.
        Sequences keep their pages. Sequences from an earlier `epoch` must pass an empty chain to
        `let_go`, so that their blocks are not cached."""
        self.epoch += 1
        self.closed_until = max(self.closed_until, closed_until)
        self.evicted = [one for one in self.evicted if rank not in (None, one.rank)]
        trees = self.trees if rank is None else self.trees[rank : rank + 1]
        blocks = sum([tree.clear() for tree in trees])
        if rank is None:
            self.log.cleared()
            self.sessions.clear()
            self.tails.clear()
            if self._events is not None:
                self._events.cleared()
        return blocks

    def drop(self, names: AbstractSet[bytes]) -> None:
        """Drops these blocks with their retention. No tier copies them."""
        for tree in self.trees:
            tree.drop(names)
        for name in names:
            self.tails.forget(name)
        for of_rank in self.snapshots:
            of_rank.take_evicted()
        self.evicted = [one for one in self.evicted if one.name not in names]
        self.retained.forget(names)

    def _first(self, chain: Chain, tokens: int) -> Chain:
        return chain[: tokens // self.block_tokens]
