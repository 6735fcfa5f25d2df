"""The executor of an instance's leader process, which sends all commands in the same order to the
followers and to its own part of the mesh.

Results are read in the leader process only, because tokens and checksums are replicated over the
mesh. If a process fails, ends or sends no messages, all current and future commands raise
`UnavailableError`. The leader's programs may then hang in a collective. The leader must therefore
exit at once and not wait for them."""

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
    future: asyncio.Future[StepResult]
    missing: set[int]
    own: StepResult | None = None
    parts: list[PullResult | DiskResult] = dataclasses.field(default_factory=list)
    failed: str = ""


class BroadcastExecutor:
    """Runs each command on all processes of the instance."""

    def __init__(self, local: Executor, followers: Followers, end: KvEnd | None = None) -> None:
        self.limits: MeshLimits = local.limits
        self.card: MeshCard = dataclasses.replace(local.card, ends=followers.ends(end))
        self._local = local
        self._followers = followers
        self._under_way: dict[int, _UnderWay] = {}
        # Commands that failed in this process. If they fail in all processes, the instance is not
        # broken.
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
        instance has failed, because freeing the memory could hang."""
        if not self._followers.failure:
            self._local.close()

    def _finished(self, number: int, done: "asyncio.Future[StepResult]") -> None:
        entry = self._under_way.get(number)
        if done.cancelled() or entry is None:
            return  # the instance has failed
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
            # No caller would receive an error that is raised here. The instance fails instead, and
            # with it the command.
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
    # The worker frees disk space only if no process has an error of another kind.
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
