"""The executor of an instance's leader process, which sends all commands in the same order to the
followers and to its own part of the mesh.

Results are read in the leader process only, because tokens and checksums are replicated over the
mesh. Pulls of KV and disk commands are an exception: each process pulls, writes or reads its part,
so bytes are summed and one error fails the command. When a process fails, falls silent or ends, all
current and future commands raise `UnavailableError`. The leader's programs may then hang in a
collective, so the leader must exit at once without waiting for them."""

import asyncio
import dataclasses
from collections import deque

import msgspec

from jdisagg.errors import UnavailableError
from jdisagg.instance.followers import Followers
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.instance import Failed, Reported
from jdisagg.messages.step_commands import (
    IN_PARTS,
    NO_ROOM,
    DiskResult,
    PullResult,
    StepCommand,
    StepResult,
)
from jdisagg.scheduler.executor import Executor, MeshLimits


@dataclasses.dataclass
class _UnderWay:
    """A running command, with the processes that have not reported its end, and the reports
    received so far."""

    future: asyncio.Future[StepResult]
    missing: set[int]
    own: StepResult | None = None
    parts: list[PullResult | DiskResult] = dataclasses.field(default_factory=list)
    failed: str = ""


class BroadcastExecutor:
    """Runs commands on `local` (the leader's own executor) and on all followers. `end` is the
    leader's endpoint for KV transfers."""

    def __init__(self, local: Executor, followers: Followers, end: KvEnd | None = None) -> None:
        self.limits: MeshLimits = local.limits
        self.card: MeshCard = dataclasses.replace(local.card, ends=followers.ends(end))
        self._local = local
        self._followers = followers
        self._under_way: dict[int, _UnderWay] = {}
        # Commands that this mesh refused. The same error on all processes is no failure.
        self._raised: deque[int] = deque(maxlen=1024)
        followers.when_told(self._told)
        followers.when_failed(self._fail_all)

    def run(self, command: StepCommand) -> asyncio.Future[StepResult]:
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        if self._followers.failure:
            future.set_exception(self._followers.failure)
            return future
        number = self._followers.order(command)
        reporters = (
            set(range(1, self._followers.processes)) if isinstance(command, IN_PARTS) else set()
        )
        self._under_way[number] = _UnderWay(future, reporters)
        own = asyncio.ensure_future(self._local.run(command))
        own.add_done_callback(lambda done: self._finished(number, done))
        return future

    def close(self) -> None:
        """Frees the mesh's memory. Call after `Followers.stop`, on any thread. Does nothing if the
        instance failed, because freeing the memory may then hang."""
        if not self._followers.failure:
            self._local.close()

    def _finished(self, number: int, done: "asyncio.Future[StepResult]") -> None:
        entry = self._under_way.get(number)
        if done.cancelled() or entry is None:
            return  # the instance failed meanwhile
        if error := done.exception():
            del self._under_way[number]
            self._raised.append(number)
            if not entry.future.done():
                entry.future.set_exception(error)
        elif entry.failed:
            self._followers.fail(f"what this process could run failed on another: {entry.failed}")
        else:
            entry.own = done.result()
            self._settle(number, entry)

    def _told(self, process: int, message: Reported | Failed) -> None:
        entry = self._under_way.get(message.number)
        if isinstance(message, Reported):
            if entry is not None and isinstance(message.result, PullResult | DiskResult):
                self._came(process, entry, message.number, message.result)
            return
        what = f"process {process}, command {message.number}: {message.message}"
        if message.fatal:
            self._followers.fail(what)
        elif entry is None:
            if message.number not in self._raised:
                self._followers.fail(f"what this process could run failed on another: {what}")
        elif process in entry.missing:
            self._came(process, entry, message.number, PullResult(-1, 0, 0, message.message))
        else:
            entry.failed = what

    def _came(
        self, process: int, entry: _UnderWay, number: int, part: PullResult | DiskResult
    ) -> None:
        entry.missing.discard(process)
        entry.parts.append(part)
        self._settle(number, entry)

    def _settle(self, number: int, entry: _UnderWay) -> None:
        if entry.own is None or entry.missing:
            return
        del self._under_way[number]
        try:
            result = _whole(entry.own, entry.parts)
        except Exception as error:
            # No caller awaits this task, so an error fails the instance and thereby the command.
            self._under_way[number] = entry
            self._followers.fail(f"command {number}: its parts do not fit: {error!r}")
            return
        if not entry.future.done():
            entry.future.set_result(result)

    def _fail_all(self, error: UnavailableError) -> None:
        for entry in self._under_way.values():
            if not entry.future.done():
                entry.future.set_exception(error)
        self._under_way.clear()


def _whole(own: StepResult, others: list[PullResult | DiskResult]) -> StepResult:
    """Combines the results of all processes: for a pull or a disk command the sum of bytes, the
    first error, the blocks that all processes found, and the most missing room if only room is
    missing; for other commands the leader's own result."""
    if not isinstance(own, PullResult | DiskResult):
        return own
    parts = [own, *others]
    moved = sum([part.bytes_moved for part in parts])
    error = next((part.error for part in parts if part.error), "")
    if isinstance(own, PullResult):
        return msgspec.structs.replace(own, bytes_moved=moved, error=error)
    missing = [
        dict(part.skipped).get(NO_ROOM, 0) if isinstance(part, DiskResult) else 0
        for part in parts
        if part.error
    ]
    # A worker makes room only if nothing else is wrong in any of its processes.
    skipped = ((NO_ROOM, max(missing)),) if missing and all(missing) else own.skipped
    found = [set(part.names) for part in others if isinstance(part, DiskResult)]
    kept = [
        (name, age)
        for name, age in zip(own.names, own.ages, strict=True)
        if all(name in names for names in found)
    ]
    return msgspec.structs.replace(
        own,
        bytes_moved=moved,
        error=error,
        skipped=skipped,
        names=tuple([name for name, _ in kept]),
        ages=tuple([age for _, age in kept]),
    )
