"""The host-memory tier of a mesh: copies out blocks whose pages are given away, and brings them
back for prompts that would compute them again.

How pieces go and come is `worker/host_pieces.py`'s; here is what becomes of blocks. Copying out
takes its place in the mesh's order at the moment when the pages are given away, so before anything
is written there; a bounded number of blocks is on its way, and what is beyond it is computed again
one day. What comes back goes into pages of its own, is read back and summed, and is kept there like
any block; one whose sum differs is forgotten, a miss.

Nothing waits for a copy but the prompt that wants it, and that no longer than computing would
take. What lies on disk (`worker/disk_tier.py`) comes back through host memory, and went there."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from jdisagg.errors import JdisaggError
from jdisagg.messages.step_commands import SLOW, ExtractResult, StepResult
from jdisagg.messages.worker_status import KeptTier
from jdisagg.plain import plain
from jdisagg.scheduler.brought_blocks import BroughtBlocks, Origin
from jdisagg.scheduler.disk_blocks import DiskBlock, sources, worth_bringing
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.host_blocks import (
    MOST_WRITING,
    HostBlock,
    HostBlocks,
    HostPiece,
    RestorePrices,
    TierRoom,
)
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.background import BackgroundTasks
from jdisagg.worker.disk_tier import DiskRoom, DiskTier
from jdisagg.worker.host_pieces import HostPieces
from jdisagg.worker.outgoing_kv import offers_of_pages
from jdisagg.worker.step_loop import StepLoop

BLOCKS_AT_ONCE = 4  # on their way back, of one prompt
MOST_RESTORES = 4  # prompts


@plain
class Turn:
    """A block's on its way back: which of its chain it is, and when nobody waits any more."""

    index: int
    given_up: asyncio.Event


@plain
class RestorePlan:
    """The first `tokens` of a chain, which are to be known on a rank."""

    rank: int
    chain: Chain
    tokens: int


class HostTier:
    """`kept`: what stays in the mesh's pages. `ids`: fresh random numbers."""

    def __init__(
        self,
        kept: Residency,
        loop: StepLoop,
        limits: MeshLimits,
        room: TierRoom,
        ids: Callable[[], int],
        counters: Counters,
        now: Callable[[], float],
    ) -> None:
        self._block_bytes = block_bytes = kept.block_tokens * limits.kv_spec.bytes_per_token
        self.blocks = HostBlocks(room.host_bytes // block_bytes if block_bytes else 0)
        self.prices = RestorePrices(room.always)
        self._kept = kept
        self._loop = loop
        self._limits = limits
        self._ids = ids
        self._counters = counters
        self._tasks = BackgroundTasks()
        self._copies: dict[bytes, asyncio.Task[None]] = {}  # on their way out
        self._restores = 0
        self.disk = DiskTier(
            kept,
            loop,
            self._copied,
            counters,
            DiskRoom(
                room.disk_bytes if self.on else 0,
                block_bytes,
                self._geometry(),
                room.disk_ttl_seconds,
            ),
            now,
        )
        key = 0
        if self.on:
            # the same in the next life, which reads what is on disk; nobody else reads the sums
            key = int.from_bytes(kept.digest(b"jdisagg sums")[:8], "little") >> 1
            kept.on_evicted(self._copy_out)
        self._pieces = HostPieces(loop, limits.page_size, key)

    @property
    def on(self) -> bool:
        return self.blocks.capacity > 0

    @property
    def quiet(self) -> bool:
        """Nothing is on its way."""
        return self._tasks.quiet and self.disk.quiet

    def kept_tiers(self) -> tuple[KeptTier, ...]:
        """What lies here and on disk; nothing where it is not on."""
        if not self.on:
            return ()
        host, size = self.blocks, self._block_bytes
        here = KeptTier("host", len(host), len(host) * size, host.capacity * size)
        return (here, *self.disk.kept_tiers())

    async def start(self) -> None:
        await self.disk.start()

    def clear(self) -> tuple[int, int]:
        """Nothing that lies here or on disk is used again; returns how many blocks there were.
        Before the pages are cleared, with which a new epoch begins."""
        gone = self.blocks.clear()
        for block in gone:
            if block.written:
                self._kept.log.lost(block.name)
        self._release(gone)
        return len(gone), self.disk.clear()

    def stop(self) -> None:
        self._tasks.cancel()
        self.disk.stop()

    def _geometry(self) -> str:
        """How a block is cut into pieces."""
        if not self.on:
            return ""
        offers = offers_of_pages(self._limits, 0, 0, self._kept.block_tokens, int)
        cuts = [(o.group, o.groups, o.start, o.valid_tokens, o.block_tokens) for o in offers]
        return f"blocks of {self._kept.block_tokens} tokens as {cuts}"

    # ---- out

    def _copy_out(self, rank: int, name: bytes, index: int, pages: tuple[int, ...]) -> None:
        """The pages of the block that is the `index`-th of its chain are given away."""
        if self._loop.failure is not None or name in self.blocks:
            return
        if self.blocks.writing >= MOST_WRITING:
            self._counters.add("host_blocks_skipped")
            return
        size, tokens = self._limits.page_size, self._kept.block_tokens
        start = index * tokens
        offers = list(offers_of_pages(self._limits, rank, start, start + tokens, self._ids))
        pieces = tuple(map(HostPiece, offers))
        block, gone = self.blocks.begin(name, pieces)
        self._drop(gone, "room")
        if block is None:
            return
        before = (0,) * (start // size)  # pages of the chain's beginning, which are not read
        copies = [self._pieces.copy_out(offer, (*before, *pages)) for offer in offers]
        task = self._copies[name] = self._tasks.spawn(self._written(block, copies))
        task.add_done_callback(lambda _: self._copied_out(name, task))

    def _copied_out(self, name: bytes, task: "asyncio.Task[None]") -> None:
        if self._copies.get(name) is task:
            del self._copies[name]

    async def _copied(self, rank: int, name: bytes, index: int) -> HostBlock | None:
        """A block in host memory, copied there if it is known in pages alone; None: it is not
        there."""
        pages = self._kept.pages(rank, name)
        if pages:
            self._copy_out(rank, name, index, pages)
        if (task := self._copies.get(name)) is not None:
            await asyncio.wait({task})
        return self.blocks.arrived(name)

    async def _written(self, block: HostBlock, copies: "list[asyncio.Future[StepResult]]") -> None:
        try:
            results = await asyncio.gather(*copies)
        except JdisaggError:
            if self.blocks.forget(block):
                self._counters.add("host_blocks_failed")
                self._release((block,))
            return
        sums = [one.checksum.checksum for one in results if isinstance(one, ExtractResult)]
        pieces = tuple(
            [replace(piece, checksum=sum_) for piece, sum_ in zip(block.pieces, sums, strict=True)]
        )
        if self.blocks.written(block, pieces):
            self._counters.add("host_blocks_written")
            self._kept.log.gained(block.name)

    # ---- back

    def worth(self, rank: int, chain: Chain, most_tokens: int) -> int:
        """How many tokens of a sequence would be known on a rank with what lies here; 0: nothing
        here is worth bringing back."""
        if not self.on or not chain or self._restores >= MOST_RESTORES:
            return 0
        size = self._kept.block_tokens
        self.disk.expire()
        chain = chain[: most_tokens // size]
        known = self._kept.match(rank, chain)
        found = sources(chain[known:], self.blocks, self.disk.blocks)
        worth = worth_bringing(found, size, self.prices)
        return (known + worth) * size if worth else 0

    def bring_back(
        self,
        wanted: RestorePlan,
        now: Callable[[], float],
        brought: BroughtBlocks,
        done: Callable[[], None],
    ) -> None:
        """Begins `restore`. `done` is called once: when it is over, or when computing would be;
        then nothing more is read from disk, whose pages others could use. What has come is written
        down in `brought`."""
        told, given_up = False, asyncio.Event()

        def tell() -> None:
            nonlocal told
            if not told:
                told = True
                done()

        async def bring() -> None:
            known = self._kept.match(wanted.rank, wanted.chain) * self._kept.block_tokens
            patience = self.prices.patience_seconds(wanted.tokens - known)
            timer = None
            if patience is not None:
                timer = asyncio.get_running_loop().call_later(patience, late)
            try:
                await self.restore(wanted, now, brought, given_up)
            except JdisaggError:
                self._counters.add("host_restores_failed")
            finally:
                if timer is not None:
                    timer.cancel()
                tell()

        def late() -> None:
            if not told:
                self._counters.add("host_restores_late")
            given_up.set()
            tell()

        self._tasks.spawn(bring())

    async def restore(
        self,
        wanted: RestorePlan,
        now: Callable[[], float],
        brought: BroughtBlocks,
        given_up: asyncio.Event,
    ) -> int:
        """Brings the first tokens of a chain into pages, those that are not known there; returns
        how many are. How many are `wanted` is what `worth` said, just now. From disk nothing comes
        once it is `given_up`."""
        size, page_size = self._kept.block_tokens, self._limits.page_size
        rank, chain = wanted.rank, wanted.chain[: wanted.tokens // size]
        self.disk.expire()
        known = self._kept.match(rank, chain)
        found = sources(chain[known:], self.blocks, self.disk.blocks)
        chain = chain[: known + len(found)]
        names = tuple(zip(chain[known:], found, strict=True))
        blocks = self.blocks.hold(tuple([name for name, on_disk in names if not on_disk]))
        saved = [self.disk.blocks.hold(name) for name, on_disk in names if on_disk]
        owner, back, count = self._kept.guest(), known, len(chain) * size // page_size
        pages = self._kept.reserve(rank, owner, chain, known * size, count)
        if pages is None:
            self.blocks.let_go(blocks)
            self.disk.blocks.let_go(saved)
            return known * size
        epoch, began = self._kept.epoch, now()
        self._restores += 1
        held = {block.name: block for block in (*blocks, *saved)}
        try:
            slots = asyncio.Semaphore(BLOCKS_AT_ONCE)
            came = await asyncio.gather(
                *(
                    self._back(held[name], rank, pages, slots, Turn(known + at, given_up))
                    for at, (name, _) in enumerate(names)
                )
            )
            back += next((at for at, one in enumerate(came) if not one), len(came))
        finally:
            self._restores -= 1
            self.blocks.let_go(blocks)
            self.disk.blocks.let_go(saved)
            fresh = epoch == self._kept.epoch
            self._kept.let_go(rank, owner, chain[:back] if fresh else ())
            if fresh:
                came_from: list[Origin] = ["disk" if disk else "host" for disk in found]
                brought.add(rank, known, came_from[: back - known])
        # what was given up would have taken longer still
        seconds = (now() - began) * (2 if given_up.is_set() and back < len(chain) else 1)
        self._count(found, back - known, seconds)
        return back * size if fresh else 0

    def _count(self, found: tuple[bool, ...], back: int, seconds: float) -> None:
        """Of these blocks, from disk or from host memory, the first `back` came."""
        size, on_disk = self._kept.block_tokens, sum(found)
        # a disk that fails slowly is dear, too
        tokens = (len(found) if on_disk else back) * size
        self.prices.restored_in(tokens, seconds, on_disk * size)
        read = sum(found[:back])
        self._counters.add("host_blocks_restored", back - read)
        self._counters.add("host_tokens_restored", (back - read) * size)
        self._counters.add("disk_blocks_restored", read)
        self._counters.add("disk_tokens_restored", read * size)

    async def _back(
        self,
        block: HostBlock | DiskBlock,
        rank: int,
        pages: tuple[int, ...],
        slots: asyncio.Semaphore,
        turn: Turn,
    ) -> bool:
        """Whether a block is in its pages, as it was when it was copied out."""
        async with slots:
            if isinstance(block, HostBlock):
                return await self._from_host(block, rank, pages)
            loaded = await self._load(block, rank, turn)
            if loaded is None:
                return False
            try:
                intact = await self._from_host(loaded, rank, pages)
            finally:
                self.blocks.let_go((loaded,))
            if not intact:
                self.disk.forget(block)
            return intact

    async def _load(self, block: DiskBlock, rank: int, turn: Turn) -> HostBlock | None:
        """Reads a block from disk into host memory, where it is held from then on."""
        tokens = self._kept.block_tokens
        start = turn.index * tokens
        offers = offers_of_pages(self._limits, rank, start, start + tokens, self._ids)
        pieces = tuple(map(HostPiece, offers))
        loading, gone = self.blocks.begin(block.name, pieces)
        self._drop(gone, "room")
        if loading is None:
            return None
        arrived = False
        try:
            read = await self.disk.load(block, turn.index, loading.offer_ids, turn.given_up)
            if read.error == SLOW:
                turn.given_up.set()  # what comes behind it would be of no use
            elif not read.error:
                sums = zip(pieces, read.checksums, strict=True)
                pieces = tuple([replace(piece, checksum=sum_) for piece, sum_ in sums])
                arrived = self.blocks.written(loading, pieces)
        finally:
            if not arrived and self.blocks.forget(loading):
                self._release((loading,))
        if not arrived:
            return None
        self._kept.log.gained(block.name)
        (held,) = self.blocks.hold((block.name,))
        return held

    async def _from_host(self, block: HostBlock, rank: int, pages: tuple[int, ...]) -> bool:
        if await self._pieces.bring_back(block.pieces, rank, pages):
            return True
        if self.blocks.forget(block):
            self._counters.add("host_blocks_broken")
            self._drop((block,), "broken")
        return False

    # ---- gone

    def _drop(self, gone: tuple[HostBlock, ...], cause: str) -> None:
        if gone:
            self._counters.add("host_blocks_dropped", len(gone), cause=cause)
            for block in gone:
                self._kept.log.lost(block.name)
            self._release(gone)

    def _release(self, gone: tuple[HostBlock, ...]) -> None:
        self._pieces.release(tuple([offer_id for block in gone for offer_id in block.offer_ids]))
