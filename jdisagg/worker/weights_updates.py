"""Updates the weights of a running worker, and lets it sleep. Implements `WeightsPort`.

New weights are read while the mesh serves. A command in the mesh's order then replaces the old
weights. In the same turn of the event loop, sequences that must not mix weights end as preempted,
cached KV is dropped in all tiers, and the names of later KV change. So no step is planned between
these changes."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from jdisagg.clock import limit, to_the_end, turn
from jdisagg.errors import DeadlineExceededError, InvalidRequestError
from jdisagg.messages.step_commands import (
    NO_ROOM,
    DiskResult,
    DropWeights,
    OfferWeights,
    PutWeights,
    ReadWeights,
    SleepMesh,
    WakeMesh,
)
from jdisagg.messages.weights import (
    CommitCall,
    OfferName,
    SleepCall,
    StageCall,
    StagedWeights,
    fingerprint_of,
    identity_of,
)
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.telemetry import Counters
from jdisagg.worker.step_loop import StepLoop

LOOK_SECONDS = 0.01
MAX_VERSION_BYTES = 128
# Lease of staged weights, as a multiple of the time limit of the call that staged them. Reading and
# the drain may each take up to this limit.
STAGED_TIMES = 3
SLEEP_LEVELS = (1, 2)
MAX_LEASE_SECONDS, OFFER_SECONDS = 3600.0, 30.0


@dataclass(slots=True)
class ServedWeights:
    """The weights that a worker serves. They stay the same when the worker changes its role.
    `identity`: identity of the weights; "" for the initial weights."""

    identity: str = ""
    folder: str = ""
    start_folder: str = ""

    def become(self, identity: str, folder: str) -> None:
        self.identity, self.folder = identity, folder


@dataclass(frozen=True, slots=True)
class _Staged:
    number: int
    identity: str
    folder: str
    until: float


class WorkerOfWeights(Protocol):
    """The interface of a worker that weight updates and sleep need."""

    name: str

    def forget_weights(self, keep: bool, identity: str) -> None:
        """Ends sequences and hand-offs, drops cached KV, and uses `identity` in the names of later
        KV. If `keep` is set, sequences that decode continue."""
        ...

    def at_rest(self) -> bool:
        """Returns whether no sequence, hand-off or copy of KV is left."""
        ...

    async def status(self) -> WorkerStatus: ...


class WeightsUpdates:
    def __init__(
        self,
        worker: WorkerOfWeights,
        served: ServedWeights,
        loop: StepLoop,
        counters: Counters,
        now: Callable[[], float],
    ) -> None:
        self.served = served
        self.asleep = False
        self._worker, self._loop, self._counters, self._now = worker, loop, counters, now
        self._staged: _Staged | None = None
        self._dropped = False  # whether the sleeping mesh has no weights
        self._reading = False
        self._changing = asyncio.Lock()

    # ---- new weights

    async def stage_weights(self, call: StageCall) -> StagedWeights:
        if not call.folder:
            raise InvalidRequestError("weights: folder must not be empty; name a checkpoint folder")
        if "@" in call.version or len(call.version.encode()) > MAX_VERSION_BYTES:
            raise InvalidRequestError(
                f"weights: version {call.version[:80]!r} must have at most {MAX_VERSION_BYTES}"
                " bytes and no '@'; choose a shorter one"
            )
        async with self._turn("the reading of weights", call.deadline_seconds):
            self._staged = None
            number, content, nbytes = await self._read(call.folder, call.deadline_seconds)
            if not content:
                return StagedWeights("", missing_bytes=nbytes)
            identity = identity_of(call.version, content)
            if identity == self.served.identity:
                self._drop()
                return StagedWeights(identity)
            until = self._now() + STAGED_TIMES * call.deadline_seconds
            self._staged = _Staged(number, identity, call.folder, until)
            self._counters.add("weights_staged")
            self._counters.add("weights_staged_bytes", nbytes)
            return StagedWeights(identity, nbytes)

    async def commit_weights(self, call: CommitCall) -> WorkerStatus:
        async with self._changing:
            if call.weights != self.served.identity:
                staged, self._staged = self._staged, None
                if staged is None or staged.identity != call.weights:
                    raise InvalidRequestError(
                        f"worker {self._worker.name!r} has not staged weights {call.weights!r}:"
                        " stage them again"
                    )
                self._loop.check()
                self._put(staged.number)
                self.served.become(staged.identity, staged.folder)
                self._worker.forget_weights(call.keep, staged.identity)
                self._counters.add("weights_updates")
        return await self._worker.status()

    async def drop_weights(self) -> None:
        if self._reading:
            self._drop()  # this also ends the call that reads
        async with self._changing:
            self.expire(math.inf)

    def expire(self, now: float) -> None:
        if self._staged is not None and self._staged.until < now:
            self._staged = None
            self._drop()

    def _put(self, number: int) -> None:
        self._loop.fire(PutWeights(self._loop.next_number(), number))
        self._dropped = False

    def _drop(self) -> None:
        self._loop.fire(DropWeights(self._loop.next_number()))

    async def offer_weights(self, lease_seconds: float) -> OfferName:
        if not 0 < lease_seconds <= MAX_LEASE_SECONDS:
            raise InvalidRequestError(
                f"lease_seconds must be positive and at most {MAX_LEASE_SECONDS:g}, got"
                f" {lease_seconds}"
            )
        async with self._turn("the offer of weights", OFFER_SECONDS):
            name, content = self._worker.name, fingerprint_of(self.served.identity)
            if self.asleep or not content:
                raise InvalidRequestError(
                    f"worker {name!r} sleeps, or serves its initial weights; update from a folder"
                )
            number = self._loop.next_number()
            making = self._loop.submit(OfferWeights(number, content, lease_seconds))
            with limit(OFFER_SECONDS):
                result = await making
            assert isinstance(result, DiskResult)
            if result.error or not result.names:
                raise InvalidRequestError(
                    result.error
                    or f"worker {name!r} has several processes, which cannot offer their weights;"
                    " update from a folder"
                )
            return OfferName(result.names[0].decode())

    async def _read(self, folder: str, seconds: float) -> tuple[int, str, int]:
        number = self._loop.next_number()
        reading = self._loop.submit(ReadWeights(number, number, folder))
        self._reading = True
        try:
            result = await self._within(reading, seconds, f"read the weights in {folder!r}")
        except BaseException:
            self._drop()
            raise
        finally:
            self._reading = False
        assert isinstance(result, DiskResult)
        if missing := dict(result.skipped).get(NO_ROOM):
            self._drop()
            return number, "", missing
        if result.error or not result.names:
            self._drop()
            raise InvalidRequestError(
                result.error
                or f"weights {folder!r}: the processes of worker {self._worker.name!r} find other"
                " files there; copy the same checkpoint to all of its hosts"
            )
        return number, result.names[0].decode(), result.bytes_moved

    def _turn(self, what: str, seconds: float) -> AbstractAsyncContextManager[None]:
        return turn(self._changing, seconds, f"worker {self._worker.name!r}: {what}")

    async def _within(self, work: Awaitable[object], seconds: float, what: str) -> object:
        name = self._worker.name
        late = DeadlineExceededError(f"worker {name!r} did not {what} within {seconds:g} s")
        with limit(seconds, late):
            return await work

    # ---- sleep

    async def sleep(self, call: SleepCall) -> WorkerStatus:
        if call.level not in SLEEP_LEVELS:
            raise InvalidRequestError(f"sleep level must be 1 or 2, got {call.level}")
        async with self._turn("the sleep", call.deadline_seconds):
            if not self.asleep:
                await self._fall_asleep(call)
        return await self._worker.status()

    async def _fall_asleep(self, call: SleepCall) -> None:
        served, name = self.served, self._worker.name
        if call.level == 2 and not (served.folder or served.start_folder):
            raise InvalidRequestError(
                f"worker {name!r} cannot read its weights again, so they may not be dropped; use"
                " sleep level 1"
            )
        self.asleep = True
        try:
            self._worker.forget_weights(False, served.identity)
            await self._within(self._rest(), call.deadline_seconds, "end its sequences")
            self._loop.check()
        except BaseException:
            self.asleep = False
            raise
        await to_the_end(self._put_to_sleep(call.level == 1))

    async def _put_to_sleep(self, keep: bool) -> None:
        try:
            await self._loop.submit(SleepMesh(self._loop.next_number(), keep))
        except BaseException:
            self.asleep = False
            raise
        self._dropped = not keep
        self._counters.add("sleeps")

    async def _rest(self) -> None:
        while not self._worker.at_rest():
            await asyncio.sleep(LOOK_SECONDS)

    async def wake(self, deadline_seconds: float) -> WorkerStatus:
        async with self._turn("the wake", deadline_seconds):
            if self.asleep:
                if self._dropped:
                    await self._read_again(deadline_seconds)
                await to_the_end(self._rouse())
        return await self._worker.status()

    async def _rouse(self) -> None:
        await self._loop.submit(WakeMesh(self._loop.next_number()))
        self.asleep = False

    async def _read_again(self, seconds: float) -> None:
        served = self.served
        folder = served.folder or served.start_folder
        number, content, _ = await self._read(folder, seconds)
        if served.identity and content != fingerprint_of(served.identity):
            self._drop()
            raise InvalidRequestError(
                f"weights {folder!r}: the files changed since they were served; restore them, or"
                " update the sleeping worker to new weights"
            )
        self._put(number)
