"""Updates the weights of a cluster's workers, and lets workers sleep.

First, all workers stage the new weights while requests run. If one worker cannot, all drop the
staged weights and continue to serve the old ones. Then placement pauses, decode workers commit, and
after them prefill workers. A worker that fails to commit keeps its old weights, and the router does
not pair it with workers that have the new ones. Later, `catch_up` loads the new weights into such a
worker, and into workers that join."""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from jdisagg.clock import Clock, turn
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.served_adapters import refuse_tenants
from jdisagg.errors import InvalidRequestError, JdisaggError, UnavailableError
from jdisagg.messages.weights import (
    SLEEP_SECONDS,
    UPDATE_SECONDS,
    CommitCall,
    SleepCall,
    StageCall,
    StagedWeights,
    UpdateMode,
    WeightsPort,
    WeightsReport,
)
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.telemetry import Counters

COMMIT_SECONDS = 60.0
FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 2.0, 300.0
LONGEST_OFFER_SECONDS = 3600.0  # the longest lease of an offer
SETTLED_SECONDS = 5.0  # after a commit, no status from before it comes any more
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wait:
    until: float = 0.0
    seconds: float = FIRST_WAIT_SECONDS / 2


class PausablePath(Protocol):
    """The interface of `RequestPath` that updates use."""

    def paused(self, drain_seconds: float | None) -> AbstractAsyncContextManager[None]:
        """Returns a context in which no attempt starts. If `drain_seconds` is set, first waits for
        at most this time until running requests have ended."""
        ...

    @property
    def cluster(self) -> ClusterPorts: ...


class WeightsControl:
    """Changes the weights of a cluster. One change runs at a time; others wait."""

    def __init__(self, path: PausablePath, clock: Clock, counters: Counters) -> None:
        self._path, self._clock, self._counters = path, clock, counters
        self._changing = asyncio.Lock()
        self._wanted: StageCall | None = None
        self._identity = ""
        self._updated: set[str] = set()  # workers that committed `_identity`, and when
        self._updated_at = 0.0
        self._waits: dict[str, _Wait] = {}

    @property
    def _ports(self) -> Mapping[str, WeightsPort]:
        return self._path.cluster.weights

    async def update(
        self,
        folder: str,
        version: str = "",
        mode: UpdateMode = UpdateMode.RECOMPUTE,
        deadline_seconds: float | None = None,
    ) -> WeightsReport:
        """Replaces the weights of all workers by those in `folder`.

        Args:
            folder: Path on the hosts of all workers, with the served model's configuration, or the
                name of an offer.
            version: Text that identifies the weights in replies. If it is empty, a part of their
                hash is used.
            deadline_seconds: Time limit of each phase: waiting for another update, reading,
                draining.

        Raises:
            InvalidRequestError: A worker cannot serve the folder. All serve the old weights.
            UnavailableError: A worker did not answer. All serve the old weights.
            DeadlineExceededError: Waiting, reading or draining took too long. All serve the old
                weights.
            UnauthenticatedError: The caller's token belongs to a tenant.
        """
        refuse_tenants("weights are updated")
        seconds = UPDATE_SECONDS if deadline_seconds is None else deadline_seconds
        async with turn(self._changing, seconds, "the update"):
            ports = dict(self._ports)
            if not ports:
                raise UnavailableError("weights: no worker is registered; try again later")
            call, began = StageCall(folder, version, seconds), self._clock.now()
            staged = await self._stage(ports, call)
            stage_seconds = self._clock.now() - began
            short = {name: ports[name] for name, one in staged.items() if one.missing_bytes}
            drain_seconds = seconds if mode is UpdateMode.DRAIN else None
            try:
                if short and mode is UpdateMode.KEEP:
                    raise _no_room(staged)
                async with self._path.paused(drain_seconds):
                    paused_at = self._clock.now()
                    async with self._asleep(short, seconds):
                        staged |= await self._stage(short, call)
                        identity = _one_identity(folder, staged)
                        commit = CommitCall(identity, mode is UpdateMode.KEEP)
                        # Continues even if the caller is cancelled. Otherwise only some workers
                        # would have the new weights, and prefill and decode workers could not be
                        # paired.
                        committing = asyncio.create_task(self._change(ports, call, commit))
                        try:
                            done, failed = await asyncio.shield(committing)
                        except asyncio.CancelledError:
                            await committing
                            raise
            except BaseException:
                await self._drop(ports)
                raise
            pause_seconds = self._clock.now() - paused_at
        if not done:
            self._counters.add("weights_updates_failed")
            raise UnavailableError(f"weights: all workers failed to update: {failed[0]}")
        self._counters.add("weights_updated")
        nbytes = sum(one.bytes for one in staged.values())
        return WeightsReport(
            identity, tuple(done), tuple(failed), nbytes, stage_seconds, pause_seconds
        )

    @contextlib.asynccontextmanager
    async def _asleep(self, some: Mapping[str, WeightsPort], seconds: float) -> AsyncIterator[None]:
        if not some:
            yield
            return
        self._counters.add("weights_updates_asleep")
        try:
            _raised(await _all(some, lambda port: port.sleep(SleepCall(2, seconds))))
            yield
        finally:
            for name, outcome in (await _all(some, lambda port: port.wake(seconds))).items():
                if isinstance(outcome, BaseException):  # its status shows that it sleeps
                    _log.warning(
                        "worker %s still sleeps after an update; wake it: %s", name, outcome
                    )
                else:
                    self._path.cluster.reported(outcome)

    async def catch_up(self) -> None:
        """Loads the weights of the last update into workers that lack them. After a failure, a
        worker is tried again after a wait that doubles with each failure. Ends when another router
        has updated the workers: that router's weights are newer."""
        wanted, ports = self._wanted, dict(self._ports)
        if wanted is None or self._changing.locked() or self._path.cluster.statuses is None:
            return
        statuses, now = self._path.cluster.statuses(), self._clock.now()
        # A worker that restarts has "" again, its initial weights.
        others = {one.name for one in statuses if one.weights not in ("", self._identity)}
        if others & self._updated:
            if now - self._updated_at >= SETTLED_SECONDS:
                _log.info("weights %s: another router has updated the workers", self._identity)
                self._wanted = None
            return
        late = [
            one.name
            for one in statuses
            if one.weights != self._identity
            and one.name in ports
            and one.serving
            and self._waits.get(one.name, _Wait()).until <= now
        ]
        having = [
            one.name
            for one in statuses
            if one.weights == self._identity and one.name in ports and one.serving
        ]
        for name in late:
            try:
                await self._give(wanted, {name: ports[name]}, having)
                self._waits.pop(name, None)
            except JdisaggError as error:
                seconds = min(2 * self._waits.get(name, _Wait()).seconds, MOST_WAIT_SECONDS)
                _log.warning(
                    "worker %s: no new weights, next try in %g s: %s", name, seconds, error
                )
                self._waits[name] = _Wait(self._clock.now() + seconds, seconds)

    async def _give(
        self, wanted: StageCall, some: Mapping[str, WeightsPort], having: Sequence[str]
    ) -> None:
        async with turn(self._changing, wanted.deadline_seconds, "the update of a late worker"):
            call, seconds = wanted, wanted.deadline_seconds
            try:
                staged = await self._stage(some, call)
            except JdisaggError:
                if (source := self._ports.get(having[0]) if having else None) is None:
                    raise
                offer = await source.offer_weights(min(seconds, LONGEST_OFFER_SECONDS))
                call = msgspec.structs.replace(wanted, folder=offer.name)
                staged = await self._stage(some, call)
            short = any(one.missing_bytes for one in staged.values())
            async with self._asleep(some if short else {}, seconds):
                staged = await self._stage(some, call) if short else staged
                if _one_identity(call.folder, staged) == self._identity:
                    done, failed = await self._commit(some, CommitCall(self._identity))
                    if failed:
                        raise UnavailableError(failed[0])
                    self._committed(done)
                    return
            await self._drop(some)
            raise _differs(call.folder, {self._identity, *(one.weights for one in staged.values())})

    async def sleep(
        self, level: int = 1, workers: tuple[str, ...] = (), deadline_seconds: float = SLEEP_SECONDS
    ) -> tuple[WorkerStatus, ...]:
        """Frees pages and weights of `workers`, or of all workers if it is empty. Their sequences
        continue on other workers, or wait.

        Raises:
            InvalidRequestError: A worker is unknown.
            DeadlineExceededError: An update or sleep in progress lasts longer than
                `deadline_seconds`.
            JdisaggError: Any error of `WeightsPort.sleep`.
        """
        call = SleepCall(level, deadline_seconds)
        return await self._each(workers, "sleep", lambda port: port.sleep(call), deadline_seconds)

    async def wake(
        self, workers: tuple[str, ...] = (), deadline_seconds: float = UPDATE_SECONDS
    ) -> tuple[WorkerStatus, ...]:
        """Ends the sleep of `workers`, or of all workers if it is empty. Raises the same errors as
        `sleep`."""
        return await self._each(
            workers, "wake", lambda port: port.wake(deadline_seconds), deadline_seconds
        )

    async def _each(
        self,
        names: tuple[str, ...],
        what: str,
        call: Callable[[WeightsPort], Awaitable[WorkerStatus]],
        seconds: float,
    ) -> tuple[WorkerStatus, ...]:
        refuse_tenants(f"workers {what}")
        async with turn(self._changing, seconds, f"the {what}"):
            ports = dict(self._ports)
            if unknown := [name for name in names if name not in ports]:
                raise InvalidRequestError(
                    f"worker {unknown[0]!r} is unknown; known: {', '.join(ports) or 'none'}"
                )
            chosen = {name: ports[name] for name in names or ports}
            outcomes = await _all(chosen, call)
            for outcome in outcomes.values():
                if isinstance(outcome, WorkerStatus):
                    self._path.cluster.reported(outcome)
            return tuple(_raised(outcomes).values())

    async def _stage(
        self, ports: Mapping[str, WeightsPort], call: StageCall
    ) -> dict[str, StagedWeights]:
        try:
            staged = _raised(await _all(ports, lambda port: port.stage_weights(call)))
            _one_identity(call.folder, staged)
            return staged
        except BaseException:
            self._counters.add("weights_updates_failed")
            await self._drop(ports)
            raise

    async def _change(
        self, ports: Mapping[str, WeightsPort], call: StageCall, commit: CommitCall
    ) -> tuple[list[str], list[str]]:
        done, failed = await self._commit(ports, commit)
        if done:
            self._wanted, self._identity, self._waits = call, commit.weights, {}
            self._updated = set()
            self._committed(done)
        return done, failed

    def _committed(self, names: list[str]) -> None:
        self._updated.update(names)
        self._updated_at = self._clock.now()

    async def _commit(
        self, ports: Mapping[str, WeightsPort], call: CommitCall
    ) -> tuple[list[str], list[str]]:
        """Commits on decode workers first, and then on prefill workers, because by then no decode
        worker receives the prompts of prefill workers any more."""
        decodes = self._path.cluster.decode
        done: list[str] = []
        failed: list[str] = []
        for decoding in (True, False):
            some = {name: port for name, port in ports.items() if (name in decodes) is decoding}
            outcomes = await _all(some, lambda port: _in_time(port.commit_weights(call)))
            for name, outcome in outcomes.items():
                if isinstance(outcome, WorkerStatus):
                    self._path.cluster.reported(outcome)
                    done.append(name)
                else:
                    failed.append(f"{name}: {outcome}")
        return done, failed

    async def _drop(self, ports: Mapping[str, WeightsPort]) -> None:
        await _all(ports, lambda port: _in_time(port.drop_weights()))


def control_of(control: WeightsControl | None) -> WeightsControl:
    """Returns a server's `WeightsControl`. Raises InvalidRequestError if the server has none."""
    if control is None:
        raise InvalidRequestError("weights: this server cannot change the weights of workers")
    return control


def positive_seconds(seconds: float) -> float:
    """Returns `seconds`. Raises InvalidRequestError if it is not positive and finite."""
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"deadline_seconds must be positive and finite, got {seconds}")
    return seconds


def _one_identity(folder: str, staged: Mapping[str, StagedWeights]) -> str:
    found = {one.weights for one in staged.values() if not one.missing_bytes}
    if len(found) > 1:
        raise _differs(folder, found)
    return next(iter(found), "")


def _differs(folder: str, found: set[str]) -> InvalidRequestError:
    return InvalidRequestError(
        f"weights {folder!r}: workers find different files there: {', '.join(sorted(found))}; copy"
        " the same checkpoint to all hosts"
    )


def _no_room(staged: Mapping[str, StagedWeights]) -> InvalidRequestError:
    name, missing = max(
        ((name, one.missing_bytes) for name, one in staged.items()), key=lambda pair: pair[1]
    )
    return InvalidRequestError(
        f"weights: worker {name!r} lacks {missing:,} bytes for a second copy of the weights, which"
        " is needed to keep the KV of sequences; use mode recompute or drain, or lower"
        " --memory_fraction"
    )


async def _in_time(call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(COMMIT_SECONDS):
            return await call
    except TimeoutError:
        raise UnavailableError(f"it did not answer within {COMMIT_SECONDS:g} s") from None


async def _all(
    ports: Mapping[str, WeightsPort], call: Callable[[WeightsPort], Awaitable[T]]
) -> dict[str, T | BaseException]:
    outcomes = await asyncio.gather(*map(call, ports.values()), return_exceptions=True)
    return dict(zip(ports, outcomes, strict=True))


def _raised(outcomes: Mapping[str, T | BaseException]) -> dict[str, T]:
    replies: dict[str, T] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, JdisaggError):
            if not outcome.message.startswith(prefix := f"worker {name!r}"):
                outcome.message = f"{prefix}: {outcome.message}"
                outcome.args = (outcome.message,)
            raise outcome
        if isinstance(outcome, BaseException):
            raise outcome
        replies[name] = outcome
    return replies
