"""A cluster whose processes are on different hosts (hosts.py), clients that load it, and what
became of their streams.

Every stream is held against a dense forward pass made here. A stream is right, or it has the right
tokens up to an error."""

import asyncio
import contextlib
import functools
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM

from jdisagg.client import AsyncClient, Client, Credentials
from jdisagg.errors import JdisaggError
from jdisagg.service.internal.connection import NO_CREDENTIALS
from jdisagg.settings.address import host_port
from tests import time_scale
from tests.end_to_end.clusters import LLAMA, dense_greedy
from tests.hosts.hosts import Hosts, Process
from tests.programs import CACHE_FLAG

PORT = 19200
PYTHON = sys.executable
QUIET_LOAD = 4.0  # of each core, which the cluster and its clients alone cause


def crowd() -> float:
    """Returns how much longer everything takes because of other work on this machine: in one walk
    on a machine with a load of 13 for each core, no process of the cluster ran for 10 s."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / QUIET_LOAD)


START_SECONDS = time_scale.seconds(240.0) * crowd()
DEADLINE_SECONDS = time_scale.seconds(90.0) * crowd()  # a restart of the only worker takes less
# After a condition has ended: registration, reconnection and a new attempt. Longer by `crowd()`.
RECOVERY_SECONDS = time_scale.seconds(15.0)
FREED_SECONDS = time_scale.seconds(30.0)  # the longest lease, and a restarted worker registers
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 150, 40
WORKER_FLAGS = (
    f"--model={LLAMA}",
    "--slots_per_rank=4",
    "--context_tokens=512",
    "--chunk_tokens=64",
    "--page_size=16",
    "--set=prefix.reuse=False",
    CACHE_FLAG,
)


@functools.cache
def prompt(number: int) -> tuple[int, ...]:
    draw = random.Random(number)
    return tuple(draw.randrange(1, 250) for _ in range(PROMPT_TOKENS))


@functools.cache
def expected(number: int) -> tuple[int, ...]:
    return tuple(dense_greedy(LLAMA, prompt(number), NEW_TOKENS))


@dataclass
class Stream:
    """One request of a client. `pause_seconds`: Longest time without a token."""

    number: int
    began: float
    tokens: list[int] = field(default_factory=list)
    pause_seconds: float = 0.0
    ended: float | None = None
    error: JdisaggError | None = None

    @property
    def wrong(self) -> bool:
        right = expected(self.number)
        whole = self.error is None and self.ended is not None
        return tuple(self.tokens) != (right if whole else right[: len(self.tokens)])


class Load:
    """Clients on the test's host, each with one stream after the other until `stop`."""

    def __init__(
        self,
        target: str,
        clients: int,
        deadline_seconds: float,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.streams: list[Stream] = []
        self._target, self._clients, self._deadline = target, clients, deadline_seconds
        self._stopping, self._credentials = False, credentials
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when every stream has ended, right or with an error within its deadline."""
        self._stopping = True
        self._thread.join(self._deadline + time_scale.seconds(20.0))
        assert not self._thread.is_alive(), "a stream hangs beyond its deadline"

    @property
    def right(self) -> list[Stream]:
        return [one for one in self.streams if one.ended and not one.error]

    @property
    def errors(self) -> Counter[str]:
        return Counter(
            f"{type(one.error).__name__}: {one.error}" for one in self.streams if one.error
        )

    def summary(self) -> str:
        """Counts of the streams, and the longest pause in one."""
        pause = max((one.pause_seconds for one in self.streams), default=0.0)
        wrong = sum(one.wrong for one in self.streams)
        return (
            f"{len(self.right)} right, {sum(self.errors.values())} errors, {wrong} wrong, longest"
            f" pause {pause:.1f} s"
        )

    def ended_right_since(self, instant: float) -> bool:
        return any((one.ended or 0.0) > instant and one.began > instant for one in self.right)

    async def _run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    AsyncClient(self._target, resume_seconds=60.0, credentials=self._credentials)
                )
                for _ in range(self._clients)
            ]
            await asyncio.gather(*map(self._be_client, range(self._clients), clients))

    async def _be_client(self, number: int, client: AsyncClient) -> None:
        while not self._stopping:
            stream = Stream(number % PROMPTS, time.monotonic())
            self.streams.append(stream)
            latest = stream.began
            try:
                async for event in client.generate(
                    token_ids=prompt(stream.number),
                    max_tokens=NEW_TOKENS,
                    temperature=0.0,
                    ignore_eos=True,
                    deadline_seconds=self._deadline,
                ):
                    now = time.monotonic()
                    stream.tokens += event.token_ids
                    stream.pause_seconds = max(stream.pause_seconds, now - latest)
                    latest = now
            except JdisaggError as error:
                stream.error = error
                await asyncio.sleep(0.2)
            stream.ended = time.monotonic()
            number += 1


class Lab:
    """Routers and workers, each on a host of its own, named "router-0", "prefill-0" and so on."""

    def __init__(
        self,
        folder: Path,
        prefills: int = 1,
        decodes: int = 1,
        routers: int = 1,
        by_name: bool = False,
        ipv6: bool = False,
    ) -> None:
        self.names = [
            *(f"router-{at}" for at in range(routers)),
            *(f"prefill-{at}" for at in range(prefills)),
            *(f"decode-{at}" for at in range(decodes)),
        ]
        self.routers = self.names[:routers]
        self.workers = self.names[routers:]
        self.hosts = Hosts(len(self.names), folder, ipv6)
        self.processes: dict[str, Process] = {}
        self._by_name = by_name  # whether processes know each other by name
        self._scheme = "ipv6" if ipv6 else "ipv4"
        # Further flags of all processes ("") and of each.
        self.flags: dict[str, tuple[str, ...]] = {}
        self.credentials = NO_CREDENTIALS

    def host(self, name: str) -> int:
        """Of a process, or 0 for the clients."""
        return 0 if name == "client" else 1 + self.names.index(name)

    def address(self, name: str) -> str:
        return host_port(self.hosts.address(self.host(name)), PORT)

    def client(self, router: int = 0) -> Client:
        return Client(self.address(self.routers[router]), credentials=self.credentials)

    def load(self, clients: int, deadline_seconds: float) -> Load:
        return Load(self.target, clients, deadline_seconds, self.credentials)

    @property
    def target(self) -> str:
        """Of clients: all routers, of which gRPC uses one at a time."""
        return f"{self._scheme}:{self.router_addresses}"

    @property
    def router_addresses(self) -> str:
        return ",".join(map(self.address, self.routers))

    def _known_as(self, name: str) -> str:
        """Returns the host of a process as other processes know it."""
        at = self.host(name)
        return self.hosts.name(at) if self._by_name else self.hosts.address(at)

    def start(self, name: str, *flags: str) -> None:
        host = self._known_as(name)
        common = [f"--host={host}", f"--port={PORT}", "--drain_seconds=20"]
        if name in self.routers:
            program = ["router", f"--model={LLAMA}", "--canary_seconds=0", "--http_port=-1"]
        else:
            role = name.partition("-")[0]
            program = ["worker", f"--role={role}", "--layout=tp=1", f"--name={name}"]
            routers = ",".join(host_port(self._known_as(one), PORT) for one in self.routers)
            program += [f"--router={routers}", *WORKER_FLAGS]
        command = [PYTHON, "-m", f"launch.{program[0]}", *program[1:], *common]
        command += [*self.flags.get("", ()), *self.flags.get(name, ()), *flags]
        self.processes[name] = self.hosts.run(self.host(name), command)

    def start_all(self) -> None:
        for name in self.names:
            self.start(name)
        with self.client() as client:
            wait_until(lambda: all_free(client, self.workers), "workers register", START_SECONDS)

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def drain(self, name: str) -> None:
        """Ends a process as an update does."""
        process = self.processes[name]
        process.signal(SIGTERM)
        wait_until(lambda: process.ended is not None, f"{name} drains", START_SECONDS)

    def wait_until_up(self, *names: str) -> None:
        """Waits until processes that were started serve."""
        for name in names:
            said = "router listens on" if name in self.routers else "serves on"
            self.processes[name].wait_for(said, START_SECONDS)

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        self.processes[name].signal(SIGSTOP)
        try:
            yield
        finally:
            self.processes[name].signal(SIGCONT)

    def between(self, source: str, target: str, **conditions: float) -> None:
        self.hosts.set(self.host(source), self.host(target), **conditions)

    def everywhere(self, **conditions: float) -> None:
        self.hosts.set(None, None, **conditions)

    def check_whole(self, load: Load, healed_at: float) -> None:
        """Checks that streams come right again soon after the last fault, that no stream was wrong
        or hangs, and that everything is freed."""
        recovery_seconds = RECOVERY_SECONDS * crowd()
        wait_until(
            lambda: load.ended_right_since(healed_at), "recovers", recovery_seconds, load.errors
        )
        load.stop()
        assert not [one for one in load.streams if one.wrong], "a stream has wrong tokens"
        assert all(one.ended is not None for one in load.streams)
        with self.client(-1) as client:
            until = time.monotonic() + FREED_SECONDS
            while left := held(client, self.workers):
                assert time.monotonic() < until, f"not freed: {left}\n{self.logs()}"
                time.sleep(0.05)

    def logs(self, characters: int = 3000) -> str:
        """Returns the ends of all processes' logs."""
        return "\n".join(
            f"---- {name}\n{process.log.read_text()[-characters:]}"
            for name, process in self.processes.items()
        )

    def close(self) -> None:
        self.hosts.close()


def held(client: Client, workers: Sequence[str]) -> str:
    """Returns what is not free, or "" once all workers are there and free."""
    try:
        statuses = {status.name: status for status in client.status()}
    except JdisaggError as error:
        return str(error)
    missing = sorted(set(workers) - set(statuses))
    busy = [
        f"{name}: {sum(status.free_pages)} of {sum(status.total_pages)} pages free,"
        f" {status.running} running, {status.handoffs} hand-offs"
        for name, status in statuses.items()
        if status.free_pages != status.total_pages or status.running or status.handoffs
    ]
    return "; ".join([*(f"{name} is not there" for name in missing), *busy])


def all_free(client: Client, workers: Sequence[str]) -> bool:
    return not held(client, workers)


def check_answers(client: Client, deadline_seconds: float | None = None) -> None:
    for number in (0, 1):
        done = client.complete(
            token_ids=prompt(number),
            max_tokens=NEW_TOKENS,
            temperature=0.0,
            deadline_seconds=deadline_seconds,
        )
        assert tuple(done.choices[0].token_ids) == expected(number)


def wait_until(condition: Callable[[], bool], what: str, seconds: float, said: object = "") -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds:g} s: {what} {said}"
        time.sleep(0.05)


@contextlib.contextmanager
def lab(
    folder: Path,
    *,
    by_name: bool = False,
    ipv6: bool = False,
    prepare: Callable[[Lab], None] = lambda made: None,
    **counts: int,
) -> Iterator[Lab]:
    """Makes the hosts, lets `prepare` change them and the flags, and starts all processes."""
    made = Lab(folder, by_name=by_name, ipv6=ipv6, **counts)
    try:
        prepare(made)
        made.start_all()
        yield made
    except BaseException:
        print(made.logs())  # pytest shows it
        raise
    finally:
        made.close()
