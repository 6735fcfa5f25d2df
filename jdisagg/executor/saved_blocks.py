"""Runs the disk commands of one mesh, which copy blocks from host memory to files and back.

Called on the dispatch thread. The threads of the disk store read and write the files
(`transfer/disk_store.py`). A command fails at its deadline."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b

import jax
import numpy as np

from jdisagg import __version__ as VERSION
from jdisagg.clock import MonotonicClock
from jdisagg.messages.step_commands import (
    SLOW,
    DiskCommand,
    DiskResult,
    FindSaved,
    LoadBlock,
    RemoveSaved,
    SaveBlock,
)
from jdisagg.transfer.block_file import FORMAT, GONE, SavedArray
from jdisagg.transfer.disk_store import DiskOutcome, DiskStore
from jdisagg.transfer.host_store import HostStore, Shards


@dataclass
class DiskReading:
    """The result of a disk command in progress. The command fails at the time `until`, or when
    `closed` is set."""

    step: int
    done: "Future[DiskOutcome]"
    now: Callable[[], float]
    until: float
    closed: threading.Event
    in_order: bool = False

    def is_ready(self) -> bool:
        return self.done.done() or self.now() >= self.until or self.closed.is_set()

    def result(self) -> DiskResult:
        if not self.done.done():
            return DiskResult(self.step, SLOW)
        came = self.done.result()
        return DiskResult(
            self.step, came.error, came.names, came.ages, came.checksums, came.skipped, came.bytes
        )


class SavedBlocks:
    """The KV blocks of one mesh on disk. The blocks are stored under a namespace that includes the
    number of head shards, the process's place in the instance, and the versions of the software
    that computes KV, because other versions may round differently.

    Args:
        part: Text that identifies this process's part of each block, or "" if one process holds
            whole blocks.
    """

    def __init__(
        self, directory: str, name: str, host: HostStore, shards: int, part: str = ""
    ) -> None:
        self._disk = DiskStore(directory, name) if directory else None
        self._host = host
        self._laid_out = f"{shards} {jax.__version__} {jax.default_backend()} {VERSION}{part}"
        self._clock = MonotonicClock()
        self._closed = threading.Event()

    def issue(self, command: DiskCommand) -> DiskReading:
        until = self._clock.now() + command.deadline_seconds
        return DiskReading(command.step, self._begin(command), self._clock.now, until, self._closed)

    def close(self) -> None:
        """Fails running commands, so that a disk that does not respond does not delay the
        executor's shutdown."""
        self._closed.set()
        if self._disk is not None:
            self._disk.close()

    def _begin(self, command: DiskCommand) -> "Future[DiskOutcome]":
        if self._disk is None:
            return _ended(GONE)
        match command:
            case FindSaved():
                laid_out = command.namespace + self._laid_out.encode()
                return self._disk.find(blake2b(laid_out, digest_size=32).digest())
            case SaveBlock():
                shards = [self._host.shards(offer_id) for offer_id in command.offer_ids]
                pieces = [one for one in shards if one]
                if len(pieces) < len(shards):
                    return _ended(GONE)
                return self._disk.write(
                    command.name, command.index, lambda: _arrays(pieces), command.checksums
                )
            case LoadBlock():
                return self._load(self._disk, command)
            case RemoveSaved():
                if command.everything:
                    return self._disk.remove_all()
                return self._disk.remove(command.names)

    def _load(self, disk: DiskStore, command: LoadBlock) -> "Future[DiskOutcome]":
        for offer_id in command.offer_ids:
            self._host.expect(offer_id)
        loaded: Future[DiskOutcome] = Future()

        def arrived(read: "Future[DiskOutcome]") -> None:
            came = read.result()
            pieces: list[Shards] = [{} for _ in command.offer_ids]
            fits = len(came.checksums) == len(pieces) and all(
                0 <= one.piece < len(pieces) for one in came.arrays
            )
            if not came.error and not fits:
                came = DiskOutcome(FORMAT)
            if not came.error:
                for one in came.arrays:
                    pieces[one.piece][one.box] = one.array
                for offer_id, shards in zip(command.offer_ids, pieces, strict=True):
                    self._host.deliver(offer_id, shards)
            loaded.set_result(came)

        disk.read(command.name, command.index).add_done_callback(arrived)
        return loaded


def _arrays(pieces: Sequence[Shards]) -> list[SavedArray]:
    """Copies only if the host memory is pinned."""
    with jax.transfer_guard_device_to_host("allow"):
        return [
            SavedArray(number, box, np.asarray(array))
            for number, boxes in enumerate(pieces)
            for box, array in boxes.items()
        ]


def _ended(error: str) -> "Future[DiskOutcome]":
    future: Future[DiskOutcome] = Future()
    future.set_result(DiskOutcome(error))
    return future
