"""Readiness means that the KV plane works: a small block made the trip from prefill to decode
lately (rule 11 of the design).

`Canary` is what is known: when each pair of workers last handed KV over, and whether that is recent
enough to call the service ready. Pure; instants are arguments. Real hand-offs count as well
(`succeeded` is for whoever sees one), so that a busy pair needs no canary. `CanaryRunner` sends one
down each pair that has shown nothing for a while; how, is the probe's affair (`canary_probe.py`).

A pair that has left is forgotten: what no worker serves any more proves nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from jdisagg.clock import Clock

STATUS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """`prefill` empty: a mixed worker that prefills for itself."""

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
    """Ready while some pair succeeded within the last `ready_seconds`."""

    def __init__(self, ready_seconds: float) -> None:
        self._ready_seconds = ready_seconds
        self._pairs: dict[Pair, _Known] = {}

    @property
    def pairs(self) -> Collection[Pair]:
        return tuple(self._pairs)

    def know(self, pairs: Collection[Pair]) -> None:
        """These are all pairs that there are."""
        self._pairs = {pair: self._pairs.get(pair, _Known()) for pair in sorted(pairs)}

    def succeeded(self, pair: Pair, now: float) -> None:
        """KV went from one to the other and was decoded, for a canary or for a client."""
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
        """Pairs of which nothing was tried and nothing seen for `every_seconds`."""
        latest = {pair: _latest(known) for pair, known in self._pairs.items()}
        return tuple(
            pair
            for pair, instant in latest.items()
            if instant is None or now - instant >= every_seconds
        )

    def age_seconds(self, pair: Pair, now: float) -> float | None:
        """Since the pair's last success; None when there was none."""
        known = self._pairs.get(pair)
        return None if known is None or known.succeeded_at is None else now - known.succeeded_at

    def readiness(self, now: float) -> Readiness:
        ages = {
            pair: age for pair in self._pairs if (age := self.age_seconds(pair, now)) is not None
        }
        if ages:
            pair = min(ages, key=lambda pair: (ages[pair], pair))
            if ages[pair] <= self._ready_seconds:
                return Readiness(True, f"KV went {pair} {ages[pair]:.1f} s ago")
            return Readiness(
                False,
                f"no KV arrived for {ages[pair]:.1f} s, more than {self._ready_seconds:g} s (last"
                f" {pair}){self._failures()}",
            )
        if not self._pairs:
            return Readiness(False, "no pair of a prefill and a decode worker is there")
        return Readiness(
            False, f"no KV has made the trip from prefill to decode yet{self._failures()}"
        )

    def _failures(self) -> str:
        said = [f"{pair}: {known.failure}" for pair, known in self._pairs.items() if known.failure]
        return f"; {said[0]}" if said else ""


def _latest(known: _Known) -> float | None:
    instants = [instant for instant in (known.succeeded_at, known.tried_at) if instant is not None]
    return max(instants) if instants else None


class CanaryRunner:
    """Sends a canary down each pair that is due, and says when readiness changes.

    `probe` returns when KV made the trip and raises otherwise; each has `timeout_seconds`. `pairs`
    lists who is there. `changed` is called with the first readiness and with each that differs from
    the one before."""

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
            # Often enough that a pair is tried soon after it is due, and that readiness ends soon
            # after it is over.
            await self._clock.sleep(self._every_seconds / 4)

    async def _look(self) -> None:
        """One canary a pair at a time: a pair that hangs costs its own next canary and nobody
        else's."""
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                self._canary.know(await self._pairs())
        except Exception:  # who is there is asked again at once; readiness runs out by itself
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
            self._canary.failed(pair, f"a canary did not arrive within {self._timeout_seconds:g} s")
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
