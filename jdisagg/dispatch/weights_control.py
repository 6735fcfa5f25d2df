"""Gives a cluster's workers other weights, and lets them sleep.

An update has two phases. All workers stage the weights while requests run; if one cannot, all drop
them and serve the old ones. Then placement pauses, decode workers commit, and prefill workers after
them. A worker that fails to commit keeps its old weights, and the router pairs it with none of the
others. It gets the weights later, as a worker that joins does (`catch_up`)."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from jdisagg.clock import Clock
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
T = TypeVar("T")


class PausablePath(Protocol):
    """The part of `RequestPath` that updates use."""

    def paused(self, drain_seconds: float | None) -> AbstractAsyncContextManager[None]:
        """Starts no attempt within the context. With `drain_seconds`, running requests end
        before, within this time."""
        ...

    @property
    def cluster(self) -> ClusterPorts: ...


class WeightsControl:
    """Changes the weights of a cluster. One change runs at a time; others wait.

    Args:
        path: The request path, whose placement pauses while workers commit.
        counters: Counters of updates.
    """

    def __init__(self, path: PausablePath, clock: Clock, counters: Counters) -> None:
        self._path, self._clock, self._counters = path, clock, counters
        self._changing = asyncio.Lock()
        self._wanted: StageCall | None = None
        self._identity = ""

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
        """Serves the checkpoint in `folder` on all workers.

        Args:
            folder: Path on the hosts of all workers, with the served model's configuration.
            version: Text that names the weights in answers. By default a part of their hash.
            mode: What happens to running requests.
            deadline_seconds: Time limit of the reading, and of the drain.

        Raises:
            InvalidRequestError: A worker cannot serve the folder. All serve the old weights.
            UnavailableError: A worker did not answer. All serve the old weights.
            DeadlineExceededError: Reading or draining took too long. All serve the old weights.
            UnauthenticatedError: The caller's token belongs to a tenant.
        """
        refuse_tenants("weights are updated")
        seconds = UPDATE_SECONDS if deadline_seconds is None else deadline_seconds
        async with self._changing:
            ports = dict(self._ports)
            if not ports:
                raise UnavailableError("weights: no worker is there to take them; try again later")
            call, began = StageCall(folder, version, seconds), self._clock.now()
            staged = await self._stage(ports, call)
            identity = next(iter(staged.values())).weights
            stage_seconds = self._clock.now() - began
            drain_seconds = seconds if mode is UpdateMode.DRAIN else None
            try:
                async with self._path.paused(drain_seconds):
                    paused_at = self._clock.now()
                    commit = CommitCall(identity, mode is UpdateMode.KEEP)
                    done, failed = await self._commit(ports, commit)
            except BaseException:
                await self._drop(ports)
                raise
            pause_seconds = self._clock.now() - paused_at
            if done:
                self._wanted, self._identity = call, identity
        if not done:
            self._counters.add("weights_updates_failed")
            raise UnavailableError(f"weights: no worker took them: {failed[0]}")
        self._counters.add("weights_updated")
        nbytes = sum(one.bytes for one in staged.values())
        return WeightsReport(
            identity, tuple(done), tuple(failed), nbytes, stage_seconds, pause_seconds
        )

    async def catch_up(self) -> None:
        """Gives the weights of the last update to workers that do not have them. Failures are left
        to the next call."""
        wanted, ports = self._wanted, self._ports
        if wanted is None or self._changing.locked() or self._path.cluster.statuses is None:
            return
        late = [
            one.name
            for one in self._path.cluster.statuses()
            if one.weights != self._identity and one.name in ports and one.serving
        ]
        if late:
            with contextlib.suppress(JdisaggError):
                await self._give(wanted, {name: ports[name] for name in late if name in ports})

    async def _give(self, wanted: StageCall, some: Mapping[str, WeightsPort]) -> None:
        async with self._changing:
            staged = await self._stage(some, wanted)
            if {one.weights for one in staged.values()} == {self._identity}:
                await self._commit(some, CommitCall(self._identity))
            else:
                await self._drop(some)

    async def sleep(
        self, level: int = 1, workers: tuple[str, ...] = (), deadline_seconds: float = SLEEP_SECONDS
    ) -> tuple[WorkerStatus, ...]:
        """Frees pages and weights of workers, by default of all. Their sequences go on at other
        workers, or wait. Raises InvalidRequestError for an unknown worker, and the errors of
        `WeightsPort.sleep`."""
        call = SleepCall(level, deadline_seconds)
        return await self._each(workers, "sleep", lambda port: port.sleep(call))

    async def wake(
        self, workers: tuple[str, ...] = (), deadline_seconds: float = UPDATE_SECONDS
    ) -> tuple[WorkerStatus, ...]:
        """Ends the sleep of workers, by default of all. Raises as `sleep`."""
        return await self._each(workers, "wake", lambda port: port.wake(deadline_seconds))

    async def _each(
        self,
        names: tuple[str, ...],
        what: str,
        call: Callable[[WeightsPort], Awaitable[WorkerStatus]],
    ) -> tuple[WorkerStatus, ...]:
        refuse_tenants(f"workers {what}")
        async with self._changing:
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
        """Stages weights on all workers. If one fails, all drop them, and its error is raised."""
        try:
            staged = _raised(await _all(ports, lambda port: port.stage_weights(call)))
            found = {one.weights for one in staged.values()}
            if len(found) > 1:
                raise InvalidRequestError(
                    f"weights {call.folder!r}: workers find different files there:"
                    f" {', '.join(sorted(found))}; copy the same checkpoint to all hosts"
                )
            return staged
        except BaseException:
            self._counters.add("weights_updates_failed")
            await self._drop(ports)
            raise

    async def _commit(
        self, ports: Mapping[str, WeightsPort], call: CommitCall
    ) -> tuple[list[str], list[str]]:
        """Commits on decode workers, then on prefill workers, whose prompts then have no receiver
        any more. Returns the workers that have the weights, and the failures."""
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
    """Returns a server's control of weights. Raises InvalidRequestError if it has none."""
    if control is None:
        raise InvalidRequestError("weights: this server cannot change the weights of workers")
    return control


def positive_seconds(seconds: float) -> float:
    """Returns a deadline. Raises InvalidRequestError unless it is positive and finite."""
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"deadline_seconds must be positive and finite, got {seconds}")
    return seconds


async def _in_time(call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(COMMIT_SECONDS):
            return await call
    except TimeoutError:
        raise UnavailableError(f"it did not answer within {COMMIT_SECONDS:g} s") from None


async def _all(
    ports: Mapping[str, WeightsPort], call: Callable[[WeightsPort], Awaitable[T]]
) -> dict[str, T | BaseException]:
    """Calls all workers at once. Returns each one's reply or error."""
    outcomes = await asyncio.gather(*map(call, ports.values()), return_exceptions=True)
    return dict(zip(ports, outcomes, strict=True))


def _raised(outcomes: Mapping[str, T | BaseException]) -> dict[str, T]:
    """Returns the replies. Raises the first error, with the worker's name."""
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
