"""Determines whether a cluster is ready. A cluster is ready if KV was recently transferred from a
prefill to a decode worker.

A canary is a small test request over one pair of workers.

A pair is removed when one of its workers leaves, because its transfers do not show whether the
current workers can transfer KV."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from jdisagg.clock import Clock

STATUS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """Names of a prefill and a decode worker. For a mixed worker, which needs no transfer,
    `prefill` is empty and `decode` is its name."""

    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.prefill or self.decode} -> {self.decode}"


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    reason: str


@dataclass(slots=True)
class _Known:
    succeeded_at: float | None = None
    tried_at: float | None = None
    failure: str = ""


class Canary:
    """Readiness of a cluster: ready while at least one pair of workers transferred KV within the
    last `ready_seconds`."""

    def __init__(self, ready_seconds: float) -> None:
        self._ready_seconds = ready_seconds
        self._pairs: dict[Pair, _Known] = {}

    @property
    def pairs(self) -> Collection[Pair]:
        return tuple(self._pairs)

    def know(self, pairs: Collection[Pair]) -> None:
        """Sets the current pairs of workers, and removes the records of all other pairs."""
        self._pairs = {pair: self._pairs.get(pair, _Known()) for pair in sorted(pairs)}

    def succeeded(self, pair: Pair, now: float) -> None:
        known = self._pairs.get(pair)
        if known is not None:
            known.succeeded_at, known.failure = now, ""

    def failed(self, pair: Pair, reason: str) -> None:
        known = self._pairs.get(pair)
        if known is not None:
            known.failure = reason

    def tried(self, pair: Pair, now: float) -> None:
        known = self._pairs.get(pair)
        if known is not None:
            known.tried_at = now

    def due(self, now: float, every_seconds: float) -> tuple[Pair, ...]:
        latest = {pair: _latest(known) for pair, known in self._pairs.items()}
        return tuple(
            pair
            for pair, instant in latest.items()
            if instant is None or now - instant >= every_seconds
        )

    def age_seconds(self, pair: Pair, now: float) -> float | None:
        known = self._pairs.get(pair)
        return None if known is None or known.succeeded_at is None else now - known.succeeded_at

    def readiness(self, now: float) -> Readiness:
        ages = {
            pair: age for pair in self._pairs if (age := self.age_seconds(pair, now)) is not None
        }
        if ages:
            pair = min(ages, key=lambda pair: (ages[pair], pair))
            if ages[pair] <= self._ready_seconds:
                return Readiness(True, f"last KV transfer {ages[pair]:.1f} s ago ({pair})")
            return Readiness(
                False,
                f"no KV transfer for {ages[pair]:.1f} s, more than {self._ready_seconds:g} s (last"
                f" {pair}){self._failures()}",
            )
        if not self._pairs:
            return Readiness(False, "no prefill and decode workers are registered")
        return Readiness(
            False, f"no KV was transferred from prefill to decode yet{self._failures()}"
        )

    def _failures(self) -> str:
        said = [f"{pair}: {known.failure}" for pair, known in self._pairs.items() if known.failure]
        return f"; {said[0]}" if said else ""


def _latest(known: _Known) -> float | None:
    instants = [instant for instant in (known.succeeded_at, known.tried_at) if instant is not None]
    return max(instants) if instants else None


class CanaryRunner:
    """Sends a canary (a small test request) over each pair of workers without a recent KV transfer,
    and reports changes of readiness.

    Args:
        probe: Function that sends a canary over a pair. Raises an error if the KV transfer fails.
        changed: Callback with the readiness, after the first check and at each change.
    """

    def __init__(
        self,
        probe: Callable[[Pair], Awaitable[None]],
        pairs: Callable[[], Awaitable[Collection[Pair]]],
        clock: Clock,
        canary: Canary,
        every_seconds: float = 2.0,
        timeout_seconds: float = 5.0,
        changed: Callable[[Readiness], None] = lambda _: None,
    ) -> None:
        self._probe = probe
        self._pairs = pairs
        self._clock = clock
        self._canary = canary
        self._every_seconds = every_seconds
        self._timeout_seconds = timeout_seconds
        self._changed = changed
        self._said: bool | None = None
        self._under_way: dict[Pair, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        tasks = [task for task in (self._task, *self._under_way.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = None

    def readiness(self) -> Readiness:
        return self._canary.readiness(self._clock.now())

    async def _run(self) -> None:
        while True:
            await self._look()
            self._say()
            # The interval is short, so that due canaries and a loss of readiness are not late.
            await self._clock.sleep(self._every_seconds / 4)

    async def _look(self) -> None:
        """A canary that hangs delays only the next canary of its pair."""
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                self._canary.know(await self._pairs())
        except Exception:  # retried in the next round, and readiness expires if none succeeds
            return
        now = self._clock.now()
        for pair in self._canary.due(now, self._every_seconds):
            if pair not in self._under_way:
                self._canary.tried(pair, now)
                task = self._under_way[pair] = asyncio.get_running_loop().create_task(
                    self._send(pair)
                )
                task.add_done_callback(lambda _, pair=pair: self._under_way.pop(pair, None))

    async def _send(self, pair: Pair) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._probe(pair)
        except TimeoutError:
            self._canary.failed(pair, f"a canary did not finish within {self._timeout_seconds:g} s")
        except Exception as error:
            self._canary.failed(pair, f"{type(error).__name__}: {error}")
        else:
            self._canary.succeeded(pair, self._clock.now())
            self._say()

    def _say(self) -> None:
        readiness = self.readiness()
        if readiness.ready is not self._said:
            self._said = readiness.ready
            self._changed(readiness)
