"""The disk tier of a mesh, behind its host memory: blocks that are used a second time are written
to disk, and come back into host memory for prompts that would compute them again, in this life of
the worker or in a later one.

The files are the executor's (`transfer/disk_store.py`); here are the commands, and what became of
them. What lies on disk is known by the names of blocks, which are the same as long as the secret
is. A disk that fails, in whatever way, is counted (`disk_errors`), and what was to be there is
computed. Only `reset` raises: what it cannot remove would be served after a restart."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.messages.step_commands import (
    SLOW,
    DiskCommand,
    DiskResult,
    FindSaved,
    LoadBlock,
    RemoveSaved,
    SaveBlock,
    StepResult,
)
from jdisagg.messages.worker_status import KeptTier
from jdisagg.plain import plain
from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES, DiskBlock, DiskBlocks
from jdisagg.scheduler.host_blocks import HostBlock
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.background import BackgroundTasks
from jdisagg.worker.step_loop import StepLoop

FILE_SECONDS = 10.0  # for a block; then the disk is not what it should be
FIND_SECONDS = 600.0  # to look at what lies there
START_SECONDS = 5.0  # for which a start waits for that
RESET_SECONDS = 60.0

Copied = Callable[[int, bytes, int], Awaitable[HostBlock | None]]


@plain
class DiskRoom:
    """`bytes_`: of all files; `block_bytes`: of each block; `geometry`: how a block lies. What was
    written `ttl_seconds` ago is not used any more; 0: whenever it was."""

    bytes_: int
    block_bytes: int
    geometry: str
    ttl_seconds: float = 0.0


class DiskTier:
    """`copied` gives a block of a rank, by name and index in its chain, as it lies in host memory,
    if it does or can be copied there."""

    def __init__(
        self,
        kept: Residency,
        loop: StepLoop,
        copied: Copied,
        counters: Counters,
        room: DiskRoom,
        now: Callable[[], float],
    ) -> None:
        self._file_bytes = room.block_bytes + FILE_EXTRA_BYTES
        self.blocks = DiskBlocks(room.bytes_ // self._file_bytes if kept.on else 0)
        self._kept = kept
        self._loop = loop
        self._copied = copied
        self._counters = counters
        self._room = room
        self._now = now
        self._open = False
        self._epoch = 0  # of what was found and what was cleared
        self._tasks = BackgroundTasks()

    @property
    def on(self) -> bool:
        return self.blocks.capacity > 0

    @property
    def quiet(self) -> bool:
        return self._tasks.quiet

    def kept_tiers(self) -> tuple[KeptTier, ...]:
        """What lies here; nothing where it is not on."""
        if not self.on:
            return ()
        blocks, size = self.blocks, self._file_bytes
        return (KeptTier("disk", len(blocks), len(blocks) * size, blocks.capacity * size),)

    async def start(self) -> None:
        """Looks at what lies there; what takes longer than a start may is found meanwhile."""
        if self.on:
            await asyncio.wait({self._tasks.spawn(self._find())}, timeout=START_SECONDS)

    def stop(self) -> None:
        self._tasks.cancel()

    async def _find(self) -> None:
        epoch = self._epoch
        namespace = self._kept.digest(b"jdisagg disk", self._room.geometry)
        found = await self._run(FindSaved(self._loop.next_number(), namespace, FIND_SECONDS))
        for cause, count in found.skipped:
            self._counters.add("disk_errors", count, cause=cause)
        if found.error:
            return
        self._open = True
        if epoch == self._epoch:
            now = self._now()
            written_at = [now - age for age in found.ages]
            stay, gone = self.blocks.found(dict(zip(found.names, written_at, strict=True)))
            for name in stay:
                self._kept.log.gained(name)
            self._counters.add("disk_blocks_found", len(stay))
            self._remove(gone, "room")
            self.expire()

    # ---- out

    def use(self, rank: int, chain: Chain) -> None:
        """A prompt begins with these blocks, which are known on the rank."""
        if self._open:
            self._counters.add("disk_blocks_skipped", self.blocks.use(rank, chain))
            self._write_more()

    def _write_more(self) -> None:
        while self._loop.failure is None:
            block, gone = self.blocks.take()
            self._gone(gone, "room")
            if block is None:
                return
            self._tasks.spawn(self._write(block))

    async def _write(self, block: DiskBlock) -> None:
        error, done = "", False
        try:
            host = await self._copied(block.rank, block.name, block.index)
            if host is not None and self.blocks.knows(block):
                saved = await self._run(
                    SaveBlock(
                        self._loop.next_number(),
                        block.name,
                        block.index,
                        host.offer_ids,
                        tuple([piece.checksum for piece in host.pieces]),
                        FILE_SECONDS,
                    )
                )
                error = saved.error
                if not error and self.blocks.written(block, self._now()):
                    done = True
                    self._counters.add("disk_blocks_written")
                    self._counters.add("disk_bytes_written", saved.bytes_moved)
                    self._kept.log.gained(block.name)
                elif error == SLOW:
                    self._remove_files((block.name,))  # if it is written all the same
        finally:
            if not done and self.blocks.not_written(block, bool(error)) and not error:
                self._counters.add("disk_blocks_skipped")
        self._write_more()

    # ---- back

    async def load(
        self, block: DiskBlock, index: int, offer_ids: tuple[int, ...], given_up: asyncio.Event
    ) -> DiskResult:
        """Reads a block that is held into host memory; one that is not what was written is
        forgotten. A disk that is only slow keeps it, and so does one that nobody waits for any
        more."""
        command = LoadBlock(self._loop.next_number(), block.name, index, offer_ids, FILE_SECONDS)
        if given_up.is_set():
            return DiskResult(command.step, SLOW)
        reading = asyncio.ensure_future(self._run(command))
        giving_up = asyncio.ensure_future(given_up.wait())
        try:
            await asyncio.wait({reading, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return DiskResult(command.step, SLOW)
        finally:
            reading.cancel()  # what comes all the same is dropped
            giving_up.cancel()
        read = reading.result()
        if not read.error:
            self._counters.add("disk_blocks_read")
            self._counters.add("disk_bytes_read", read.bytes_moved)
        elif read.error != SLOW:
            self.forget(block)
        return read

    def forget(self, block: DiskBlock) -> None:
        """It is not what was written."""
        if self.blocks.forget(block):
            self._gone((block.name,), "broken")

    # ---- gone

    def expire(self) -> None:
        """What was written too long ago is not used any more, and removed."""
        if self._room.ttl_seconds:
            self._gone(self.blocks.expire(self._now() - self._room.ttl_seconds), "expired")

    def clear(self) -> int:
        """Nothing that lies there is used again; returns how many blocks there were."""
        self._epoch += 1
        gone = self.blocks.clear()
        for block in gone:
            if block.written:
                self._kept.log.lost(block.name)
        return len(gone)

    async def empty(self) -> None:
        """Removes what was cleared. Raises UnavailableError where it still lies there."""
        command = RemoveSaved(self._loop.next_number(), (), RESET_SECONDS, everything=True)
        removed = await self._run(command)
        if removed.error:
            raise UnavailableError(
                f"KV on disk could not be removed ({removed.error}), and would be used again after"
                " a restart; empty the folder of --disk_cache_dir, or mend the disk and reset again"
            )

    def empty_later(self) -> None:
        """As `empty`, which nobody waits for."""

        async def empty() -> None:
            with contextlib.suppress(UnavailableError):  # counted
                await self.empty()

        self._tasks.spawn(empty())

    def _gone(self, names: Iterable[bytes], cause: str) -> None:
        """They are not known any more."""
        names = tuple(names)
        for name in names:
            self._kept.log.lost(name)
        self._remove(names, cause)

    def _remove(self, names: tuple[bytes, ...], cause: str) -> None:
        if names:
            self._counters.add("disk_blocks_dropped", len(names), cause=cause)
            self._remove_files(names)

    def _remove_files(self, names: tuple[bytes, ...]) -> None:
        command = RemoveSaved(self._loop.next_number(), names, RESET_SECONDS)
        running = self._begin(command)  # before whatever is written there later

        async def remove() -> None:
            await self._end(command, running)

        self._tasks.spawn(remove())

    # ---- the commands

    async def _run(self, command: DiskCommand) -> DiskResult:
        return await self._end(command, self._begin(command))

    def _begin(self, command: DiskCommand) -> "asyncio.Future[StepResult] | None":
        """It takes its place now. None: the mesh is broken, and its disk with it."""
        try:
            return self._loop.submit(command)
        except JdisaggError:
            return None

    async def _end(
        self, command: DiskCommand, running: "asyncio.Future[StepResult] | None"
    ) -> DiskResult:
        result: StepResult = DiskResult(command.step, "mesh")
        if running is not None:
            with contextlib.suppress(JdisaggError):
                result = await asyncio.shield(running)
        assert isinstance(result, DiskResult)
        if result.error:
            self._counters.add("disk_errors", cause=result.error)
        return result
