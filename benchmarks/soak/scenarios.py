"""One fault at one moment under load, and checks that the service kept its guarantees.

A scenario starts a batch of streams, waits until a hand-off is held at a given moment, kills or
stops a process, and releases the hand-off. Then it checks that the fault took effect, that every
stream ended with the right tokens, that all pages are free within ten seconds, and that the victim
serves again. The pauses of streams are reported but not checked."""

import asyncio
import contextlib
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import psutil

from benchmarks.soak.cluster import ROUTER, ChaosCluster, stand_still
from benchmarks.soak.load import DEADLINE_SECONDS, Kind, Stream
from benchmarks.soak.moments import Moment
from benchmarks.soak.orders import Reached
from jdisagg.client import AsyncClient
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS
from tests import time_scale

HOLD_SECONDS = 8.0
REACH_SECONDS = time_scale.seconds(30.0)
STOP_SECONDS = 4.5
# A canary whose block a faulty channel dropped holds its pages until its own deadline.
QUIET_SECONDS = 10.0 + DEFAULT_TIMEOUTS.process.canary_seconds
BACK_SECONDS = time_scale.seconds(240.0)
TRIES = 4  # of a scenario whose moment was missed
MOVE_TRIES = 4
MOVE_SECONDS = 8.0
MOVABLE = 6  # fewer than there are slots
CLIENT = "client"

HOLDERS = {
    Moment.RESERVED: "decode",
    Moment.COMPUTING: "prefill",
    Moment.OFFERED: "prefill",
    Moment.PULLING: "decode",
    Moment.PART_INSERTED: "prefill",
    Moment.ALL_INSERTED: "prefill",
    Moment.DECODING: "decode",
    Moment.MIGRATING: "decode",
}


@dataclass(frozen=True)
class Scenario:
    """`victim`: a role, "router" or "client". `deed`: SIGKILL, SIGSTOP (followed by SIGCONT) or
    SIGTERM. `member`: index of the victim's process; None for all."""

    moment: Moment
    victim: str
    deed: signal.Signals = signal.SIGKILL
    member: int | None = None

    @property
    def name(self) -> str:
        which = "" if self.member is None else f"'s process {self.member}"
        return f"{self.deed.name} {self.victim}{which} while {self.moment.value}"


@dataclass
class Outcome:
    """The result of a scenario.

    Attributes:
        faults: Descriptions of broken guarantees, empty if there are none.
        missed: Why nothing was under way when the fault happened; empty if something was.
    """

    scenario: str
    faults: list[str] = field(default_factory=list)
    missed: str = ""
    pauses: list[float] = field(default_factory=list)
    quiet_seconds: float | None = None
    back_seconds: float | None = None

    @property
    def row(self) -> dict[str, object]:
        median = round(statistics.median(self.pauses), 2) if self.pauses else None
        longest = round(max(self.pauses), 2) if self.pauses else None
        times = {"quiet_s": self.quiet_seconds, "victim_back_s": self.back_seconds}
        rounded = {
            name: None if value is None else round(value, 2) for name, value in times.items()
        }
        counts = {
            "streams_interrupted": len(self.pauses),
            "pause_median_s": median,
            "pause_max_s": longest,
        }
        return {"scenario": self.scenario, **counts, **rounded, "faults": self.faults}


def all_scenarios(processes: int = 1) -> Iterator[Scenario]:
    """Returns all combinations of moment, victim and signal. SIGTERM is sent to all processes of an
    instance, because a single process cannot drain alone."""
    for moment, deed in product(Moment, (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)):
        members = [None] if processes == 1 or deed is signal.SIGTERM else list(range(processes))
        if moment is not Moment.MIGRATING:
            yield from (
                Scenario(moment, victim, deed, member)
                for victim, member in product(("prefill", "decode"), members)
            )
            yield Scenario(moment, ROUTER, deed)
        elif deed is not signal.SIGTERM:
            yield from (Scenario(moment, "decode", deed, member) for member in members)
    yield from (Scenario(moment, CLIENT) for moment in Moment if moment is not Moment.MIGRATING)


class _Ended(Exception):
    """What a fault was to strike had ended before."""


class Harness:
    """Runs scenarios against one cluster, one after the other."""

    def __init__(
        self, cluster: ChaosCluster, kinds: Sequence[Kind], streams: int, seed: int = 0
    ) -> None:
        self._cluster = cluster
        self._kinds = kinds
        self._streams = streams
        self._random = random.Random(seed)

    async def run(self, scenario: Scenario) -> Outcome:
        """Runs a scenario, again if its moment was missed and no guarantee was broken."""
        outcome = await self._run(scenario)
        for _ in range(TRIES - 1):
            if outcome.faults or not outcome.missed:
                break
            outcome = await self._run(scenario)
        if outcome.missed:
            outcome.faults.append(outcome.missed)
        return outcome

    async def _run(self, scenario: Scenario) -> Outcome:
        outcome = Outcome(scenario.name)
        await self._cluster.until_live(self._cluster.workers, BACK_SECONDS)
        async with AsyncClient(self._cluster.address, connect_seconds=30.0) as client:
            own = self._own_client() if scenario.victim == CLIENT else None
            streams, tasks, number = (
                self._choose(scenario.moment),
                list["asyncio.Task[Stream]"](),
                0,
            )
            try:
                if scenario.moment is Moment.MIGRATING:
                    number, held = await self._until_one_moves(streams, tasks, client)
                else:
                    early = streams[: 0 if own else max(1, self._streams // 3)]
                    tasks += _start(early, client)
                    await _until_one_begins(early)
                    number, reached = self._cluster.desk.hold(
                        self._holders(scenario.moment), scenario.moment, HOLD_SECONDS
                    )
                    if own is None:
                        tasks += _start(streams[len(tasks) :], client)
                    held = await asyncio.wait_for(asyncio.shield(reached), REACH_SECONDS)
                if len(tasks) < len(streams):  # they would have been held first, or in the way
                    tasks += _start(streams[len(tasks) :], client)
                    await asyncio.sleep(0.1)  # what is held goes on: it must not come to its end
                victim = self._victim(scenario, held.worker, held.other)
                at = time.monotonic()
                await self._hurt(scenario, victim, own, number, outcome)
                await asyncio.wait(tasks, timeout=DEADLINE_SECONDS + 10)
                self._judge(streams, tasks, at, outcome)
                outcome.quiet_seconds = await self._cluster.until_quiet(QUIET_SECONDS)
                if victim != CLIENT:
                    await self._cluster.until_live(self._cluster.workers, BACK_SECONDS)
                    outcome.back_seconds = time.monotonic() - at
            except TimeoutError:
                outcome.missed = (
                    f"no hand-off came to {scenario.moment.value} within {REACH_SECONDS:g} s"
                )
            except _Ended as error:
                outcome.missed = str(error)
            except AssertionError as error:
                outcome.faults.append(str(error))
            finally:
                self._cluster.desk.let_go(number)
                if own is not None:
                    own.kill()
                    own.wait()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return outcome

    def _choose(self, moment: Moment) -> list[Stream]:
        """Chooses the stream for the moment. A stream that is to migrate, or to be interrupted
        while it decodes, must not have ended by then."""
        most = max(kind.max_tokens for kind in self._kinds)
        lasting = [
            kind
            for kind in self._kinds
            if kind.max_tokens == most or moment not in (Moment.MIGRATING, Moment.DECODING)
        ]
        return [Stream(self._random.choice(lasting)) for _ in range(self._streams)]

    async def _until_one_moves(
        self, streams: list[Stream], tasks: "list[asyncio.Task[Stream]]", client: AsyncClient
    ) -> tuple[int, Reached]:
        """Drains a worker until one of its sequences migrates to another. If all its sequences end
        before that, tries again. Few streams run, so that the other workers have room. Raises
        TimeoutError if no sequence migrates."""
        for _ in range(MOVE_TRIES):
            await self._cluster.until_live(self._cluster.workers, BACK_SECONDS)
            await self._cluster.until_warm(self._cluster.workers, BACK_SECONDS)
            few = streams[len(tasks) :][:MOVABLE]
            tasks += _start(few, client)
            await _until_one_begins(few)
            statuses = await self._cluster.statuses()
            busiest = max(
                self._cluster.of_role("decode"),
                key=lambda name: statuses[name].running if name in statuses else -1,
            )
            number, reached = self._cluster.desk.hold(
                self._members(busiest), Moment.MIGRATING, HOLD_SECONDS
            )
            self._cluster.signal(busiest, signal.SIGTERM)
            self._cluster.forget_start(busiest)
            if (await asyncio.wait({reached}, timeout=MOVE_SECONDS))[0]:
                return number, reached.result()
            self._cluster.desk.let_go(number)
        raise TimeoutError

    def _own_client(self) -> "subprocess.Popen[bytes]":
        """Starts a client in a separate process as the only client, so that the held hand-off is
        its own. The prompt has several chunks, and no worker has cached it."""
        number = self._random.randrange(1_000_000)
        prompt = f"{number} " + "Once upon a time there was a little dog who liked to play " * 11
        flags = (
            f"--target={self._cluster.address}",
            f"--prompt={prompt}",
            "--max_tokens=330",
            "--ignore_eos",
        )
        quiet = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
            "stdin": subprocess.DEVNULL,
        }
        return subprocess.Popen([sys.executable, "-m", "launch.ask", *flags], **quiet)  # type: ignore[call-overload]

    def _holders(self, moment: Moment) -> list[str]:
        return [
            member
            for name in self._cluster.of_role(HOLDERS[moment])
            for member in self._members(name)
        ]

    def _members(self, worker: str) -> list[str]:
        count = self._cluster.shape.processes
        return [worker] if count == 1 else [f"{worker}.{process}" for process in range(count)]

    def _victim(self, scenario: Scenario, holder: str, other: str) -> str:
        """Returns the worker that takes part in the held hand-off, if it is known."""
        if scenario.victim in (ROUTER, CLIENT):
            return scenario.victim
        known = [
            name.partition(".")[0] for name in (holder, other) if name.startswith(scenario.victim)
        ]
        return known[0] if known else self._random.choice(self._cluster.of_role(scenario.victim))

    async def _hurt(
        self,
        scenario: Scenario,
        victim: str,
        own: "subprocess.Popen[bytes] | None",
        number: int,
        outcome: Outcome,
    ) -> None:
        if own is not None:
            if own.poll() is not None:
                raise _Ended("the client had ended before it could be killed")
            own.kill()
            own.wait()
            self._cluster.desk.let_go(number)
            return
        before = self._cluster.signal(victim, scenario.deed, scenario.member)
        if scenario.deed is not signal.SIGSTOP:
            self._cluster.forget_start(victim)
        assert before, f"{victim} does not run"
        if scenario.deed is signal.SIGSTOP:
            stopped = await stand_still(before)
            self._cluster.desk.let_go(number)
            await asyncio.sleep(STOP_SECONDS)
            for process in before:
                # given up for dead meanwhile, and started again
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
            assert stopped, f"{victim} went on after SIGSTOP"
            return
        await asyncio.sleep(0.05)
        self._cluster.desk.let_go(number)
        seconds = 2.0 if scenario.deed is signal.SIGKILL else self._cluster.shape.drain_seconds + 10
        until = time.monotonic() + seconds
        while any(_runs(process) for process in before):
            assert time.monotonic() < until, (
                f"{victim} still runs {seconds:g} s after {scenario.deed.name}"
            )
            await asyncio.sleep(0.02)

    def _judge(
        self,
        streams: list[Stream],
        tasks: "list[asyncio.Task[Stream]]",
        at: float,
        outcome: Outcome,
    ) -> None:
        waiting = sum(not task.done() for task in tasks)
        if waiting:
            outcome.faults.append(f"{waiting} streams still wait past their deadline")
        outcome.faults += [
            wrong
            for stream, task in zip(streams, tasks, strict=True)
            if task.done() and (wrong := stream.wrong)
        ]
        pauses = [stream.pause_after(at) for stream in streams]
        outcome.pauses = [pause for pause in pauses if pause is not None]
        if not outcome.pauses:
            outcome.missed = "no stream was under way when it happened"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # gone between the two
        return False


def _start(streams: list[Stream], client: AsyncClient) -> "list[asyncio.Task[Stream]]":
    return [asyncio.create_task(stream.run(client)) for stream in streams]


async def _until_one_begins(streams: list[Stream]) -> None:
    """So that some are decoding while others are handed over."""
    until = time.monotonic() + REACH_SECONDS
    while streams and not any(stream.times for stream in streams) and time.monotonic() < until:
        await asyncio.sleep(0.01)
